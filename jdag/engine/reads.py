"""Reads: values fetched by programs. They make no node, no edge and no context.

Told: Fetched by a program here, Read and Reading by other workers. Asks for Resume,
Read and Reading. Invariant: every Fetched is resumed and every Read answered, whatever
becomes of the values, their context or their worker.
"""

from dataclasses import dataclass
from functools import partial

from jdag.engine.graph import Fragment, Value
from jdag.engine.leaves import Leaves
from jdag.engine.state import State, lost_failure
from jdag.engine.vocabulary import (
    Failure,
    Fetched,
    Key,
    Read,
    Reading,
    Resume,
    Worker,
)

Answered = Key | Failure


@dataclass(slots=True)
class Fetch:
    """One program's wait for values, from one or several workers."""

    waiter: int
    results: list[Answered | None]
    missing: int


@dataclass(slots=True)
class Request:
    """The part of a fetch that one other worker answers."""

    fetch: Fetch
    worker: Worker
    places: tuple[int, ...]


class Reads:
    """Reads asked by this worker's programs and asked of it."""

    def __init__(self, state: State, leaves: Leaves) -> None:
        self._state = state
        self._leaves = leaves
        self._number = 0
        self._requests: dict[int, Request] = {}
        self._waiting: dict[Value, list[partial[None]]] = {}

    def fetched(self, event: Fetched) -> None:
        """A program here waits for values."""
        fetch = Fetch(event.waiter, [None] * len(event.keys), len(event.keys))
        places: dict[Worker, list[int]] = {}
        for place, (_, owner) in enumerate(event.keys):
            places.setdefault(owner, []).append(place)
        for owner, mine in places.items():
            keys = tuple(event.keys[place][0] for place in mine)
            if owner == self._state.worker:
                for place, key in zip(mine, keys, strict=True):
                    self._when_read(key, partial(self._give, fetch, place))
            elif owner in self._state.lost:
                for place in mine:
                    self._give(fetch, place, lost_failure(owner, self._state.worker))
            else:
                self._number += 1
                self._requests[self._number] = Request(fetch, owner, tuple(mine))
                self._state.send(owner, Read(self._number, keys))
        if not event.keys:
            self._state.out.append(Resume(event.waiter, ()))

    def _give(self, fetch: Fetch, place: int, answer: Answered) -> None:
        fetch.results[place] = answer
        fetch.missing -= 1
        if fetch.missing == 0:
            self._state.out.append(Resume(fetch.waiter, tuple(fetch.results)))

    def _when_read(self, key: Key, give: partial[None]) -> None:
        """Give the value of a key, or why there is none, once that is known."""
        value = self._find(key)
        if value.settled:
            give(value.failure or value.stored)
            return
        self._waiting.setdefault(value, []).append(give)
        self._state.when_settled((value,), partial(self._settled, value))

    def _settled(self, value: Value) -> None:
        for give in self._waiting.pop(value, ()):
            give(value.failure or value.stored)

    def _find(self, key: Key) -> Value:
        if key.kind == "leaf":
            return self._leaves.read(key)
        fragment = (
            None if key.context is None else self._state.contexts.get(key.context)
        )
        value = None if fragment is None else fragment.values.get(key)
        return self._leaves.missing(key) if value is None else value

    def read(self, sender: Worker, message: Read) -> None:
        """Another worker asks: answer when all of it is known."""
        results: list[Answered | None] = [None] * len(message.keys)
        fetch = Fetch(0, results, len(results))
        for place, key in enumerate(message.keys):
            self._when_read(
                key, partial(self._reply, sender, message.request, fetch, place)
            )

    def _reply(
        self, sender: Worker, request: int, fetch: Fetch, place: int, answer: Answered
    ) -> None:
        fetch.results[place] = answer
        fetch.missing -= 1
        if fetch.missing == 0:
            failures = tuple(
                result if isinstance(result, Failure) else None
                for result in fetch.results
            )
            values = tuple(
                result for result in fetch.results if isinstance(result, Key)
            )
            self._state.send(sender, Reading(request, failures), values)

    def reading(self, message: Reading, landed: tuple[Key, ...]) -> None:
        """What was asked for is here."""
        request = self._requests.pop(message.request, None)
        if request is None:
            self._state.drop(landed)
            return
        keys = iter(landed)
        for place, failure in zip(request.places, message.failures, strict=True):
            self._give(request.fetch, place, next(keys) if failure is None else failure)

    def lost(self, worker: Worker) -> None:
        """A worker is gone: it answers no more."""
        for number, request in tuple(self._requests.items()):
            if request.worker == worker:
                del self._requests[number]
                for place in request.places:
                    failure = lost_failure(worker, self._state.worker)
                    self._give(request.fetch, place, failure)

    def release(self, fragment: Fragment, failure: Failure) -> None:
        """A context goes: who still waits for a value of it gets to know."""
        if not self._waiting:
            return
        for value in fragment.values.values():
            for give in self._waiting.pop(value, ()):
                give(failure)
