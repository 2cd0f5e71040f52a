"""What a value takes on the wire: its type and shape as a header, then its bytes.

The header is an `ArrayType`. The elements go row by row and little-endian; of PRNG keys
their key data; of a dual, which has a `primal` and a `tangent` of one type, those of
the one and then of the other. A Python number travels as the weak scalar that JAX makes
of it, so that abstract runs count the same.
"""

import math
from functools import lru_cache
from typing import Annotated, Any

from jax.dtypes import canonicalize_dtype
from msgspec import Meta
from msgspec.structs import replace

from jdag.engine.names import Name, Record
from jdag.errors import ProtocolError

NBYTES_MAX = (1 << 63) - 1
RANK_MAX = 64  # As numpy's; it also bounds the numbers that errors print.

Axis = Annotated[int, Meta(ge=0, le=NBYTES_MAX)]

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
SCALARS = (int, float, complex)


class ArrayType(Record, gc=False):
    """Shape, name of the dtype, weak type or not: an abstract value as it travels.

    `device` is that of a ref's value, None for the default one of its worker. `dual`
    tells that two arrays of this type do, a primal and its tangent.
    """

    shape: Annotated[tuple[Axis, ...], Meta(max_length=RANK_MAX)]
    dtype: Name
    weak: bool
    device: Name | None = None
    dual: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, of a dual those of both arrays."""
        return self.array_nbytes * (1 + self.dual)

    @property
    def array_nbytes(self) -> int:
        """Bytes of the elements of one array."""
        return math.prod(self.shape) * DTYPES[self.dtype]


def type_of(value: Any) -> ArrayType:
    """The type of an array, an abstract value or a Python number.

    Raises:
        ProtocolError: it is nothing of the kind, its dtype has no number here, or it
            has more than `RANK_MAX` axes.
    """
    if type(value) is ArrayType:
        return value
    if type(value) in SCALARS:
        return ArrayType((), canonicalize_dtype(type(value)).name, True)
    try:
        shape, dtype = tuple(value.shape), value.dtype
    except AttributeError as error:
        if hasattr(value, "tangent"):
            return replace(type_of(value.primal), dual=True)
        raise ProtocolError(
            f"{value!r} of type {type(value).__name__} is no value: allowed are arrays,"
            " abstract values, and Python int, float and complex"
        ) from error
    if hasattr(value, "weak"):
        known = _array_type(shape, dtype, bool(value.weak))
        return known if value.device is None else replace(known, device=value.device)
    weak = getattr(value, "weak_type", False)  # JAX's own word; numpy has none.
    return _array_type(shape, dtype, bool(weak))


@lru_cache(4096)
def _array_type(shape: tuple[int, ...], dtype: Any, weak: bool) -> ArrayType:
    name = str(dtype)
    if len(shape) > RANK_MAX:
        raise ProtocolError(f"rank {len(shape)}: allowed is 0 to {RANK_MAX}")
    if name not in DTYPES:
        raise ProtocolError(
            f"dtype {name} cannot travel: allowed are {', '.join(DTYPES)}"
        )
    return ArrayType(tuple(map(int, shape)), name, weak)


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
