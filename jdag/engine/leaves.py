"""Leaves and their versions: created, replaced and dropped in the order of messages.

The owner of a leaf numbers its versions, since programs on several workers may assign
to it concurrently. Messages refer to the `newest` version: the last one assigned before
the message arrived. So each update starts from the previous version, and no update is
lost, whatever the order of requests. Requests of one worker arrive in the order in
which it sent them. A context keeps reading the version that it read first
(`LeafEnd.read`) until its own program assigns.

A version is stored while it is the newest, while an assignment or a read waits for it,
and while a context that read it is open: `users` counts these. If the worker that
requested a version is lost and the version cannot be computed, the update is withdrawn:
the version takes the array of the previous one.
"""

from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from jdag.engine.graph import Fragment, LeafEnd, LeafVersions, Value, Version
from jdag.engine.lifetimes import Lifetimes
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
    """An assignment in progress. It counts as a user of its inputs."""

    issuer: Worker
    part: Assignment
    inputs: list[Value] = []
    outputs: list[Value] = []
    fragments: list[Fragment] = []  # The contexts of the inputs.


class Leaves(Struct, eq=False):
    _state: State
    _lifetimes: Lifetimes

    def assigned(self, event: Assigned) -> None:
        """Send the assignments of a program to the owners, one message for each owner.

        Raises:
            WorkerLost: an owner is lost; nothing is sent.
        """
        state = self._state
        parts: dict[Worker, list[Assignment]] = {}
        for part in event.parts:
            if part.worker in state.lost:
                why = state.loss(part.worker)
                raise WorkerLost(_lost(part, why, len(event.parts)))
            parts.setdefault(part.worker, []).append(part)
        parts.setdefault(state.worker, [])
        messages = {to: Assign(event.path, tuple(each)) for to, each in parts.items()}
        for worker in messages:
            state.expect_handling(worker, event.path)
        state.send_each(messages)
        state.send(state.worker, messages[state.worker])
        outputs = [key for part in event.parts for key in part.outputs]
        self._lifetimes.renewed([key for key in outputs if key.kind == "newest"])

    def assign(self, issuer: Worker, message: Assign) -> None:
        """Create an assignment's versions. They settle when its functions have run.

        Raises:
            ProtocolError: a version exists already.
        """
        new: dict[Key, None] = {}
        pairs = [zip(part.outputs, part.avals, strict=True) for part in message.parts]
        for key, _ in chain.from_iterable(pairs):
            leaf = self._state.leaves.get(key.name)
            exists = key in new or (leaf is not None and key.index <= leaf.newest)
            if key.kind == "leaf" and exists:
                raise ProtocolError(f"version {key.index} of {key.name} exists already")
            new[key] = None
        constants = {key: unused(key, settled=True) for key in landing(message)}
        updates = [Update(issuer, part) for part in message.parts]
        # All inputs are resolved first, so that no part reads another part's version.
        for update in updates:
            self._resolve_inputs(update, constants)
        for update in updates:
            part = update.part
            for key, aval in zip(part.outputs, part.avals, strict=True):
                update.outputs.append(self._next(key, aval, issuer))
            if part.function is None:
                self._settle(update, None)
            else:
                run = partial(self._run, update)
                self._state.when_settled(update.inputs, run)

    def _resolve_inputs(self, update: Update, constants: Mapping[Key, Value]) -> None:
        contexts = self._state.contexts
        for key in update.part.inputs:
            value = constants.get(key)
            if key.kind in LEAF_KINDS:
                value = self.version(key)
            elif value is None and key.context in contexts:
                fragment = contexts[key.context]
                value = fragment.values.get(key)
                if value is not None:
                    assert value.users, key  # Otherwise the value was discarded.
                    fragment.pending += 1
                    update.fragments.append(fragment)
            value = value or self.missing(key)
            value.users += 1
            update.inputs.append(value)

    def _next(self, key: Key, aval: Any, issuer: Worker) -> Value:
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
        return self._next(NewestKey(None, leaf, 0), None, issuer)

    def _run(self, update: Update) -> None:
        state, part = self._state, update.part
        failure = first_failure(update.inputs)
        for fragment in update.fragments:
            # The context was aborted: its values are dropped.
            if fragment.released and failure is None:
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
            message = f"{failure.message}\n{_not_assigned(update.part)}"
            site = update.part.call_site
            failure = replace(failure, message=message, call_site=site)
        self._settle(update, failure)

    def _settle(self, update: Update, failure: Failure | None) -> None:
        state = self._state
        withdrawn = failure is not None and self._is_lost(update.issuer, failure)
        for value in update.outputs:
            self.version_done(value, failure, withdrawn=withdrawn)
        state.release(update.inputs)
        for fragment in update.fragments:
            state.pending_done(fragment)

    def _is_lost(self, issuer: Worker, failure: Failure) -> bool:
        reports_loss = failure.error == WorkerLost.__name__ and failure.worker == issuer
        return reports_loss or issuer in self._state.lost

    def version_done(
        self, value: Value, failure: Failure | None, *, withdrawn: bool = False
    ) -> None:
        if not isinstance(value, Version) or value.before is None:
            self._state.settle(value, failure)
            return
        before = value.before
        if withdrawn:
            copy = partial(self._as_before, value, before)
            self._state.when_settled((before,), copy)
        else:
            value.before = None
            self._state.settle(value, failure)
            self._state.release((before,))

    def _as_before(self, version: Value, before: Value) -> None:
        version.stored = before.stored
        self._state.settle(version, before.failure)

    def version(self, key: Key) -> Version | None:
        if key.kind == "newest":
            return self.newest(key.name)
        leaf = self._state.leaves.get(key.name)
        return leaf.versions.get(key.index) if leaf and not leaf.forgotten else None

    def newest(self, leaf_id: LeafId) -> Version | None:
        leaf = self._state.leaves.get(leaf_id)
        if leaf is None or leaf.forgotten:
            return None
        return leaf.versions.get(leaf.newest)

    def missing(self, key: Key) -> Value:
        if key.kind == "leaf":
            leaf = self._state.leaves.get(key.name)
            newest = f"the newest is {leaf.newest}" if leaf else "it was dropped"
            why = f"version {key.index} of {key.name} is no longer stored ({newest})"
        elif key.kind == "newest":
            why = f"{key.name} is not stored here: it was dropped, or not assigned yet"
        else:
            why = f"{key.kind} {key.name} of context {key.context} is not stored here"
        value = Value(key)
        value.settled = True
        value.failure = self._state.failure("ContextError", why)
        return value

    def stale(self, oldest: Mapping[LeafId, int]) -> tuple[Stale, ...]:
        leaves = self._state.leaves
        newer = {name: leaves[name].newest - oldest[name] for name in oldest}
        return tuple(Stale(name, count) for name, count in newer.items() if count)

    def use(self, fragment: Fragment, key: Key) -> Value:
        """Return a leaf version as a value of a context; create its `LeafEnd`."""
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
        self._state.when_settled((version,), self._mirror, version, value)
        return value

    def _mirror(self, source: Version, value: Value) -> None:
        if not value.settled:  # Otherwise an abort has settled it.
            value.stored = source.stored
            self._state.settle(value, source.failure)

    def release(self, fragment: Fragment) -> None:
        leaves = self._state.leaves
        read = [key for key in fragment.values if key.kind == "leaf"]
        self._state.release(leaves[key.name].versions[key.index] for key in read)

    def dropped(self, event: Dropped) -> None:
        by_worker: dict[Worker, list[LeafId]] = {}
        for leaf in event.leaves:
            by_worker.setdefault(leaf.worker, []).append(leaf)
        for worker, leaves in by_worker.items():
            self._state.send(worker, Forget(tuple(leaves)))

    def forget(self, sender: Worker, message: Forget) -> None:
        for name in message.leaves:
            leaf = self._state.leaves.get(name)
            if leaf is not None and not leaf.forgotten:
                leaf.forgotten = True
                self._state.release((leaf.versions[leaf.newest],))


_NEVER = -1  # The number of a version that no key can name.


def unused(key: Key, *, settled: bool = False) -> Value:
    """Return a value that no program can name. It is dropped with its last user."""
    value = Value(key)
    value.settled = settled
    value.users = 0
    return value


def _lost(part: Assignment, why: str, parts: int) -> str:
    others = f"; no part of the assignment ({parts} parts) is done" * (parts > 1)
    return (
        f"{part.outputs[0].name} cannot be assigned, called at {part.call_site}: "
        f"{why}{others}"
    )


def _not_assigned(part: Assignment) -> str:
    names = ", ".join(str(key.name) for key in part.outputs)
    return f"(not assigned: {names}; other leaves assigned with it are not affected)"
