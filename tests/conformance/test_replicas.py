"""Replicas over workers: gradients and sums in one order, on every driver."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jdag
from tests.conformance.drivers import Driver
from tests.replica_cases import NAMES, SHAPES, expected, factors, one_part, weighed

HOW = ("owner", "tree", "ring")
WORKERS = ("a", "b", "c", "d")


def gradient_of(cluster: Any, how: str) -> bytes:
    """That of parameters on b, of which each worker has a replica."""
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


def test_unequal_replicas_are_refused_on_every_driver(cluster: Any):
    trees = {
        "a": cluster.put("a", np.ones(3, np.float32)),
        "c": cluster.put("c", np.ones(4, np.float32)),
    }
    with cluster.context() as ctx:
        why = r"of 'a' is float32\[3\], of 'c' float32\[4\]"
        with pytest.raises(jdag.JdagError, match=why):
            ctx.all_reduce(trees, "ring")
    cluster.drop(trees)
