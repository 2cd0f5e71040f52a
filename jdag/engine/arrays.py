"""Array types as data, and the placeholder of an array in a tree of arguments."""

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta, Struct

NBYTES_MAX = (1 << 63) - 1
RANK_MAX = 64  # The limit of numpy; it also bounds the length of error texts.

Axis = Annotated[int, Meta(ge=0, le=NBYTES_MAX)]

_Text = Annotated[str, Meta(max_length=1 << 16)]

_BY_NBYTES = {
    1: "bool int8 uint8 int2 int4 uint2 uint4 float4_e2m1fn float8_e3m4 float8_e4m3"
    " float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz"
    " float8_e8m0fnu",
    2: "int16 uint16 float16 bfloat16",
    4: "int32 uint32 float32",
    8: "int64 uint64 float64 complex64 key<fry>",
    16: "complex128 key<rbg> key<urbg>",
}
# Number of bytes of one element, by dtype.
DTYPES = {
    dtype: nbytes for nbytes, dtypes in _BY_NBYTES.items() for dtype in dtypes.split()
}
if TYPE_CHECKING:
    Dtype = str
else:  # Decoding refuses any other dtype.
    Dtype = Literal[tuple(DTYPES)]


class ArrayType(
    Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False
):
    """Shape, dtype name and weak type: an abstract value as data.

    `device` names the device of a ref's value; None is the worker's default device.
    `dual` marks a pair of arrays of this type, a primal and its tangent.
    """

    shape: Annotated[tuple[Axis, ...], Meta(max_length=RANK_MAX)]
    dtype: Dtype
    weak: bool
    device: _Text | None = None
    dual: bool = False

    @property
    @lru_cache(4096)  # noqa: B019 - Equal types share an entry.
    def nbytes(self) -> int:
        """Bytes of the array; for a dual, the bytes of both arrays."""
        return self.array_nbytes * (1 + self.dual)

    @property
    @lru_cache(4096)  # noqa: B019
    def array_nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype]


class Hole(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=10):
    """The placeholder of an array in a tree of arguments."""


HOLE = Hole()
