"""Forward: runs calls and transfers, and records the graph.

Inputs:  Call, Ship and Primal of any worker.
Outputs: Forward jobs and Primal messages.

Invariants
- Data may arrive before its call. The data then creates a recv without avals, and the
  call adds the avals.
- A call runs when all its inputs have settled. If an input failed, the call does not
  run, and its results fail with the first failure by position.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from jdag.engine.graph import CallNode, Fragment, RecvEnd, SendEnd, Value
from jdag.engine.leaves import Leaves, unused
from jdag.engine.lifetimes import Lifetimes
from jdag.engine.protocol import (
    LEAF_KINDS,
    Call,
    Failure,
    Forward,
    Key,
    OutputKey,
    Path,
    Primal,
    ReceivedKey,
    ResidualsKey,
    Ship,
    Worker,
    landing,
    made_by,
)
from jdag.engine.state import State, first_failure


class Forwarding(Struct, eq=False):
    _state: State
    _leaves: Leaves
    _lifetimes: Lifetimes
    # Called after a forward if all its cotangents had already arrived.
    _woken: Callable[[Fragment, CallNode], None]

    def call(self, sender: Worker, message: Call) -> None:
        state, context = self._state, message.context
        if message.discarded:
            self._lifetimes.discard(message.discarded)
        fragment = state.contexts.get(context) or state.fragment(context)
        if fragment is None:
            state.drop(landing(message))
        else:
            self._call(fragment, message)

    def _call(self, fragment: Fragment, message: Call) -> None:
        context, path = message.context, message.path
        for incoming in message.incoming:
            slots, source = len(incoming.tracked), incoming.source
            recv = fragment.recvs.get((path, source))
            recv = recv or self._new_recv(fragment, path, source, slots)
            recv.tracked = incoming.tracked
        if message.incoming:  # Shapes of the symbolic zeros that these recvs may send.
            for key, aval in zip(message.inputs, message.function.avals, strict=True):
                if key.kind == "received" and key.name[0] == path:
                    fragment.recvs[key.name].avals[key.index] = aval
        node = CallNode(path, message.function, message.call_site, tag=message.tag)
        if message.tag is not None and message.tag.listed and fragment.release is None:
            fragment.listed = True
            fragment.tags.append(message.tag)
        node.arguments = tuple([self.value(fragment, key) for key in message.inputs])
        for argument in node.arguments:
            argument.users += 1
        results = []
        for index, recording in enumerate(message.outputs):
            key = OutputKey(context, path, index)
            value = Value(key, node if recording else None)
            fragment.values[key] = value
            results.append(value)
        node.results = tuple(results)
        if True in message.outputs:  # Only tracked calls enter the graph.
            tracked = zip(node.arguments, message.tracked, strict=True)
            node.inputs = tuple([value for value, on in tracked if on])
            node.outputs = tuple([value for value in results if value.producer])
            for index, value in enumerate(node.outputs):
                value.index = index
            node.residuals = ResidualsKey(context, path, 0)
            fragment.nodes[path] = node
        else:  # No pass differentiates this call.
            self._state.skip(fragment, node, "BIW")
        fragment.pending += 1
        self._state.when_settled(node.arguments, self._start, fragment, node)

    def value(self, fragment: Fragment, key: Key) -> Value:
        if key.kind in LEAF_KINDS:
            return self._leaves.use(fragment, key)
        if key.kind == "constant":
            value = fragment.values[key] = unused(key, settled=True)
            return value
        local = fragment.values.get(key)
        if local is None:
            return self._leaves.missing(key)
        assert local.users, key  # Otherwise the value was discarded.
        return local

    def _start(self, fragment: Fragment, node: CallNode) -> None:
        if fragment.released:
            return
        failure = first_failure(node.arguments)
        if failure is not None:
            if failure.path == node.path:  # The transfer to this call failed.
                failure = replace(failure, call_site=node.call_site)
                fragment.failures.append(failure)
            self._state.skip(fragment, node, "FBIW")
            self._settle(fragment, node, failure)
            return
        context, path, function = fragment.context, node.path, node.function
        inputs = tuple([value.stored for value in node.arguments])
        outputs = tuple([value.key for value in node.results])
        head = self._state.number_job(), context, path, function
        tag = node.tag and fragment.tag(node)
        job = Forward(*head, inputs, outputs, node.residuals, tag)
        self._state.compute(job, partial(self._forwarded, fragment, node), fragment)

    def _forwarded(
        self, fragment: Fragment, node: CallNode, failure: Failure | None, job: Any
    ) -> None:
        if fragment.released:
            self._state.drop(made_by(job))
            return
        if failure is not None:
            failure = replace(failure, call_site=node.call_site)
            fragment.failures.append(failure)
            self._state.skip(fragment, node, "BIW")
        elif node.residuals is None and job.residuals is not None:
            self._state.drop((job.residuals,))  # A pass spent the node before it ran.
        self._settle(fragment, node, failure)

    def _settle(
        self, fragment: Fragment, node: CallNode, failure: Failure | None
    ) -> None:
        state = self._state
        node.done = True
        node.failure = failure
        state.release(node.arguments)
        node.arguments = ()
        for value in node.results:
            state.settle(value, failure)
        if node.waited:
            node.waited = False
            self._woken(fragment, node)
        state.pending_done(fragment)

    def _new_recv(
        self, fragment: Fragment, path: Path, source: Worker, slots: int
    ) -> RecvEnd:
        recv, name = RecvEnd(path, source, [None] * slots), (path, source)
        keys = [ReceivedKey(fragment.context, name, slot) for slot in range(slots)]
        recv.outputs = tuple([Value(key, recv, key.index) for key in keys])
        fragment.values.update(zip(keys, recv.outputs, strict=True))
        fragment.recvs[name] = recv
        if source in self._state.lost:
            self._fail_recv(recv, source)
        return recv

    def lost(self, worker: Worker) -> None:
        for fragment in self._state.contexts.values():
            for recv in tuple(fragment.recvs.values()):
                if recv.source == worker:
                    self._fail_recv(recv, worker)

    def _fail_recv(self, recv: RecvEnd, source: Worker) -> None:
        for value in recv.outputs:
            if not value.settled:
                self._state.settle(value, self._state.lost_failure(source))

    def ship(self, sender: Worker, message: Ship) -> None:
        state = self._state
        if message.discarded:
            self._lifetimes.discard(message.discarded)
        fragment = state.fragment(message.context)
        if fragment is not None:
            self._ship(fragment, message)
        else:
            failures = (state.released_failure(message.context),) * len(message.keys)
            primal = Primal(message.context, message.path, state.worker, failures)
            state.send(message.destination, primal)

    def _ship(self, fragment: Fragment, message: Ship) -> None:
        values = tuple([self.value(fragment, key) for key in message.keys])
        slots = tuple(zip(values, message.tracked, strict=True))
        for value in values:
            value.users += 1
        if True in message.tracked:
            inputs = tuple([value if tracked else None for value, tracked in slots])
            fragment.sends[message.path] = SendEnd(
                message.path,
                message.destination,
                inputs,
                message.function,
                message.call_site,
                spent=[not tracked for tracked in message.tracked],
            )
        fragment.pending += 1
        self._state.when_settled(values, self._shipped, fragment, message, values)

    def _shipped(
        self, fragment: Fragment, message: Ship, values: tuple[Value, ...]
    ) -> None:
        state = self._state
        failures = tuple([value.failure for value in values])
        if fragment.released:
            if fragment.owner not in state.lost:
                return  # The receiver is aborted too.
            failures = (state.released_failure(fragment.context),) * len(values)
        slots = zip(values, failures, strict=True)
        state.send(
            message.destination,
            Primal(message.context, message.path, state.worker, failures),
            tuple([value.stored for value, failure in slots if failure is None]),
        )
        state.release(values)
        state.pending_done(fragment)

    def primal(self, sender: Worker, message: Primal) -> None:
        state = self._state
        fragment = state.fragment(message.context)
        if fragment is None:
            state.drop(landing(message))
            return
        slots, path, source = len(message.failures), message.path, message.source
        recv = fragment.recvs.get((path, source))
        recv = recv or self._new_recv(fragment, path, source, slots)
        for value, failure in zip(recv.outputs, message.failures, strict=True):
            if not value.settled:
                state.settle(value, failure)
            elif failure is None:  # It has already failed with the sender's loss.
                state.drop((value.key,))
