"""What programs on different workers hand to each other: refs as data, and replies."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from jdag.compute.avals import Aval
from jdag.engine.functions import remote
from jdag.engine.protocol import Key, LeafId, Path, Worker

Identity = tuple[Worker, Path]  # Of a failure: where it happened, and in which call.


@dataclass(frozen=True, slots=True)
class RefData:
    """A ref without the program that holds it: what travels between workers."""

    key: Key
    owner: Worker
    aval: Aval
    tracked: bool
    descends: LeafId | None


@remote
class Reply(NamedTuple):
    """What a program returns: its result as data, and the failures that it has seen.

    `kept` are call and number of outputs in the result of which refs are elsewhere too.
    """

    result: Any
    seen: tuple[Identity, ...]
    kept: tuple[tuple[Path, int], ...]


class RefBase:
    """Base of `jdag.Ref`, by which a lower layer tells refs from other values."""

    __slots__ = ()


def is_ref(value: object) -> bool:
    """Tell whether a value is a ref."""
    return isinstance(value, RefBase)
