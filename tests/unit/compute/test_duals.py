"""Duals: what pairs, sums, bytes and fingerprints make of values with a tangent."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdag.compute.avals import aval_of, is_deleted
from jdag.compute.duals import Dual, is_dual, jvp_of, primal_of, seeded
from jdag.compute.moves import moved_arrays
from jdag.compute.sums import add
from jdag.compute.values import Values
from jdag.engine.addends import top
from jdag.engine.arrays import ArrayType
from jdag.engine.protocol import ContextId, Primal
from jdag.errors import JdagError
from jdag.sim.digest import fingerprint
from jdag.wire.arrays import type_of
from jdag.wire.messages import Codec, size
from tests.tools.compute_cases import pair_of
from tests.tools.error_texts import fails_with

W = jnp.arange(9.0).reshape(3, 3) / 9 + 0.1
X = jnp.linspace(-1, 1, 6).reshape(3, 2)
DW, DX = jnp.cos(5 * W), jnp.sin(7 * X)


def affine(w, x):
    return jnp.tanh(w @ x), jnp.sum(w * w), jnp.argmax(x)


def picks(w, x):
    """Residuals that are integers and bools, which have no tangent."""
    largest = jnp.take(x, jnp.argsort(w[0]), axis=0)
    return jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, largest * w[:, : x.shape[1]])


def as_it_stands(w, x):
    """It moves an array, so it is not compiled."""
    return jnp.sin(moved_arrays([w @ x], jax.devices()[:1])[0])


@jax.custom_vjp
def thrice(a):
    return 3 * jnp.sin(a)


thrice.defvjp(lambda a: (3 * jnp.sin(a), a), lambda a, g: (3 * jnp.cos(a) * g,))


@jax.custom_vjp
def calls_itself(a):
    return jnp.sin(a)


calls_itself.defvjp(lambda a: (calls_itself(a), a), lambda a, g: (g * jnp.cos(a),))


def with_own_rule(w, x):
    return thrice(w @ x)


def inexact(outputs: Any) -> list[Any]:
    return [output for output in outputs if aval_of(output).inexact]


def assert_dual(found: Any, primal: Any, tangent: Any) -> None:
    assert is_dual(found)
    np.testing.assert_allclose(found.primal, primal, rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(found.tangent, tangent, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize(
    "fn",
    [
        *(affine, picks, as_it_stands, with_own_rule),
        lambda w, x: jnp.exp(1j * (w @ x)) * (1 + w[0, 0]),
    ],
    ids=["affine", "picks", "moves", "own rule", "complex"],
)
def test_forward_and_vjp_are_the_jvp_of_jaxs(fn: Any):
    def smooth(w, x):
        return inexact(jax.tree.leaves(fn(w, x)))

    def pulled(w, x, *cotangents):
        return jax.vjp(smooth, w, x)[1](list(cotangents))

    made = pair_of(fn, W, X)
    outputs, residuals = made.forward([Dual(W, DW), Dual(X, DX)])
    outputs = inexact(outputs)
    cotangents = [(o.primal + 1, o.tangent - 2) for o in outputs]
    gradients = made.vjp(residuals, [[Dual(*c)] for c in cotangents])
    if fn is not with_own_rule:  # JAX takes no jvp of a custom_vjp by itself.
        wanted = jax.jvp(smooth, (W, X), (DW, DX))
        for output, *dual in zip(outputs, *wanted, strict=True):
            assert_dual(output, *dual)
    primals, tangents = zip((W, DW), (X, DX), *cotangents, strict=True)
    wanted = jax.jvp(pulled, primals, tangents)
    for gradient, *dual in zip(gradients, *wanted, strict=True):
        assert_dual(gradient, *dual)


def test_integers_and_what_no_dual_reaches_have_no_tangent():
    made = pair_of(affine, W, X)
    outputs, residuals = made.forward([Dual(W, DW), Dual(X, DX)])
    assert [is_dual(output) for output in outputs] == [True, True, False]
    outputs, residuals = made.forward([W, X])
    assert not any(map(is_dual, outputs)) and not any(map(is_dual, residuals.keeps))
    plain = made.vjp(residuals, [[outputs[0]], []])
    assert not any(map(is_dual, plain))


def test_of_plain_residuals_the_vjp_is_linear_in_a_dual_cotangent():
    made = pair_of(affine, W, X)
    outputs, residuals = made.forward([W, X])
    first, second = outputs[0] + 1, outputs[0] * 2
    duals = made.vjp(residuals, [[Dual(first, second)], []])
    by_first, by_second = (made.vjp(residuals, [[c], []]) for c in (first, second))
    for dual, *wanted in zip(duals, by_first, by_second, strict=True):
        assert_dual(dual, *wanted)


def test_where_a_gradient_is_stopped_the_tangent_is_zero():
    made = pair_of(affine, W, X, tracked=(True, False))
    outputs, _ = made.forward([Dual(W, DW), Dual(X, DX)])
    wanted = jax.jvp(lambda w: affine(w, X)[0], (W,), (DW,))
    assert_dual(outputs[0], *wanted)
    outputs, residuals = made.forward([W, Dual(X, DX)])
    assert not any(map(is_dual, outputs)) and not residuals.dual


def test_what_a_linear_function_keeps_is_no_dual_nor_is_its_cotangent():
    made = pair_of(jnp.sum, W)
    outputs, residuals = made.forward([Dual(W, DW)])
    assert_dual(outputs[0], jnp.sum(W), jnp.sum(DW))
    (gradient,) = made.vjp(residuals, [[jnp.ones(())]])
    assert not residuals.dual and not is_dual(gradient)


def test_duals_and_arrays_add_up_in_one_order_both_parts_bit_by_bit():
    parts = [jnp.sin(10.0**k * W) * 10.0**-k for k in range(20)]
    tangents = [jnp.cos(k + W) for k in range(20)]
    addends = [
        part if k % 3 == 0 else Dual(part, tangent)
        for k, (part, tangent) in enumerate(zip(parts, tangents, strict=True))
    ]
    total = add(addends)
    moving = [tangent if k % 3 else None for k, tangent in enumerate(tangents)]
    np.testing.assert_array_equal(total.primal, add(parts))
    np.testing.assert_array_equal(total.tangent, add(top(moving, add)))
    assert_array_first = jnp.ones((3, 3)) + Dual(W, DW)
    np.testing.assert_array_equal(assert_array_first.tangent, DW)


def test_a_vjp_folds_dual_addends_as_a_sum_does():
    made = pair_of(affine, W, X)
    outputs, residuals = made.forward([Dual(W, DW), X])
    addends = [outputs[0], outputs[0].primal, outputs[0] + outputs[0]]
    several = made.vjp(residuals, [addends, []])
    one = made.vjp(residuals, [[add(addends)], []])
    for ours, theirs in zip(several, one, strict=True):
        assert_dual(ours, *theirs.keeps)


def test_seeding_copies_no_array():
    made = pair_of(seeded, [W], [DW], tracked=(False, False))
    (dual,), residuals = made.forward([W, DW])
    assert dual.primal is W and dual.tangent is DW and residuals is None
    assert made.out_avals == (aval_of(W),)


def test_a_custom_vjp_that_calls_itself_is_named():
    made = pair_of(lambda w, x: calls_itself(w) @ x, W, X)
    said = r"<lambda> has no second derivative by jdag.hvp.*custom_vjp function"
    with pytest.raises(JdagError, match=said):
        made.forward([Dual(W, DW), X])


def test_a_callback_without_a_jvp_is_named_in_forward_and_vjp():
    def called(a):
        shape = jax.ShapeDtypeStruct(a.shape, a.dtype)
        return jax.pure_callback(np.sin, shape, a)

    one = jax.custom_vjp(jnp.sin)
    one.defvjp(lambda a: (jnp.sin(a), a), lambda a, g: (called(a) * g,))
    made = pair_of(one, W)
    outputs, residuals = made.forward([Dual(W, DW)])
    with fails_with(JdagError, "compute.no_second_derivative_jvp"):
        made.vjp(residuals, [[outputs[0]]])


def test_what_a_users_rule_raises_is_left_as_it_is():
    def wrong(primals, tangents):
        raise KeyError("my own")

    one = jax.custom_jvp(jnp.sin)
    one.defjvp(wrong)
    with fails_with(KeyError, "compute.my_own"):
        jvp_of(one, "mine")(Dual(W, DW))


def test_bytes_count_both_arrays_and_shared_ones_once():
    values = Values()
    values.put("w", W)
    values.put("dual", Dual(W, DW))
    assert values.bytes_held == 2 * W.nbytes
    made = pair_of(affine, W, X)
    _, residuals = made.forward([Dual(W, DW), X])
    values.put("residuals", residuals)
    kept = {id(part): part.nbytes for part in (W, DW, *residuals.keeps)}
    assert not any(map(is_dual, residuals.keeps))
    assert values.bytes_held == sum(kept.values())
    assert residuals.nbytes == 2 * made.residual_bytes
    values.drop(("w", "dual", "residuals"))
    assert values.bytes_held == 0


def test_a_dual_travels_as_two_arrays_under_one_header():
    dual = Dual(W, DW)
    kind = ArrayType((3, 3), "float64", False, dual=True)
    assert type_of(dual) == kind and kind.nbytes == 2 * W.nbytes
    message = Primal(ContextId(0, 1, 0), (1,), "a", (None, None))
    codec = Codec(("a",))
    head = codec.encode(message, [kind, type_of(X)])
    assert codec.decode(head) == (message, (kind, type_of(X)), len(head))
    elements = 2 * W.nbytes + X.nbytes
    assert size(message, [dual, X]) == (elements, len(head) + elements)


def test_a_fingerprint_is_of_both_arrays():
    prints = [Dual(W, DW), Dual(DW, W), Dual(W, W), Dual(W, DW + 1e-16), W]
    assert len(set(map(fingerprint, prints))) == len(prints)
    assert fingerprint(Dual(W, DW)) == fingerprint(Dual(W + 0, DW + 0))


def test_a_deleted_array_of_a_dual_is_named():
    gone = W + 1
    dual = Dual(W, gone)
    made = pair_of(affine, W, X)
    gone.delete()
    assert is_deleted(dual) and not is_deleted(primal_of(dual))
    with fails_with(JdagError, "compute.argument_0_of_affine_was"):
        made.forward([dual, X])
