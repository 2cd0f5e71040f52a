"""Values as bytes in memory and back: types, bits, memory that is used again."""

import gc
import importlib
import inspect
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdag.compute.buffers import (
    ALIASED_MIN_BYTES,
    ALIGNMENT_BYTES,
    DELIVERED_MIN_BYTES,
    JAX_MIN_BYTES,
    Buffers,
    _copies,
    array_over,
    delivered,
    parts,
    start_copies,
)
from jdag.compute.duals import Dual
from jdag.compute.hooks import hooked
from jdag.compute.moves import moved_arrays
from jdag.engine.arrays import DTYPES
from jdag.errors import JdagError
from jdag.wire.arrays import type_of
from tests.tools.compute_cases import pair_of, setting
from tests.tools.error_texts import fails_with

LARGE = ALIASED_MIN_BYTES
# Of them the compiled functions of the first tier.
FIRST = ("bool", "int8", "bfloat16", "float32", "complex128")
PLAIN = [name for name in DTYPES if not name.startswith("key<")]
IMPLS = ("threefry2x32", "rbg", "unsafe_rbg")
SHAPES = ((), (2, 0, 3), (257, 263))


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def carried(value: Any, buffers: Buffers | None = None) -> Any:
    data = b"".join(parts(value))
    view = (buffers or Buffers()).aligned(len(data))
    view[:] = data
    kind = type_of(value)
    assert len(data) == kind.nbytes
    return array_over(kind, view)


def bits(value: Any) -> tuple[Any, ...]:
    if isinstance(value, Dual):
        return (*bits(value.primal), *bits(value.tangent))
    assert isinstance(value, jax.Array), type(value)
    kind = (value.shape, str(value.dtype), jax.typeof(value).weak_type)
    if not isinstance(value.dtype, np.dtype):
        value = jax.random.key_data(value)
    return (*kind, np.asarray(value).tobytes())


def drawn(dtype: str, shape: tuple[int, ...]) -> Any:
    count = int(np.prod(shape))
    raw = np.random.default_rng(7).integers(0, 256, count * DTYPES[dtype], np.uint8)
    kind = jnp.dtype(dtype)
    if dtype == "bool":
        return (raw[:count] > 127).reshape(shape)
    if DTYPES[dtype] == 1:  # Some have fewer than 8 bits in use.
        return (raw[:count] % 4).astype(np.float32).astype(kind).reshape(shape)
    return raw.view(kind).reshape(shape)


@pytest.mark.parametrize("dtype", PLAIN)
def test_arrays_of_every_dtype_come_with_their_type_and_bits(dtype: str):
    for shape in SHAPES:
        drawn_here = drawn(dtype, shape)
        array = jnp.asarray(drawn_here)
        assert bits(delivered(carried(array))) == bits(array), shape
        assert bits(jnp.asarray(carried(drawn_here))) == bits(array), shape


@pytest.mark.parametrize("kind", ["int64", "uint64", "float64", "complex128"])
def test_an_array_of_64_bits_comes_as_jit_would_have_it(kind: str):
    value = np.array([3, 1 << 40, 7], kind)
    for wide in (False, True, False):
        with jax.enable_x64(wide):
            array = jax.jit(lambda x: x)(value)
            assert bits(delivered(value)) == bits(array)
            assert delivered(value).committed is array.committed


def test_jax_has_the_private_function_by_which_small_arrays_are_copied():
    """If it has gone, `_identity` can make them: see `_place`."""
    pxla = importlib.import_module("jax._src.interpreters.pxla")
    assert hasattr(pxla, "batched_device_put"), jax.__version__
    given = [*inspect.signature(pxla.batched_device_put).parameters][:5]
    assert given == ["aval", "sharding", "xs", "devices", "committed"], jax.__version__


@pytest.mark.parametrize("value", [np.ones(3), 2.5, np.ones(DELIVERED_MIN_BYTES)])
def test_a_received_value_passes_a_guard_of_implicit_transfers(value: Any):
    wanted = bits(delivered(value))
    with jax.transfer_guard("disallow"):
        assert bits(delivered(value)) == wanted
    with (
        jax.transfer_guard("disallow_explicit"),
        fails_with(JdagError, "compute.cannot_become_a_jax_array"),
    ):
        delivered(value)


@jax.jit
def computed(value: Any) -> Any:
    same = value.reshape(value.shape)
    return value, jnp.stack([value, value]), value == same


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(dtype, marks=[pytest.mark.second] * (dtype not in FIRST))
        for dtype in PLAIN
    ],
)
def test_a_compiled_function_of_what_landed_gives_the_same_type_and_bits(dtype: str):
    for shape in ((), (257, 263)):
        array = jnp.asarray(drawn(dtype, shape))
        for given in (array, weak(array)):
            got, wanted = computed(carried(given)), computed(given)
            assert list(map(bits, got)) == list(map(bits, wanted)), (shape, given)


