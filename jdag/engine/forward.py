"""Forward: calls and transfers, and recording of the graph.

Inputs:  Call, Ship and Primal of any worker.
Outputs: Forward jobs, Primal messages and acknowledgements.

Invariants
- Data may arrive before its call: it then creates an empty recv, which the call
  completes.
- A call runs when all its inputs have settled. If any failed, the call does not run and
  its results hold the first failure by position.
- A call or ship of a released context is acknowledged too, since its sender may not
  know of the release and waits.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from jdag.engine.graph import CallNode, Fragment, RecvEnd, SendEnd, Value
from jdag.engine.leaves import Leaves, unused
from jdag.engine.lifetimes import Lives
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
)
from jdag.engine.state import State, first_failure


class Forwarding(Struct, eq=False):
    """The forward half of one engine."""

    _state: State
    _leaves: Leaves
    _lives: Lives
    # Called when a node that a pass waits for has run.
    _woken: Callable[[Fragment, CallNode], None]

    def call(self, sender: Worker, message: Call) -> None:
        """Handle a call, issued by any worker."""
        state, context = self._state, message.context
        if message.discarded:
            self._lives.discard(message.discarded)
        fragment = state.contexts.get(context) or state.fragment(context)
        if fragment is None:
            state.drop(landing(message))
        else:
            self._call(fragment, message)
        state.acknowledge(sender, context, message.path)

    def _call(self, fragment: Fragment, message: Call) -> None:
        context, path = message.context, message.path
        for incoming in message.incoming:
            slots = len(incoming.tracked)
            recv = self._recv(fragment, path, incoming.source, slots)
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
        else:  # Nothing of it is differentiated, in whatever pass.
            self._state.skip(fragment, node, "BIW")
        fragment.pending += 1
        start = partial(self._start, fragment, node)
        self._state.when_settled(node.arguments, start)

    def value(self, fragment: Fragment, key: Key) -> Value:
        """The value that an input of a call denotes here."""
        if key.kind in LEAF_KINDS:
            return self._leaves.use(fragment, key)
        if key.kind == "constant":
            value = fragment.values[key] = unused(key, settled=True)
            return value
        known = fragment.values.get(key)
        if known is None:
            return self._leaves.missing(key)
        assert known.users, key  # Otherwise it was discarded.
        return known

    def _start(self, fragment: Fragment, node: CallNode) -> None:
        if fragment.gone:
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
        id, residuals = self._state.number_job(), node.residuals
        job = Forward(
            *(id, context, path, function, inputs, outputs, residuals),
            fragment.tag(node),
        )
        self._state.compute(job, partial(self._forwarded, fragment, node), fragment)

    def _forwarded(
        self, fragment: Fragment, node: CallNode, failure: Failure | None, job: Any
    ) -> None:
        if fragment.gone:
            kept = () if job.residuals is None else (job.residuals,)
            self._state.drop((*job.outputs, *kept))
            return
        if failure is not None:
            failure = replace(failure, call_site=node.call_site)
            fragment.failures.append(failure)
            self._state.skip(fragment, node, "BIW")
        elif node.residuals is None and job.residuals is not None:
            self._state.drop((job.residuals,))  # Spent before it ran.
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
        state.less_pending(fragment)

    def _recv(
        self, fragment: Fragment, path: Path, source: Worker, slots: int
    ) -> RecvEnd:
        """The recv of a transfer, created by its call or its data."""
        recv = fragment.recvs.get((path, source))
        if recv is None:
            recv = RecvEnd(path, source, [None] * slots)
            name = path, source
            keys = [ReceivedKey(fragment.context, name, slot) for slot in range(slots)]
            recv.outputs = tuple([Value(key, recv, key.index) for key in keys])
            fragment.values.update(zip(keys, recv.outputs, strict=True))
            fragment.recvs[name] = recv
            if source in self._state.lost:
                self._fail_recv(recv, source)
        return recv

    def lost(self, worker: Worker) -> None:
        """A worker is lost: fail the values that have not arrived from it."""
        for fragment in self._state.contexts.values():
            for recv in tuple(fragment.recvs.values()):
                if recv.source == worker:
                    self._fail_recv(recv, worker)

    def _fail_recv(self, recv: RecvEnd, source: Worker) -> None:
        for value in recv.outputs:
            if not value.settled:
                self._state.settle(value, self._state.lost_failure(source))

    def ship(self, sender: Worker, message: Ship) -> None:
        """The issuer of a call requests that values here be sent to its callee."""
        state = self._state
        self._lives.discard(message.discarded)
        fragment = state.fragment(message.context)
        if fragment is not None:
            self._ship(fragment, message)
        else:
            failures = (state.gone_failure(message.context),) * len(message.keys)
            primal = Primal(message.context, message.path, state.worker, failures)
            state.send(message.destination, primal)
        state.acknowledge(sender, message.context, message.path)

    def _ship(self, fragment: Fragment, message: Ship) -> None:
        values = tuple([self.value(fragment, key) for key in message.keys])
        slots = tuple(zip(values, message.tracked, strict=True))
        for value in values:
            value.users += 1
        if True in message.tracked:
            inputs = tuple([value if tracked else None for value, tracked in slots])
            of = message.path, message.destination, inputs, message.function
            spent = [not tracked for tracked in message.tracked]
            fragment.sends[message.path] = SendEnd(*of, message.call_site, spent)
        fragment.pending += 1
        self._state.when_settled(
            values, partial(self._shipped, fragment, message, values)
        )

    def _shipped(
        self, fragment: Fragment, message: Ship, values: tuple[Value, ...]
    ) -> None:
        state = self._state
        failures = tuple([value.failure for value in values])
        if fragment.gone:
            if fragment.owner not in state.lost:
                return  # The abort also reaches the receiver.
            failures = (state.gone_failure(fragment.context),) * len(values)
        carried = zip(values, failures, strict=True)
        state.send(
            message.destination,
            Primal(message.context, message.path, state.worker, failures),
            tuple([value.stored for value, failure in carried if failure is None]),
        )
        state.release(values)
        state.less_pending(fragment)

    def primal(self, sender: Worker, message: Primal) -> None:
        """The values of a transfer arrived."""
        state = self._state
        fragment = state.fragment(message.context)
        if fragment is None:
            state.drop(landing(message))
            return
        slots = len(message.failures)
        recv = self._recv(fragment, message.path, message.source, slots)
        for value, failure in zip(recv.outputs, message.failures, strict=True):
            if not value.settled:
                state.settle(value, failure)
            elif failure is None:
                state.drop((value.key,))  # Too late: the loss was already reported.
