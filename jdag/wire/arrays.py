"""What a value takes on the wire: its type and shape as a header, then its bytes.

The header is a byte for the dtype (its top bit is set for a weak type, which constants
may have, the next where a device is named), a byte for the rank (its top bit is set for
a dual), 8 bytes for each axis, and the name of the device. Then the elements, row by
row and little-endian; of PRNG keys their key data; of a dual, which has a `primal` and
a `tangent` of one type, those of the one and then of the other. A Python number travels
as the weak scalar that JAX makes of it, so that abstract runs count the same.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from jax.dtypes import canonicalize_dtype

from jdag.errors import ProtocolError
from jdag.wire.cursors import Reader, Writer
from jdag.wire.encoding import NAME, Layout, integer, many

# Bytes of an element. The place in this table is the dtype's number: only append.
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

_NAMES = tuple(DTYPES)
_NUMBERS = {name: number for number, name in enumerate(_NAMES)}
_WEAK = _DUAL = 0x80
_PLACED = 0x40
_FLAGS = _WEAK | _PLACED
_NUMBER = integer(1, "dtype")
_RANK = integer(1, "rank")

HEADER_BYTES = 2
AXIS_BYTES = 8
NBYTES_MAX = (1 << 63) - 1
RANK_MAX = 64  # As numpy's; it also bounds the numbers that errors print.


_AXIS = integer(AXIS_BYTES, "an axis")


class ArrayType(NamedTuple):
    """Shape, name of the dtype, weak type or not: an abstract value as it travels.

    `device` is that of a ref's value, None for the default one of its worker. `dual`
    tells that two arrays of this type do, a primal and its tangent.
    """

    shape: tuple[int, ...]
    dtype: str
    weak: bool
    device: str | None = None
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
    if type(value) in SCALARS:
        return ArrayType((), canonicalize_dtype(type(value)).name, True)
    try:
        shape, dtype = tuple(value.shape), value.dtype
    except AttributeError as error:
        if hasattr(value, "tangent"):
            return type_of(value.primal)._replace(dual=True)
        raise ProtocolError(
            f"{value!r} of type {type(value).__name__} is no value: allowed are arrays,"
            " abstract values, and Python int, float and complex"
        ) from error
    if hasattr(value, "weak"):
        known = _array_type(shape, dtype, bool(value.weak))
        return known if value.device is None else known._replace(device=value.device)
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
    return ArrayType(shape, name, weak)


def sizes(values: Sequence[Any]) -> tuple[int, int]:
    """Bytes of all elements, and of all headers."""
    elements, axes = 0, 0
    for value in values:
        try:
            shape = value.shape
            axes += len(shape)  # JAX's own nbytes takes thrice as long as this product.
            elements += math.prod(shape) * int(value.dtype.itemsize)
        except AttributeError:
            kind = type_of(value)
            axes += len(kind.shape)
            elements += kind.nbytes
    return elements, HEADER_BYTES * len(values) + AXIS_BYTES * axes


def _more(value: Any) -> int:
    if type(value) in SCALARS:
        return 0
    if hasattr(value, "tangent"):
        return _more(value.primal)
    device = value.device if hasattr(value, "weak") else None
    return AXIS_BYTES * len(value.shape) + (0 if device is None else NAME.size(device))


def _write(writer: Writer, value: Any) -> None:
    kind = value if type(value) is ArrayType else type_of(value)
    writer.out += _written(kind)


@lru_cache(1024)
def _written(kind: ArrayType) -> bytes:
    writer = Writer({})
    flags = _WEAK * kind.weak | _PLACED * (kind.device is not None)
    _NUMBER.write(writer, _NUMBERS[kind.dtype] | flags)
    _RANK.write(writer, len(kind.shape) | _DUAL * kind.dual)
    for axis in kind.shape:
        _AXIS.write(writer, axis)
    if kind.device is not None:
        NAME.write(writer, kind.device)
    return bytes(writer.out)


def _read(reader: Reader) -> ArrayType:
    data, start = reader.data, reader.offset
    end = start + HEADER_BYTES
    if end <= len(data):
        end += AXIS_BYTES * (data[start + 1] & ~_DUAL)
        if not data[start] & _PLACED and end <= len(data):
            reader.offset = end
            return _made(data[start:end])
    return _read_anew(reader)


def _read_anew(reader: Reader) -> ArrayType:
    number, ranked = _NUMBER.read(reader), _RANK.read(reader)
    name = number & ~_FLAGS
    if name >= len(_NAMES):
        raise ProtocolError(f"dtype {name}: allowed is 0 to {len(_NAMES) - 1}")
    rank = ranked & ~_DUAL
    if rank > RANK_MAX:
        raise ProtocolError(f"rank {rank}: allowed is 0 to {RANK_MAX}")
    shape = tuple([_AXIS.read(reader) for _ in range(rank)])
    dtype = _NAMES[name]
    # As numpy counts: it refuses an empty array whose other axes are as large.
    nbytes = math.prod([axis for axis in shape if axis]) * DTYPES[dtype]
    if nbytes > NBYTES_MAX:
        raise ProtocolError(f"shape {shape} of {dtype}: allowed are {NBYTES_MAX} bytes")
    device = NAME.read(reader) if number & _PLACED else None
    return ArrayType(shape, dtype, bool(number & _WEAK), device, bool(ranked & _DUAL))


@lru_cache(1024)
def _made(data: bytes) -> ArrayType:
    return _read_anew(Reader(data, {}))


# Of anything with a shape and a dtype; read as an `ArrayType`.
ARRAY_TYPE = Layout(HEADER_BYTES, _more, _write, _read)
ARRAY_TYPES = many(ARRAY_TYPE, "array types")
