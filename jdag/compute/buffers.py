"""Conversion of values to bytes and back: views of arrays, and arrays over buffers.

`parts` returns the elements of a value as bytes. Arrays are copied only if they are not
contiguous or not on the CPU. `start_copies` starts to copy those of an accelerator when
they are dispatched, large ones to page-locked memory: a copy to other memory passes
through such memory first. JAX cannot page-lock memory that is not its own, such as a
shared segment. Received bytes are written into a buffer from `Buffers.aligned`, which
`array_over` turns into a value in place: JAX uses aligned memory without a copy. Values
below 4 MiB become read-only numpy arrays and weak scalars become Python numbers.
Compiled functions accept these as fast as JAX arrays, but creating a JAX array takes
longer (0.3 ms for 512 KiB in an idle worker). `delivered` converts values to JAX arrays
for user code.

Invariants: a buffer is reused only when no view of it and no array over it exists; a
buffer passed to `array_over` is not written again.
"""

import math
import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.config import trace_context
from jax._src.lib import xla_client  # type: ignore[attr-defined]
from jax.dtypes import canonicalize_dtype
from msgspec.structs import replace

from jdag.compute.avals import KEYS, dtype_of
from jdag.compute.duals import Dual, is_array_type
from jdag.engine.arrays import DTYPES, ArrayType
from jdag.errors import JdagError

ALIGNMENT_BYTES = 64  # JAX takes memory of this alignment without a copy.
ALIASED_MIN_BYTES = 1 << 18  # A smaller value is copied, which is faster.
JAX_MIN_BYTES = 1 << 22  # A smaller value on a CPU stays a numpy array.
DELIVERED_MIN_BYTES = 1 << 20  # A smaller value is copied by jit, which is faster.
POOLED_MIN_BYTES = 1 << 16
KEPT_BYTES_MAX = 1 << 28

_NUMBERS = (int, float, complex)
# Shape, dtype, start and end of each small value.
ArrayLayout = list[tuple[tuple[int, ...], Any, int, int]]
_PLAIN = {name: dtype_of(name) for name in DTYPES if name not in KEYS}


def parts(value: Any) -> tuple[memoryview, ...]:
    """Return views of a value's elements as bytes: one view, or two for a dual.

    The order is row-major. The views are read-only and keep the memory alive. Only
    arrays that are not contiguous or not on the CPU are copied. A Python int, float or
    complex is encoded as JAX's weak scalar.
    """
    kind = value.__class__
    if kind is Dual:
        return (*parts(value.primal), *parts(value.tangent))
    if is_array_type(kind):
        if not isinstance(value.aval.dtype, np.dtype):  # A PRNG key.
            value = jax.random.key_data(value)
    elif kind in _NUMBERS:
        with np.errstate(over="ignore"):  # Overflow gives infinity, as in JAX.
            value = np.array(value, canonicalize_dtype(kind))
    try:
        return (memoryview(value).cast("B").toreadonly(),)
    # The array is empty, strided, on a GPU, or of dtype bfloat16.
    except (TypeError, ValueError, BufferError):
        if is_array_type(kind) and value.platform() != "cpu":
            started = _copies.pop(id(value), None)
            value = _on_host(value) if started is None else started
    elements: Any = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return (memoryview(elements).toreadonly(),)


# Page-locked copies of arrays that `start_copies` has started, by the array's id. An
# entry ends when `parts` uses it, or with its array.
_copies: dict[int, Any] = {}


def start_copies(values: Iterable[Any]) -> None:
    """Start to copy arrays of an accelerator to the host, for `parts`. Do not wait."""
    for value in values:
        if is_array_type(value.__class__) and isinstance(value.aval.dtype, np.dtype):
            copy = value if value.platform() == "cpu" else _on_host(value)
            if copy is not value:
                _copies[id(value)] = copy
                weakref.finalize(value, _copies.pop, id(value), None).atexit = False


