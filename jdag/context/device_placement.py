"""Moves of values to a worker or a device, and from a device to another worker.

A move is a call of an identity function, which is differentiable, at the destination.
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

# Copies of values that are on named devices. The dict's keys are: the value's key,
# whether the copy is tracked, and the destination.
Copies = dict[tuple[Key, bool, Worker], Ref]


def move(call: Callable[..., Any], where: str, tree: Any) -> Any:
    """Call the identity `transferred` on a worker with the leaves of a pytree.

    There is one call for tracked leaves and one for untracked leaves, since the outputs
    of a call are all tracked or all untracked. Statics, and numbers inside the pytree,
    are returned unchanged.
    """
    leaves, treedef = flatten(tree)
    moved = list(leaves)
    for is_tracked in (True, False):
        indices = [
            index
            for index, leaf in enumerate(leaves)
            if not (is_static(leaf) if leaf is tree else is_constant(leaf))
            and (is_ref(leaf) and leaf.tracked) is is_tracked
        ]
        if indices:
            refs = call(where, transferred, *[leaves[index] for index in indices])
            for index, ref in zip(indices, refs, strict=True):
                moved[index] = ref
    return unflatten(treedef, moved)


def at_home(frame: Any, parts: Split, worker: Worker) -> Split:
    """Replace the arguments of a call that are on named devices of other workers.

    `worker` runs the call. A value on a named device of another worker is first copied
    to that worker's default device by a separate call, whose vjp returns the cotangent
    to the device. Each value is copied once for each destination. The copy exists as
    long as refs of the value: the value's `Hold` owns the copy, or the frame if the
    value is a leaf.
    """

    def call(_: str, fn: Callable[..., Any], *refs: Ref) -> Any:
        return frame.issue(refs[0].owner, None, fn, split(refs, {}, is_ref))

    far = [
        (index, ref)
        for index, ref in parts.refs
        if is_ref(ref) and ref.device is not None and ref.owner != worker
    ]
    missing: dict[str, dict[tuple[Key, bool], Ref]] = {}
    for _, ref in far:
        frame.admit(ref)
        if (ref.key, ref.tracked, worker) not in _copies_of(ref, frame):
            missing.setdefault(ref.place, {})[ref.key, ref.tracked] = ref
    for group in missing.values():
        sources = list(group.values())
        for source, copy in zip(sources, move(call, "", sources), strict=True):
            _copies_of(source, frame)[source.key, source.tracked, worker] = copy
    refs = dict(parts.refs)
    for index, ref in far:
        refs[index] = _copies_of(ref, frame)[ref.key, ref.tracked, worker]
    return replace(parts, refs=tuple(refs.items()))


def _copies_of(ref: Ref, frame: Any) -> Copies:
    # A copy belongs to one context, but a leaf to all contexts.
    copies: Copies = frame.copies
    return copies if ref.leaf or ref.hold is None else ref.hold.copies
