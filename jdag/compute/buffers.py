"""Values as bytes in memory and back: views of arrays, and arrays over buffers.

A value leaves as views of its elements (`parts`), without a copy where they are on the
CPU and in order. What comes is written into a buffer from `Buffers.aligned` and becomes
a value in place (`landed`): JAX takes aligned memory without a copy. Values below 4 MiB
become read-only numpy arrays and weak scalars Python numbers: compiled functions take
these as fast as JAX arrays, which take longer to make (0.3 ms for 512 KiB, in a worker
that was idle). `delivered` makes of them what users see.

Invariants: a buffer is handed out again only when no view of it and no array over it is
left; a buffer that was handed to `landed` is not written again.
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
from jdag.compute.duals import Dual, is_array
from jdag.engine.arrays import ArrayType

ALIGNMENT_BYTES = 64  # What JAX asks of memory that it takes without a copy.
ALIASED_MIN_BYTES = 1 << 18  # A smaller value is copied faster than it is handed over.
JAX_MIN_BYTES = 1 << 22  # A smaller one is brought to a CPU by whoever computes on it.
DELIVERED_MIN_BYTES = 1 << 20  # A smaller one is copied faster than it is taken over.
POOLED_MIN_BYTES = 1 << 16
KEPT_MAX_BYTES = 1 << 28

_NUMBERS = (int, float, complex)


def parts(value: Any) -> tuple[memoryview, ...]:
    """Return the elements of a value as bytes, row by row; of a dual those of both.

    Nothing is copied but what is on another device than the CPU or not in order. The
    views keep the memory alive, and may not be written. A Python int, float or complex
    is the weak scalar that JAX makes of it.
    """
    if value.__class__ is Dual:
        return (*parts(value.primal), *parts(value.tangent))
    if is_array(value):
        if not isinstance(value.dtype, np.dtype):  # It is one of JAX's own, of keys.
            value = jax.random.key_data(value)
    elif type(value) in _NUMBERS:
        with np.errstate(over="ignore"):  # To infinity, as JAX has it.
            value = np.array(value, canonicalize_dtype(type(value)))
    # Views of bytes: to Python's own buffers bfloat16 and its kin mean nothing.
    elements: Any = np.asarray(value).reshape(-1).view(np.uint8)
    return (memoryview(elements).toreadonly(),)


def landed(kind: ArrayType, view: memoryview) -> Any:
    """Return the value of a type whose elements lie in a buffer.

    From `ALIASED_MIN_BYTES` on, an array on the CPU aliases the buffer, if that is
    aligned: it may not be written again. Of less, nothing is kept. Elements lie row by
    row; of a dual, those of the primal and then of the tangent.

    Returns:
        A `Dual`; a JAX array, on the default device; for a small one a read-only numpy
        array; for a weak scalar a Python number. In a call of a compiled function each
        has the type and the bits of the value that `parts` was given.
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
    """The same with a weak type: a number, where JAX makes that same type of it."""
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
    """Return a value that landed as users see it: as a JAX array, or a dual of two.

    Functions that are not compiled, hooks and fetches take this. What is nothing
    that lands (a failure, an abstract value, a JAX array) stays as it is.
    """
    if isinstance(value, np.ndarray):
        small = value.nbytes < DELIVERED_MIN_BYTES
        return _delivered(value) if small else _taken_over(value)
    if type(value) in _NUMBERS:
        return _delivered(value)
    if value.__class__ is Dual:
        return Dual(*map(delivered, value.keeps))
    return value


@jax.jit
def _delivered(value: Any) -> Any:
    return value  # As jnp.asarray makes it, in a third of the time.


class Buffers:
    """Buffers to receive into; the memory of large ones is used again.

    Fresh memory costs a page fault every 4 KiB, which is more than the copy into it.
    What is let go of is kept for the next of about its size, up to `kept_max` bytes,
    where such sizes were asked for since the last sweep but one: weights that were
    received once, and gave way to others long after, leave nothing here. It may be let
    go of in any thread and at any moment, so what is kept is only ever changed by
    operations of lists that nothing interrupts.
    """

    __slots__ = ("__weakref__", "_before", "_free", "_kept_max", "_since")

    def __init__(self, kept_max: int = KEPT_MAX_BYTES) -> None:
        self._kept_max = kept_max
        self._free: defaultdict[int, list[Any]] = defaultdict(list)  # By size.
        # The sizes that were asked for since the last sweep, and before it.
        self._since: set[int] = set()
        self._before: set[int] = set()

    @property
    def kept(self) -> int:
        """Bytes that are kept for later."""
        return sum([size * len(blocks) for size, blocks in [*self._free.items()]])

    def aligned(self, nbytes: int) -> memoryview:
        """Return a writable buffer of so many bytes, at an address for `landed`.

        Its bytes are whatever they are. It is used again when neither a view of it nor
        an array over it is left.
        """
        size = _capacity(nbytes)
        if nbytes < POOLED_MIN_BYTES or size > self._kept_max:
            return memoryview(_block(nbytes))
        self._since.add(size)
        try:
            block = self._free[size].pop()
        except IndexError:
            block = _block(size)
        # An object of its own for each use: when that goes, so has all that is over it.
        lease: Any = np.frombuffer(memoryview(block), np.uint8, nbytes)
        weakref.finalize(lease, _give_back, weakref.ref(self), block).atexit = False
        return memoryview(lease)

    def sweep(self) -> None:
        """Let go of what is kept of sizes not asked for since the sweep before."""
        for size, blocks in self._free.items():
            if size not in self._since:
                blocks.clear()
        self._before, self._since = self._since, set()

    def clear(self) -> None:
        """Let go of what is kept."""
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
    """The next size that is a power of two, or by quarters of one above it."""
    step = 1 << max((nbytes - 1).bit_length() - 3, 0)
    return -(-nbytes // step) * step