def _on_host(value: Any) -> Any:
    """Return a page-locked copy of a large array. Of others, JAX keeps the copy."""
    pinned = _pinned(value.sharding) if value.nbytes >= ALIASED_MIN_BYTES else None
    if pinned is not None:
        return jax.device_put(value, pinned)
    value.copy_to_host_async()
    return value


@lru_cache(maxsize=256)
def _pinned(sharding: Any) -> Any:
    """Return the sharding in page-locked memory. None if its devices have none."""
    kinds = [m.kind for d in sharding.device_set for m in d.addressable_memories()]
    return sharding.with_memory_kind("pinned_host") if "pinned_host" in kinds else None


def array_over(kind: ArrayType, view: memoryview) -> Any:
    """Return the value of type `kind` whose elements are in the buffer `view`.

    From `ALIASED_MIN_BYTES` on, an array on the CPU aliases an aligned buffer, which
    must not be written again. Elements are in row-major order. For a dual, the elements
    of the primal come first, then those of the tangent.

    The result is a `Dual`, a JAX array on the default device, a read-only numpy array
    (for small values) or a Python number (for weak scalars). A compiled function treats
    the result like the value given to `parts`: same type, same bits.
    """
    if kind.dual:
        half, single = view.nbytes // 2, replace(kind, dual=False)
        return Dual(array_over(single, view[:half]), array_over(single, view[half:]))
    impl = KEYS.get(kind.dtype)
    if impl is not None:
        width = view.nbytes // 4 // max(math.prod(kind.shape), 1)
        key_data = _array((*kind.shape, width), np.dtype(np.uint32), view)
        return jax.random.wrap_key_data(jnp.asarray(key_data), impl=impl)
    array = _array(kind.shape, dtype_of(kind.dtype), view)
    return _weak(array) if kind.weak else array


def layout_of(kinds: Sequence[ArrayType]) -> ArrayLayout | None:
    """Return where a message has values; None if some need `array_over`."""
    layout, stop = [], 0
    for kind in kinds:
        dtype, start = _PLAIN.get(kind.dtype), stop
        stop += kind.nbytes
        if dtype is None or kind.dual or kind.weak or stop >= ALIASED_MIN_BYTES:
            return None
        layout.append((kind.shape, dtype, start, stop))
    return layout


def _array(shape: tuple[int, ...], dtype: Any, view: memoryview) -> Any:
    nbytes = view.nbytes
    assert nbytes == math.prod(shape) * dtype.itemsize, (shape, dtype, nbytes)
    if nbytes < ALIASED_MIN_BYTES:
        return np.ndarray(shape, dtype, bytes(view))  # Arrays over bytes are read-only.
    elements: Any = np.frombuffer(view.toreadonly(), np.uint8).view(dtype)
    array = elements.reshape(shape)
    if nbytes < JAX_MIN_BYTES and jax.default_backend() == "cpu":
        return array
    return _device_put(array)


def _device_put(array: Any) -> Any:
    with np.errstate(all="ignore"):  # With x64 off, 64-bit values become 32-bit.
        # from_dlpack would commit the array to a device, and supports fewer dtypes.
        return jax.device_put(array)


def _weak(array: Any) -> Any:
    """Return the array with a weak type; a Python number if JAX gives it this dtype."""
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
    """Convert a received value to a JAX array, or a dual of JAX arrays.

    It serves uncompiled functions, hooks and fetches. Other objects (failures, abstract
    values, JAX arrays) are returned unchanged.
    """
    kind = value.__class__
    if kind is np.ndarray or kind in _NUMBERS:
        small = kind in _NUMBERS or value.nbytes < DELIVERED_MIN_BYTES
        try:
            return _copied(value) if small else _device_put(value)
        except jax.errors.JaxRuntimeError as error:
            return _put_explicitly(error, value)
    if kind is Dual:
        return Dual(*map(delivered, value.keeps))
    return value


