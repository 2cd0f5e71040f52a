"""The names of now, where workers that were lost have been replaced.

A program names workers, leaves, contexts and objects as they were first. Inputs: events
in these names; answers of the engine. Outputs: the same in the engine's names, and in
the program's. Only names of what has changed are in the tables.
"""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from jdag.compute.pytrees import flatten, unflatten
from jdag.compute.refs import RefData, Reply
from jdag.engine.protocol import (
    Answered,
    ContextId,
    Key,
    Launched,
    LeafId,
    ObjectId,
    PassResult,
    Return,
    Worker,
    named,
)

Values = Sequence[tuple[Key, Any]]

_OPAQUE = ("function", "data", "aval", "avals")
_WORKERS = ("worker", "owner", "destination", "source", "to")


class CurrentNames:
    """The first names of a program's things, and the engines' names of now."""

    def __init__(self, state: Any) -> None:
        self._state = state
        self.workers: dict[Worker, Worker] = {}
        self.contexts: dict[ContextId, ContextId] = {}
        self.objects: dict[ObjectId, ObjectId] = {}

    def of(self, event: Any) -> Any:
        """Return an event in the names of now."""
        if not self.workers:
            return event
        if type(event) not in (Launched, Answered):
            return self.mapped(event)
        given = "arguments" if type(event) is Launched else "data"
        leaves, treedef = flatten(getattr(event, given))
        tree = unflatten(treedef, list(map(self.mapped, leaves)))
        return replace(self.mapped(replace(event, **{given: None})), **{given: tree})

    def stored(self, values: Values) -> Values:
        """Return values under the keys of now."""
        return [(self.mapped(key), value) for key, value in values]

    def mapped(self, one: Any) -> Any:
        """Return data of the engine's, or a ref's, in the names of now."""
        kind = type(one)
        if kind is tuple:
            workers = self.workers
            return tuple(
                [workers.get(p, p) if type(p) is str else self.mapped(p) for p in one]
            )
        if kind is ContextId:
            return self.contexts.get(one, one)
        if kind is LeafId:
            return LeafId(self.workers.get(one.worker, one.worker), one.number)
        if kind is ObjectId:
            one = self.objects.get(one, one)
            return replace(one, worker=self.workers.get(one.worker, one.worker))
        if kind is RefData:
            owner = self.workers.get(one.owner, one.owner)
            descends = one.descends and self.mapped(one.descends)
            key = self.mapped(one.key)
            return RefData(key, owner, one.aval, one.tracked, descends)
        if not isinstance(one, Struct) or not kind.__module__.startswith("jdag.engine"):
            return one
        new = {}
        for name in one.__struct_fields__:
            part = getattr(one, name)
            if type(part) is str:
                if name in _WORKERS:
                    new[name] = self.workers.get(part, part)
            elif name not in _OPAQUE:
                new[name] = self.mapped(part)
        return replace(one, **new)

    def answer(self, found: Any) -> Any:
        """Return an answer of the engine's in the names of the program."""
        if not self.workers:
            return found
        if type(found) is PassResult:
            stale = [replace(one, leaf=self.leaf(one.leaf)) for one in found.stale]
            leaves = tuple(map(self.leaf, found.leaves))
            return replace(found, leaves=leaves, stale=tuple(stale))
        if type(found) is tuple and found and type(found[0]) is Return:
            return tuple(map(self.news, found))
        return found

    def news(self, one: Any) -> Any:
        """Return how a program ended in the names of the program that started it."""
        if type(one) is not Return or not isinstance(one.result, Reply):
            return one
        leaves, treedef = flatten(one.result.result)
        result = unflatten(treedef, list(map(self._first, leaves)))
        return replace(one, result=one.result._replace(result=result))

    def _first(self, one: Any) -> Any:
        if type(one) is ObjectId:
            return replace(one, worker=self._worker(one.worker))
        if type(one) is not RefData:
            return one
        key, id = one.key, one.key.name
        if type(id) is LeafId:
            key = replace(key, name=self.leaf(id))
        firsts = [one for one, now in self.contexts.items() if now == key.context]
        key = replace(key, context=firsts[0] if firsts else key.context)
        descends = one.descends and self.leaf(one.descends)
        owner = self._worker(one.owner)
        return RefData(key, owner, one.aval, one.tracked, descends)

    def _worker(self, now: Worker) -> Worker:
        names = [name for name, one in self.workers.items() if one == now]
        own = named(now)
        return own if own in names or not names else names[0]

    def leaf(self, id: LeafId) -> LeafId:
        """Return the first name of a leaf."""
        names = [name for name, now in self.workers.items() if now == id.worker]
        known = [LeafId(name, id.number) for name in (*names, id.worker)]
        found = [one for one in known if one in self._state.leaves]
        return found[0] if found else LeafId(self._worker(id.worker), id.number)
