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


def shares(refs: dict[str, Any]) -> dict[str, Any]:
    return {name: [ref] * len(refs) for name, ref in refs.items()}


def all_gather(ctx: Any, refs: dict[str, Any]) -> None:
    ctx.all_gather(refs, "ring")


def reduce_scatter(ctx: Any, refs: dict[str, Any]) -> None:
    ctx.reduce_scatter(shares(refs), "ring")


def all_to_all(ctx: Any, refs: dict[str, Any]) -> None:
    ctx.all_to_all(shares(refs))


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


@pytest.mark.parametrize(("how", "steps"), [("owner", 1), ("tree", 2)])
def test_without_a_ring_each_level_of_the_tree_is_a_step_if_all_links_differ(
    how, steps
):
    def gather(ctx: Any, refs: Any) -> None:
        ctx.all_gather(refs, how)

    def scatter(ctx: Any, refs: Any) -> None:
        ctx.reduce_scatter(shares(refs), how)

    def reduce(ctx: Any, refs: Any) -> None:
        ctx.all_reduce(refs, how)

    def broadcast(ctx: Any, refs: Any) -> None:
        ctx.replicate(list(refs), refs["r0"], how)

    kind, step = "fully_connected", step_ns(GIB // 8)
    assert timed(kind, 7, GIB // 8, broadcast) == steps * step
    assert timed(kind, 7, GIB // 8, reduce) == 2 * steps * step
    for program in (gather, scatter):  # Routes of other workers share links.
        took_ns = timed(kind, 7, GIB // 8, program)
        assert took_ns == step if how == "owner" else 2 * step <= took_ns <= 6 * step


@pytest.mark.parametrize(("cut_through", "steps"), [(True, 7), (False, 8)])
def test_an_all_to_all_over_a_switch_takes_n_minus_1_steps_and_store_and_forward_one(
    cut_through, steps
):
    took_ns = timed("switch", 8, GIB // 8, all_to_all, cut_through)
    assert took_ns == steps * step_ns(GIB // 8)
