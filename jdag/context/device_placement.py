"""Placement of values: moves to a worker or a device, and values that leave a device.

A move is a call of a tracked identity at its destination.
"""

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from jdag.compute.pytrees import (
    Split,
    flatten,
    is_constant,
    is_static,
    split,
    unflatten,
)
from jdag.compute.refs import is_ref
from jdag.context.refs import Ref
from jdag.engine.functions import transferred
from jdag.engine.protocol import Key, Worker

# Copies of values of named devices: by key, tracked or not, and destination.
Copies = dict[tuple[Key, bool, Worker], Ref]


def move(call: Callable[..., Any], where: str, tree: Any) -> Any:
    """Call `transferred` on a worker with the leaves of a pytree.

    What is tracked goes by one call and the rest by another, since outputs of one call
    are tracked or not together. Statics, and numbers inside the pytree, stay as they
    are: there is nothing to move.
    """
    leaves, treedef = flatten(tree)
    there = list(leaves)
    for kind in (True, False):
        places = [
            place
            for place, leaf in enumerate(leaves)
            if not (is_static(leaf) if leaf is tree else is_constant(leaf))
            and (is_ref(leaf) and leaf.tracked) is kind
        ]
        if places:
            refs = call(where, transferred, *[leaves[place] for place in places])
            for place, ref in zip(places, refs, strict=True):
                there[place] = ref
    return unflatten(treedef, there)


def at_home(frame: Any, parts: Split, worker: Worker) -> Split:
    """Return the arguments of a call on `worker`, none on a device of another.

    What is on one is moved to its worker's default device first. That is a call of its
    own, so that its cotangent comes back to that device; there is one for each value
    and destination, as there is one transfer. It lives as long as what it is made from
    can be named: with the hold of that, or in the `copies` of the frame.
    """

    def call(_: str, fn: Callable[..., Any], *refs: Ref) -> Any:
        return frame.issue(refs[0].owner, None, fn, split(refs, {}, is_ref))

    far = [
        (place, ref)
        for place, ref in parts.refs
        if is_ref(ref) and ref.device is not None and ref.owner != worker
    ]
    sources: dict[str, dict[tuple[Key, bool], Ref]] = {}
    for _, ref in far:
        frame.admit(ref)
        if (ref.key, ref.tracked, worker) not in _kept(ref, frame.copies):
            sources.setdefault(ref.place, {})[ref.key, ref.tracked] = ref
    for refs in sources.values():
        those = list(refs.values())
        for source, ref in zip(those, move(call, "", those), strict=True):
            _kept(source, frame.copies)[source.key, source.tracked, worker] = ref
    found = dict(parts.refs)
    for place, ref in far:
        found[place] = _kept(ref, frame.copies)[ref.key, ref.tracked, worker]
    return replace(parts, refs=tuple(found.items()))


def _kept(ref: Ref, copies: Copies) -> Copies:
    # Copies are of one context, and a leaf is of all.
    return copies if ref.leaf or ref.hold is None else ref.hold.copies
