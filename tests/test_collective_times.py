"""Collectives over a network take the times of their closed forms."""

from typing import Any

import jax
import numpy as np
import pytest

import jdag
from jdag.sim.network import LinkModel
from jdag.sim.topologies import Dimension, topology

RATE = 50_000_000_000  # Bytes a second.
GIB = 1 << 30


def timed(
    kind: str, count: int, nbytes: int, program: Any, cut_through: bool = False
) -> int:
    """How long a program takes from when its refs are there, in ns."""
    names = [f"r{number}" for number in range(count)]
    line = [Dimension(kind, count, LinkModel(0, RATE))]
    network = topology(names, line, cut_through=cut_through, control_lane=True)
    workers = ["main", *names]
    settings: Any = {"network": network, "values": "abstract"}
    with jdag.simulate(workers, seed=0, **settings) as cluster:
        aval = jax.ShapeDtypeStruct((nbytes // 4,), np.float32)
        refs = {name: cluster.put(name, aval) for name in names}
        cluster.driver.settle()
        first = len(cluster.trace)
        with cluster.context() as ctx:
            program(ctx, refs)
            cluster.driver.settle()
        moves = [
            one
            for one in list(cluster.trace)[first:]
            if one.kind in ("send", "deliver") and "Primal" in str(one.named)
        ]
        assert moves
        return moves[-1].time_ns - moves[0].time_ns


def step_ns(nbytes: int) -> int:
    return -(-nbytes * 1_000_000_000 // RATE)


@pytest.mark.parametrize("count", [3, 8])
def test_a_ring_all_reduce_takes_2_n_minus_1_steps_of_an_nth(count):
    nbytes = GIB // 8 * count
    took_ns = timed("ring", count, nbytes, lambda c, refs: c.all_reduce(refs, "ring"))
    assert took_ns == 2 * (count - 1) * step_ns(GIB // 8)
    assert count != 8 or took_ns == 37_580_970


def add(a: Any, b: Any) -> Any:
    return a + b


def all_gather(ctx: Any, refs: dict[str, Any]) -> None:
    """Each shard goes around the ring."""
    names = list(refs)
    for first, ref in enumerate(refs.values()):
        shard = ref
        for step in range(1, len(names)):
            shard = ctx.move(names[(first + step) % len(names)], shard)


def reduce_scatter(ctx: Any, refs: dict[str, Any]) -> None:
    """The sum of each shard goes around the ring; `refs` stand for all shards."""
    names = list(refs)
    for first, ref in enumerate(refs.values()):
        total = ref
        for step in range(1, len(names)):
            here = names[(first + step) % len(names)]
            total = ctx.call(here, add, total, refs[here])


def all_to_all(ctx: Any, refs: dict[str, Any]) -> None:
    """In round k each worker sends a shard of its own to the k-th after it."""
    names = list(refs)
    for step in range(1, len(names)):
        for first, shard in enumerate(refs.values()):
            ctx.move(names[(first + step) % len(names)], shard)


@pytest.mark.parametrize(
    ("kind", "program"),
    [
        ("ring", all_gather),
        ("ring", reduce_scatter),
        ("fully_connected", all_to_all),
    ],
)
def test_collectives_of_n_shards_take_n_minus_1_steps_or_one_if_all_links_differ(
    kind, program
):
    steps = 1 if kind == "fully_connected" else 7
    assert timed(kind, 8, GIB // 8, program) == steps * step_ns(GIB // 8)


@pytest.mark.parametrize(("cut_through", "steps"), [(True, 7), (False, 8)])
def test_an_all_to_all_over_a_switch_takes_n_minus_1_steps_and_store_and_forward_one(
    cut_through, steps
):
    took_ns = timed("switch", 8, GIB // 8, all_to_all, cut_through)
    assert took_ns == steps * step_ns(GIB // 8)
