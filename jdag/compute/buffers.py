"""Values as bytes in memory and back: views of arrays, and arrays over buffers.

A value is sent as views of its elements (`parts`), without a copy if they are on the
CPU and contiguous. Received bytes are written into a buffer from `Buffers.aligned` and
become a value in place (`landed`): JAX takes aligned memory without a copy. Values
below 4 MiB become read-only numpy arrays and weak scalars Python numbers: compiled
functions take these as fast as JAX arrays, which take longer to make (0.3 ms for 512
KiB, in a worker that was idle). `delivered` converts them to what users see.

Invariants: a buffer is reused only when no view of it and no array over it is left; a
buffer passed to `landed` is not written again.
"""

import math
import weakref
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import canonicalize_dtype

from jdag.compute.avals import KEYS, dtype_of
from jdag.compute.duals import Dual, is_array_type
from jdag.engine.arrays import ArrayType
from jdag.errors import JdagError

ALIGNMENT_BYTES = 64  # JAX takes memory of this alignment without a copy.
ALIASED_MIN_BYTES = 1 << 18  # Below this a copy is faster than aliasing.
JAX_MIN_BYTES = 1 << 22  # Below this a CPU value stays numpy's until it is used.
DELIVERED_MIN_BYTES = 1 << 20  # Below this a copy is faster than device_put.
POOLED_MIN_BYTES = 1 << 16
KEPT_MAX_BYTES = 1 << 28

_NUMBERS = (int, float, complex)


def parts(value: Any) -> tuple[memoryview, ...]:
    """Return the elements of a value as bytes, row by row; for a dual, of both arrays.

    Only arrays on other devices than the CPU, or not contiguous, are copied. The views
    are read-only and keep the memory alive. A Python int, float or complex is encoded
    as JAX's weak scalar.
    """
    kind = value.__class__
    if kind is Dual:
        return (*parts(value.primal), *parts(value.tangent))
    if is_array_type(kind):
        if not isinstance(value.aval.dtype, np.dtype):  # A key dtype.
            value = jax.random.key_data(value)
    elif kind in _NUMBERS:
        with np.errstate(over="ignore"):  # Overflows to infinity, as in JAX.
            value = np.array(value, canonicalize_dtype(kind))
    try:
        return (memoryview(value).cast("B").toreadonly(),)
    except (TypeError, ValueError, BufferError):  # Empty, apart, elsewhere; bfloat16.
        pass
    elements: Any = np.asarray(value).reshape(-1).view(np.uint8)
    return (memoryview(elements).toreadonly(),)


def landed(kind: ArrayType, view: memoryview) -> Any:
    """Return the value of a type whose elements are in a buffer.

    From `ALIASED_MIN_BYTES` on, an array on the CPU aliases the buffer if that is
    aligned; the buffer must not be written again. Smaller ones are copied. Elements are
    row-major; a dual has those of its primal, then of its tangent.

    Returns:
        A `Dual`; a JAX array on the default device; for small ones a read-only numpy
        array; for a weak scalar a Python number. In a call of a compiled function each
        has the type and the bits of the value given to `parts`.
    """
    if kind.dual:
        half = view.nbytes // 2
        return Dual(_single(kind, view[:half]), _single(kind, view[half:]))
    return _single(kind, view)


def _single(kind: ArrayType, view: memoryview) -> Any:
    impl = KEYS.get(kind.dtype)
    if impl is not None:
        width = view.nbytes // 4 // max(math.prod(kind.shape), 1)
        data = _array((*kind.shape, width), np.dtype(np.uint32), view)
        return jax.random.wrap_key_data(jnp.asarray(data), impl=impl)
    array = _array(kind.shape, dtype_of(kind.dtype), view)
    return _weak(array) if kind.weak else array


def _array(shape: tuple[int, ...], dtype: Any, view: memoryview) -> Any:
    nbytes = view.nbytes
    assert nbytes == math.prod(shape) * dtype.itemsize, (shape, dtype, nbytes)
    if nbytes < ALIASED_MIN_BYTES:
        return np.ndarray(shape, dtype, bytes(view))  # Read-only, as bytes are.
    elements: Any = np.frombuffer(view.toreadonly(), np.uint8).view(dtype)
    array = elements.reshape(shape)
    if nbytes < JAX_MIN_BYTES and jax.default_backend() == "cpu":
        return array
    return _taken_over(array)


