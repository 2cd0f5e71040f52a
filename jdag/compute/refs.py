"""Refs and replies as data, exchanged by programs on different workers."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from jax.tree_util import Partial, tree_map

from jdag.compute.avals import Aval
from jdag.engine.functions import is_remote, remote
from jdag.engine.protocol import Key, LeafId, Path, Worker

Identity = tuple[Worker, Path]  # A failure's worker and the path of its call.


@dataclass(frozen=True, slots=True)
class RefData:
    key: Key
    owner: Worker
    aval: Aval
    tracked: bool
    descends: LeafId | None


def rebuild_objects(tree: Any) -> Any:
    def is_handed(leaf: Any) -> bool:
        return isinstance(leaf, Partial) and is_remote(leaf.func)

    return tree_map(lambda x: x() if is_handed(x) else x, tree, is_leaf=is_handed)


@remote
class Reply(NamedTuple):
    """The result of a program as data, and the failures that the program has received.

    `kept` lists the values in the result to which the program still holds refs: the
    path of the call, and the number of the output.
    """

    result: Any
    seen: tuple[Identity, ...]
    kept: tuple[tuple[Path, int], ...]


class RefBase:
    """Base of `jdag.Ref`, by which lower layers recognize refs."""

    __slots__ = ()


# Whether a value is a ref. It runs no Python code, as calls ask it of all arguments.
is_ref: Callable[[object], bool] = partial(type.__instancecheck__, RefBase)
