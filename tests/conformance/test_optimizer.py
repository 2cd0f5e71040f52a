"""The optimizer: one step on each owner, and absent leaves stand still."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdag
from tests.conformance.functions import (
    FRAGILE,
    ONES,
    dies_forward,
    difference,
    mean_square,
    total,
    weighted,
)
from tests.tools.error_texts import fails_with


def test_sgd_on_two_owners_gives_gradients_9_and_weights_055(cluster: Any):
    w1, w2 = cluster.put("b", ONES), cluster.put("c", ONES)
    optimizer = jdag.Optimizer(optax.sgd(0.05), [w1, w2])
    with cluster.context() as ctx:
        h = ctx.call("b", jnp.matmul, w1, ONES)
        ctx.backward(ctx.call("c", weighted, w2, h, ONES))
        for leaf in (w1, w2):
            np.testing.assert_array_equal(ctx.gradient(leaf).fetch(), 9 * ONES)
        optimizer.step(ctx)
    for leaf, owner in ((w1, "b"), (w2, "c")):
        assert leaf.worker == owner
        np.testing.assert_allclose(leaf.fetch(), 0.55 * ONES, rtol=1e-12)


def test_a_parameter_without_a_gradient_in_this_context_does_not_move(cluster: Any):
    p, q = cluster.put("b", 1.0), cluster.put("c", 1.0)
    optimizer = jdag.Optimizer(optax.sgd(0.1), {"p": p, "q": q})
    for used in ((p, q), (p,)):
        with cluster.context() as ctx:
            ctx.backward(ctx.call("d", total, *used))
            for leaf in used:
                assert float(ctx.gradient(leaf).fetch()) == 1.0
            optimizer.step(ctx)
    np.testing.assert_allclose(jdag.fetch([p, q]), [0.8, 0.9], rtol=1e-12)


def test_a_step_is_one_message_to_each_owner_all_at_once(driver: Any, cluster: Any):
    leaves = [cluster.put(worker, 1.0) for worker in "bbcc"]
    optimizer = jdag.Optimizer(optax.sgd(0.1), leaves)
    with cluster.context() as ctx:
        ctx.backward(ctx.call("d", total, *leaves))
        driver.settle(cluster)
        before = cluster.info()["a"]["messages_sent"]
        optimizer.step(ctx)
        assert cluster.info()["a"]["messages_sent"] - before == 2
    np.testing.assert_allclose(jdag.fetch(leaves), [0.9] * 4, rtol=1e-12)


def test_a_step_that_fails_on_one_owner_names_it_and_the_others_have_moved(
    cluster: Any,
):
    p, q = cluster.put("b", 1.0), cluster.put("c", 1.0)
    optimizer = jdag.Optimizer(FRAGILE, {"p": p, "q": q})
    with cluster.context() as ctx:
        ctx.backward(ctx.call("d", difference, p, q))
        optimizer.step(ctx)
    assert float(p.fetch()) == 0.5
    with pytest.raises(jdag.errors.RemoteError) as caught:
        q.fetch()
    said = str(caught.value)
    for part in (
        "failed on 'c'",
        "stepping ['q'] (leaf 1 on c)",
        "a gradient below zero",
        "not assigned: leaf 1 on c; other leaves assigned with it are not affected",
    ):
        assert part in said, said


def test_a_step_with_an_owner_that_died_names_it_and_moves_nobody(driver: Any):
    with driver.mortal("c") as cluster:
        p, q = cluster.put("b", 1.0), cluster.put("c", 1.0)
        optimizer = jdag.Optimizer(optax.sgd(0.1), [p, q])
        with cluster.context() as ctx:
            ctx.backward(ctx.call("d", total, p, q), retain_graph=True)
            with pytest.raises(jdag.errors.WorkerLost):
                ctx.call("c", dies_forward, p).fetch()
            with fails_with(jdag.errors.WorkerLost, "conformance.c") as caught:
                optimizer.step(ctx)
            assert "no leaf of" in str(caught.value)
        assert float(p.fetch()) == 1.0


def trained(cluster: Any, leaves: Any, optimizer: Any, steps: range) -> list[bytes]:
    w1, w2 = leaves
    for step in steps:
        x = jnp.cos(jnp.arange(9.0) + step).reshape(3, 3)
        with cluster.context() as ctx:
            h = ctx.call(w1.worker, jnp.matmul, w1, x)
            h = ctx.call(w2.worker, jnp.matmul, w2, h)
            ctx.backward(ctx.call("d", mean_square, h))
            optimizer.step(ctx)
    return [np.asarray(leaf.fetch()).tobytes() for leaf in leaves]


def test_training_resumed_on_any_placement_has_the_bits_of_training_that_went_on(
    driver: Any, tmp_path: Path
):
    tx = optax.adam(0.05)
    with driver.cluster() as cluster:
        leaves = [cluster.put("b", ONES), cluster.put("c", 0.5 * ONES)]
        optimizer = jdag.Optimizer(tx, leaves)
        trained(cluster, leaves, optimizer, range(3))
        cluster.save(tmp_path / "saved", leaves=leaves, optimizer=optimizer)
        wanted = trained(cluster, leaves, optimizer, range(3, 6))
    with driver.cluster() as cluster:
        leaves = [cluster.put(owner, 0 * ONES) for owner in "ca"]
        optimizer = jdag.Optimizer(tx, leaves)
        cluster.load(tmp_path / "saved", leaves=leaves, optimizer=optimizer)
        assert trained(cluster, leaves, optimizer, range(3, 6)) == wanted


def averaged(average: Any, w: Any) -> Any:
    return 0.75 * average + 0.25 * w


def test_a_copy_of_leaves_does_not_follow_their_steps_and_averages_them(cluster: Any):
    w = cluster.put("b", jnp.arange(3.0))
    params = {"w": w, "tied": w, "v": cluster.put("c", 2 * ONES), "n": 5}
    fixed = cluster.put("b", 7.0, tracked=False)
    optimizer = jdag.Optimizer(optax.sgd(0.5), [w, params["v"]])
    first = cluster.copy(params)
    average, state = cluster.copy((params, fixed), tracked=False)
    assert first["w"] is not first["v"] and first["w"] == first["tied"] != w
    assert [one.tracked for one in (first["w"], average["w"], state)] == [1, 0, 0]
    assert not cluster.copy(fixed).tracked
    start: Any = {"w": jnp.arange(3.0), "v": 2 * ONES}
    wanted = mean = start
    for _ in range(3):
        with cluster.context() as ctx:
            ctx.backward(ctx.call("d", total, w, params["v"]))
            optimizer.step(ctx)
        two = [{name: tree[name] for name in "wv"} for tree in (average, params)]
        cluster.update(averaged, *two)
        wanted = {name: one - 0.5 for name, one in wanted.items()}
        mean = {name: averaged(one, wanted[name]) for name, one in mean.items()}
    found = jdag.fetch((first, average, state, params))
    for tree, values in zip(found[:2], (start, mean), strict=True):
        for name in ("w", "tied", "v"):
            np.testing.assert_array_equal(tree[name], values[name.replace("tied", "w")])
    np.testing.assert_array_equal(found[3]["v"], wanted["v"])
    assert (found[0]["n"], float(found[2])) == (5, 7.0)
    with cluster.context() as ctx:  # A copy is a leaf like others.
        leaves = [params["w"], first["w"]]
        ctx.backward(ctx.call("d", total, *leaves, average["v"]))
        assert [*ctx.gradients()] == leaves
    with fails_with(jdag.JdagError, "conformance.is_no_leaf"), cluster.context() as ctx:
        cluster.copy(ctx.call("b", jnp.sin, w))
