"""Reads: values fetched by programs. They create no node, edge or context.

Inputs:  Fetched from programs here, Read and Reading from other workers.
Outputs: Resume, Read and Reading.

Invariants: every Fetched is resumed and every Read is answered, even if the values,
their context or their worker are lost; a leaf version is stored until it has been read,
even if the leaf is assigned to.
"""

from collections.abc import Sequence
from functools import partial

from msgspec import Struct

from jdag.engine.graph import Value, Version
from jdag.engine.leaves import Leaves
from jdag.engine.protocol import (
    LEAF_KINDS,
    AnyKey,
    Failure,
    Fetched,
    Key,
    Read,
    Reading,
    ReadingKey,
    Worker,
    landing,
)
from jdag.engine.state import State

_Answered = Key | Failure
# A requested key and its value. The request counts as a user of leaf versions.
_Requested = tuple[Key, Value]


class Fetch(Struct, eq=False):
    waiter: int
    results: list[_Answered | None]
    missing: int  # Number of workers that have not answered.
    local: dict[int, _Requested]  # Values on this worker, by index.


class Reads(Struct, eq=False):
    _state: State
    _leaves: Leaves
    _number: int = 0
    # Per request: the fetch, the worker that answers, and the indices of its keys.
    _requests: dict[int, tuple[Fetch, Worker, list[int]]] = {}

    def fetched(self, event: Fetched) -> None:
        parts: dict[Worker, list[int]] = {}
        for index, (_, owner) in enumerate(event.keys):
            parts.setdefault(owner, []).append(index)
        fetch = Fetch(event.waiter, [None] * len(event.keys), len(parts), {})
        for owner, indices in parts.items():
            keys = tuple([event.keys[index][0] for index in indices])
            if owner == self._state.worker:
                requested = self._look_up(keys)
                fetch.local = dict(zip(indices, requested, strict=True))
                callback = partial(self._store_answers, fetch, (), ())
                self._state.when_settled([value for _, value in requested], callback)
            elif owner in self._state.lost:
                self._store_lost(fetch, indices, owner)
            else:
                self._number += 1
                self._requests[self._number] = fetch, owner, indices
                self._state.send(owner, Read(self._number, keys))
        if not parts:
            self._state.resume(event.waiter, ())

    def _store_lost(self, fetch: Fetch, indices: Sequence[int], worker: Worker) -> None:
        failure = self._state.lost_failure(worker)
        self._store_answers(fetch, indices, [failure] * len(indices))

    def _store_answers(
        self, fetch: Fetch, indices: Sequence[int], answers: Sequence[_Answered]
    ) -> None:
        for index, answer in zip(indices, answers, strict=True):
            fetch.results[index] = answer
        fetch.missing -= 1
        if fetch.missing:
            return
        for index, requested in fetch.local.items():
            fetch.results[index] = self._answer(requested)
        self._state.resume(fetch.waiter, tuple(fetch.results))
        if fetch.local:
            self._release(tuple(fetch.local.values()))

    def _look_up(self, keys: Sequence[Key]) -> list[_Requested]:
        requested = []
        for key in keys:
            version = self._leaves.version(key) if key.kind in LEAF_KINDS else None
            if version is not None:
                version.users += 1
            requested.append((key, version or self._value(key)))
        return requested

    def _value(self, key: Key) -> Value:
        fragment = self._state.contexts.get(key.context)
        value = None if fragment is None else fragment.values.get(key)
        return self._leaves.missing(key) if value is None else value

    def _answer(self, requested: _Requested) -> _Answered:
        """Return the stored key of a settled value, or the value's failure.

        A value that is not a version is looked up again: it may have been dropped while
        the read waited for other values.
        """
        key, value = requested
        current = value if type(value) is Version else self._value(key)
        return value.failure or current.failure or current.stored

    def _release(self, requested: Sequence[_Requested]) -> None:
        self._state.release(value for _, value in requested if type(value) is Version)

    def read(self, sender: Worker, message: Read) -> None:
        first = message.keys[0] if len(message.keys) == 1 else None
        if first is not None and first.context is not None:
            # A fast path for the common case: one settled value of a context.
            fragment = self._state.contexts.get(first.context)
            value = None if fragment is None else fragment.values.get(first)
            if value is not None and value.settled and value.failure is None:
                reading = Reading(message.request, (None,))
                self._state.send(sender, reading, (value.stored,))
                return
        requested = self._look_up(message.keys)
        reply = partial(self._reply, sender, message, requested)
        self._state.when_settled([value for _, value in requested], reply)

    def _reply(
        self, sender: Worker, message: Read, requested: Sequence[_Requested]
    ) -> None:
        answers = [self._answer(each) for each in requested]
        failures = tuple([a if isinstance(a, Failure) else None for a in answers])
        keys = tuple([answer for answer in answers if isinstance(answer, AnyKey)])
        self._state.send(sender, Reading(message.request, failures), keys)
        self._release(requested)

    def reading(self, sender: Worker, message: Reading) -> None:
        request = self._requests.pop(message.request, None)
        if request is None:
            self._state.drop(landing(message))
            return
        answers = [
            ReadingKey(None, message.request, slot) if failure is None else failure
            for slot, failure in enumerate(message.failures)
        ]
        fetch, _, indices = request
        self._store_answers(fetch, indices, answers)

    def lost(self, worker: Worker) -> None:
        for number, (fetch, owner, indices) in tuple(self._requests.items()):
            if owner == worker:
                del self._requests[number]
                self._store_lost(fetch, indices, worker)
