"""Reads: values fetched by programs. They create no node, edge or context.

Inputs:  Fetched from programs here, Read and Reading from other workers.
Outputs: Resume, Read and Reading.

Invariants: every Fetched is resumed and every Read is answered, even if the values,
their context or their worker are lost; a leaf version that is read is kept until then,
regardless of assignments in the meantime.
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
# A requested key and its value; a leaf version is kept until the answer is sent.
Found = tuple[Key, Value]


class Fetch(Struct, eq=False):
    """One program's wait for values, from one or several workers."""

    waiter: int
    results: list[_Answered | None]
    missing: int  # Workers that have not answered.
    own: dict[int, Found]  # This worker's own values, by index.


class Reads(Struct, eq=False):
    """Reads by this worker's programs, and reads that it answers."""

    _state: State
    _leaves: Leaves
    _number: int = 0
    # Per request: the fetch, the worker that answers, and the indices of its keys.
    _requests: dict[int, tuple[Fetch, Worker, list[int]]] = {}

    def fetched(self, event: Fetched) -> None:
        """A program here waits for values."""
        parts: dict[Worker, list[int]] = {}
        for place, (_, owner) in enumerate(event.keys):
            parts.setdefault(owner, []).append(place)
        fetch = Fetch(event.waiter, [None] * len(event.keys), len(parts), {})
        for owner, places in parts.items():
            keys = tuple([event.keys[place][0] for place in places])
            if owner == self._state.worker:
                found = self._find(keys)
                fetch.own = dict(zip(places, found, strict=True))
                give = partial(self._give, fetch, (), ())
                self._state.when_settled([value for _, value in found], give)
            elif owner in self._state.lost:
                self._give_lost(fetch, places, owner)
            else:
                self._number += 1
                self._requests[self._number] = fetch, owner, places
                self._state.send(owner, Read(self._number, keys))
        if not parts:
            self._state.resume(event.waiter, ())

    def _give_lost(self, fetch: Fetch, places: Sequence[int], worker: Worker) -> None:
        failure = self._state.lost_failure(worker)
        self._give(fetch, places, [failure] * len(places))

    def _give(
        self, fetch: Fetch, places: Sequence[int], answers: Sequence[_Answered]
    ) -> None:
        """Store one worker's answers; resume the program when all have answered."""
        for place, answer in zip(places, answers, strict=True):
            fetch.results[place] = answer
        fetch.missing -= 1
        if fetch.missing:
            return
        for place, found in fetch.own.items():
            fetch.results[place] = self._answer(found)
        self._state.resume(fetch.waiter, tuple(fetch.results))
        if fetch.own:
            self._let_go(tuple(fetch.own.values()))

    def _find(self, keys: Sequence[Key]) -> list[Found]:
        found = []
        for key in keys:
            version = self._leaves.version(key) if key.kind in LEAF_KINDS else None
            if version is not None:
                version.users += 1
            found.append((key, version or self._value(key)))
        return found

    def _value(self, key: Key) -> Value:
        fragment = self._state.contexts.get(key.context)
        value = None if fragment is None else fragment.values.get(key)
        return self._leaves.missing(key) if value is None else value

    def _answer(self, found: Found) -> _Answered:
        """The stored key of a settled value, or its failure.

        Unless it is kept for the read it is looked up again: it may have been dropped
        while others were awaited.
        """
        key, value = found
        again = value if type(value) is Version else self._value(key)
        return value.failure or again.failure or again.stored

    def _let_go(self, found: Sequence[Found]) -> None:
        self._state.release(value for _, value in found if type(value) is Version)

    def read(self, sender: Worker, message: Read) -> None:
        """Another worker requests values: answer when all have settled."""
        first = message.keys[0] if len(message.keys) == 1 else None
        if first is not None and first.context is not None:
            # The common case: one value of a context that has already settled.
            fragment = self._state.contexts.get(first.context)
            value = None if fragment is None else fragment.values.get(first)
            if value is not None and value.settled and value.failure is None:
                reading = Reading(message.request, (None,))
                self._state.send(sender, reading, (value.stored,))
                return
        found = self._find(message.keys)
        reply = partial(self._reply, sender, message, found)
        self._state.when_settled([value for _, value in found], reply)

    def _reply(self, sender: Worker, message: Read, found: Sequence[Found]) -> None:
        answers = [self._answer(one) for one in found]
        failures = tuple([a if isinstance(a, Failure) else None for a in answers])
        held = tuple([answer for answer in answers if isinstance(answer, AnyKey)])
        self._state.send(sender, Reading(message.request, failures), held)
        self._let_go(found)

    def reading(self, sender: Worker, message: Reading) -> None:
        """The answer to a read of this worker arrived."""
        request = self._requests.pop(message.request, None)
        if request is None:
            self._state.drop(landing(message))
            return
        answers = [
            ReadingKey(None, message.request, slot) if failure is None else failure
            for slot, failure in enumerate(message.failures)
        ]
        fetch, _, places = request
        self._give(fetch, places, answers)

    def lost(self, worker: Worker) -> None:
        """A worker is lost: fail the reads that it has not answered."""
        for number, (fetch, asked, places) in tuple(self._requests.items()):
            if asked == worker:
                del self._requests[number]
                self._give_lost(fetch, places, worker)