def weak(array: jax.Array) -> jax.Array:
    made: Any = jax.lax.convert_element_type_p.bind(
        array, new_dtype=array.dtype, weak_type=True, sharding=None
    )
    return made


@jax.jit
def promoted(value: Any) -> Any:
    return [jnp.ones(3, kind) * value for kind in (jnp.bfloat16, jnp.int8, "float32")]


@pytest.mark.parametrize("x64", [True, False])
def test_numbers_and_weak_arrays_promote_as_in_process(x64: bool):
    whole = (3, -7, 2**31 - 1)
    broken = (0.1, -0.0, float("inf"), 1e300, 1e-310, 2.5 - 0.1j)
    with setting("jax_enable_x64", x64):
        arrays = (jnp.asarray(0.1), jnp.full(3, 0.1), weak(jnp.ones((), jnp.float16)))
        assert all(array.weak_type for array in arrays)
        for value in (*whole, *broken, *arrays):
            got, wanted = promoted(carried(value)), promoted(value)
            assert list(map(bits, got)) == list(map(bits, wanted)), value
            assert bits(delivered(carried(value))) == bits(jnp.asarray(value)), value


def test_what_is_wider_than_the_configuration_counts_as_in_process():
    for size in (3, LARGE):
        for dtype in ("int64", "uint64", "float64", "complex128"):
            array = drawn(dtype, (size,))
            with setting("jax_enable_x64", False):
                here = carried(array)
                with np.errstate(over="ignore", invalid="ignore"):  # JAX's own.
                    got, wanted = computed(here), computed(array)
                assert list(map(bits, got)) == list(map(bits, wanted)), (size, dtype)


