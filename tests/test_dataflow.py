"""The graph of a plan: differentiation gives eager's bits."""

from random import Random
from typing import Any

import numpy as np
import pytest

from jdag.api.drivers import simulate
from tests.cutting_cases import Program, bits, draw, eagerly, gradients_of, recorded


def eager_gradients(program: Program) -> list[Any]:
    with simulate(program.workers, seed=0) as cluster:
        leaves = [cluster.put(leaf.worker, leaf.array) for leaf in program.leaves]
        with cluster.context() as ctx:
            ctx.backward(*eagerly(ctx, program, leaves))
            found = ctx.gradients()
            return [found[leaf].fetch() if leaf in found else None for leaf in leaves]


@pytest.mark.parametrize("seed", range(12))
def test_nodes_one_by_one_give_the_bits_of_eager_passes(seed: int) -> None:
    program = draw(Random(f"bits {seed}"))
    made = recorded(program)
    values = made.one_by_one()
    plain, eager = gradients_of(program), eager_gradients(program)
    for leaf, expected, reached in zip(made.leaves, plain, eager, strict=True):
        number = made.gradients.get(leaf)
        assert (number is None) == (reached is None)
        if number is not None:
            assert bits(values[number]) == bits(reached)
            np.testing.assert_allclose(values[number], expected, rtol=1e-12, atol=1e-12)
