"""Assignments that are made again: leaves as they were, and updates of a log.

Each gets a new number. Of a leaf that is on its worker already the next version is
made, else its first one: `made` has the leaves that are there.
"""

from collections.abc import Container
from typing import Any

from msgspec.structs import replace

from jdag.api.current_names import Values
from jdag.api.leaves import Assignments, Change, add_part
from jdag.api.refs import Leaf
from jdag.api.snapshots import Snapshot
from jdag.compute.avals import Aval
from jdag.engine.functions import transferred
from jdag.engine.protocol import (
    Assigned,
    Assignment,
    ConstantKey,
    Key,
    LeafId,
    LeafKey,
    NewestKey,
    Path,
)

Again = tuple[Path, list[Assignment], Values]  # Number, parts, and what is stored.


def restored(
    assignments: Assignments, snapshot: Snapshot, made: Container[LeafId]
) -> Again:
    """Give leaves the values that they had, each from the copy on its own worker."""
    draft = assignments._draft()
    for id, copies in snapshot.items():  # Apart, so that one that failed is alone.
        copy = next(iter(copies.values()))
        change = Change(transferred, (), (copy,))
        call = assignments._traced(draft, copy.owner, change)
        key = _key(LeafKey(None, id, 0), made)
        add_part(draft, [key], [Leaf(id, copy.aval)], call)
    return draft.path, draft.parts, ()


def repeated(
    assignments: Assignments, event: Assigned, values: Values, made: Container[LeafId]
) -> Again:
    """Make an update of the log again, from the same values."""
    draft = assignments._draft()
    path, of = draft.path, dict(values)

    def renamed(key: Key) -> Key:
        if key.kind != "constant":
            return key
        return ConstantKey(None, (*path, *key.name[len(path) :]), key.index)

    stored: list[tuple[Key, Any]] = [(renamed(key), value) for key, value in values]
    for part in event.parts:
        outputs = [_key(key, made) for key in part.outputs]
        if part.function is None and outputs[0].kind == "newest":
            # The values go as constants, since the owner numbers this version.
            given = [of[key] for key in part.outputs]
            args = [v.struct() if isinstance(v, Aval) else v for v in given]
            change = Change(transferred, (), tuple(args))
            call = assignments._traced(draft, part.worker, change)
            both = zip(outputs, part.avals, strict=True)
            add_part(draft, outputs, [Leaf(k.name, aval) for k, aval in both], call)
            stored = [one for one in stored if one[0] not in part.outputs]
            continue
        draft.parts.append(
            replace(
                part,
                path=(*path, *part.path[len(path) :]),
                inputs=tuple(map(renamed, part.inputs)),
                outputs=tuple(outputs),
            )
        )
    value_of = assignments.state.value
    stored += [(key, value_of(value)) for key, value in draft.constants.values()]
    return path, draft.parts, stored


def _key(key: Key, made: Container[LeafId]) -> Key:
    return NewestKey(None, key.name, 0) if key.name in made else key
