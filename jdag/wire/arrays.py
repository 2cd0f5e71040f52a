"""Values on the wire: the type as a header, then the elements.

The header is an `ArrayType`. Elements are row-major and little-endian; PRNG keys are
sent as key data, a dual as its primal and then its tangent. A Python number is sent as
a weakly typed scalar, so that abstract runs count the same bytes.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from jax.dtypes import canonicalize_dtype
from msgspec.structs import replace

from jdag.engine.arrays import DTYPES, RANK_MAX, ArrayType
from jdag.errors import ProtocolError

SCALARS = (int, float, complex)


def type_of(value: Any) -> ArrayType:
    cls = type(value)
    if cls is np.ndarray:
        return _array_type(value.shape, value.dtype, False)
    if isinstance(value, ArrayType):
        return value
    if cls in SCALARS:
        return _array_type((), canonicalize_dtype(cls), True)
    value = getattr(value, "aval", value)  # Attributes of a JAX array itself are slow.
    try:
        shape, dtype = tuple(value.shape), value.dtype
    except AttributeError as error:
        if hasattr(value, "tangent"):
            return replace(type_of(value.primal), dual=True)
        raise ProtocolError(
            f"{value!r} of type {type(value).__name__} is not a value: expected arrays,"
            " abstract values, and Python int, float and complex"
        ) from error
    if hasattr(value, "weak"):
        kind = _array_type(shape, dtype, bool(value.weak))
        return kind if value.device is None else replace(kind, device=value.device)
    weak = getattr(value, "weak_type", False)  # An attribute of JAX, not of numpy.
    return _array_type(shape, dtype, bool(weak))


@lru_cache(4096)
def _array_type(shape: tuple[int, ...], dtype: Any, weak: bool) -> ArrayType:
    name = str(dtype)
    if len(shape) > RANK_MAX:
        raise ProtocolError(
            f"an array of rank {len(shape)}: expected rank 0 to {RANK_MAX}"
        )
    if name not in DTYPES:
        raise ProtocolError(
            f"dtype {name} cannot be sent: expected {', '.join(DTYPES)}"
        )
    return ArrayType(tuple(map(int, shape)), name, weak)
