"""A 32-bit number for the bytes of a value, so that traces can distinguish values.

CRC-32: any one flipped bit changes it, any two, and any two bytes exchanged within
512 MiB (the polynomial is primitive). It is by far the fastest measured: 0.25 ms for
1 MiB, where SHA-1 and SHA-256 took 0.55 and BLAKE2b 1.1.
"""

import zlib
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from jdag.compute.avals import Aval, aval_of
from jdag.compute.buffers import parts

_ABSTRACT = (Aval, jax.ShapeDtypeStruct)
_NUMBERS = (int, float, complex)


def fingerprint(value: Any) -> int:
    """Return 32 bits for dtype, shape and raw bytes of an array or scalar.

    An abstract value is identified by shape and dtype alone, a dual by both its arrays.
    Nothing is copied if the array is in this process's memory and contiguous.
    """
    aval = value if value.__class__ is Aval else aval_of(value)
    found = _start(aval.shape, aval.dtype)
    if isinstance(value, _ABSTRACT):
        return found
    if isinstance(value, _NUMBERS) and not isinstance(value, np.generic):
        return zlib.crc32(repr((type(value).__name__, value)).encode(), found)
    for elements in parts(value):
        found = zlib.crc32(elements, found)
    return found


@lru_cache(maxsize=4096)
def _start(shape: tuple[int, ...], dtype: Any) -> int:
    return zlib.crc32(f"{dtype}{shape}".encode())
