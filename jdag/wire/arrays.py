"""Values on the wire: the type as a header, then the elements.

The header is an `ArrayType`. Elements are row-major and little-endian; PRNG keys send
their key data; a dual sends its primal, then its tangent, both of one type. A Python
number is sent as JAX's weak scalar, so that abstract runs count the same bytes.
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
    """The type of an array, an abstract value or a Python number."""
    of = type(value)
    if of is np.ndarray:
        return _array_type(value.shape, value.dtype, False)
    if isinstance(value, ArrayType):
        return value
    if of in SCALARS:
        return _array_type((), canonicalize_dtype(of), True)
    value = getattr(value, "aval", value)  # Of a JAX array, which is slow itself.
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
    weak = getattr(value, "weak_type", False)  # JAX's attribute; numpy has none.
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
