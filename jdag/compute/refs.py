"""Refs and replies as data, exchanged by programs on different workers."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from jax.tree_util import Partial, tree_map

from jdag.compute.avals import Aval
from jdag.engine.functions import is_remote, remote
from jdag.engine.protocol import Key, LeafId, Path, Worker

Identity = tuple[Worker, Path]  # Of a failure: where it happened, and in which call.


@dataclass(frozen=True, slots=True)
class RefData:
    """A ref without the program that holds it, as it travels between workers."""

    key: Key
    owner: Worker
    aval: Aval
    tracked: bool
    descends: LeafId | None


def taken(tree: Any) -> Any:
    """Return a pytree with objects over leaves in place of their data."""

    def is_handed(one: Any) -> bool:
        return isinstance(one, Partial) and is_remote(one.func)

    return tree_map(lambda x: x() if is_handed(x) else x, tree, is_leaf=is_handed)


@remote
class Reply(NamedTuple):
    """The return of a program: its result as data, and the failures that it has seen.

    `kept`: path of call and number of output of each value in the result to which the
    program still holds refs.
    """

    result: Any
    seen: tuple[Identity, ...]
    kept: tuple[tuple[Path, int], ...]


class RefBase:
    """Base of `jdag.Ref`, by which lower layers recognize refs."""

    __slots__ = ()


def is_ref(value: object) -> bool:
    """Tell whether a value is a ref."""
    return isinstance(value, RefBase)