@pytest.mark.parametrize("impl", IMPLS)
def test_keys_come_back_as_keys_of_their_kind(impl: str):
    one = jax.random.key(5, impl=impl)
    for keys in (one, jax.random.split(one, 3), jax.random.split(one, (2, LARGE // 8))):
        got = carried(keys)
        assert bits(got) == bits(keys)
    draw = jax.random.uniform(carried(one), (4,))
    assert bits(draw) == bits(jax.random.uniform(one, (4,)))


@pytest.mark.parametrize("size", [3, LARGE, LARGE + 1])
def test_a_dual_comes_back_as_a_dual(size: int):
    primal = jnp.arange(size, dtype=jnp.float32)
    dual = Dual(primal, jnp.sin(primal))
    got = carried(dual)
    assert bits(delivered(got)) == bits(dual)
    assert bits(jax.jit(lambda x: x + x + x)(got)) == bits(dual + dual + dual)


def test_arrays_in_any_order_of_memory_leave_row_by_row():
    array = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    line = array.ravel()[::-2]
    for given in (
        array.T,
        array[:, ::2],
        array[::-1],
        np.asfortranarray(array),
        line,
    ):
        assert bits(jnp.asarray(carried(given))) == bits(jnp.asarray(given))
    scalar = np.float32(2.5)
    assert bits(jnp.asarray(carried(scalar))) == bits(jnp.asarray(scalar))


def test_what_leaves_is_not_copied_and_lives_as_long_as_its_views():
    array = jnp.arange(LARGE, dtype=jnp.float32) + 1
    (view,) = parts(array)
    assert address(view) == array.unsafe_buffer_pointer()
    wanted = np.asarray(array).tobytes()
    array.delete()
    del array
    gc.collect()
    others = [jnp.zeros(LARGE, jnp.float32) + place for place in range(4)]
    assert bytes(view) == wanted and len(others) == 4
    mine = np.arange(7.0)
    assert address(parts(mine)[0]) == mine.ctypes.data


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let arrays of the CPU pass for those of a GPU. Returns a log of their copies."""
    log: list[str] = []
    array_class, put = type(jnp.ones(1)), jax.device_put
    to_host = array_class.copy_to_host_async

    def logged_put(value: Any, sharding: Any) -> Any:
        log.append(sharding.memory_kind)
        return put(value, sharding)

    def logged_to_host(array: Any) -> None:
        log.append("to JAX's copy")
        to_host(array)

    monkeypatch.setattr(array_class, "platform", lambda array: "gpu")
    monkeypatch.setattr(array_class, "copy_to_host_async", logged_to_host)
    monkeypatch.setattr(jax, "device_put", logged_put)
    return log


# Python's buffer protocol refuses arrays of a GPU, and arrays of bfloat16 anywhere.
def large_array() -> Any:
    return jnp.arange(LARGE, dtype=jnp.bfloat16)


def test_an_array_of_an_accelerator_is_copied_once_to_page_locked_memory(accelerator):
    array = large_array()
    start_copies([array])
    assert accelerator == ["pinned_host"]
    copy = _copies[id(array)]
    (view,) = parts(array)
    assert accelerator == ["pinned_host"] and not _copies
    assert address(view) == copy.unsafe_buffer_pointer()
    assert bytes(view) == np.asarray(array).tobytes()
    (again,) = parts(array)  # The started copy was used up.
    assert accelerator == ["pinned_host"] * 2 and bytes(again) == bytes(view)


def test_a_copy_that_was_started_for_nothing_ends_with_its_array(accelerator):
    array = large_array()
    start_copies([array])
    assert len(_copies) == 1
    del array
    assert not _copies


def test_jax_keeps_the_copy_of_a_small_array_or_without_page_locked_memory(
    accelerator, monkeypatch: pytest.MonkeyPatch
):
    small = jnp.arange(3, dtype=jnp.bfloat16)
    start_copies([small, 2.5, np.ones(3), jax.random.key(0)])
    monkeypatch.setattr("jdag.compute.buffers._pinned", lambda sharding: None)
    start_copies([large_array()])
    assert accelerator == ["to JAX's copy"] * 2 and not _copies
    assert bytes(parts(small)[0]) == np.asarray(small).tobytes()


def test_nothing_is_started_for_an_array_of_the_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(jax, "device_put")
    array = large_array()
    start_copies([array])
    assert not _copies and bytes(parts(array)[0]) == np.asarray(array).tobytes()


def test_views_of_what_leaves_cannot_be_written():
    for value in (jnp.ones(3), np.ones(3), 2.0):
        (view,) = parts(value)
        with fails_with(TypeError, "compute.read_only"):
            view[0] = 1


@pytest.mark.parametrize("nbytes", [LARGE, JAX_MIN_BYTES])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "complex64"])
def test_a_large_value_stays_where_it_landed(dtype: str, nbytes: int):
    size = nbytes // DTYPES[dtype]
    view = Buffers().aligned(nbytes)
    view[:] = bytes(nbytes)
    there = address(view)
    got = array_over(type_of(jnp.zeros(size, dtype)), view)
    assert isinstance(got, jax.Array if nbytes == JAX_MIN_BYTES else np.ndarray)
    if isinstance(got, np.ndarray):
        assert got.ctypes.data == there and not got.flags.writeable
        assert bits(delivered(got)) == bits(jnp.zeros(size, dtype))
        return
    assert got.unsafe_buffer_pointer() == there and not got.committed


@pytest.mark.parametrize("nbytes", [DELIVERED_MIN_BYTES, DELIVERED_MIN_BYTES // 2])
def test_what_was_delivered_keeps_its_bytes_when_buffers_are_used_again(nbytes: int):
    buffers = Buffers()
    view = buffers.aligned(nbytes)
    view[:] = bytes([1, 2]) * (nbytes // 2)
    kind = type_of(jnp.zeros(nbytes // 2, jnp.uint16))
    got = delivered(array_over(kind, view))
    assert isinstance(got, jax.Array) and not got.committed
    del view
    gc.collect()
    other = buffers.aligned(nbytes)
    other[:] = bytes(nbytes)
    assert (np.asarray(got) == 0x201).all()


def test_a_small_value_keeps_nothing_of_its_buffer():
    view = memoryview(bytearray(np.arange(5.0).tobytes()))
    got = array_over(type_of(np.zeros(5)), view)
    view[:] = bytes(40)
    assert got.tolist() == [0, 1, 2, 3, 4]
    with fails_with(ValueError, "compute.read_only"):
        got[0] = 1


def test_an_array_that_is_donated_leaves_its_buffer_unwritten_and_gives_it_back():
    buffers = Buffers()
    view = buffers.aligned(LARGE)
    view[:] = bytes(LARGE)
    got = array_over(type_of(jnp.zeros(LARGE // 4, jnp.float32)), view)
    more: Any = jax.jit(lambda x: x + 1, donate_argnums=0)(got)
    assert more.sum() == LARGE // 4
    assert bytes(view) == bytes(LARGE)
    del got, view
    gc.collect()
    assert buffers.kept == LARGE


@pytest.mark.parametrize("dtype", ["int32", "bfloat16", "float8_e4m3fn", "bool"])
def test_a_buffer_is_used_again_when_the_last_array_over_it_is_gone(dtype: str):
    buffers = Buffers()
    view = buffers.aligned(LARGE)[:]
    there = address(view)
    view[:] = bytes([0, 1] * (LARGE // 2))
    got = array_over(type_of(jnp.zeros(LARGE // DTYPES[dtype], dtype)), view)
    seen = np.asarray(got)[3:]
    wanted = seen.tobytes()
    del view
    gc.collect()
    assert buffers.kept == 0
    del got
    gc.collect()
    other = buffers.aligned(LARGE)
    other[:] = bytes(LARGE)
    assert address(other) != there and seen.tobytes() == wanted
    del other, seen
    gc.collect()
    assert buffers.kept == 2 * LARGE


def test_buffers_of_any_size_are_aligned_and_writable():
    buffers = Buffers()
    for nbytes in (0, 1, 63, LARGE - 1, LARGE, LARGE + 1, 1_000_003, 5 * LARGE):
        view = buffers.aligned(nbytes)
        assert view.nbytes == nbytes and not view.readonly
        assert address(view) % ALIGNMENT_BYTES == 0 or not nbytes
        view[:] = bytes(nbytes)


def test_what_is_kept_is_bounded():
    buffers = Buffers(kept_bytes_max=8 * LARGE)
    small = [buffers.aligned(LARGE) for _ in range(12)]
    small.clear()
    assert buffers.kept == 8 * LARGE
    small.append(buffers.aligned(LARGE))
    large = buffers.aligned(4 * LARGE)
    del large
    assert buffers.kept == 7 * LARGE  # There is no room for it.
    buffers.sweep()
    large = buffers.aligned(4 * LARGE)
    buffers.sweep()  # Of the others none was asked for in between.
    there = address(large)
    del large
    assert buffers.kept == 4 * LARGE
    large = buffers.aligned(4 * LARGE)
    assert address(large) == there
    too_large = buffers.aligned(9 * LARGE)
    del too_large
    assert buffers.kept == 0
    del buffers
    large[:] = bytes(4 * LARGE)  # Who keeps them may go before those who use them.


def test_a_sweep_lets_go_of_sizes_that_were_not_asked_for_since_the_one_before():
    pool = Buffers()
    sizes = [1 << 17, 1 << 18, 1 << 19]
    for size in sizes:
        del [pool.aligned(size)][0]
    assert pool.kept == sum(sizes)
    pool.sweep()
    assert pool.kept == sum(sizes)
    del [pool.aligned(sizes[1])][0]
    pool.sweep()
    assert pool.kept == sizes[1]
    pool.sweep()
    assert pool.kept == 0


def test_what_comes_back_long_after_its_size_was_asked_for_is_not_kept():
    pool = Buffers()
    weights, batch = pool.aligned(LARGE), pool.aligned(2 * LARGE)
    pool.sweep()
    del batch
    assert pool.kept == 2 * LARGE
    batch = pool.aligned(2 * LARGE)
    pool.sweep()
    del weights, batch
    assert pool.kept == 2 * LARGE


def test_buffers_may_be_let_go_of_in_any_thread():
    buffers = Buffers(kept_bytes_max=16 * LARGE)
    errors = []

    def use(mark: int) -> None:
        try:
            for turn in range(300):
                held = [buffers.aligned((1 + turn % 3) * LARGE) for _ in range(3)]
                for place, view in enumerate(held):
                    view[:8] = bytes([mark, turn % 256, place] + [0] * 5)
                for place, view in enumerate(held):
                    assert view[:3].tolist() == [mark, turn % 256, place]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=use, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    gc.collect()
    assert 0 < buffers.kept <= (16 + 3 * 3) * LARGE  # One each may come too late.


def test_hooks_see_jax_arrays():
    seen: list[Any] = []
    cotangent = np.ones(3, np.float32)
    assert isinstance(hooked(seen.append, cotangent), jax.Array)
    hooked(seen.append, Dual(cotangent, cotangent))
    assert [type(one) for one in seen] == [type(jnp.ones(1))] * 2


SEEN: list[Any] = []


@jax.custom_vjp
def doubled(x: Any) -> Any:
    return 2 * x


def _doubled_back(_: Any, cotangent: Any) -> Any:
    SEEN.append(cotangent)
    return (2 * cotangent,)


doubled.defvjp(lambda x: (doubled(x), None), _doubled_back)


def moved_double(x: Any) -> Any:
    """It moves an array, so it is not compiled."""
    SEEN.append(x)
    return doubled(moved_arrays([x], jax.devices()[:1])[0])


def test_functions_that_are_not_compiled_see_jax_arrays():
    x = np.ones(3)
    made = pair_of(moved_double, x)
    assert made.source.unjitted
    _, residuals = made.forward((x,))
    assert residuals is not None
    for addends in ([x], [x, x, x]):
        made.vjp(residuals, [addends])
    assert len(SEEN) >= 3
    assert all(isinstance(one, jax.Array) for one in SEEN)
