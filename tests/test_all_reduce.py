"""One sum of what several workers have: its order, its bytes, and bad input."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdag
from jdag import sim
from jdag.api.optimizer import Optimizer
from jdag.api.refs import fetch
from jdag.errors import JdagError
from jdag.parallel.routes import HOW
from tests.face_cases import ONES
from tests.replica_cases import (
    NAMES,
    REPLICAS,
    SHAPES,
    WORKERS,
    bits,
    expected,
    factors,
    one_part,
    sent,
    total,
    weighed,
)


def reduced(cluster, how, workers=REPLICAS):
    refs = {
        worker: cluster.put(worker, factors(number, SHAPES))
        for number, worker in enumerate(workers)
    }
    since = len(cluster.trace)
    with cluster.context() as ctx:
        sums = ctx.all_reduce(refs, how)
        cluster.driver.settle()
        links = sent(cluster, since).get("Primal", {})
        assert [ref.place for ref in jax.tree.leaves(sums)] == [
            worker for worker in workers for _ in SHAPES
        ]
        return [one_part(tree, NAMES) for tree in jdag.fetch(sums).values()], links


@pytest.mark.parametrize("how", HOW)
def test_all_get_one_sum_in_the_order_that_is_told(how):
    trees = [factors(number, SHAPES) for number in range(len(REPLICAS))]
    right = expected(how, trees, NAMES, among=True)
    assert bits(right) != bits(expected(how, trees[::-1], NAMES, among=True))
    with jdag.simulate(WORKERS, seed=0) as cluster:
        got, _ = reduced(cluster, how)
    assert [bits(one) for one in got] == [bits(right)] * 4


def stacked(cluster, how, count, size):
    names = [f"w{number}" for number in range(count)]
    shape = jax.ShapeDtypeStruct((size,), jnp.float32)
    refs = {name: cluster.put(name, shape) for name in names}
    with cluster.context() as ctx:
        ctx.all_reduce(refs, how)
        cluster.driver.settle()
    return sent(cluster).get("Primal", {})


@pytest.mark.parametrize("count", [2, 3, 4, 8, 16])
def test_around_a_ring_each_link_has_2_n_minus_1_nths_of_the_bytes(count):
    names = [f"w{number}" for number in range(count)]
    size = 60 * count
    with jdag.simulate(names, seed=0, values="abstract") as cluster:
        links = stacked(cluster, "ring", count, size)
    assert links == {
        (name, names[(number + 1) % count]): 2 * (count - 1) * 60 * 4
        for number, name in enumerate(names)
    }


@pytest.mark.parametrize(
    ("how", "above"), [("owner", (0, 0, 0, 0)), ("tree", (0, 0, 1, 1))]
)
def test_to_the_owner_and_along_a_tree_all_goes_up_and_down_each_link(how, above):
    with jdag.simulate(
        [f"w{n}" for n in range(5)], seed=0, values="abstract"
    ) as cluster:
        links = stacked(cluster, how, 5, 100)
    pairs = [(f"w{n}", f"w{up}") for n, up in enumerate(above, 1)]
    assert sorted(links) == sorted([*pairs, *((up, n) for n, up in pairs)])
    assert set(links.values()) == {400}


@pytest.mark.parametrize("count", [2, 3, 8])
def test_reduce_add_around_a_ring_is_reduce_scatter_then_a_gather_at_the_owner(count):
    names = [f"w{number}" for number in range(count)]
    with jdag.simulate(["m", *names], seed=0, values="abstract") as cluster:
        params = cluster.put("m", jax.ShapeDtypeStruct((60 * count,), jnp.float32))
        with cluster.context() as ctx:
            replicas = ctx.replicate(names, params, "ring")
            losses = [
                ctx.call(name, total_of, replica)
                for name, replica in zip(names, replicas, strict=True)
            ]
            ctx.backward(*losses)
    part = 60 * 4
    ring = {
        (name, names[number - 1]): (count - 1) * part
        for number, name in enumerate(names)
    }
    assert sent(cluster)["Cotangent"] == {
        **ring,
        **{(name, "m"): part for name in names},
    }


def total_of(x):
    return jnp.sum(x)


@pytest.mark.parametrize("how", HOW)
def test_an_all_reduce_of_tracked_arrays_has_the_gradient_of_the_oracle(how):
    def program(ctx, params):
        squares = {
            worker: ctx.call(worker, jnp.square, params[worker]) for worker in REPLICAS
        }
        sums = ctx.all_reduce({worker: {"x": x} for worker, x in squares.items()}, how)
        losses = [
            ctx.call(worker, weighed, sums[worker], {"x": number + 1.0})
            for number, worker in enumerate(REPLICAS)
        ]
        return ctx.call("m", total, *losses)

    params = {
        worker: jnp.linspace(0.0, 1.0, 6) + number
        for number, worker in enumerate(REPLICAS)
    }
    value, right = jdag.oracle(program)(params)
    with jdag.simulate(WORKERS, seed=0) as cluster:
        refs = {worker: cluster.put(worker, x) for worker, x in params.items()}
        got = jdag.fetch(jdag.value_and_grad(program, cluster)(refs))
    np.testing.assert_allclose(got[0], value, rtol=1e-13)
    for worker in REPLICAS:
        np.testing.assert_allclose(got[1][worker], right[worker], rtol=1e-13)


def test_replicas_that_an_optimizer_steps_by_one_sum_stay_equal(cluster):
    def trained(workers):
        leaves = {worker: cluster.put(worker, ONES) for worker in workers}
        optimizer = Optimizer(optax.adam(0.1), leaves)
        for _ in range(3):
            with cluster.context() as ctx:
                losses = [
                    ctx.call(worker, lambda w, k: jnp.sum(w * w * k), leaf, 2.0)
                    for worker, leaf in leaves.items()
                ]
                ctx.backward(*losses)
                gradients = ctx.gradient(leaves)
                several = len(workers) > 1
                sums = ctx.all_reduce(gradients, "ring") if several else None
                optimizer.step(ctx, sums)
        return fetch(leaves)

    # Three gradients are three times one: Adam's steps are the same, but for its eps.
    found = trained(["b", "c", "d"])
    for worker in "cd":
        np.testing.assert_array_equal(found["b"], found[worker])
    np.testing.assert_allclose(found["b"], trained(["a"])["a"], rtol=1e-6)


def test_gradients_that_are_not_those_of_the_leaves_are_refused(cluster):
    leaves = {"p": cluster.put("b", ONES), "q": cluster.put("c", jnp.ones(2))}
    optimizer = Optimizer(optax.sgd(0.1), leaves)
    with cluster.context() as ctx:
        p, q = leaves["p"], leaves["q"]
        for given, text in (
            ({"p": p}, "gradients in the structure of its leaves, .*'q'.*these are"),
            ({"p": p, "q": p}, r"float64\[3,3\] for \['q'\].*, which is float64\[2\]"),
            ({"p": p, "q": jnp.ones(2)}, r"leaf \['q'\] is .*it takes a ref"),
            ({"p": p, "q": ctx.move("b", q)}, "'c'.*lives on 'b'.*no leaf of Optim"),
        ):
            with pytest.raises(JdagError, match=f"(?s){text}"):
                optimizer.step(ctx, given)
    np.testing.assert_array_equal(fetch(leaves["p"]), ONES)


def test_numbers_of_mixed_dtypes_are_reduced_as_what_they_are():
    def tree(number):
        return {
            "half": jnp.full(3, number + 0.5, jnp.bfloat16),
            "count": jnp.arange(5) * number,
            "wave": jnp.full((2, 2), number * 1j),
            "none": jnp.zeros((0, 2)),
        }

    with jdag.simulate(WORKERS, seed=0) as cluster:
        refs = {worker: cluster.put("m", tree(n)) for n, worker in enumerate(REPLICAS)}
        with cluster.context() as ctx:
            for how in HOW:
                for got in jdag.fetch(ctx.all_reduce(refs, how)).values():
                    assert got["half"].tolist() == [8.0] * 3
                    assert got["half"].dtype == jnp.bfloat16
                    assert got["count"].tolist() == [0, 6, 12, 18, 24]
                    assert got["wave"].tolist() == [[6j, 6j]] * 2
                    assert got["none"].shape == (0, 2)


UNEQUAL = {
    "shape": (
        {"w": jnp.ones(4)},
        r"\['w'\] of 'a' is float64\[3\], of 'b' float64\[4\]",
    ),
    "dtype": (
        {"w": jnp.ones(3, jnp.float32)},
        r"\['w'\] of 'a' is float64\[3\], of 'b' float32\[3\]",
    ),
    "structure": (
        {"v": jnp.ones(3)},
        r"equal pytrees: that of 'a' is .*'w'.*, that of 'b' .*'v'",
    ),
}


@pytest.mark.parametrize("case", UNEQUAL)
@pytest.mark.parametrize("how", HOW)
def test_unequal_replicas_are_refused_and_both_are_named(case, how):
    tree, why = UNEQUAL[case]
    with jdag.simulate(WORKERS, seed=0) as cluster:
        refs = {"a": cluster.put("a", {"w": jnp.ones(3)}), "b": cluster.put("b", tree)}
        with cluster.context() as ctx, pytest.raises(JdagError, match=why):
            ctx.all_reduce(refs, how)


def test_what_cannot_be_added_or_is_not_by_worker_is_refused():
    with jdag.simulate(WORKERS, seed=0) as cluster:
        flags = {name: cluster.put(name, {"f": jnp.array([True])}) for name in "abc"}
        with cluster.context() as ctx:
            with pytest.raises(
                JdagError, match=r"adds numbers, and \['f'\] of 'a' is bool"
            ):
                ctx.all_reduce(flags)
            with pytest.raises(
                JdagError, match=r"by its name, as in \{'ps0'.*, not .*list"
            ):
                ctx.all_reduce(cast(Any, list(flags.values())))
            with pytest.raises(JdagError, match=r"takes one worker or more, and got"):
                ctx.all_reduce({})
            with pytest.raises(
                JdagError, match=r"ctx.all_reduce: there is no worker 'x'"
            ):
                ctx.all_reduce({"x": flags["a"]})


def took_ns(how, network):
    names = [f"w{number}" for number in range(8)]
    megabyte = jax.ShapeDtypeStruct((250_000,), jnp.float32)
    with jdag.simulate(names, seed=0, values="abstract", network=network) as cluster:
        refs = {name: cluster.put(name, megabyte) for name in names}
        cluster.driver.settle()
        begun_ns = cluster.now_ns
        with cluster.context() as ctx:
            ctx.all_reduce(refs, how)
            cluster.driver.settle()
        assert not list(cluster.trace.of_kind("resend"))
        came = cluster.trace.of_kind("deliver")
        last = [one.time_ns for one in came if one.named["message"] == "Primal"][-1]
        return last - begun_ns


def test_through_ports_a_ring_takes_less_time_than_the_owner_and_without_more():
    gigabyte = 1_000_000_000
    model = sim.LinkModel(latency_ns=1_000, bandwidth_bytes_per_s=gigabyte)
    links = sim.Network(model)
    ports = sim.Network(model, port_bandwidth_bytes_per_s=gigabyte)
    # Seven megabytes into one port and seven out of it; then 2 (n - 1) / n of one.
    assert 14_000_000 < took_ns("owner", ports) < 14_100_000
    assert 7_000_000 < took_ns("tree", ports) < 12_000_000
    assert 1_750_000 < took_ns("ring", ports) < 2_000_000
    assert 2_000_000 < took_ns("owner", links) < 2_100_000


def test_what_is_no_array_stays_that_of_each_worker():
    def program(ctx, leaves):
        trees = {worker: {"w": w, "of": worker} for worker, w in leaves.items()}
        sums = ctx.all_reduce(trees)
        assert [tree["of"] for tree in sums.values()] == list(leaves)
        return ctx.call("a", weighed, {"w": sums["a"]["w"]}, {"w": 2.0})

    ones = {worker: jnp.ones(2) for worker in REPLICAS}
    assert jdag.oracle(program)(ones)[0] == 16
    with jdag.simulate(WORKERS, seed=0) as cluster, cluster.context() as ctx:
        leaves = {worker: cluster.put(worker, w) for worker, w in ones.items()}
        assert program(ctx, leaves).fetch() == 16


def test_of_one_worker_the_sum_is_what_it_has_and_that_warns():
    with jdag.simulate(WORKERS, seed=0) as cluster:
        for how in HOW:
            said = "ctx.all_reduce of 'a' alone: the sum of one is itself"
            with pytest.warns(UserWarning, match=said) as warned:
                got, links = reduced(cluster, how, workers=("a",))
            assert [one.filename for one in warned] == [__file__]
            assert bits(got[0]) == bits(one_part(factors(0, SHAPES), NAMES))
            assert links == {}
