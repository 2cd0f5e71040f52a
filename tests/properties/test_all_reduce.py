"""One sum of what several workers have: its order, its bytes, and bad input."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdag
from jdag.collectives.routes import HOW
from jdag.context.refs import fetch
from jdag.errors import JdagError
from jdag.training.optimizer import Optimizer
from tests.tools.error_texts import fails_with
from tests.tools.face_cases import ONES
from tests.tools.replica_cases import (
    NAMES,
    REPLICAS,
    SHAPES,
    WORKERS,
    bits,
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


def test_gradients_that_are_not_those_of_the_leaves_are_refused(cluster):
    leaves = {"p": cluster.put("b", ONES), "q": cluster.put("c", jnp.ones(2))}
    optimizer = Optimizer(optax.sgd(0.1), leaves)
    with cluster.context() as ctx:
        p, q = leaves["p"], leaves["q"]
        for given, text in (
            ({"p": p}, "gradients in the structure of its leaves, .*'q'.*, not PyT"),
            ({"p": p, "q": p}, r"float64\[3,3\] for \['q'\].*, which is float64\[2\]"),
            ({"p": p, "q": jnp.ones(2)}, r"leaf \['q'\] is .*expected a ref"),
            ({"p": p, "q": ctx.move("b", q)}, "on 'c'.* is on 'b'; .*no leaf of Optim"),
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
        r"\['w'\] of 'a' is float64\[3\], but of 'b' it is float64\[4\]",
    ),
    "dtype": (
        {"w": jnp.ones(3, jnp.float32)},
        r"\['w'\] of 'a' is float64\[3\], but of 'b' it is float32\[3\]",
    ),
    "structure": (
        {"v": jnp.ones(3)},
        r"equal structure: the one of 'a' is .*'w'.*, but the one of 'b' .*'v'",
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
            with fails_with(JdagError, "properties.adds_numbers_and_f_of"):
                ctx.all_reduce(flags)
            with fails_with(JdagError, "properties.by_its_name_as_in"):
                ctx.all_reduce(cast(Any, list(flags.values())))
            with fails_with(JdagError, "properties.takes_one_worker_or_more"):
                ctx.all_reduce({})
            with fails_with(JdagError, "properties.ctx_all_reduce_there_is"):
                ctx.all_reduce({"x": flags["a"]})


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
            said = "ctx.all_reduce of 'a' alone has no effect: the sum is the pytree"
            with pytest.warns(UserWarning, match=said) as warned:
                got, links = reduced(cluster, how, workers=("a",))
            assert [one.filename for one in warned] == [__file__]
            assert bits(got[0]) == bits(one_part(factors(0, SHAPES), NAMES))
            assert links == {}
