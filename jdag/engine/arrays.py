"""Arrays as data: their types, and the hole that one leaves in a structure.

`jdag.wire` writes these to messages, and `jdag.compute` makes values of them.
"""

import math
from functools import lru_cache
from typing import Annotated

from msgspec import Meta, Struct

from jdag.errors import ProtocolError

NBYTES_MAX = (1 << 63) - 1
RANK_MAX = 64  # As numpy's; it also bounds the numbers that errors print.

Axis = Annotated[int, Meta(ge=0, le=NBYTES_MAX)]

Text = Annotated[str, Meta(max_length=1 << 16)]

# Bytes of an element.
DTYPES = {
    "bool": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
    "int2": 1,
    "int4": 1,
    "uint2": 1,
    "uint4": 1,
    "float4_e2m1fn": 1,
    "float8_e3m4": 1,
    "float8_e4m3": 1,
    "float8_e4m3b11fnuz": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "key<fry>": 8,
    "key<rbg>": 16,
    "key<urbg>": 16,
}


class ArrayType(
    Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False
):
    """Shape, name of the dtype, weak type or not: an abstract value as data.

    `device` is that of a ref's value, None for the default one of its worker. `dual`
    stands for two arrays of this type, a primal and its tangent.
    """

    shape: Annotated[tuple[Axis, ...], Meta(max_length=RANK_MAX)]
    dtype: Text
    weak: bool
    device: Text | None = None
    dual: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, of a dual those of both arrays."""
        return self.array_nbytes * (1 + self.dual)

    @property
    def array_nbytes(self) -> int:
        """Bytes of the elements of one array."""
        return math.prod(self.shape) * DTYPES[self.dtype]


@lru_cache(4096)
def check_possible(kind: ArrayType) -> None:
    """Raise ProtocolError where no array has the type."""
    if kind.dtype not in DTYPES:
        raise ProtocolError(
            f"dtype {kind.dtype[:80]!r}: allowed are {', '.join(DTYPES)}"
        )
    # As numpy counts: it refuses an empty array whose other axes are as large.
    nbytes = math.prod([axis for axis in kind.shape if axis]) * DTYPES[kind.dtype]
    if nbytes > NBYTES_MAX:
        raise ProtocolError(
            f"shape {kind.shape} of {kind.dtype}: allowed are {NBYTES_MAX} bytes"
        )


class Hole(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=10):
    """The place of an array in a structure of arguments."""


HOLE = Hole()
