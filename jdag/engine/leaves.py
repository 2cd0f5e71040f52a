"""Leaves and their versions: made, replaced and dropped in message order.

A version is kept while it is the newest, while an assignment waits for it, and while a
context that read it is open. Invariant: `users` counts just those last two.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from jdag.engine.graph import Fragment, LeafEnd, Value
from jdag.engine.state import State, first_failure
from jdag.engine.vocabulary import (
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
    Path,
    Stale,
    Worker,
    landing,
)
from jdag.errors import WorkerLost


@dataclass(slots=True)
class Version:
    """One version of a leaf and how many contexts and assignments use it."""

    value: Value
    users: int = 0


@dataclass(slots=True)
class Leaf:
    """The versions of one leaf that are still held here."""

    aval: Any
    newest: int = -1
    forgotten: bool = False
    versions: dict[int, Version] = field(default_factory=dict)


@dataclass(slots=True)
class Batch:
    """What came with one message, dropped when the last of its parts has settled."""

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
        self._leaves: dict[LeafId, Leaf] = {}
        self.unacknowledged: dict[tuple[Path, Worker], None] = {}

    def assigned(self, event: Assigned) -> None:
        """A program here makes versions of leaves: one message to each who keeps some.

        Where one of these is lost nobody is told.
        """
        state = self._state
        parts: dict[Worker, list[Assignment]] = {}
        for part in event.parts:
            if part.worker in state.lost:
                raise WorkerLost(_lost(part, len(event.parts)))
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
        self.assign(own)

    def arrived(self, sender: Worker, message: Assign) -> None:
        """An assignment from another worker."""
        self.assign(message)
        self._state.send(sender, Acknowledge(None, message.path))

    def assign(self, message: Assign) -> None:
        """Make the versions: they settle when the functions have run."""
        constants = tuple(key for key in landing(message) if key.kind == "constant")
        batch = Batch(len(message.parts), constants)
        # All is taken before the first is made: no part reads what another replaces.
        taken = [self._inputs(part, batch) for part in message.parts]
        for part, (inputs, held) in zip(message.parts, taken, strict=True):
            self._assign(part, inputs, held)

    def _assign(self, part: Assignment, inputs: tuple[Value, ...], held: Held) -> None:
        state = self._state
        outputs = []
        for key, aval in zip(part.outputs, part.avals, strict=True):
            leaf = self._leaves.setdefault(key.name, Leaf(aval))
            previous = leaf.versions.get(leaf.newest)
            leaf.newest = key.index
            value = Value(key, None, 0)
            leaf.versions[key.index] = Version(value)
            outputs.append(value)
            if previous is not None:
                self._free(leaf, previous)
        if part.function is None:
            self._settle(tuple(outputs), held, None)
            return
        run = partial(self._run, part, inputs, tuple(outputs), held)
        state.when_settled(inputs, run)

    def _inputs(self, part: Assignment, batch: Batch) -> tuple[tuple[Value, ...], Held]:
        """The values of an assignment, each held until it has run."""
        state = self._state
        inputs: list[Value] = []
        fragments: list[Fragment] = []
        values: list[Value] = []
        versions: list[tuple[LeafId, Version]] = []
        for key in part.inputs:
            value: Value | None = None
            if key.kind == "leaf":
                version = self._version(key)
                if version is not None:
                    version.users += 1
                    versions.append((key.name, version))
                    value = version.value
            elif key.kind == "constant":
                value = Value(key, None, 0)
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
        state.compute(job, self._computed, held, (part, outputs))

    def _computed(
        self,
        failure: Failure | None,
        held: Held,
        owner: tuple[Assignment, tuple[Value, ...]],
        job: Job,
    ) -> None:
        part, outputs = owner
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
        for value in outputs:
            state.settle(value, failure)
        state.release(held.values)
        for fragment in held.fragments:
            state.less_pending(fragment)
        for name, version in held.versions:
            version.users -= 1
            self._free(self._leaves[name], version)
        for value in outputs:  # Dropped or replaced while it was being made.
            leaf = self._leaves.get(value.key.name)
            if leaf is None:
                state.drop((value.key,))
            elif value.key.index in leaf.versions:
                self._free(leaf, leaf.versions[value.key.index])

    # ------------------------------------------------------------- use and freedom

    def _version(self, key: Key) -> Version | None:
        leaf = self._leaves.get(key.name)
        if leaf is None or leaf.forgotten:
            return None
        return leaf.versions.get(key.index)

    def missing(self, key: Key) -> Value:
        """A value that holds why it is not here."""
        if key.kind == "leaf":
            leaf = self._leaves.get(key.name)
            newest = (
                "it was dropped" if leaf is None else f"the newest is {leaf.newest}"
            )
            why = f"version {key.index} of {key.name} is not held any more ({newest})"
        else:
            why = f"{key.kind} {key.name} of context {key.context} is not held here"
        value = Value(key, None, 0)
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

    def read(self, key: Key) -> Value:
        """A version, to be read outside any context."""
        version = self._version(key)
        return self.missing(key) if version is None else version.value

    def use(self, fragment: Fragment, key: Key) -> Value:
        """A version as a value of a context, with the end of its gradient."""
        value = fragment.values.get(key)
        if value is not None:
            return value
        version = self._version(key)
        if version is None:
            return self.missing(key)
        version.users += 1
        end = fragment.leaves.get(key.name)
        if end is None:
            end = fragment.leaves[key.name] = LeafEnd(
                key.name, self._leaves[key.name].aval
            )
        value = fragment.values[key] = Value(key, end, len(end.outputs))
        end.outputs = (*end.outputs, value)
        source = version.value
        self._state.when_settled((source,), partial(self._mirror, source, value))
        return value

    def _mirror(self, source: Value, value: Value) -> None:
        if not value.settled:  # It has if the context was aborted.
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
            if worker == self._state.worker:
                self.forget(Forget(tuple(leaves)))
            else:
                self._state.send(worker, Forget(tuple(leaves)))

    def forget(self, message: Forget) -> None:
        """Drop leaves; a version in use goes when its last user does."""
        for name in message.leaves:
            leaf = self._leaves.get(name)
            if leaf is not None:
                leaf.forgotten = True
                for version in tuple(leaf.versions.values()):
                    self._free(leaf, version)

    def _free(self, leaf: Leaf, version: Version) -> None:
        key = version.value.key
        superseded = leaf.forgotten or key.index != leaf.newest
        if superseded and version.users == 0 and version.value.settled:
            if leaf.versions.pop(key.index, None) is not None:
                self._state.drop((key,))
            if not leaf.versions:
                self._leaves.pop(key.name, None)

    def live(self) -> int:
        """How many leaves are held here."""
        return sum(not leaf.forgotten for leaf in self._leaves.values())

    def lost(self, worker: Worker) -> None:
        """A worker is gone: it acknowledges nothing more."""
        for pending in [key for key in self.unacknowledged if key[1] == worker]:
            del self.unacknowledged[pending]


def _lost(part: Assignment, parts: int) -> str:
    beside = f"; none of {parts} that were asked for together is made" * (parts > 1)
    return (
        f"{part.outputs[0].name} cannot be made, called at {part.call_site}: worker "
        f"{part.worker!r} is lost{beside}"
    )


def _unmade(part: Assignment) -> str:
    names = ", ".join(str(key.name) for key in part.outputs)
    return f"(not made: {names}; what was assigned beside that is not affected)"
