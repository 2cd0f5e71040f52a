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
    """An abstract value: shape, dtype (numpy's, or a PRNG key type) and weak type.

    A weakly typed value came from a Python scalar; JAX's dtype promotion prefers the
    dtype of the other operand. `device` names the worker's device that holds the value
    of a ref; None is the default device. Equality ignores `device`. `nbytes` is the
    size of the array in bytes; for PRNG keys, the size of the key data.
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
        """The number of elements. A PRNG key counts as one element."""
        return math.prod(self.shape)

    @property
    def inexact(self) -> bool:
        return is_inexact(self.dtype)

    @property
    def strong(self) -> "Aval":
        if not self.weak:
            return self
        return intern_aval(self.shape, self.dtype, False).on(self.device)

    def on(self, device: str | None) -> "Aval":
        if device == self.device:
            return self
        return intern_aval(self.shape, self.dtype, self.weak, device)

    def struct(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype, weak_type=self.weak)

    def __str__(self) -> str:
        shape = ",".join(map(str, self.shape))
        return f"{'~' if self.weak else ''}{self.dtype}[{shape}]"


@lru_cache(maxsize=1024)
def is_inexact(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, np.inexact))


@lru_cache(maxsize=65536)
def intern_aval(
    shape: tuple[int, ...], dtype: Any, weak: bool, device: str | None = None
) -> Aval:
    """Return one shared object per abstract value: identical objects compare faster."""
    return Aval(shape, dtype, weak, device)


@lru_cache(maxsize=1024)
def _dtype_in_jax(dtype: Any, configured: Configuration) -> Any:
    return jax.typeof(np.empty((), dtype)).dtype


@lru_cache(maxsize=64)
def dtype_of(name: str) -> Any:
    if name not in KEYS:
        return jnp.dtype(name)
    return jax.eval_shape(lambda: jax.random.key(0, impl=KEYS[name])).dtype


def aval_from(kind: ArrayType) -> Aval:
    return intern_aval(kind.shape, dtype_of(kind.dtype), kind.weak).on(kind.device)


def aval_of(value: Any, configured: Configuration | None = None) -> Aval:
    """Return the abstract value of an array or scalar under JAX's current settings.

    These are `configured`, if the caller has just read them.

    Accepts JAX and numpy arrays, numpy scalars, Python int, float and complex (weak),
    `jax.ShapeDtypeStruct`, `Aval` (returned unchanged) and `Dual` (the type of its
    primal). With x64 off, 64-bit numpy values get the 32-bit types that JAX gives them.
    """
    if isinstance(value, Aval):
        return value
    try:
        if type(value) is np.ndarray:
            dtype = _dtype_in_jax(value.dtype, configured or configuration())
            return intern_aval(value.shape, dtype, False)
        aval = value.aval  # Attributes of a JAX array itself are slow.
        return intern_aval(aval.shape, aval.dtype, aval.weak_type)
    except (AttributeError, TypeError, ValueError):  # Not an array that JAX accepts.
        return _aval_of_non_array(value)


def _aval_of_non_array(value: Any) -> Aval:
    if isinstance(value, jax.ShapeDtypeStruct):
        return intern_aval(value.shape, value.dtype, value.weak_type)
    if isinstance(value, Dual):
        return aval_of(value.primal)
    config: Any = jax.config
    try:
        aval = jax.typeof(value)
    except OverflowError as error:
        raise JdagError(
            f"{value} is too large for an integer of JAX, which has "
            f"{64 if config.jax_enable_x64 else 32} bits under the current settings; "
            "pass a float, or make it a constant of the function: jdag.static(value)"
        ) from error
    # JAX raises one of these for masked arrays and lists, for example.
    except (TypeError, ValueError, RecursionError) as error:
        dtype = getattr(value, "dtype", None)
        suffix = "" if dtype is None else f" of dtype {dtype}"
        raise JdagError(
            f"{kind_of(value)}{suffix} is not an array: expected a JAX or numpy array "
            "of numbers, bools or PRNG keys, or a Python int, float or complex"
        ) from error
    return intern_aval(aval.shape, aval.dtype, aval.weak_type)


def is_deleted(value: Any) -> bool:
    if value.__class__ is Dual:
        return any(map(is_deleted, value.keeps))
    return is_array_type(value.__class__) and value.is_deleted()


def is_live(value: Any) -> bool:
    return is_array_type(value.__class__) and not value.is_deleted()


def are_live(values: Sequence[Any]) -> bool:
    return are_arrays(values) and not any([value.is_deleted() for value in values])


def frozen(value: Any) -> Any:
    """Return the value, or a read-only copy of a numpy array that can change."""
    if not isinstance(value, _NUMPY):
        if is_deleted(value):
            raise JdagError(
                f"{aval_of(value)} was deleted, or donated to a jitted function; jdag "
                "needs an array from the call until its last use: pass a copy "
                "(jnp.copy) if the original is to be donated"
            )
        return value
    if value.dtype.kind not in "biufcV":  # V: bfloat16 and similar dtypes.
        raise JdagError(
            f"JAX cannot compute with a numpy array of dtype {value.dtype}; "
            "supported dtypes are bool, integers, floats and complex"
        )
    if isinstance(value, np.ndarray) and (
        value.flags.writeable or value.base is not None
    ):
        value = value.copy()
        value.flags.writeable = False
    return value
