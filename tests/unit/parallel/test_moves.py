"""Moves as a primitive: where they go back to, and calls that have them in them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdag
from jdag.compute.jaxprs import has_move, reaches
from jdag.compute.moves import home_of, moved_arrays
from jdag.errors import JdagError, RemoteError
from jdag.parallel import data_parallel, replicate
from tests.tools.compute_cases import Call, Leaf
from tests.tools.error_texts import fails_with
from tests.unit.parallel.cases import (
    ROWS,
    array,
    close,
    names,
    norm_params,
    plain_loss,
    program,
    rows_out,
    spread_loss,
    where,
)

D = jax.devices()


def test_what_is_there_stays_and_what_is_not_moves_back_with_its_cotangent():
    x, y = array(3), jax.device_put(array(3, seed=1), D[2])
    assert moved_arrays([x, y], [None, D[2]])[1] is y
    found, vjp = jax.vjp(lambda x, y: moved_arrays([x, y], [D[4], D[5]]), x, y)
    assert where(found) == ["cpu:4", "cpu:5"]
    back = vjp([jax.device_put(one, D[7]) for one in (x, x)])
    assert where(back) == ["cpu:0", "cpu:2"]
    tangents = jax.jvp(lambda x: moved_arrays([x], [D[4]])[0], (x,), (x,))
    assert where(tangents) == ["cpu:4"] * 2


def test_where_a_tracer_lives_is_known_if_it_stands_for_an_array():
    seen = []

    def noted(x: Any) -> Any:
        seen.append(home_of(x))
        return jnp.sum(x)

    x = jax.device_put(array(3), D[3])
    jax.grad(noted)(x)
    jax.jvp(jax.grad(noted), (x,), (x,))
    jax.jit(noted)(x)
    jax.vmap(noted)(x)
    assert seen == [D[3], D[3], None, None]


def test_a_move_is_found_wherever_it_is_in_a_function():
    def move(x: Any) -> Any:
        return jnp.sum(replicate(x, names(2, 1))[1])

    x = array(3)
    for fn in (
        move,
        jax.jit(move),
        jax.checkpoint(move),
        lambda x: jax.lax.cond(True, move, jnp.sum, x),
        lambda x: jax.lax.scan(lambda c, y: (c, move(y)), 0, x[None])[1],
    ):
        assert has_move(jax.make_jaxpr(fn)(x))
    assert not has_move(jax.make_jaxpr(jax.jit(jnp.sum))(x))


def test_moves_in_one_call_reach_one_another_no_more_than_before():
    x = array(3)
    _, vjp = jax.vjp(lambda x, y: moved_arrays([x, y], [D[1], D[2]]), x, x)
    assert reaches(vjp, 2, 2) == ((True, False), (False, True))


# ----------------------------------------------------------------- calls on workers


def test_a_call_that_moves_arrays_runs_unjitted_by_itself():
    x = array(3)
    call = Call(lambda x: jnp.sum(replicate(x, names(3))[2] ** 2), Leaf(x))
    assert call.pair.source.unjitted and call.pair.may_raise
    assert where(call.outputs) == ["cpu:0"]
    close(call.vjp([jnp.float64(3)])[0], 6 * x)
    assert not Call(jnp.sum, Leaf(x)).pair.source.unjitted


def test_what_an_unjitted_function_leaves_elsewhere_comes_home_with_its_gradient():
    def away(x: Any) -> Any:
        (there,) = replicate(x, ["cpu:3"])
        return jnp.sin(there), jnp.cos(there)

    x = array(3)
    call = Call(away, Leaf(x))
    assert where(call.outputs) == ["cpu:0"] * 2
    found = call.vjp([x], [2 * x])[0]
    close(found, x * jnp.cos(x) - 2 * x * jnp.sin(x))
    assert where(found) == ["cpu:0"]


@pytest.mark.parametrize(("place", "rows"), [("b", 8), ("b/cpu:1", 8), ("b", 9)])
def test_a_worker_spreads_a_call_over_its_devices(place, rows):
    params, x = norm_params(), array(rows, 3, seed=9)
    with jdag.simulate(["a", "b"], seed=0) as cluster:
        refs = cluster.put(place, {"w": params["w"]})
        with cluster.context() as ctx:
            loss = program(ctx, refs, x, place)
            ctx.backward(loss)
            gradient = ctx.gradient(refs["w"])
            assert gradient.place == place
            found = jdag.fetch((loss, gradient))
        vector = {"w": array(3, 4, seed=3)}
        product = jdag.hvp(program, cluster)(refs, vector, x, place)

    def alone(w: Any) -> Any:
        return jnp.sin(plain_loss({"w": w}, jnp.cos(x)))

    close(found, jax.value_and_grad(alone)(params["w"]))
    wanted = jax.jvp(jax.grad(alone), (params["w"],), (vector["w"],))[1]
    close(jdag.fetch(product)["w"], wanted)
    oracle = jdag.oracle(program)({"w": params["w"]}, x, place)
    assert oracle[0] == found[0]
    np.testing.assert_array_equal(oracle[1]["w"], found[1])


@pytest.mark.second
def test_trainers_spread_their_replicas_over_devices_and_share_an_embedding():
    trainers = [f"trainer{number}" for number in range(4)]
    ids = [np.arange(rows) % 5 for rows in (7, 4, 2, 1)]
    params = {"table": array(5, 3), "dense": {"w": array(3, 2, seed=1)}}

    def dense(p: Any, rows: Any) -> Any:
        return jnp.sum(data_parallel(rows_out, p, rows, names(2)) ** 2)

    def looked_up(table: Any, ids: Any) -> Any:
        return table[ids]

    def step(ctx: Any, params: Any) -> Any:
        replicas = ctx.replicate(trainers, params["dense"], how="tree")
        losses = []
        for trainer, replica, own in zip(trainers, replicas, ids, strict=True):
            rows = ctx.call("ps", looked_up, params["table"], own)
            losses.append(ctx.call(trainer, dense, replica, rows))
        return ctx.call("ps", lambda *losses: sum(losses), *losses)

    with jdag.simulate(["main", "ps", *trainers], seed=0) as cluster:
        refs = cluster.put("ps", params)
        found = jdag.fetch(jdag.value_and_grad(step, cluster)(refs))

    def alone(params: Any) -> Any:
        rows = [params["table"][own] for own in ids]
        return sum(jnp.sum(rows_out(params["dense"], one) ** 2) for one in rows)

    close(found, jax.value_and_grad(alone)(params))


def test_a_worker_may_be_asked_for_it_with_nothing_around():
    params, x = {"w": array(3, 4)}, array(7, 3, seed=9)
    with jdag.simulate(["a", "b"], seed=0) as cluster, cluster.context() as ctx:
        refs = cluster.put("b", params)
        out = ctx.call("b", data_parallel, rows_out, refs, x, output_device="cpu:4")
        ctx.backward(out, cotangents=jnp.ones(7))
        close(out.fetch(), rows_out(params, x))
        wanted = jax.grad(lambda p: jnp.sum(rows_out(p, x)))(params)
        close(ctx.gradient(refs["w"]).fetch(), wanted["w"])


def test_abstract_workers_know_the_shapes():
    with jdag.simulate(["a", "b"], seed=0, values="abstract") as cluster:
        refs = cluster.put("b", {"w": array(3, 4)})
        with cluster.context() as ctx:
            loss = program(ctx, refs, array(8, 3), "b")
            ctx.backward(loss)
            assert ctx.gradient(refs["w"]).fetch().shape == (3, 4)


def test_a_function_that_its_user_jits_is_refused_and_named():
    jitted = jax.jit(spread_loss, static_argnums=2)

    def outer(w: Any, x: Any) -> Any:
        return jitted({"w": w}, x, "cpu:0")

    with jdag.simulate(["a", "b"], seed=0) as cluster, cluster.context() as ctx:
        out = ctx.call("b", outer, array(3, 4), array(8, 3))
        with fails_with(JdagError, "parallel.outer_failed_on_b_inside") as caught:
            out.fetch()
        assert not isinstance(caught.value, RemoteError)


def curved(p: Any, x: Any) -> Any:
    return jnp.tanh(x @ p["w"] * p["n"]) ** 2


def steep(loss: Any) -> Any:
    def norm(p: Any) -> Any:
        return jnp.sum(jax.grad(loss, allow_int=True)(p)["w"] ** 2)

    return lambda p: jax.grad(norm, allow_int=True)(p)["w"]


def test_second_derivatives_of_a_program_over_devices_show_none_of_its_devices():
    p, x = {"w": array(3, 2), "n": jnp.arange(2)}, array(4, 3, seed=1)

    def loss(p: Any) -> Any:
        return jnp.sum(data_parallel(curved, p, x, names(2)))

    # JAX would compare the devices of the program with those of what is around it.
    far = jax.device_put(p, D[3])
    with fails_with(JdagError, "parallel.arrays_cannot_move_between_devices"):
        jax.jit(steep(loss))(far)
    assert jax.eval_shape(steep(loss), far).shape == (3, 2)
    wanted = steep(lambda p: jnp.sum(curved(p, x)))(p)
    close(steep(loss)(far), wanted)
    close(steep(jax.checkpoint(loss))(p), wanted)
    once = jax.checkpoint(jax.grad(loss, allow_int=True))
    product = jax.grad(lambda w: jnp.sum(once({**p, "w": w})["w"] ** 2))(p["w"])
    close(product, wanted)


@pytest.mark.parametrize("rows", ROWS)
def test_inside_of_checkpoint_gradients_come_to_where_their_arrays_live(rows):
    p, x = {"w": array(3, 2), "n": jnp.arange(2)}, array(rows, 3, seed=1)
    far, there = jax.device_put(p, D[3]), jax.device_put(x, D[5])

    def loss(p: Any, x: Any) -> Any:
        return jnp.sum(data_parallel(curved, p, x, names(2)))

    both: Any = {"argnums": (0, 1), "allow_int": True}
    found = jax.grad(jax.checkpoint(loss), **both)(far, there)
    assert where((found[0]["w"], found[1])) == ["cpu:3", "cpu:5"]
    wanted = jax.grad(lambda p, x: jnp.sum(curved(p, x)), **both)(p, x)
    close((found[0]["w"], found[1]), (wanted[0]["w"], wanted[1]))
    far["w"] -= found[0]["w"]


def test_real_workers_give_the_bits_of_simulated_ones():
    params, x = {"w": array(3, 4)}, array(7, 3, seed=9)
    clusters = (
        jdag.simulate(["a", "b"], seed=3),
        jdag.launch(["a", "b"], allow=["tests.unit.parallel.cases"]),
    )
    bits = []
    for made in clusters:
        with made as cluster:
            refs = cluster.put("b", params)
            with cluster.context() as ctx:
                loss = program(ctx, refs, x, "b")
                ctx.backward(loss)
                found = jdag.fetch((loss, ctx.gradient(refs)))
            bits.append([np.asarray(a).tobytes() for a in jax.tree.leaves(found)])
    assert bits[0] == bits[1]
