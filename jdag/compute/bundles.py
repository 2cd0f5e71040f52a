"""Residuals that leave one compiled segment for a later one.

A `Bundle` has residuals as few arrays. Those that the segment was given, or returns,
are held by reference, since jit would copy them. Small arrays are packed, one array for
each dtype, and unpacked inside the jit of the later segment.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdag.compute.avals import Aval, aval_of
from jdag.compute.tracing import Residuals, Traced

PACKED_BYTES_MAX = 1 << 14  # Above, a copy costs more than one more output of jit.
LAYOUTS_MAX = 4096

Places = tuple[int, ...]


@dataclass(frozen=True, eq=False, repr=False)
class Layout:
    """Where a bundle has its residuals; equal ones are one object (`layout`).

    Attributes:
        residuals: for each its trace, and the places of args, outputs and rest among
            the values: arrays that are not packed, then the parts of packed ones.
        packs: the types of the parts of each packed array; these arrays come last.
        alone: places of the arrays that nothing else holds.
    """

    residuals: tuple[tuple[Traced, tuple[Places, ...]], ...]
    packs: tuple[tuple[Aval, ...], ...] = ()
    alone: Places = ()

    def unpacked(self, arrays: Sequence[Any]) -> list[Residuals]:
        """Return the residuals in a bundle of these arrays."""
        plain = len(arrays) - len(self.packs)
        values = list(arrays[:plain])
        for packed, parts in zip(arrays[plain:], self.packs, strict=True):
            end = 0
            for aval in parts:
                start, end = end, end + aval.size
                part = jax.lax.slice_in_dim(packed, start, end)
                values.append(part.reshape(aval.shape))
        found = []
        for traced, places in self.residuals:
            args, outputs, rest = [tuple([values[i] for i in at]) for at in places]
            found.append(Residuals(traced, args, outputs, rest, False))
        return found


layout = lru_cache(maxsize=LAYOUTS_MAX)(Layout)


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Bundle:
    """Residuals for one later segment, which uses them up.

    `keeps` holds every array that this keeps alive, arguments included.
    """

    layout: Layout
    keeps: tuple[Any, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all that this keeps alive."""
        return sum([aval_of(array).nbytes for array in self.keeps])

    def residuals(self) -> list[Residuals]:
        """Return the residuals of each call."""
        return self.layout.unpacked(self.keeps)


def bundled(residuals: Sequence[Residuals]) -> Bundle:
    """Return residuals as a bundle, with every array as it is."""
    packing = Packing(())
    where, _, places = packing.packed(residuals, packs=False)
    return Bundle(layout(where), tuple([packing.made[place] for place in places]))


class Packing:
    """The arrays that leave a segment while it is traced; each leaves once."""

    def __init__(self, given: Sequence[Any]) -> None:
        self.made: list[Any] = []
        self._count = len(given)
        self._places = {id(array): place for place, array in enumerate(given)}

    def place(self, array: Any) -> int:
        """Return the place of an array: among those given, then those made."""
        place = self._places.get(id(array))
        if place is None:
            place = self._places[id(array)] = self._count + len(self.made)
            self.made.append(array)
        return place

    def packed(
        self, residuals: Sequence[Residuals], packs: bool = True
    ) -> tuple[Any, Any, Places]:
        """Return two fields of the residuals' layout, and the places of its arrays."""
        held = [(one.args, one.outputs, one.rest) for one in residuals]
        arrays = {id(one): one for parts in held for part in parts for one in part}
        plain: list[Any] = []
        small: dict[Any, list[Any]] = {}
        for name, array in arrays.items():
            new = packs and name not in self._places
            kind = _packed_as(array) if new else None
            same = plain if kind is None else small.setdefault(kind, [])
            same.append(array)
        few = [same for same in small.values() if len(same) > 1]
        plain += [same[0] for same in small.values() if len(same) == 1]
        index = {id(one): at for at, one in enumerate(chain(plain, *few))}
        where = [
            (
                one.traced,
                tuple([tuple([index[id(a)] for a in part]) for part in parts]),
            )
            for one, parts in zip(residuals, held, strict=True)
        ]
        types = [tuple(map(aval_of, same)) for same in few]
        leaving = [
            *plain,
            *[jnp.concatenate([one.ravel() for one in same]) for same in few],
        ]
        return tuple(where), tuple(types), tuple(map(self.place, leaving))


def _packed_as(array: Any) -> Any:
    """The dtype of an array that is packed; None for others."""
    aval = aval_of(array)
    plain = isinstance(aval.dtype, np.dtype) and aval.dtype != jax.dtypes.float0
    is_packed = plain and not aval.weak and aval.nbytes <= PACKED_BYTES_MAX
    return aval.dtype if is_packed else None
