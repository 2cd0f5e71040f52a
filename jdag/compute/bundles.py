"""Residuals passed from one compiled segment to a later one.

A `Bundle` stores residuals as few arrays. Residuals that are inputs or outputs of the
segment are held by reference, since jit would copy them. Small arrays are packed, one
array for each dtype, and unpacked inside the jit of the later segment.
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

PACKED_BYTES_MAX = 1 << 14  # A larger copy costs more than another output of jit.
LAYOUTS_MAX = 4096

Places = tuple[int, ...]


@dataclass(frozen=True, eq=False, repr=False)
class Layout:
    """Positions of residuals in a bundle. `layout` returns equal ones as one object.

    Attributes:
        residuals: for each call its trace, and the positions of its arguments, outputs
            and other arrays. Positions count the arrays that are not packed, then the
            parts of packed arrays.
        packs: the types of the parts of each packed array. Packed arrays come last.
        alone: the positions of the arrays that only the bundle holds.
    """

    residuals: tuple[tuple[Traced, tuple[Places, ...]], ...]
    packs: tuple[tuple[Aval, ...], ...] = ()
    alone: Places = ()

    def unpacked(self, arrays: Sequence[Any]) -> list[Residuals]:
        plain = len(arrays) - len(self.packs)
        values = list(arrays[:plain])
        for packed, avals in zip(arrays[plain:], self.packs, strict=True):
            end = 0
            for aval in avals:
                start, end = end, end + aval.size
                part = jax.lax.slice_in_dim(packed, start, end)
                values.append(part.reshape(aval.shape))
        unpacked = []
        for traced, places in self.residuals:
            args, outputs, rest = [
                tuple([values[i] for i in part_places]) for part_places in places
            ]
            unpacked.append(Residuals(traced, args, outputs, rest, False))
        return unpacked


layout = lru_cache(maxsize=LAYOUTS_MAX)(Layout)


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Bundle:
    """Residuals for one later segment. `keeps` also lists arrays that are arguments."""

    layout: Layout
    keeps: tuple[Any, ...]

    @property
    def nbytes(self) -> int:
        return sum([aval_of(array).nbytes for array in self.keeps])

    def residuals(self) -> list[Residuals]:
        return self.layout.unpacked(self.keeps)


def bundled(residuals: Sequence[Residuals]) -> Bundle:
    packing = Packing(())
    where, _, places = packing.packed(residuals, packs=False)
    return Bundle(layout(where), tuple([packing.leaving[place] for place in places]))


class Packing:
    """Collects the arrays that a segment returns, each once, during its trace."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        self.leaving: list[Any] = []
        self._count = len(inputs)
        self._places = {id(array): place for place, array in enumerate(inputs)}

    def place(self, array: Any) -> int:
        place = self._places.get(id(array))
        if place is None:
            place = self._places[id(array)] = self._count + len(self.leaving)
            self.leaving.append(array)
        return place

    def packed(
        self, residuals: Sequence[Residuals], packs: bool = True
    ) -> tuple[Any, Any, Places]:
        """Return `residuals` and `packs` for a `Layout`, and the arrays' positions."""
        held = [(each.args, each.outputs, each.rest) for each in residuals]
        arrays = {id(array): array for parts in held for array in chain(*parts)}
        plain: list[Any] = []
        small: dict[Any, list[Any]] = {}
        for name, array in arrays.items():
            new = packs and name not in self._places
            kind = _packed_as(array) if new else None
            group = plain if kind is None else small.setdefault(kind, [])
            group.append(array)
        packed = [group for group in small.values() if len(group) > 1]
        plain += [group[0] for group in small.values() if len(group) == 1]
        index = {id(array): n for n, array in enumerate(chain(plain, *packed))}
        locations = [
            (
                each.traced,
                tuple([tuple([index[id(a)] for a in part]) for part in parts]),
            )
            for each, parts in zip(residuals, held, strict=True)
        ]
        types = [tuple(map(aval_of, group)) for group in packed]
        leaving = [
            *plain,
            *[jnp.concatenate([array.ravel() for array in group]) for group in packed],
        ]
        return tuple(locations), tuple(types), tuple(map(self.place, leaving))


def _packed_as(array: Any) -> Any:
    aval = aval_of(array)
    plain = isinstance(aval.dtype, np.dtype) and aval.dtype != jax.dtypes.float0
    is_packed = plain and not aval.weak and aval.nbytes <= PACKED_BYTES_MAX
    return aval.dtype if is_packed else None