def _taken_over(array: Any) -> Any:
    with np.errstate(all="ignore"):  # Where x64 is off, wide numbers become narrow.
        # Not from_dlpack: that commits its array to a device, and knows fewer dtypes.
        return jax.device_put(array)


def _weak(array: Any) -> Any:
    """An array with a weak type: a Python number if JAX gives that the same type."""
    if array.shape == ():
        number = array.item()
        kind = type(number)
        if kind in _NUMBERS and canonicalize_dtype(kind) == array.dtype:
            return number
    converted: Any = jax.lax.convert_element_type_p
    return converted.bind(
        jnp.asarray(array), new_dtype=array.dtype, weak_type=True, sharding=None
    )


def delivered(value: Any) -> Any:
    """Return a received value as users see it: as a JAX array, or a dual of two.

    Functions that are not compiled, hooks and fetches take this. Anything else (a
    failure, an abstract value, a JAX array) is returned unchanged.
    """
    kind = value.__class__
    if kind is np.ndarray or kind in _NUMBERS:
        small = kind in _NUMBERS or value.nbytes < DELIVERED_MIN_BYTES
        try:
            return _identity(value) if small else _taken_over(value)
        except jax.errors.JaxRuntimeError as error:
            return _despite(error, value)
    if kind is Dual:
        return Dual(*map(delivered, value.keeps))
    return value


@jax.jit
def _identity(value: Any) -> Any:
    return value  # As jnp.asarray makes it, in a third of the time.


def _despite(error: Exception, value: Any) -> Any:
    """Deliver a value where a guard forbids implicit transfers."""
    try:
        return _taken_over(value)
    except jax.errors.JaxRuntimeError:
        raise JdagError(
            f"a value that was received cannot become a JAX array here: {error}; "
            "fetch where transfers are allowed"
        ) from error


class Buffers:
    """Buffers to receive into; memory of large ones is reused.

    Fresh memory costs a page fault every 4 KiB, more than the copy into it. Freed
    memory is kept for the next buffer of about its size, up to `kept_max` bytes, if
    such sizes were requested since the last sweep but one: weights that were received
    once leave nothing here. It may be freed in any thread at any moment, so the lists
    of free blocks are changed by atomic operations only.
    """

    __slots__ = ("__weakref__", "_before", "_free", "_kept_max", "_since")

    def __init__(self, kept_max: int = KEPT_MAX_BYTES) -> None:
        self._kept_max = kept_max
        self._free: defaultdict[int, list[Any]] = defaultdict(list)  # By size.
        # The sizes requested since the last sweep, and before it.
        self._since: set[int] = set()
        self._before: set[int] = set()

    @property
    def kept(self) -> int:
        """Bytes kept for reuse."""
        return sum([size * len(blocks) for size, blocks in [*self._free.items()]])

    def aligned(self, nbytes: int) -> memoryview:
        """Return a writable buffer of `nbytes`, aligned for `landed`, with any content.

        It is reused when neither a view of it nor an array over it is left.
        """
        size = _capacity(nbytes)
        if nbytes < POOLED_MIN_BYTES or size > self._kept_max:
            return memoryview(_block(nbytes))
        self._since.add(size)
        try:
            block = self._free[size].pop()
        except IndexError:
            block = _block(size)
        # One lease object per use: it is collected after every view and array over it.
        lease: Any = np.frombuffer(memoryview(block), np.uint8, nbytes)
        weakref.finalize(lease, _give_back, weakref.ref(self), block).atexit = False
        return memoryview(lease)

    def sweep(self) -> None:
        """Free the kept memory of sizes not requested since the previous sweep."""
        for size, blocks in self._free.items():
            if size not in self._since:
                blocks.clear()
        self._before, self._since = self._since, set()

    def clear(self) -> None:
        """Free all kept memory."""
        for blocks in self._free.values():
            blocks.clear()

    def _keep(self, block: Any) -> None:
        size = block.nbytes
        is_wanted = size in self._since or size in self._before
        if is_wanted and self.kept + size <= self._kept_max:
            self._free[size].append(block)


def _give_back(pool: "weakref.ref[Buffers]", block: Any) -> None:
    buffers = pool()
    if buffers is not None:
        buffers._keep(block)


def _block(nbytes: int) -> Any:
    memory = np.empty(nbytes + ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    return memory[start : start + nbytes]


def _capacity(nbytes: int) -> int:
    """Round up to a power of two, or to quarters between two powers."""
    step = 1 << max((nbytes - 1).bit_length() - 3, 0)
    return -(-nbytes // step) * step
