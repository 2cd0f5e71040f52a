"""Forward/vjp pairs: their gradients, their residuals, and what they refuse."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdag.compute.avals import Aval, aval_of
from jdag.compute.moves import moved_arrays
from jdag.compute.pairs import pair
from jdag.compute.pytrees import split, static
from jdag.compute.sums import filled
from jdag.engine.functions import unjitted
from jdag.errors import JdagError
from tests.tools.compute_cases import Call, Leaf, array, assert_same, setting
from tests.tools.error_texts import fails_with


def test_an_output_that_got_no_cotangent_counts_as_zero() -> None:
    def several(x: Any) -> dict[str, Any]:
        return {"sum": jnp.sum(x), "more": (x * x, jnp.sin(x) * 2.0)}

    x, g = array(6), array(6, seed=1)
    call = Call(several, Leaf(x))
    assert call.pair.out_tree == jax.tree.structure(several(x))
    (only_square,) = call.vjp([g], [], [])  # Sorted by key: more, then sum.
    assert_same(only_square, 2 * x * g)
    (nothing,) = call.vjp([], [], [])
    assert_same(nothing, jnp.zeros(6))


def test_an_argument_that_is_not_used_gets_an_explicit_zero() -> None:
    call = Call(lambda x, unused: x * 2.0, Leaf(array(3)), Leaf(array(2, 2)))
    assert_same(call.vjp([jnp.ones(3)]), (jnp.full(3, 2.0), jnp.zeros((2, 2))))


def test_keywords_statics_and_nested_arguments_reach_the_function() -> None:
    def fold(parts: Any, *, axis: int, mode: str, scale: Any, then: Any) -> Any:
        assert isinstance(axis, int)
        assert mode == "sum"
        return then(jnp.sum(parts["a"], axis=axis) * scale + parts["b"][0])

    a, b = array(3, 4), array(4, seed=1)
    call = Call(
        fold,
        {"a": Leaf(a), "b": [Leaf(b), None]},
        scale=3.0,
        axis=static(0),
        mode="sum",
        then=jnp.sin,
    )
    expected, vjp = jax.vjp(lambda a, b: jnp.sin(a.sum(0) * 3.0 + b), a, b)
    assert_same(call.outputs, [expected])
    assert_same(call.vjp([jnp.ones(4)]), vjp(jnp.ones(4)))


def test_integer_inputs_and_outputs_carry_no_cotangent() -> None:
    def pick(table: Any, rows: Any) -> Any:
        chosen = table[rows]
        return jnp.argmax(chosen, axis=1), chosen * 2.0, rows > 1

    table, rows = array(5, 3), jnp.array([1, 1, 4])
    call = Call(pick, Leaf(table), Leaf(rows))
    assert call.tracked == (True, False)
    assert call.pair.out_tracked == (False, True, False)
    assert [output.dtype for output in call.outputs] == [np.int64, np.float64, np.bool_]
    expected = jnp.zeros((5, 3)).at[rows].add(2.0)
    assert_same(call.vjp([jnp.ones((3, 3))]), [expected])


def test_keys_go_in_and_come_out_untracked() -> None:
    def noisy(key: Any, x: Any) -> Any:
        key, now = jax.random.split(key)
        return key, x * jax.random.normal(now, x.shape)

    key, x = jax.random.key(3), array(4)
    call = Call(noisy, Leaf(key), Leaf(x))
    expected_key, expected = noisy(key, x)
    assert call.pair.out_tracked == (False, True)
    assert call.outputs[0] == expected_key
    assert_same(call.outputs[1], expected)
    assert_same(call.vjp([x]), [expected])
    assert aval_of(key).nbytes == 8
    assert not aval_of(key).inexact


@pytest.mark.parametrize("holomorphic_part", [jnp.sin, jnp.conj, jnp.abs])
def test_complex_cotangents_follow_jax(holomorphic_part: Any) -> None:
    z = array(4) + 1j * array(4, seed=1)
    call = Call(holomorphic_part, Leaf(z))
    output, vjp = jax.vjp(holomorphic_part, z)
    cotangent = output * (1.5 if output.dtype == np.float64 else 1.5 - 0.5j)
    assert_same(call.vjp([cotangent]), vjp(cotangent))


def test_bfloat16_stays_bfloat16_both_ways() -> None:
    w, x = array(8, 8, dtype=jnp.bfloat16), array(2, 8, seed=1, dtype=jnp.bfloat16)
    call = Call(lambda w, x: jnp.where(x @ w > 0, 1.0, 0.5) * (x @ w), Leaf(w), Leaf(x))
    assert call.pair.out_avals == (Aval((2, 8), np.dtype(jnp.bfloat16)),)
    assert call.outputs[0].dtype == jnp.bfloat16
    gradients = call.vjp([filled(call.pair.out_avals[0], 1)])
    assert [gradient.dtype for gradient in gradients] == [jnp.bfloat16] * 2


def test_a_weak_scalar_promotes_as_in_jax_and_comes_out_strong() -> None:
    x = array(3, dtype=np.float32)
    assert Call(operator.mul, Leaf(x), 2.0).outputs[0].dtype == np.float32
    assert Call(operator.mul, Leaf(x), np.float64(2.0)).outputs[0].dtype == np.float64
    call = Call(lambda x, y: (y, jnp.where(x > 0, 1.0, 0.0), 3), Leaf(x), 2.0)
    assert not any(output.weak_type for output in call.outputs)
    assert call.pair.out_avals == tuple(map(aval_of, call.outputs))
    types = [str(aval) for aval in call.pair.out_avals]
    assert types == ["float64[]", "float64[3]", "int64[]"]


def test_a_weak_leaf_gets_a_strong_gradient() -> None:
    leaf = jnp.asarray(2.0)
    assert leaf.weak_type
    (gradient,) = Call(lambda x: x * x, Leaf(leaf)).vjp([jnp.ones(())])
    assert not gradient.weak_type


def test_arrays_of_size_zero_go_through() -> None:
    call = Call(lambda x: (jnp.sum(x), x * 2.0), Leaf(jnp.zeros((0, 3))))
    assert_same(call.outputs, (jnp.zeros(()), jnp.zeros((0, 3))))
    assert_same(call.vjp([jnp.ones(())], []), [jnp.zeros((0, 3))])
    assert aval_of(jnp.zeros((0, 3))).nbytes == 0


def test_a_call_without_tracked_inputs_or_outputs_keeps_no_residuals() -> None:
    untracked = Call(jnp.sin, array(3))
    assert untracked.kept is None
    assert untracked.pair.out_tracked == (False,)
    integers = Call(lambda x: jnp.argmax(jnp.sin(x)), Leaf(array(3)))
    assert integers.kept is None
    assert integers.pair.out_tracked == (False,)


def test_arguments_and_outputs_are_kept_as_they_are_not_copied() -> None:
    w, x = array(64, 64), array(8, 64, seed=1)
    call = Call(lambda w, x: jnp.exp(x @ w), Leaf(w), Leaf(x))
    kept = call.residuals
    assert any(held is w for held in kept.args)
    assert any(held is x for held in kept.args)
    assert any(held is call.outputs[0] for held in kept.outputs)
    known = {a.unsafe_buffer_pointer() for a in (w, x, call.outputs[0])}
    assert not any(held.unsafe_buffer_pointer() in known for held in kept.rest)
    assert not any(held.shape == w.shape for held in kept.rest)
    assert kept.nbytes == sum(held.nbytes for held in kept.rest)
    assert call.pair.residual_bytes == kept.nbytes


def test_untracked_arguments_that_the_vjp_needs_are_not_copied_either() -> None:
    w, x = array(16, 16), array(16, 16, seed=1)
    call = Call(lambda w, x: x @ w, Leaf(w), x)
    assert [held is x for held in call.residuals.args] == [True]
    assert call.residuals.rest == ()
    assert call.residuals.nbytes == 0


def test_a_residual_that_occurs_twice_is_kept_once() -> None:
    def wave(x: Any) -> Any:
        y = jnp.sin(x) + jnp.cos(x)
        return y * y * y

    call = Call(wave, Leaf(array(5)))
    pointers = [held.unsafe_buffer_pointer() for held in call.residuals.rest]
    assert len(set(pointers)) == len(pointers)


def test_a_trace_is_shared_by_shapes_and_forward() -> None:
    traces: list[None] = []

    def counted(w: Any, x: Any, n: Any) -> Any:
        traces.append(None)
        return jnp.sum(x @ w) * n

    call = Call(counted, Leaf(array(3, 3)), np.ones((2, 3)), 2.0)
    assert call.pair.out_avals == (Aval((), np.dtype(np.float64)),)
    assert len(traces) == 1
    call.vjp([jnp.ones(())])
    Call(counted, Leaf(array(3, 3)), array(2, 3), 5.0)
    assert len(traces) == 1


def test_a_retrace_under_another_setting_of_jax_uses_its_own_residuals() -> None:
    config: Any = jax.config

    def depends(x: Any) -> Any:
        return jnp.sin(x) if config.jax_numpy_rank_promotion == "warn" else x * x * x

    x = array(3)
    call = Call(depends, Leaf(x))
    before = call.residuals
    with setting("jax_numpy_rank_promotion", "warn"):
        _, inside = call.pair.forward([x])
    _, after = call.pair.forward([x])
    one = [[jnp.ones(3)]]
    assert inside is not None
    assert after is not None
    assert_same(call.pair.vjp(before, one), [3 * x * x])
    assert_same(call.pair.vjp(inside, one), [jnp.cos(x)])
    assert_same(call.pair.vjp(after, one), [3 * x * x])


def test_what_the_function_raises_while_it_is_traced_comes_out_as_it_is() -> None:
    def wrong(x: Any) -> Any:
        raise LookupError("mine")

    with fails_with(LookupError, "compute.mine"):
        Call(wrong, Leaf(array(3)))


def test_a_callback_that_raises_is_raised_by_forward() -> None:
    def back(x: Any) -> Any:
        return jax.pure_callback(divided, jax.ShapeDtypeStruct((), x.dtype), x)

    def divided(x: Any) -> Any:
        return np.asarray(1 // int(x), np.float64)

    call = Call(jax.jit(back), jnp.asarray(1.0))
    assert call.pair.may_raise
    with fails_with(Exception, "compute.zerodivisionerror"):
        call.pair.forward([jnp.asarray(0.0)])


def test_a_callback_that_raises_in_a_vjp_is_raised_by_vjp() -> None:
    def refuse(x: Any) -> Any:
        raise ZeroDivisionError

    @jax.custom_vjp
    def fine(x: Any) -> Any:
        return x * 2.0

    def backward(_: Any, g: Any) -> Any:
        return (jax.pure_callback(refuse, jax.ShapeDtypeStruct((3,), g.dtype), g),)

    fine.defvjp(lambda x: (fine(x), None), backward)
    call = Call(fine, Leaf(array(3)))
    assert not call.pair.may_raise
    with fails_with(Exception, "compute.zerodivisionerror"):
        call.vjp([jnp.ones(3)])
    assert call.residuals.traced.may_raise


@pytest.mark.parametrize(
    ("output", "where"),
    [("text", "as its output"), ({"a": [1.0, print]}, r"\['a'\]\[1\]")],
)
def test_an_output_that_is_no_array_is_named(output: Any, where: str) -> None:
    def wordy(x: Any) -> Any:
        return output

    with pytest.raises(JdagError, match=rf"wordy returned a \w+ (at )?{where}"):
        Call(wordy, Leaf(array(3)))


def test_none_and_python_scalars_are_outputs() -> None:
    call = Call(lambda x: (None, 2, True, 1.5, np.ones(2)), array(3))
    types = [str(aval) for aval in call.pair.out_avals]
    assert types == ["int64[]", "bool[]", "float64[]", "float64[2]"]


def test_deleted_arrays_are_named_in_forward_and_vjp() -> None:
    x = array(3)
    call = Call(lambda y, x: jnp.sin(x) * y, array(3, seed=1), Leaf(x))
    call.vjp([jnp.ones(3)])
    for kept in call.residuals.keeps:
        kept.delete()
    x.delete()
    with fails_with(JdagError, "compute.argument_donated_jnp_copy"):
        call.pair.forward(call.args)
    with fails_with(JdagError, "compute.residual_of_was_deleted_or"):
        call.vjp([jnp.ones(3)])


def test_a_tracked_integer_is_refused() -> None:
    parts = split((jnp.arange(3),), {}, lambda _: False)
    with fails_with(JdagError, "compute.argument_0_of_is_tracked"):
        pair(jnp.sin, parts.template, (aval_of(jnp.arange(3)),), (True,))


def eager(w: Any, x: Any, n: Any) -> Any:
    """It moves an array, so it is not compiled."""
    assert aval_of(n).weak
    seen.append(type(x))
    (out,) = moved_arrays([jnp.tanh(x @ w)], jax.devices()[:1])
    return {"out": out * n, "best": jnp.argmax(x)}


seen: list[type] = []


def test_a_function_that_moves_runs_as_it_stands_with_the_same_gradients() -> None:
    w, x = array(3, 2), array(4, 3, seed=1)
    seen.clear()
    call = Call(eager, Leaf(w), Leaf(x), 2.0)
    assert call.pair.may_raise
    assert len(seen) == 3  # The trace that found the move, its shapes, its one run.
    assert call.pair.out_avals == tuple(map(aval_of, call.outputs))
    _, vjp = jax.vjp(lambda w, x: jnp.tanh(x @ w) * 2.0, w, x)
    g = array(4, 2, seed=2)
    total = g + 2 * g + 3 * g
    assert_same(call.vjp([g, 2 * g, 3 * g]), vjp(total))
    assert any(held is w for held in call.residuals.args)
    assert call.residuals.nbytes < w.nbytes + x.nbytes + call.outputs[1].nbytes


def test_marked_and_unmarked_functions_of_one_code_have_pairs_of_their_own() -> None:
    def make() -> Any:
        return lambda x: jnp.sin(x) * 2.0

    assert not Call(make(), array(3)).pair.may_raise
    assert Call(unjitted(shapes=lambda x: x)(make()), array(3)).pair.may_raise


def test_unjitted_functions_see_numpy_values_as_jit_would_show_them() -> None:
    times = unjitted(shapes=functools.partial(jax.eval_shape, jnp.multiply))
    call = Call(times(lambda x, n: x * n), array(3, dtype=np.float32), np.ones(3))
    assert call.outputs[0].dtype == call.pair.out_avals[0].dtype == np.float64
    reals, whole = np.ones(3, np.float32), np.ones(3, np.int32)
    assert (reals * whole).dtype == np.float64
    call = Call(times(lambda x, n: x * n), reals, whole)
    assert call.outputs[0].dtype == call.pair.out_avals[0].dtype == np.float32


def test_what_a_function_returns_as_it_came_is_not_copied() -> None:
    x, y, n = array(3), array(3, seed=1), np.arange(4)
    call = Call(lambda x, y, n: (y, {"n": n, "x": x}), Leaf(x), Leaf(y), jnp.asarray(n))
    outputs = call.pair.forward([x, y, of_jax := jnp.asarray(n)])[0]
    assert outputs[0] is y and outputs[1] is of_jax and outputs[2] is x
    outputs, residuals = call.pair.forward([x, y, n])  # Of numpy's, JAX makes its own.
    assert all(isinstance(output, jax.Array) for output in outputs)
    assert residuals is not None
    frozen = n.copy()
    frozen.flags.writeable = False  # Nobody can change it.
    assert call.pair.forward([x, y, frozen])[0][1] is frozen
    narrow = frozen.astype(np.int32)
    narrow.flags.writeable = False
    assert isinstance(call.pair.forward([x, y, narrow])[0][1], jax.Array)
    (dx, dy) = call.pair.vjp(residuals, [[x, y], [2 * x]])
    np.testing.assert_array_equal(dx, 2 * x)
    np.testing.assert_array_equal(dy, x + y)


def test_a_custom_vjp_of_what_returns_its_argument_is_used() -> None:
    @jax.custom_vjp
    def reversing(x: Any) -> Any:
        return x

    reversing.defvjp(lambda x: (x, None), lambda _, g: (-g,))
    call = Call(reversing, Leaf(x := array(3)))
    (output,), residuals = call.pair.forward([x])
    assert residuals is not None
    np.testing.assert_array_equal(output, x)
    np.testing.assert_array_equal(call.pair.vjp(residuals, [[x]])[0], -x)
