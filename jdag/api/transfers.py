"""Moving arrays: a call of a tracked identity at their destination."""

from collections.abc import Callable
from typing import Any

from jdag.compute.pytrees import flatten, is_constant, is_static, unflatten
from jdag.compute.refs import is_ref
from jdag.engine.functions import moved


def move(call: Callable[..., Any], where: str, tree: Any) -> Any:
    """Call `moved` on a worker with the leaves of a pytree.

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
            arrays = tuple([leaves[place] for place in places])
            refs = call(where, moved, *arrays)
            for place, ref in zip(places, refs, strict=True):
                there[place] = ref
    return unflatten(treedef, there)
