"""Segments as compiled functions: their values, bundles, executables and errors."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdag.compute import bundles
from jdag.compute.avals import aval_of
from jdag.compute.bundles import Bundle
from jdag.compute.placed import placed
from jdag.compute.segments import SegmentFunction, failed_call, link
from jdag.compute.values import Values
from jdag.engine.functions import unjitted
from jdag.engine.segments import NodeKind, SegmentNode
from jdag.runtime.failures import failure_of
from tests.tools.error_texts import fails_with
from tests.tools.segment_cases import Tape, array, dense, mlp, mlp_of, square

FORWARD, VJP, SUM, FILL, *_ = NodeKind


@contextmanager
def compilations() -> Iterator[list[str]]:
    found: list[str] = []

    def listener(event: str, duration_secs: float, **_: Any) -> None:
        if "backend_compile" in event:
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)


def linked(forward: SegmentFunction, backward: SegmentFunction) -> None:
    arrays, outputs = tuple(range(len(forward.avals))), range(len(backward.outputs))
    first = SimpleNamespace(function=forward, needs=arrays, makes=(900, 901))
    link([first, SimpleNamespace(function=backward, needs=(900, 901), makes=outputs)])


def assert_near(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        scale = float(np.abs(other).max())
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6 * max(scale, 1))


def test_one_and_two_segments_give_the_gradients_of_jax() -> None:
    tape, loss, params = mlp(3)
    value, grads = jax.value_and_grad(mlp_of(3), argnums=params)(*tape.arrays)
    assert_near(tape.whole(loss, params).run(tape.arrays), [value, *grads])
    forward, backward = tape.halves(loss, params)
    found, bundle = forward.run(tape.arrays)
    assert_near([found, *backward.run((found, bundle))], [value, *grads])


def test_an_exact_segment_has_the_bits_of_its_pairs() -> None:
    tape = Tape(array(8, 8), array(8, seed=1), array(4, 8, seed=2))
    x: Any = 2
    for _ in range(3):  # The weights are used three times.
        x = tape.call(dense, 0, 1, x)
    loss = tape.call(square, x)
    forward, backward = tape.halves(loss, [0, 1], exact=True)
    expected = tape.one_by_one(loss, [0, 1])
    found, bundle = forward.run(tape.arrays)
    for exactly in (
        tape.whole(loss, [0, 1], exact=True).run(tape.arrays),
        (found, *backward.run((found, bundle))),
    ):
        assert all(map(np.array_equal, exactly, expected))
    assert_near(tape.whole(loss, [0, 1]).run(tape.arrays), expected)


def test_a_segment_is_compiled_once_and_before_it_runs() -> None:
    width = 11  # No other test compiles for it.
    tape, loss, params = mlp(3, width)
    first = tape.halves(loss, params)
    linked(*first)
    with compilations() as found:
        for one in first:
            one.compile()
        assert len(found) == 2
        for arrays in (tape.arrays, tuple(map(np.asarray, tape.arrays))):
            value, bundle = first[0].run(arrays)
            first[1].run((value, bundle))
        assert len(found) == 2
    other, same, _ = mlp(3, width)
    second = [
        replace(one, calls=(("other", "there"),) * len(one.calls))
        for one in other.halves(same, params)
    ]
    linked(*second)
    with compilations() as found:
        for one in second:
            one.compile()
        second[1].run(second[0].run(other.arrays))
        assert found == []
    unlinked = other.halves(same, params)
    unlinked[1].compile()  # Its bundle is unknown: it is compiled when it runs.
    with compilations() as found:
        unlinked[1].run(unlinked[0].run(other.arrays))
        assert found == []


def test_an_exact_segment_compiles_its_pairs_before_it_runs() -> None:
    tape, loss, params = mlp(3, 13)  # No other test compiles for this width.
    whole = tape.whole(loss, params, exact=True)
    with compilations() as found:
        whole.compile()
        assert len(found) == 4  # Forward and vjp of the layer, and of the loss.
        jax.block_until_ready(
            tape.halves(loss, params, exact=True)[0].run(tape.arrays)[0]
        )
        whole.run(tape.arrays)
        assert len(found) <= 5  # The ones of the root.


def test_large_residuals_are_donated_and_only_these() -> None:
    tape, loss, params = mlp(3, 128, 256)
    wanted = [*params, len(params)]  # The gradient of x has the shape of residuals.
    forward, backward = tape.halves(loss, wanted)
    value, bundle = forward.run(tape.arrays)
    expected = jax.grad(mlp_of(3), argnums=wanted)(*tape.arrays)
    assert_near(backward.run((value, bundle)), expected)
    deleted = [one for one in bundle.keeps if one.is_deleted()]
    assert [one.shape for one in deleted] == [(256, 128)]
    assert not any([one.is_deleted() for one in (*tape.arrays, value)])
    with fails_with((ValueError, RuntimeError), "compute.deleted"):
        backward.run((value, bundle))  # Nobody has a bundle twice.


def test_small_residuals_are_one_array_and_arguments_stay_as_they_are() -> None:
    tape, loss, params = mlp(3)
    forward, _ = tape.halves(loss, params)
    _, bundle = forward.run(tape.arrays)
    kept = {id(array) for array in tape.arrays}
    own = [array for array in bundle.keeps if id(array) not in kept]
    assert [array.ndim for array in own] == [1]
    assert len(bundle.keeps) == 1 + 3 + 1  # Three weights, and x.
    assert bundle.nbytes == sum([array.nbytes for array in bundle.keeps])
    values = Values()
    values.put("x", tape.arrays[-1])
    values.put("bundle", bundle)
    assert values.bytes_held == bundle.nbytes
    values.drop(["bundle"])
    assert values.bytes_held == tape.arrays[-1].nbytes


def two_dtypes(x: Any, h: Any) -> Any:
    return (jnp.sin(x) * jnp.cos(x)).sum() + (jnp.sin(h) ** 3).sum().astype(x.dtype)


def test_each_dtype_is_packed_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    tape = Tape(array(5), array(3, seed=1).astype(jnp.bfloat16))
    root = tape.call(two_dtypes, 0, 1)
    expected = jax.grad(two_dtypes, argnums=(0, 1))(*tape.arrays)
    forward, backward = tape.halves(root, [0, 1])
    value, bundle = forward.run(tape.arrays)
    packed = {tuple(aval.dtype for aval in pack) for pack in bundle.layout.packs}
    assert all([len(set(dtypes)) == 1 for dtypes in packed])
    assert packed
    for one, other in zip(backward.run((value, bundle)), expected, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(
            one.astype(np.float32), other.astype(np.float32), rtol=2e-2
        )
    monkeypatch.setattr(bundles, "PACKED_BYTES_MAX", -1)
    plain, _ = Tape.halves(doubled := Tape(array(6)), doubled.call(square, 0), [0])
    assert plain.run(doubled.arrays)[1].layout.packs == ()


def passed(x: Any, y: Any) -> Any:
    return y, x


def test_inputs_that_come_out_are_not_copied() -> None:
    x, y = array(4), np.arange(3.0, dtype=np.float32)
    y.flags.writeable = False
    tape = Tape(x, y)
    _, second = tape.call(passed, 0, 1)
    run = tape.segment([second, second, 1, 0]).run
    found = run((x, y))
    assert [one is x for one in found] == [True, True, False, True]
    assert found[2] is y
    found = run((x, np.arange(3.0, dtype=np.float32)))  # Its owner may write to it.
    assert isinstance(found[2], jax.Array)


def several(x: Any, n: Any) -> Any:
    return x * n, n + 1, jax.lax.stop_gradient(x).sum(), jnp.exp(x)


@pytest.mark.parametrize("exact", [False, True])
def test_outputs_without_cotangents_and_without_gradients(exact: bool) -> None:
    x, n = array(6), jnp.int32(3)
    tape = Tape(x, n)
    product, count, total, power = tape.call(several, 0, 1)
    loss = tape.call(square, product)  # The others get no cotangent.
    whole = tape.whole(loss, [0], exact)
    assert_near(whole.run((x, n)), [(x * 3) @ (x * 3), 18 * x])
    outputs = [product, count, total, power, product, 0]
    found = tape.segment(outputs, exact).run((x, n))
    assert_near(found, [x * 3, jnp.int32(4), x.sum(), jnp.exp(x), x * 3, x])


def test_its_types_are_known_without_running() -> None:
    tape, loss, params = mlp(2)
    whole = tape.whole(loss, params)
    assert whole.out_avals == tuple(map(aval_of, (jnp.float32(0), *tape.arrays[:-1])))
    names = (
        "tests.tools.segment_cases:dense, tests.tools.segment_cases:square and 1 more"
    )
    assert whole.name == names
    kinds = [kind for _, kind in whole.costs]
    assert kinds == [*["forward"] * 3, "fill", *["vjp"] * 3]
    assert whole.costs[0] == ("tests.tools.segment_cases:dense", "forward")
    assert whole.costs[3] == ("fill", "fill")
    nodes = (SegmentNode(SUM, 0, ((0, 1, 2),)), SegmentNode(FILL, 0, ((0,),)))
    avals = (aval_of(array(3)),) * 3
    calls = (("", ""),) * 2
    made = SegmentFunction((), avals, (), nodes, (3, 4), (), calls, False)
    assert_near(made.run((array(3),) * 3), [array(3) * 3, jnp.zeros(3, np.float32)])


@pytest.mark.parametrize(
    "nodes",
    [
        (SegmentNode(SUM, 0, ((0, 7),)),),
        (SegmentNode(SUM, 0, ((0, 1),)),),
        (SegmentNode(SUM, 0, ((),)),),
        (SegmentNode(FORWARD, 1, ((0,),)),),
        (SegmentNode(FORWARD, 0, ((1,),)),),
        (SegmentNode(VJP, 0, ((0,), ())),),
        (SegmentNode(VJP, 0, ((2,), (), ())),),
    ],
)
def test_a_node_that_does_not_fit_is_refused(nodes: Any) -> None:
    tape = Tape(array(3), array(4))
    pairs, calls = (tape.pair_of(square, 0),), (("", ""),)
    with pytest.raises(ValueError, match=r"do not match|missing value|argument"):
        SegmentFunction(pairs, tape.avals, (1,), nodes, (), (), calls, False)


def raises(x: Any) -> Any:
    raise ZeroDivisionError(f"as it is wont: {x}")


def bad_host(x: Any) -> Any:
    return jax.pure_callback(raises, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@pytest.mark.parametrize("exact", [False, True])
def test_an_error_names_the_call_or_in_a_fused_segment_all_calls(exact: bool) -> None:
    tape = Tape(jnp.ones(3), jnp.arange(3))
    outputs = [tape.call(square, 0), tape.call(bad_host, 1)]
    segment = tape.segment(outputs, exact)
    assert segment.may_raise
    with fails_with(Exception, "compute.as_it_is_wont") as caught:
        segment.run(tape.arrays)
    failure = failure_of(caught.value, "a", (1,), "segment")
    names = (
        "tests.tools.segment_cases:square and tests.unit.compute.test_segments:bad_host"
    )
    sites = ("case.py:2" if exact else "case.py:1 and case.py:2",)
    name = "tests.unit.compute.test_segments:bad_host" if exact else names
    assert (failure.function, failure.call_site) == (name, *sites)
    assert failed_call(ValueError()) is None


@unjitted(shapes=lambda x: x)
def on_host(x: Any) -> Any:
    assert not isinstance(x, jax.core.Tracer)
    return jnp.asarray(np.asarray(x) * 2)


def test_unjitted_functions_and_devices_run_call_by_call() -> None:
    x = array(5)
    tape = Tape(x)
    moved = placed(tape.pair_of(square, 0), "cpu:0", ("cpu:0",))
    whole = tape.whole(tape.call(moved, 0), [0])
    assert_near(whole.run((x,)), [x @ x, 2 * x])
    assert [aval.device for aval in whole.out_avals] == ["cpu:0", "cpu:0"]
    assert whole.costs[0] == ("tests.tools.segment_cases:square@cpu:0", "forward")
    tape = Tape(jnp.arange(3))
    segment = tape.segment([tape.call(on_host, 0)])
    segment.compile()
    assert_near(segment.run(tape.arrays), [2 * jnp.arange(3)])


def test_a_bundle_of_single_calls_serves_a_fused_segment_and_the_other_way() -> None:
    tape, loss, params = mlp(3)
    grads = jax.grad(mlp_of(3), argnums=params)(*tape.arrays)
    both = [tape.halves(loss, params, exact) for exact in (False, True)]
    for (forward, _), (_, backward) in (both, both[::-1]):
        value, bundle = forward.run(tape.arrays)
        assert type(bundle) is Bundle
        assert_near(backward.run((value, bundle)), grads)
