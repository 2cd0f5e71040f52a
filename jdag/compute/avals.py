"""Array types without values: shape, dtype, weak type."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdag.compute.configuration import Configuration, configuration
from jdag.compute.duals import Dual, are_arrays, is_array_type
from jdag.engine.arrays import ArrayType
from jdag.errors import JdagError, kind_of

_NUMPY = (np.ndarray, np.generic)
# The PRNG implementation of each key dtype.
KEYS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}


@dataclass(frozen=True, slots=True)
class Aval:
    """An abstract value: `shape`, `dtype` (numpy's, or a key type of JAX), `weak`.

    A weak value came from a Python scalar and gives way in JAX's dtype promotion.
    `device` names the device of its worker that holds a ref's value, None for the
    default; equality ignores it. `nbytes` are those of the values; for keys, of their
    key data.
    """

    shape: tuple[int, ...]
    dtype: Any
    weak: bool = False
    device: str | None = field(default=None, compare=False)
    nbytes: int = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        nbytes = math.prod(self.shape) * int(self.dtype.itemsize)
        object.__setattr__(self, "nbytes", nbytes)
        object.__setattr__(self, "_hash", hash((self.shape, self.dtype, self.weak)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def size(self) -> int:
        """Number of elements; a key is one element."""
        return math.prod(self.shape)

    @property
    def inexact(self) -> bool:
        """Whether it can carry a cotangent: float or complex, bfloat16 included."""
        return is_inexact(self.dtype)

    @property
    def strong(self) -> "Aval":
        """The same without the weak type."""
        if not self.weak:
            return self
        return intern_aval(self.shape, self.dtype, False).on(self.device)

    def on(self, device: str | None) -> "Aval":
        """The same on another device of its worker."""
        if device == self.device:
            return self
        return intern_aval(self.shape, self.dtype, self.weak, device)

    def struct(self) -> jax.ShapeDtypeStruct:
        """The `jax.ShapeDtypeStruct` of this."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, weak_type=self.weak)

    def __str__(self) -> str:
        shape = ",".join(map(str, self.shape))
        return f"{'~' if self.weak else ''}{self.dtype}[{shape}]"


@lru_cache(maxsize=1024)
def is_inexact(dtype: Any) -> bool:
    """Tell whether a dtype is float or complex; PRNG keys are not."""
    return bool(jnp.issubdtype(dtype, np.inexact))


@lru_cache(maxsize=65536)
def intern_aval(
    shape: tuple[int, ...], dtype: Any, weak: bool, device: str | None = None
) -> Aval:
    """Return one shared object per abstract value (cached).

    Cache keys then compare by identity, in a tenth of the time.
    """
    return Aval(shape, dtype, weak, device)


@lru_cache(maxsize=1024)
def _dtype_in_jax(dtype: Any, configured: Configuration) -> Any:
    """Return the dtype that JAX gives to numpy arrays of a dtype."""
    return jax.typeof(np.empty((), dtype)).dtype


@lru_cache(maxsize=64)
def dtype_of(name: str) -> Any:
    """Return the dtype of this name: numpy's, or a key type of JAX."""
    if name not in KEYS:
        return jnp.dtype(name)
    return jax.eval_shape(lambda: jax.random.key(0, impl=KEYS[name])).dtype


def aval_from(kind: ArrayType) -> Aval:
    """Return the abstract value of an `ArrayType`."""
    return intern_aval(kind.shape, dtype_of(kind.dtype), kind.weak).on(kind.device)


def aval_of(value: Any) -> Aval:
    """Return the abstract value of an array or scalar, as JAX would take it now.

    Takes JAX and numpy arrays, numpy scalars, Python int, float and complex (weak),
    `jax.ShapeDtypeStruct`, an `Aval` (returned as it is) and a `Dual` (that of its
    primal). With x64 off, 64-bit numpy values get the 32-bit types that JAX gives them.
    """
    if isinstance(value, Aval):
        return value
    try:
        known = value.aval
        return intern_aval(value.shape, value.dtype, known.weak_type)
    except AttributeError:
        return _other_aval(value)


def _other_aval(value: Any) -> Aval:
    if isinstance(value, jax.ShapeDtypeStruct):
        return intern_aval(value.shape, value.dtype, value.weak_type)
    if isinstance(value, Dual):
        return aval_of(value.primal)
    config: Any = jax.config
    try:
        if type(value) is np.ndarray:
            dtype = _dtype_in_jax(value.dtype, configuration())
            return intern_aval(value.shape, dtype, False)
        known = jax.typeof(value)
    except OverflowError as error:
        raise JdagError(
            f"{value} is too large for the integers of JAX, which have "
            f"{64 if config.jax_enable_x64 else 32} bits here; pass it as a float, "
            "or as jdag.static(value), part of the function"
        ) from error
    except (TypeError, ValueError, RecursionError) as error:  # Of masked arrays; lists.
        dtype = getattr(value, "dtype", None)
        of_dtype = "" if dtype is None else f" of dtype {dtype}"
        raise JdagError(
            f"{kind_of(value)}{of_dtype} is no array: arrays are JAX or numpy arrays "
            "of numbers, bools or PRNG keys, and Python int, float or complex"
        ) from error
    return intern_aval(known.shape, known.dtype, known.weak_type)


def is_deleted(value: Any) -> bool:
    """Tell whether a value is a JAX array whose buffer was deleted or donated."""
    if value.__class__ is Dual:
        return any(map(is_deleted, value.keeps))
    return is_array_type(value.__class__) and value.is_deleted()


def is_there(value: Any) -> bool:
    """Tell whether a value is a JAX array (not a tracer) that was not deleted."""
    return is_array_type(value.__class__) and not value.is_deleted()


def all_there(values: Sequence[Any]) -> bool:
    """Tell whether `is_there` holds of all values."""
    return are_arrays(values) and not any([value.is_deleted() for value in values])


def frozen(value: Any) -> Any:
    """Return the value, or a read-only copy of a numpy array that can change."""
    if not isinstance(value, _NUMPY):
        if is_deleted(value):
            raise JdagError(
                f"{aval_of(value)} was deleted, or donated to a jitted function; an "
                "array must exist when it is passed, and as long as it is "
                "used: pass a copy (jnp.copy) where the original is to be donated"
            )
        return value
    if value.dtype.kind not in "biufcV":  # V: bfloat16 and similar types.
        raise JdagError(
            f"a numpy array of dtype {value.dtype} cannot be computed with; "
            "dtypes are bool, integers, floats and complex"
        )
    if isinstance(value, np.ndarray) and (
        value.flags.writeable or value.base is not None
    ):
        value = value.copy()
        value.flags.writeable = False
    return value
