"""Leaves and their versions: made, replaced and dropped in the order of messages.

The owner of a leaf numbers its versions, since programs of several workers may assign
to it concurrently without knowing of each other. They refer to the `newest`: the last
version assigned before the request arrived. So each update starts from the previous one
and none is lost, whatever the order of requests; those of one worker arrive in the
order in which it sent them. A context keeps reading the version that it read first
(`LeafEnd.read`) until its own program assigns.

A version is kept while it is the newest, while an assignment or a read waits for it,
and while a context that read it is open: `users` counts these. If the worker that
requested a version is lost and the version cannot be made, the update is withdrawn: the
version takes over the array of the previous one.
"""

from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from jdag.engine.graph import Fragment, LeafEnd, LeafVersions, Value, Version
from jdag.engine.lifetimes import Lives
from jdag.engine.protocol import (
    LEAF_KINDS,
    Assign,
    Assigned,
    Assignment,
    Dropped,
    Failure,
    Forget,
    Forward,
    Job,
    Key,
    LeafId,
    LeafKey,
    NewestKey,
    Stale,
    Worker,
    landing,
)
from jdag.engine.state import State, first_failure
from jdag.errors import ProtocolError, WorkerLost


class Update(Struct, eq=False):
    """An assignment in progress: its inputs are kept until it has run."""

    issuer: Worker
    part: Assignment
    inputs: list[Value] = []
    outputs: list[Value] = []
    fragments: list[Fragment] = []  # Of the inputs.


