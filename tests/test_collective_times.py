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


def timed(kind: str, count: int, nbytes: int, program: Any) -> int:
    """How long a program takes from when its refs are there, in ns."""
    names = [f"r{number}" for number in range(count)]
    line = [Dimension(kind, count, LinkModel(0, RATE))]
    network = topology(names, line, control_lane=True)
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
