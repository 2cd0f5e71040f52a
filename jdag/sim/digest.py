"""CRC-32 checksums of array values, by which traces distinguish values.

CRC-32 detects any change of one or two bits, and any two bytes exchanged within 512 MiB
(its polynomial is primitive). It was the fastest hash measured: 0.25 ms for 1 MiB,
against 0.55 ms for SHA-1 and SHA-256, and 1.1 ms for BLAKE2b.
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
    """Return the CRC-32 of an array's or scalar's dtype, shape and raw bytes.

    For an abstract value this uses only dtype and shape, and for a dual both of its
    arrays. A contiguous array in this process's memory is not copied.
    """
    aval = value if value.__class__ is Aval else aval_of(value)
    checksum = _start(aval.shape, aval.dtype)
    if isinstance(value, _ABSTRACT):
        return checksum
    if isinstance(value, _NUMBERS) and not isinstance(value, np.generic):
        return zlib.crc32(repr((type(value).__name__, value)).encode(), checksum)
    for elements in parts(value):
        checksum = zlib.crc32(elements, checksum)
    return checksum


@lru_cache(maxsize=4096)
def _start(shape: tuple[int, ...], dtype: Any) -> int:
    return zlib.crc32(f"{dtype}{shape}".encode())