def _copied(value: Any) -> Any:
    if value.__class__ is not np.ndarray:
        return _identity(value)
    config: Any = jax.config
    context = config.jax_default_device, trace_context()
    aval, sharding, devices, committed = _place(value.shape, value.dtype, context)
    values = [value] * len(devices)
    return xla_client.batched_device_put(aval, sharding, values, devices, committed)


@lru_cache(maxsize=1024)
def _place(shape: tuple[int, ...], dtype: Any, context: Any) -> tuple[Any, ...]:
    """Return the type and the place of what `_identity` makes of an array.

    With these, `batched_device_put` makes an array. No public function of JAX 0.10.2
    and 0.12.0 is as fast: `_identity` takes 1.1 times as long, from 200 KB on 1.6; all
    others take 2 to 7 times as long.
    """
    array = _identity(np.zeros(shape, dtype))
    return array.aval, array.sharding, list(array.devices()), array.committed


@jax.jit
def _identity(value: Any) -> Any:
    return value  # jnp.asarray(value) would take three times as long.


def _put_explicitly(error: Exception, value: Any) -> Any:
    try:
        return _device_put(value)
    except jax.errors.JaxRuntimeError:
        raise JdagError(
            f"a received value cannot become a JAX array here: {error}; "
            "fetch it where the transfer guard allows transfers"
        ) from error


class Buffers:
    """A pool of buffers for received bytes, which reuses the memory of large buffers.

    Fresh memory costs a page fault every 4 KiB, which takes longer than the copy into
    it. Freed memory is kept for the next buffer of about the same size, up to
    `kept_bytes_max` bytes in total, if a buffer of that size was requested since the
    last `sweep` or in the interval before it. So memory of weights that are received
    once is freed. Buffers may be freed in any thread at any moment, so the lists of
    free blocks are changed only by atomic operations.
    """

    __slots__ = ("__weakref__", "_free", "_kept_bytes_max", "_last_sizes", "_sizes")

    def __init__(self, kept_bytes_max: int = KEPT_BYTES_MAX) -> None:
        self._kept_bytes_max = kept_bytes_max
        self._free: defaultdict[int, list[Any]] = defaultdict(list)  # Blocks by size.
        # Sizes requested since the last sweep, and in the interval before it.
        self._sizes: set[int] = set()
        self._last_sizes: set[int] = set()

    @property
    def kept(self) -> int:
        return sum([size * len(blocks) for size, blocks in [*self._free.items()]])

    def aligned(self, nbytes: int) -> memoryview:
        """Return a writable buffer for `array_over`. Its contents are arbitrary."""
        size = _capacity(nbytes)
        if nbytes < POOLED_MIN_BYTES or size > self._kept_bytes_max:
            return memoryview(_block(nbytes))
        self._sizes.add(size)
        try:
            block = self._free[size].pop()
        except IndexError:
            block = _block(size)
        # Each use has a lease. It is collected after all views and arrays over it.
        lease: Any = np.frombuffer(memoryview(block), np.uint8, nbytes)
        weakref.finalize(lease, _return_block, weakref.ref(self), block).atexit = False
        return memoryview(lease)

    def sweep(self) -> None:
        for size, blocks in self._free.items():
            if size not in self._sizes:
                blocks.clear()
        self._last_sizes, self._sizes = self._sizes, set()

    def clear(self) -> None:
        for blocks in self._free.values():
            blocks.clear()

    def _keep(self, block: Any) -> None:
        size = block.nbytes
        is_requested = size in self._sizes or size in self._last_sizes
        if is_requested and self.kept + size <= self._kept_bytes_max:
            self._free[size].append(block)


def _return_block(pool: "weakref.ref[Buffers]", block: Any) -> None:
    buffers = pool()
    if buffers is not None:
        buffers._keep(block)


def _block(nbytes: int) -> Any:
    memory = np.empty(nbytes + ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    return memory[start : start + nbytes]


def _capacity(nbytes: int) -> int:
    """Round up to a power of two, or to one of three equal steps between two powers."""
    step = 1 << max((nbytes - 1).bit_length() - 3, 0)
    return -(-nbytes // step) * step
