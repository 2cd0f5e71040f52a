"""Halves of a vjp: the bits and the flops of the whole, and what the stash holds."""

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdag.compute.avals import Aval, aval_of
from jdag.compute.duals import Dual, is_dual
from jdag.compute.exported import ExportedProgram, exported
from jdag.compute.halves import BackwardHalves, Stash, halves
from jdag.compute.moves import moved_arrays
from jdag.compute.pairs import Pair
from jdag.compute.placed import placed
from jdag.compute.pytrees import static
from jdag.errors import JdagError
from tests.tools.compute_cases import Call, Leaf, array, summed
from tests.tools.error_texts import fails_with
from tests.tools.tiers import sized


def bits(values: Sequence[Any]) -> list[Any]:
    return [(aval_of(one), np.asarray(one).tobytes()) for one in values]


def cotangents_for(pair: Any, count: int = 3) -> list[list[Any]]:
    outs = [a for a, on in zip(pair.out_avals, pair.out_tracked, strict=True) if on]
    return [
        [
            array(*aval.shape, seed=50 + n, dtype=aval.dtype) / (n + 3)
            for n in range(count)
        ]
        for aval in outs
    ]


def in_halves(
    pair: Any, residuals: Any, weights: tuple[bool, ...], cotangents: Any
) -> tuple[list[Any], Stash]:
    made = halves(pair, weights)
    first, stash = made.input_half(residuals, cotangents)
    assert bits(made.weight_half(stash)) == bits(made.weight_half(stash))
    inputs, outputs = iter(first), iter(made.weight_half(stash))
    assert [*map(aval_of, first)] == [*made.input_avals]
    found = [next(outputs) if weight else next(inputs) for weight in weights]
    assert (next(inputs, None), next(outputs, None)) == (None, None)
    return found, stash


def check(call: Call, *weights: bool, count: int = 3) -> tuple[BackwardHalves, Stash]:
    cotangents = cotangents_for(call.pair, count)
    made = halves(call.pair, weights).cut((count,) * len(cotangents))
    found, stash = in_halves(call.pair, call.residuals, weights, cotangents)
    assert bits(found) == bits(call.vjp(*cotangents))
    kept = [call.args[place] for place in made.args_kept]
    kept += [call.outputs[place] for place in made.outputs_kept]
    inputs = [one for one, weight in zip(found, weights, strict=True) if not weight]
    kept += [inputs[place] for place in made.results_kept]
    own = [one for one in stash.keeps if not any(one is other for other in kept)]
    assert len(own) + len(kept) == len(stash.keeps)
    assert sum([aval_of(one).nbytes for one in own]) == made.stash_bytes
    assert stash.nbytes == made.stash_bytes
    return made, stash


def holds(stash: Stash, value: Any) -> bool:
    return any(one is value for one in stash.keeps)


def layer(w: Any, b: Any, x: Any) -> Any:
    return jnp.tanh(x @ w + b)


def mlp(ws: Sequence[Any], x: Any) -> Any:
    for w in ws:
        x = jax.nn.relu(x @ w)
    return x


