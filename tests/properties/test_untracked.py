"""Leaves without gradients, and values that are kept from one context to the next."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jdag
from jdag.errors import ContextError, GraphError, JdagError
from tests.conformance.trainers import cell
from tests.tools.compute_cases import array, assert_same
from tests.tools.error_texts import fails_with
from tests.tools.face_cases import nothing_is_left, squares

X = array(4, 3)
W, STATS = array(3, seed=1), array(3, seed=2)


def scaled(w: Any, stats: Any, x: Any) -> Any:
    return w * x * stats + stats


def loss(ctx: Any, params: Any, x: Any) -> Any:
    w, stats = params["w"], params["stats"]
    parts = [ctx.call(worker, scaled, w, stats, x) for worker in ("b", "c", "d")]
    return ctx.call("c", squares, *parts)


def plain(w: Any, stats: Any) -> Any:
    return squares(*[scaled(w, jax.lax.stop_gradient(stats), X)] * 3)


def placed(cluster: Any) -> dict[str, Any]:
    stats = cluster.put("b", STATS, tracked=False)
    return {"w": cluster.put("b", W), "stats": stats}


def test_an_untracked_leaf_is_a_constant_to_what_is_differentiated(cluster):
    params = placed(cluster)
    assert params["w"].tracked and not params["stats"].tracked
    wanted = jax.value_and_grad(plain, argnums=(0, 1))(W, STATS)
    with cluster.context() as ctx:
        ctx.backward(loss(ctx, params, X))
        assert list(ctx.gradients()) == [params["w"]]
        assert_same(ctx.gradient(params["w"]).fetch(), wanted[1][0])
    for run in (jdag.value_and_grad(loss, cluster), jdag.oracle(loss)):
        value, gradient = run(params, X)  # Zeros for the statistics, as in JAX.
        assert_same((value, (gradient["w"], gradient["stats"])), wanted)


def test_a_hessian_vector_product_takes_an_untracked_leaf_for_a_constant(cluster):
    params, vector = placed(cluster), {"w": array(3, seed=5), "stats": X[0]}
    product = jdag.hvp(loss, cluster)(params, vector, X)
    wanted = jax.jvp(lambda w: jax.grad(plain)(w, STATS), (W,), (vector["w"],))[1]
    assert_same(product, {"w": wanted, "stats": jnp.zeros(3)})


def test_what_wants_a_gradient_of_an_untracked_leaf_says_that_it_has_none(cluster):
    params = placed(cluster)
    said = r"leaf 0 on b.*, untracked\) cannot be stepped: .*tracked=False"
    with pytest.raises(JdagError, match=said):
        jdag.Optimizer(optax.sgd(0.1), params)
    with cluster.context() as ctx:
        ctx.backward(loss(ctx, params, X))
        said = r"leaf 0 on b is untracked, since it was made by tracked=False or clus"
        with pytest.raises(GraphError, match=said):
            ctx.gradient(params)
        for hook in (ctx.on_gradient, ctx.on_cotangent):
            with fails_with(GraphError, "properties.on_t_ref_is_not"):
                hook(params["stats"], print)


def test_an_untracked_leaf_stays_one_when_it_is_updated_saved_and_loaded(
    cluster, tmp_path
):
    params = placed(cluster)
    cluster.update(lambda stats, more: stats + more, params["stats"], 1.0)
    assert_same(params["stats"].fetch(), STATS + 1.0)
    cluster.save(tmp_path, params=params)
    cluster.update(lambda stats: stats * 0, params["stats"])
    cluster.load(tmp_path, params=params)
    assert_same(params["stats"].fetch(), STATS + 1.0)
    places = {"w": "c", "stats": "d/cpu:0"}
    loaded = cluster.load(tmp_path, params=places)["params"]
    assert loaded["w"].tracked and not loaded["stats"].tracked
    with cluster.context() as ctx:
        ctx.backward(loss(ctx, loaded, X))
        assert list(ctx.gradients()) == [loaded["w"]]


def test_programs_are_handed_an_untracked_leaf_as_one(cluster):
    @jdag.program
    def forward(ctx: Any, params: Any) -> Any:
        assert not params["stats"].tracked and params["stats"].worker == "b"
        return params, loss(ctx, params, X)

    params = placed(cluster)
    with cluster.context() as ctx:
        same, value = ctx.call("d", forward, params)
        assert not same["stats"].tracked
        ctx.backward(value)
        assert list(ctx.gradients()) == [params["w"]]


def test_what_is_kept_in_a_loop_is_held_once(cluster):
    w = cluster.put("b", W)
    h: Any = X[0]
    for _ in range(100):
        with cluster.context() as ctx:
            state = {"h": ctx.call("b", cell, w, h, X[1]), "name": "state"}
            kept = cluster.keep(state)
            h = kept["h"]
            del kept
    cluster.driver.settle()
    assert cluster.info()["b"]["values_held"] == 2  # And the parameter.
    last = h.fetch()
    with cluster.context() as ctx:
        both = cluster.keep([ctx.call("c", jnp.sin, h), h])
        del h
        assert_same(jdag.fetch(both), [jnp.sin(last), last])
    with cluster.context():
        assert [cluster.info()[name]["values_held"] for name in "bc"] == [2, 1]
    cluster.drop(both)
    del both
    nothing_is_left(cluster)
    assert [cluster.info()[name]["values_held"] for name in "bc"] == [1, 0]
    assert_same(w.fetch(), W)


def test_each_ref_of_a_kept_value_holds_it(cluster):
    @jdag.program
    def same(ctx: Any, h: Any) -> Any:
        return h

    with cluster.context() as ctx:
        out = ctx.call("b", jnp.sin, X)
        first, second = cluster.keep([out, out])
        third = jdag.stop_gradient(second)
        fourth = ctx.call("c", same, first)
        del first, second, third
    with cluster.context() as ctx:
        assert_same(ctx.call("c", jnp.cos, fourth).fetch(), jnp.cos(jnp.sin(X)))
        del fourth
    nothing_is_left(cluster)
    assert cluster.info()["b"]["values_held"] == 0


def test_what_is_kept_on_a_device_is_used_elsewhere_in_each_context(cluster):
    with cluster.context() as ctx:
        kept = cluster.keep(ctx.call("b/cpu:0", jnp.sin, X))
    for _ in range(3):
        with cluster.context() as ctx:
            assert_same(ctx.call("c", jnp.cos, kept).fetch(), jnp.cos(jnp.sin(X)))
    cluster.update(lambda kept, more: kept + more, kept, kept)
    assert_same(kept.fetch(), 2 * jnp.sin(X))


def test_shapes_are_kept_in_abstract_mode():
    with jdag.simulate(["a", "b"], values="abstract", seed=0) as cluster:
        with cluster.context() as ctx:
            kept = cluster.keep(ctx.call("b", jnp.sin, X))
        with cluster.context() as ctx:
            assert ctx.call("b", squares, kept).shape == ()


def test_what_cannot_be_kept_is_refused(cluster):
    with cluster.context() as ctx:
        out = ctx.call("b", jnp.sin, X)
        with fails_with(JdagError, "properties.leaf_x_is_a_jax"):
            cluster.keep({"h": out, "x": X})
    with fails_with(ContextError, "properties.cluster_keep_of_ref_which"):
        cluster.keep(out)
