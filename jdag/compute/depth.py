"""How deep pytrees are nested, found out before JAX takes one apart.

JAX does so recursively, and where the stack is too small for that it does not give back
what it has taken of it: all that runs afterwards has less.
"""

from collections.abc import Iterable
from typing import Any

import jax.tree_util as jtu

from jdag.errors import JdagError, is_deeper

DEPTH_MAX = 150
_one_level: Any = jtu.default_registry.flatten_one_level


def check_depth(tree: Any, what: str) -> None:
    """Raise JdagError where a pytree, called `what`, is too deep or contains itself."""
    if is_deeper(tree, DEPTH_MAX, _parts):
        raise JdagError(
            f"{what} is a pytree that is nested more than {DEPTH_MAX} deep, or that "
            "contains itself"
        )


def _parts(node: Any) -> Iterable[Any]:
    """The children of a node, none of a leaf."""
    kind = type(node)
    if kind is list or kind is tuple:
        return node
    if kind is dict:
        return node.values()
    found = _one_level(node)
    return () if found is None else found[0]