def normed(x: Any, scale: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale


def block(p: dict[str, Any], x: Any) -> Any:
    h = normed(x, p["scale"])
    q, k, v = [h @ p[name] for name in ("wq", "wk", "wv")]
    x = x + jax.nn.softmax(q @ k.T / 4.0) @ v
    return x + jax.nn.gelu(normed(x, p["scales"]) @ p["up"]) @ p["down"]


def convolved(kernel: Any, shift: Any, x: Any) -> Any:
    found = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME")
    return jax.nn.softplus(found + shift[None, :, None, None])


def tied(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w) @ w.T + jnp.sum(w * w)


def looked_up(table: Any, x: Any) -> Any:
    return jnp.sin(table)[jnp.array([1, 1, 3, 0])] @ x


def elementwise(w: Any, v: Any, x: Any) -> Any:
    return jnp.sin(w * x) * v + w


def of_layer(size: int) -> tuple[Call, tuple[bool, ...]]:
    w, b, x = array(size, size), array(size, seed=1), array(size, size, seed=2)
    return Call(layer, Leaf(w), Leaf(b), Leaf(x)), (True, True, False)


def of_mlp(size: int) -> tuple[Call, tuple[bool, ...]]:
    ws = [Leaf(array(size, size, seed=seed)) for seed in range(3)]
    return Call(mlp, ws, Leaf(array(size, size, seed=5))), (True,) * 3 + (False,)


def of_block(size: int) -> tuple[Call, tuple[bool, ...]]:
    names = ("wq", "wk", "wv")
    leaves = {name: array(size, size, seed=at) for at, name in enumerate(names)}
    leaves["up"] = array(size, 4 * size, seed=4)
    leaves["down"] = array(4 * size, size, seed=5)
    leaves["scale"], leaves["scales"] = array(size, seed=6), array(size, seed=7)
    p = {name: Leaf(one) for name, one in leaves.items()}
    return Call(block, p, Leaf(array(size // 2, size, seed=8))), (True,) * 7 + (False,)


CASES = [of_layer, of_mlp, of_block]


def flops(compiled: Any, *args: Any) -> float:
    found: Any = compiled.lower(*args).compile().cost_analysis()
    return float(found["flops"])


@pytest.mark.parametrize("make", CASES)
def test_halves_together_have_the_flops_of_the_whole(make: Any) -> None:
    call, weights = make(32)
    one = cotangents_for(call.pair, 1)
    _, stash = check(call, *weights, count=1)
    kept, compiled = call.residuals, stash.halves
    assert compiled is not None
    values = [*kept.rest, *kept.args, *kept.outputs, *one[0]]
    sums = tuple(map(tuple, one))
    whole = flops(kept.traced.backward, kept.rest, kept.args, kept.outputs, sums)
    first = flops(compiled.first, *[values[place] for place in compiled.reads])
    second = flops(compiled.second, *stash.keeps)
    assert first + second <= 1.02 * whole
    assert min(first, second) > 0.25 * whole  # Either half does its share.


def test_beside_a_convolution_sums_alone_may_be_rounded_differently() -> None:
    kernel, shift, x = array(4, 3, 3, 3), array(4, seed=1), array(2, 3, 8, 8, seed=2)
    call = Call(convolved, Leaf(kernel), Leaf(shift), Leaf(x))
    weights, cotangents = (True, True, False), cotangents_for(call.pair)
    found, stash = in_halves(call.pair, call.residuals, weights, cotangents)
    whole = call.vjp(*cotangents)
    assert bits(found[::2]) == bits(whole[::2])
    np.testing.assert_allclose(found[1], whole[1], rtol=1e-14)
    assert stash.halves is not None and stash.halves.handed[0] is None
    check(Call(lambda k, x: convolved(k, shift, x), Leaf(kernel), Leaf(x)), True, False)


@pytest.mark.parametrize("fn", [tied, looked_up])
def test_a_weight_that_is_used_twice_and_one_that_is_looked_up(fn: Any) -> None:
    call = Call(fn, Leaf(array(6, 6)), Leaf(array(6, 6, seed=1)))
    check(call, True, False)
    check(call, False, True)


def test_without_inputs_the_weights_half_is_the_whole() -> None:
    call, weights = of_block(8)
    made = halves(call.pair, (True,) * len(weights))
    first, stash = made.input_half(call.residuals, cotangents_for(call.pair))
    assert first == () and stash.halves is not None and None in stash.halves.handed
    check(call, *[True] * len(weights))


def test_without_weights_the_stash_is_empty() -> None:
    call, weights = of_block(8)
    made, stash = check(call, *[False] * len(weights))
    assert (made.stash_bytes, stash.keeps) == (0, ())


def test_what_has_no_products_runs_in_the_first_half() -> None:
    call = Call(elementwise, *[Leaf(array(5, seed=seed)) for seed in range(3)])
    made, stash = check(call, True, True, False)
    assert made.stash_bytes == 2 * 5 * 8 and stash.halves is not None
    assert stash.halves.handed == (0, 1)  # The results themselves.


def test_an_output_without_cotangent_counts_as_zero() -> None:
    def two(w: Any, x: Any) -> tuple[Any, Any]:
        return x @ w, jnp.sin(x) @ w

    call = Call(two, Leaf(array(4, 4)), Leaf(array(4, 4, seed=1)))
    g = array(4, 4, seed=2)
    few: list[list[list[Any]]] = [[[g], []], [[], [g, 2 * g, 3 * g]], [[], []]]
    for cotangents in few:
        found, _ = in_halves(call.pair, call.residuals, (True, False), cotangents)
        assert bits(found) == bits(call.vjp(*cotangents))


def test_many_addends_are_summed_as_elsewhere() -> None:
    call, weights = of_layer(8)
    addends = cotangents_for(call.pair, 21)[0]
    found, _ = in_halves(call.pair, call.residuals, weights, [addends])
    assert bits(found) == bits(call.vjp([summed(addends)]))


UNARY: dict[str, Callable[[Any], Any]] = {
    "tanh": jnp.tanh,
    "sin": jnp.sin,
    "relu": jax.nn.relu,
    "softmax": jax.nn.softmax,
    "transpose": jnp.transpose,
    "spread": lambda a: a - a.mean(0),
}
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "product": jnp.matmul,
    "times": jnp.multiply,
    "plus": jnp.add,
}
STEPS = st.lists(
    st.tuples(st.sampled_from([*UNARY, *BINARY]), *[st.integers(0, 9)] * 2),
    min_size=2,
    max_size=8,
)


def drawn(*values: Any, steps: Sequence[tuple[str, int, int]]) -> Any:
    made = list(values)
    for name, one, other in steps:
        few = [made[-1 - at % len(made)] for at in (one, other)]
        made.append(UNARY[name](few[0]) if name in UNARY else BINARY[name](*few))
    return made[-1], made[len(made) // 2]


@settings(max_examples=sized(10, 100))
@given(STEPS, st.lists(st.booleans(), min_size=3, max_size=3))
def test_random_functions_have_the_bits_of_the_whole(
    steps: list[tuple[str, int, int]], weights: list[bool]
) -> None:
    leaves = [Leaf(array(4, 4, seed=seed) / 2) for seed in range(3)]
    check(Call(drawn, *leaves, steps=static(tuple(steps))), *weights)


def test_the_stash_holds_activations_and_not_weights() -> None:
    call, weights = of_mlp(8)
    made, stash = check(call, *weights)
    *ws, x = call.args
    assert holds(stash, x) and not any([holds(stash, w) for w in ws])
    assert made.args_kept == (3,)
    # Of each layer its input and a cotangent: of the first input, none is its own.
    assert made.stash_bytes == 5 * x.nbytes
    assert not any([one.dtype == bool for one in stash.keeps])  # No masks.


def test_residuals_that_only_the_first_half_reads_go_after_it() -> None:
    call, weights = of_mlp(8)
    made, cotangents = halves(call.pair, weights), cotangents_for(call.pair)
    _, stash = made.input_half(call.residuals, cotangents)
    w, x = weakref.ref(call.args[0]), weakref.ref(call.args[3])
    call.kept, call.args, call.outputs = None, [], ()
    gc.collect()
    assert w() is None and x() is not None
    assert len(made.weight_half(stash)) == 3


def test_a_result_that_the_second_half_reads_is_held_once() -> None:
    def shifted(w: Any, v: Any, x: Any) -> Any:
        return (x + v) @ w

    call = Call(shifted, *[Leaf(array(4, 4, seed=seed)) for seed in range(3)])
    made, _ = check(call, True, True, False)
    assert made.results_kept == (0,)


def test_the_stash_is_known_without_running_anything() -> None:
    call, weights = of_mlp(8)
    made = halves(call.pair, weights)
    known = made.cut((3,))
    _, stash = made.input_half(call.residuals, cotangents_for(call.pair))
    assert made.cut((3,)) is known and stash.halves is known.halves
    assert made.weight_avals == (Aval((8, 8), np.dtype(np.float64)),) * 3
    assert made.input_avals == made.weight_avals[:1]


def deep(w: Any, v: Any, x: Any) -> Any:
    return jnp.tanh(jnp.sin(x @ w) @ v)


def test_each_half_recomputes_what_is_under_checkpoint() -> None:
    def twice(w: Any, v: Any, x: Any) -> Any:
        part = jax.checkpoint(deep)
        return part(w, v, part(w, v, x))

    leaves = [Leaf(array(6, 6, seed=seed)) for seed in range(3)]
    for fn in (jax.checkpoint(deep), twice):
        call = Call(fn, *leaves)
        _, stash = check(call, True, True, False)
        assert stash.halves is not None and stash.halves.handed == (None, None)
        assert all([holds(stash, one) for one in call.args])  # To compute it again.


def test_a_scan_runs_in_the_first_half() -> None:
    def scanned(w: Any, xs: Any) -> Any:
        step = lambda h, x: (jnp.tanh(h @ w + x), None)  # noqa: E731
        return jax.lax.scan(step, jnp.zeros((4, 4)), xs)[0]

    call = Call(scanned, Leaf(array(4, 4)), Leaf(array(3, 4, 4, seed=1)))
    made, stash = check(call, True, False)
    assert stash.halves is not None and stash.halves.handed == (0,)
    assert made.stash_bytes == 4 * 4 * 8


def uncut(pair: Any, residuals: Any, cotangents: Any) -> Stash:
    found, stash = in_halves(pair, residuals, (True, False), cotangents)
    assert bits(found) == bits(pair.vjp(residuals, cotangents))
    assert stash.halves is None and len(stash.keeps) == 1
    made = halves(pair, (True, False)).cut((3,) * len(cotangents))
    assert stash.nbytes == made.stash_bytes == aval_of(stash.keeps[0]).nbytes
    return stash


def test_a_vjp_with_a_callback_is_not_cut() -> None:
    @jax.custom_vjp
    def checked(x: Any) -> Any:
        return x * 2.0

    def backward(_: Any, g: Any) -> Any:
        return (jax.pure_callback(looked_at, jax.ShapeDtypeStruct((4, 4), g.dtype), g),)

    def looked_at(g: Any) -> Any:
        if g[0, 0] == 7:
            raise ZeroDivisionError
        return g

    checked.defvjp(lambda x: (checked(x), None), backward)
    call = Call(lambda w, x: checked(x @ w), Leaf(array(4, 4)), Leaf(array(4, 4)))
    uncut(call.pair, call.residuals, cotangents_for(call.pair))
    with fails_with(Exception, "compute.zerodivisionerror"):
        halves(call.pair, (True, False)).input_half(
            call.residuals, [[jnp.full((4, 4), 7.0)]]
        )


def test_an_unjitted_vjp_is_not_cut() -> None:
    def moved(w: Any, x: Any) -> Any:
        return moved_arrays([x @ w], jax.devices()[:1])[0]

    call = Call(moved, Leaf(array(4, 4)), Leaf(array(4, 4, seed=1)))
    uncut(call.pair, call.residuals, cotangents_for(call.pair))


def test_with_duals_a_vjp_is_not_cut() -> None:
    w, x, g = [array(4, 4, seed=seed) for seed in range(3)]
    call = Call(lambda w, x: jnp.sin(x @ w), Leaf(w), Leaf(x))
    made = halves(call.pair, (True, False))
    _, residuals = call.pair.forward([Dual(w, x), x])
    assert residuals is not None and residuals.dual
    for held, addends in ((residuals, [g, g, g]), (call.residuals, [g, Dual(g, w), g])):
        (dx,), stash = made.input_half(held, [addends])
        dw, whole = made.weight_half(stash)[0], call.pair.vjp(held, [addends])
        assert is_dual(dx) and is_dual(dw) and stash.nbytes == 2 * w.nbytes
        assert bits([*dw.keeps, *dx.keeps]) == bits([*whole[0].keeps, *whole[1].keeps])


def test_what_came_as_stablehlo_runs_in_the_first_half() -> None:
    call = Call(lambda w, x: jnp.sin(x @ w), Leaf(array(4, 4)), Leaf(array(4, 4)))
    there = Pair(
        ExportedProgram(exported(call.pair), call.pair), call.pair.avals, (True,) * 2
    )
    _, residuals = there.forward(call.args)
    assert residuals is not None
    found, stash = in_halves(
        there, residuals, (True, False), cotangents := cotangents_for(there)
    )
    assert bits(found) == bits(there.vjp(residuals, cotangents))
    assert stash.halves is not None and stash.halves.handed == (0,)


def test_halves_on_devices_put_each_cotangent_on_that_of_its_input() -> None:
    call, weights = of_layer(8)
    here = placed(call.pair, "cpu:0", ("cpu:0", None, "cpu:0"))
    _, residuals = here.forward(call.args)
    cotangents = cotangents_for(here)
    assert residuals is not None
    found, _ = in_halves(here, residuals, weights, cotangents)
    assert bits(found) == bits(here.vjp(residuals, cotangents))
    whole = here.vjp(residuals, cotangents)
    assert [one.committed for one in found] == [one.committed for one in whole]
    made = halves(here, weights)
    assert [aval.device for aval in made.weight_avals] == ["cpu:0", None]
    assert [aval.device for aval in made.input_avals] == ["cpu:0"]


def test_wrong_flags_and_deleted_arrays_are_named() -> None:
    call, weights = of_layer(4)
    with fails_with(ValueError, "compute.weights_has_2_flags_3"):
        halves(call.pair, (True, False))
    made = halves(call.pair, weights)
    cotangents = cotangents_for(call.pair)
    _, stash = made.input_half(call.residuals, cotangents)
    call.args[2].delete()
    with fails_with(JdagError, "compute.stashed_of_layer_was_deleted"):
        made.weight_half(stash)
    call.args[0].delete()
    with fails_with(JdagError, "compute.residual_of_layer_was_deleted"):
        made.input_half(call.residuals, cotangents)