class Leaves(Struct, eq=False):
    """The leaves of one worker, and the assignments that it issued."""

    _state: State
    _lives: Lives

    def assigned(self, event: Assigned) -> None:
        """A program here assigns to leaves: send one message to each of their owners.

        If one of these is lost, nothing is sent.
        """
        state = self._state
        parts: dict[Worker, list[Assignment]] = {}
        for part in event.parts:
            if part.worker in state.lost:
                why = state.loss(part.worker)
                raise WorkerLost(_lost(part, why, len(event.parts)))
            parts.setdefault(part.worker, []).append(part)
        parts.setdefault(state.worker, [])
        messages = {to: Assign(event.path, tuple(of)) for to, of in parts.items()}
        own = messages[state.worker]
        for worker in messages:
            if worker != state.worker:
                state.assignments[event.path, worker] = None
        state.send_each(messages)
        state.send(state.worker, own)
        outputs = [key for part in event.parts for key in part.outputs]
        self._lives.renewed([key for key in outputs if key.kind == "newest"])

    def assign(self, issuer: Worker, message: Assign) -> None:
        """Create the versions; they settle when the functions have run.

        Raises:
            ProtocolError: a version in it is made already.
        """
        made: dict[Key, None] = {}
        pairs = [zip(one.outputs, one.avals, strict=True) for one in message.parts]
        for key, _ in chain.from_iterable(pairs):
            leaf = self._state.leaves.get(key.name)
            is_made = key in made or (leaf is not None and key.index <= leaf.newest)
            if key.kind == "leaf" and is_made:
                raise ProtocolError(f"version {key.index} of {key.name} is made twice")
            made[key] = None
        constants = {key: unused(key, settled=True) for key in landing(message)}
        updates = [Update(issuer, part) for part in message.parts]
        # All inputs are resolved first, so that no part reads another part's version.
        for update in updates:
            self._take(update, constants)
        for update in updates:
            part = update.part
            for key, aval in zip(part.outputs, part.avals, strict=True):
                update.outputs.append(self._next(key, aval, issuer))
            if part.function is None:
                self._settle(update, None)
            else:
                run = partial(self._run, update)
                self._state.when_settled(update.inputs, run)
        self._state.acknowledge(issuer, None, message.path)

    def _take(self, update: Update, constants: Mapping[Key, Value]) -> None:
        contexts = self._state.contexts
        for key in update.part.inputs:
            value = constants.get(key)
            if key.kind in LEAF_KINDS:
                value = self.version(key)
            elif value is None and key.context in contexts:
                fragment = contexts[key.context]
                value = fragment.values.get(key)
                if value is not None:
                    assert value.users, key  # Otherwise it was discarded.
                    fragment.pending += 1
                    update.fragments.append(fragment)
            value = value or self.missing(key)
            value.users += 1
            update.inputs.append(value)

    def _next(self, key: Key, aval: Any, issuer: Worker) -> Value:
        """The first version of a new leaf, or the next of an existing one."""
        leaf = self._state.leaves.get(key.name)
        number = key.index
        if key.kind == "leaf":
            leaf = leaf or self._state.leaves.setdefault(key.name, LeafVersions(aval))
        elif leaf is None or leaf.forgotten:
            return unused(LeafKey(None, key.name, _NEVER))
        else:
            number = leaf.newest + 1
        previous = leaf.versions.get(leaf.newest)
        version = Version(LeafKey(None, key.name, number), leaf, previous)
        leaf.versions[number] = version
        leaf.newest = number
        for fragment in self._state.contexts.values():
            if fragment.owner == issuer and key.name in fragment.leaves:
                fragment.leaves[key.name].read = None
        return version

    def next_version(self, leaf: LeafId, issuer: Worker) -> Any:
        """The next version of a leaf that is here, which `made` is to settle."""
        return self._next(NewestKey(None, leaf, 0), None, issuer)

    def _run(self, update: Update) -> None:
        state, part = self._state, update.part
        failure = first_failure(update.inputs)
        for fragment in update.fragments:
            if fragment.gone and failure is None:  # Aborted: its values are not kept.
                why = f"context {fragment.context} was released before its values"
                failure = state.failure("ContextError", f"{why} were used")
        if failure is not None:
            self._settle(update, failure)
            return
        inputs = tuple([value.stored for value in update.inputs])
        outputs = tuple([value.key for value in update.outputs])
        number = state.number_job()
        job = Forward(number, None, part.path, part.function, inputs, outputs, None)
        state.compute(job, partial(self._computed, update), update)

    def _computed(self, update: Update, failure: Failure | None, _: Job) -> None:
        if failure is not None:
            said = f"{failure.message}\n{_unmade(update.part)}"
            site = update.part.call_site
            failure = replace(failure, message=said, call_site=site)
        self._settle(update, failure)

    def _settle(self, update: Update, failure: Failure | None) -> None:
        state = self._state
        withdrawn = failure is not None and self._is_lost(update.issuer, failure)
        for value in update.outputs:
            self.made(value, failure, withdrawn=withdrawn)
        state.release(update.inputs)
        for fragment in update.fragments:
            state.less_pending(fragment)

    def _is_lost(self, issuer: Worker, failure: Failure) -> bool:
        """Whether the requesting worker is lost, or this failure reports its loss."""
        began = failure.error == WorkerLost.__name__ and failure.worker == issuer
        return began or issuer in self._state.lost

    def made(
        self, value: Value, failure: Failure | None, *, withdrawn: bool = False
    ) -> None:
        """A version is made, and `stored`, or has failed."""
        if not isinstance(value, Version) or value.before is None:
            self._state.settle(value, failure)
            return
        before = value.before
        if withdrawn:
            same = partial(self._as_before, value, before)
            self._state.when_settled((before,), same)
        else:
            value.before = None
            self._state.settle(value, failure)
            self._state.release((before,))

    def _as_before(self, version: Value, before: Value) -> None:
        version.stored = before.stored
        self._state.settle(version, before.failure)

    def version(self, key: Key) -> Version | None:
        """The version that a key denotes; None if it is not here."""
        leaf = self._state.leaves.get(key.name)
        if leaf is None or leaf.forgotten:
            return None
        return leaf.versions.get(leaf.newest if key.kind == "newest" else key.index)

    def missing(self, key: Key) -> Value:
        """A failed value that explains why the key is not held here."""
        if key.kind == "leaf":
            leaf = self._state.leaves.get(key.name)
            newest = f"the newest is {leaf.newest}" if leaf else "it was dropped"
            why = f"version {key.index} of {key.name} is not held any more ({newest})"
        elif key.kind == "newest":
            why = f"{key.name} is not held here: it was dropped, or is not made yet"
        else:
            why = f"{key.kind} {key.name} of context {key.context} is not held here"
        value = Value(key)
        value.settled = True
        value.failure = self._state.failure("ContextError", why)
        return value

    def stale(self, oldest: Mapping[LeafId, int]) -> tuple[Stale, ...]:
        """The leaves that have newer versions than these."""
        leaves = self._state.leaves
        newer = {name: leaves[name].newest - oldest[name] for name in oldest}
        return tuple(Stale(name, by) for name, by in newer.items() if by)

    def use(self, fragment: Fragment, key: Key) -> Value:
        """A version as a value of a context, with its `LeafEnd`."""
        end = fragment.leaves.get(key.name)
        is_newest = key.kind == "newest"
        if is_newest and end is not None and end.read is not None:
            return end.read
        version = self.version(key)
        exact = key if version is None else version.key
        value = fragment.values.get(exact)
        if value is None:
            if version is None:
                return self.missing(key)
            value = self._used(fragment, version)
        if is_newest:
            fragment.leaves[key.name].read = value
        return value

    def _used(self, fragment: Fragment, version: Version) -> Value:
        name = version.key.name
        version.users += 1
        end = fragment.leaves.get(name)
        if end is None:
            end = fragment.leaves[name] = LeafEnd(name, version.leaf.aval)
        value = fragment.values[version.key] = Value(version.key, end)
        end.outputs = (*end.outputs, value)
        self._state.when_settled((version,), partial(self._mirror, version, value))
        return value

    def _mirror(self, source: Version, value: Value) -> None:
        if not value.settled:  # An aborted context has settled it.
            value.stored = source.stored
            self._state.settle(value, source.failure)

    def release(self, fragment: Fragment) -> None:
        """A context ended: release the versions that it read."""
        leaves = self._state.leaves
        read = [key for key in fragment.values if key.kind == "leaf"]
        self._state.release(leaves[key.name].versions[key.index] for key in read)

    def dropped(self, event: Dropped) -> None:
        """A program here drops leaves, here and on other workers."""
        by_worker: dict[Worker, list[LeafId]] = {}
        for leaf in event.leaves:
            by_worker.setdefault(leaf.worker, []).append(leaf)
        for worker, leaves in by_worker.items():
            self._state.send(worker, Forget(tuple(leaves)))

    def forget(self, sender: Worker, message: Forget) -> None:
        """Drop leaves; a version in use is dropped with its last user."""
        for name in message.leaves:
            leaf = self._state.leaves.get(name)
            if leaf is not None and not leaf.forgotten:
                leaf.forgotten = True
                self._state.release((leaf.versions[leaf.newest],))


_NEVER = -1  # The number of a version that no key can name.


def unused(key: Key, *, settled: bool = False) -> Value:
    """A value that no program can name; it is dropped with its last user."""
    value = Value(key)
    value.settled = settled
    value.users = 0
    return value


def _lost(part: Assignment, why: str, parts: int) -> str:
    beside = f"; none of {parts} that were asked for together is made" * (parts > 1)
    return (
        f"{part.outputs[0].name} cannot be made, called at {part.call_site}: "
        f"{why}{beside}"
    )


def _unmade(part: Assignment) -> str:
    names = ", ".join(str(key.name) for key in part.outputs)
    return f"(not made: {names}; what was assigned beside that is not affected)"
