"""Replicas over workers: gradients and sums in one order, on every driver."""

from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdag
from jdag.collectives.routes import route_of
from tests.conformance.drivers import Driver
from tests.tools.replica_cases import (
    NAMES,
    SHAPES,
    added_up,
    bits,
    expected,
    factors,
    one_part,
    total,
    weighed,
)

HOW = ("owner", "tree", "ring")
WORKERS = ("a", "b", "c", "d")


def gradient_of(cluster: Any, how: str) -> bytes:
    params = {name: jnp.zeros(shape, jnp.float32) for name, shape in SHAPES.items()}
    leaves = cluster.put("b", params)
    with cluster.context() as ctx:
        replicas = ctx.replicate(WORKERS, leaves, how)
        losses = [
            ctx.call(worker, weighed, replica, factors(number, SHAPES))
            for number, (worker, replica) in enumerate(
                zip(WORKERS, replicas, strict=True)
            )
        ]
        ctx.backward(*losses)
        found: bytes = one_part(jdag.fetch(ctx.gradient(leaves)), NAMES).tobytes()
    cluster.drop(leaves)
    return found


def right(how: str, *, among: bool) -> bytes:
    trees = [factors(number, SHAPES) for number in range(4)]
    found: bytes
    found = expected(how, trees, NAMES, among=among, source=1).tobytes()
    return found


@pytest.mark.parametrize("how", HOW)
def test_reduce_add_over_workers_gives_one_sum_in_the_order_of_the_replicas(
    cluster: Any, how: str
):
    assert gradient_of(cluster, how) == right(how, among=False)


def test_reduce_add_has_one_bit_pattern_whatever_arrives_first(driver: Driver):
    patterns = [
        tuple(gradient_of(cluster, how) for how in HOW)
        for cluster in driver.rough(WORKERS, 5)
    ]
    assert patterns == [tuple(right(how, among=False) for how in HOW)] * 5


@pytest.mark.parametrize("how", HOW)
def test_an_all_reduce_gives_each_the_same_sum_to_the_last_bit(cluster: Any, how: str):
    trees = {
        worker: cluster.put(worker, factors(number, SHAPES))
        for number, worker in enumerate(WORKERS)
    }
    with cluster.context() as ctx:
        sums = ctx.all_reduce(trees, how)
        assert {sums[worker]["w"].worker for worker in WORKERS} == set(WORKERS)
        found = [one_part(tree, NAMES).tobytes() for tree in jdag.fetch(sums).values()]
    assert found == [right(how, among=True)] * 4
    cluster.drop(trees)


def shares_on(cluster: Any) -> dict[str, list[Any]]:
    """Of each worker a share for each, whose sums differ in any other order."""
    return {
        worker: [cluster.put(worker, factors(4 * n + to, SHAPES)) for to in range(4)]
        for n, worker in enumerate(WORKERS)
    }


@pytest.mark.parametrize("how", HOW)
def test_shares_are_gathered_summed_and_exchanged_in_the_order_of_workers(
    cluster: Any, how: str
):
    shares = shares_on(cluster)
    with cluster.context() as ctx:
        gathered = ctx.all_gather({w: few[1] for w, few in shares.items()}, how)
        sums = ctx.reduce_scatter(shares, how)
        sent = ctx.all_to_all(shares)
        for found in (gathered, sums, sent):
            assert list(found) == list(WORKERS)
            for worker, tree in found.items():
                assert {ref.worker for ref in jax.tree.leaves(tree)} == {worker}
        gathered, sums, sent = jdag.fetch((gathered, sums, sent))
    cluster.drop(shares)
    for to, worker in enumerate(WORKERS):
        mine = [factors(4 * n + to, SHAPES) for n in range(4)]
        assert bits(sent[worker]) == bits(mine)
        assert bits(gathered[worker]) == bits(
            [factors(4 * n + 1, SHAPES) for n in range(4)]
        )
        parts = [one_part(tree, NAMES) for tree in mine]
        (right,) = added_up(route_of(to, 4, cast(Any, how), -1), parts)
        assert one_part(sums[worker], NAMES).tobytes() == right.tobytes()


def exchanging(how: str, ctx: Any, params: Any) -> Any:
    shares = {
        w: [ctx.call(w, jnp.sin, one) for one in few] for w, few in params.items()
    }
    gathered = ctx.all_gather({w: few[0] for w, few in shares.items()}, how)
    sums, sent = ctx.reduce_scatter(shares, how), ctx.all_to_all(shares)
    losses = []
    for number, worker in enumerate(WORKERS):
        given = (*gathered[worker], sums[worker], *sent[worker])
        losses.append(ctx.call(worker, weigh_all, number + 1.0, *given))
    return ctx.call("a", total, *losses)


def weigh_all(weight: Any, *arrays: Any) -> Any:
    return sum([weight * jnp.sum(one**2) / (1 + at) for at, one in enumerate(arrays)])


@pytest.mark.parametrize("how", HOW)
def test_gradients_of_exchanges_are_those_of_the_oracle(cluster: Any, how: str):
    program = partial(exchanging, how)
    arrays = {
        worker: [np.linspace(n, to + 1, 3) for to in range(4)]
        for n, worker in enumerate(WORKERS)
    }
    wanted = jdag.oracle(program)(arrays)
    params = {w: [cluster.put(w, one) for one in few] for w, few in arrays.items()}
    with cluster.context() as ctx:
        loss = program(ctx, params)
        ctx.backward(loss)
        found = loss.fetch(), jdag.fetch(ctx.gradient(params))
    step = jdag.compile(program, cluster, exact=True)
    assert bits(step.value_and_grad(params)) == bits(found)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)
    del step
    cluster.drop(params)
