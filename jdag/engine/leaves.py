"""Leaves and their versions: made, replaced and dropped in the order of messages.

The owner of a leaf numbers its versions, since programs of several workers may assign
to it at once without knowing of each other. They ask for the `newest`: the last version
that was assigned before the request arrived. So each update starts from the one before
it and none is lost, in whatever order requests arrive; those of one worker arrive in
the order in which it sent them. A context goes on reading the version that it read
first (`LeafEnd.read`) until its own program assigns.

A version is kept while it is the newest, while an assignment or a read waits for it,
and while a context that read it is open. Invariant: `users` counts only those last. If
the worker that asked for a version is lost and the version cannot be made, it is as if
it had not asked: the version is the one before.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from msgspec.structs import replace

from jdag.engine.graph import Fragment, LeafEnd, Value
from jdag.engine.protocol import (
    LEAF_KINDS,
    Acknowledge,
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
    Path,
    Stale,
    Worker,
    is_newest,
    landing,
)
from jdag.engine.state import State, first_failure
from jdag.errors import WorkerLost


@dataclass(slots=True)
class Version:
    """One version of a leaf; how many contexts, assignments and reads use it."""

    value: Value
    users: int = 0
    before: "Version | None" = None  # That whose value it has, as it was not made.


@dataclass(slots=True)
class LeafVersions:
    """The versions of one leaf that are still held here."""

    aval: Any
    newest: int = -1
    forgotten: bool = False
    versions: dict[int, Version] = field(default_factory=dict)


@dataclass(slots=True)
class Batch:
    """What came with one message, dropped when the last of its parts has settled."""

    issuer: Worker
    parts: int
    constants: tuple[Key, ...]


class Held(NamedTuple):
    """What an assignment reads: it is kept until that has run."""

    fragments: tuple[Fragment, ...]
    versions: tuple[tuple[LeafId, Version], ...]
    values: tuple[Value, ...]  # Of the fragments.
    batch: Batch


class Leaves:
    """The leaves of one worker, and the assignments that it issued."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._leaves: dict[LeafId, LeafVersions] = {}
        self.unacknowledged: dict[tuple[Path, Worker], None] = {}

    def assigned(self, event: Assigned) -> None:
        """A program here makes versions of leaves: one message to each who keeps some.

        Where one of these is lost nobody is told.
        """
        state = self._state
        parts: dict[Worker, list[Assignment]] = {}
        for part in event.parts:
            if part.worker in state.lost:
                why = state.loss(part.worker)
                raise WorkerLost(_lost(part, why, len(event.parts)))
            parts.setdefault(part.worker, []).append(part)
        own = Assign(event.path, tuple(parts.pop(state.worker, ())))
        sent: dict[Key, None] = {}
        for worker, theirs in parts.items():
            message = Assign(event.path, tuple(theirs))
            carried = landing(message)
            self.unacknowledged[event.path, worker] = None
            state.send(worker, message, carried)
            sent.update(dict.fromkeys(carried))
        kept = landing(own)
        state.drop(key for key in sent if key not in kept)
        self.assign(state.worker, own)

    def arrived(self, sender: Worker, message: Assign) -> None:
        """An assignment from another worker."""
        self.assign(sender, message)
        self._state.send(sender, Acknowledge(None, message.path))

    def assign(self, issuer: Worker, message: Assign) -> None:
        """Make the versions: they settle when the functions have run."""
        constants = tuple(key for key in landing(message) if key.kind == "constant")
        batch = Batch(issuer, len(message.parts), constants)
        # All is taken before the first is made: no part reads what another replaces.
        taken = [self._inputs(part, batch) for part in message.parts]
        for part, (inputs, held) in zip(message.parts, taken, strict=True):
            self._assign(part, inputs, held)

    def _assign(self, part: Assignment, inputs: tuple[Value, ...], held: Held) -> None:
        state = self._state
        outputs = tuple(
            self._next(key, aval, held.batch.issuer)
            for key, aval in zip(part.outputs, part.avals, strict=True)
        )
        if part.function is None:
            self._settle(outputs, held, None)
            return
        run = partial(self._run, part, inputs, outputs, held)
        state.when_settled(inputs, run)

    def _next(self, key: Key, aval: Any, issuer: Worker) -> Value:
        """A new leaf's first version, or the next one of a leaf that is here."""
        leaf = self._leaves.get(key.name)
        if not is_newest(key):
            leaf = leaf or self._leaves.setdefault(key.name, LeafVersions(aval))
            number = key.index
        elif leaf is None or leaf.forgotten:
            return Value(_version_key(key.name, _NEVER))
        else:
            number = leaf.newest + 1
        previous = leaf.versions.get(leaf.newest)
        value = Value(_version_key(key.name, number))
        leaf.versions[number] = Version(value)
        leaf.newest = number
        if previous is not None:
            leaf.versions[number].before = previous
            previous.users += 1
        for fragment in self._state.contexts.values():
            if fragment.owner == issuer and key.name in fragment.leaves:
                fragment.leaves[key.name].read = None
        return value

    def _inputs(self, part: Assignment, batch: Batch) -> tuple[tuple[Value, ...], Held]:
        """The values of an assignment, each held until it has run."""
        state = self._state
        inputs: list[Value] = []
        fragments: list[Fragment] = []
        values: list[Value] = []
        versions: list[tuple[LeafId, Version]] = []
        for key in part.inputs:
            value: Value | None = None
            if key.kind in LEAF_KINDS:
                version = self.hold(key)
                if version is not None:
                    versions.append((key.name, version))
                    value = version.value
            elif key.kind == "constant":
                value = Value(key)
                state.settle(value, None)
            else:
                fragment = (
                    None if key.context is None else state.contexts.get(key.context)
                )
                value = None if fragment is None else fragment.values.get(key)
                if fragment is not None and value is not None:
                    assert value.users, key  # It was discarded, and is gone.
                    fragment.pending += 1
                    fragments.append(fragment)
                    value.users += 1
                    values.append(value)
            inputs.append(self.missing(key) if value is None else value)
        held = Held(tuple(fragments), tuple(versions), tuple(values), batch)
        return tuple(inputs), held

    def _run(
        self,
        part: Assignment,
        inputs: tuple[Value, ...],
        outputs: tuple[Value, ...],
        held: Held,
    ) -> None:
        state = self._state
        failure = first_failure(inputs)
        for fragment in held.fragments:
            if fragment.gone and failure is None:  # Aborted: its values are not kept.
                why = f"context {fragment.context} was released before its values"
                failure = state.failure("ContextError", f"{why} were used")
        if failure is not None:
            self._settle(outputs, held, failure)
            return
        job = Forward(
            state.number_job(),
            None,
            part.path,
            part.function,
            tuple(value.stored for value in inputs),
            tuple(value.key for value in outputs),
            None,
        )
        state.compute(job, partial(self._computed, part, outputs, held), held)

    def _computed(
        self,
        part: Assignment,
        outputs: tuple[Value, ...],
        held: Held,
        failure: Failure | None,
        job: Job,
    ) -> None:
        if failure is not None:
            failure = replace(
                failure,
                message=f"{failure.message}\n{_unmade(part)}",
                call_site=part.call_site,
            )
        self._settle(outputs, held, failure)

    def _settle(
        self,
        outputs: tuple[Value, ...],
        held: Held,
        failure: Failure | None,
    ) -> None:
        state = self._state
        held.batch.parts -= 1
        if not held.batch.parts:
            state.drop(held.batch.constants)
        withdrawn = failure is not None and self._is_lost(held.batch.issuer, failure)
        for value in outputs:
            self._made(value, failure, withdrawn)
        state.release(held.values)
        for fragment in held.fragments:
            state.less_pending(fragment)
        for name, version in held.versions:
            self.let_go(name, version)

    def _is_lost(self, issuer: Worker, failure: Failure) -> bool:
        """Whether the worker that asked, or where the failure began, is lost."""
        began = failure.error == WorkerLost.__name__ and failure.worker == issuer
        return began or issuer in self._state.lost

    def _made(self, value: Value, failure: Failure | None, withdrawn: bool) -> None:
        """A version is here, or is not and never will be."""
        leaf = self._leaves.get(value.key.name)
        version = None if leaf is None else leaf.versions.get(value.key.index)
        if leaf is None or version is None:  # Dropped while it was being made.
            self._state.settle(value, failure)
            self._state.drop((value.key,))
            return
        before = version.before
        if before is not None and withdrawn:
            same = partial(self._as_before, leaf, version, before)
            self._state.when_settled((before.value,), same)
            return
        version.before = None
        self._state.settle(value, failure)
        if before is not None:
            self.let_go(value.key.name, before)
        self._free(leaf, version)  # It may have been replaced already.

    def _as_before(self, leaf: LeafVersions, version: Version, before: Version) -> None:
        version.value.stored = before.value.stored
        self._state.settle(version.value, before.value.failure)
        self._free(leaf, version)

    # ------------------------------------------------------------- use and freedom

    def _version(self, key: Key) -> Version | None:
        leaf = self._leaves.get(key.name)
        if leaf is None or leaf.forgotten:
            return None
        return leaf.versions.get(leaf.newest if is_newest(key) else key.index)

    def hold(self, key: Key) -> Version | None:
        """A version, kept until `let_go`; None if it is not here."""
        version = self._version(key)
        if version is not None:
            version.users += 1
        return version

    def let_go(self, name: LeafId, version: Version) -> None:
        """A user of a version has done with it."""
        version.users -= 1
        self._free(self._leaves[name], version)

    def missing(self, key: Key) -> Value:
        """A value that holds why it is not here."""
        if key.kind == "leaf":
            leaf = self._leaves.get(key.name)
            newest = (
                "it was dropped" if leaf is None else f"the newest is {leaf.newest}"
            )
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
        """Which leaves have newer versions than these."""
        found = []
        for name, version in oldest.items():
            leaf = self._leaves.get(name)
            if leaf is not None and leaf.newest > version:
                found.append(Stale(name, leaf.newest - version))
        return tuple(found)

    def use(self, fragment: Fragment, key: Key) -> Value:
        """A version as a value of a context, with the end of its gradient."""
        end = fragment.leaves.get(key.name)
        if is_newest(key) and end is not None and end.read is not None:
            return end.read
        version = self._version(key)
        exact = key if version is None else version.value.key
        value = fragment.values.get(exact)
        if value is None:
            if version is None:
                return self.missing(key)
            value = self._used(fragment, version)
        if is_newest(key):
            fragment.leaves[key.name].read = value
        return value

    def _used(self, fragment: Fragment, version: Version) -> Value:
        source = version.value
        name = source.key.name
        version.users += 1
        end = fragment.leaves.get(name)
        if end is None:
            end = fragment.leaves[name] = LeafEnd(name, self._leaves[name].aval)
        place = len(end.outputs)
        value = fragment.values[source.key] = Value(source.key, end, place)
        end.outputs = (*end.outputs, value)
        self._state.when_settled((source,), partial(self._mirror, source, value))
        return value

    def _mirror(self, source: Value, value: Value) -> None:
        if not value.settled:  # It has if the context was aborted.
            value.stored = source.stored
            self._state.settle(value, source.failure)

    def release(self, fragment: Fragment) -> None:
        """A context ended: the versions that it read may go."""
        for key in fragment.values:
            if key.kind == "leaf" and key.name in self._leaves:
                leaf = self._leaves[key.name]
                version = leaf.versions.get(key.index)
                if version is not None:
                    version.users -= 1
                    self._free(leaf, version)

    def dropped(self, event: Dropped) -> None:
        """A program here drops leaves, here and on other workers."""
        by_worker: dict[Worker, list[LeafId]] = {}
        for leaf in event.leaves:
            by_worker.setdefault(leaf.worker, []).append(leaf)
        for worker, leaves in by_worker.items():
            message = Forget(tuple(leaves))
            if worker == self._state.worker:
                self.forget(worker, message)
            else:
                self._state.send(worker, message)

    def forget(self, sender: Worker, message: Forget) -> None:
        """Drop leaves; a version in use goes when its last user does."""
        for name in message.leaves:
            leaf = self._leaves.get(name)
            if leaf is not None:
                leaf.forgotten = True
                for version in tuple(leaf.versions.values()):
                    self._free(leaf, version)

    def _free(self, leaf: LeafVersions, version: Version) -> None:
        key = version.value.key
        superseded = leaf.forgotten or key.index != leaf.newest
        if superseded and version.users == 0 and version.value.settled:
            if leaf.versions.pop(key.index, None) is not None:
                self._state.drop((key,))
                if version.before is not None:
                    version.before.users -= 1
                    self._free(leaf, version.before)
            if not leaf.versions:
                self._leaves.pop(key.name, None)

    def live(self) -> int:
        """How many leaves are held here."""
        return sum(not leaf.forgotten for leaf in self._leaves.values())

    def lost(self, worker: Worker) -> None:
        """A worker is lost: it acknowledges nothing more."""
        for pending in [key for key in self.unacknowledged if key[1] == worker]:
            del self.unacknowledged[pending]


_NEVER = -1  # The number of a version that nobody can ask for.


def _version_key(name: LeafId, number: int) -> Key:
    return LeafKey(None, name, number)


def _lost(part: Assignment, why: str, parts: int) -> str:
    beside = f"; none of {parts} that were asked for together is made" * (parts > 1)
    return (
        f"{part.outputs[0].name} cannot be made, called at {part.call_site}: "
        f"{why}{beside}"
    )


def _unmade(part: Assignment) -> str:
    names = ", ".join(str(key.name) for key in part.outputs)
    return f"(not made: {names}; what was assigned beside that is not affected)"
