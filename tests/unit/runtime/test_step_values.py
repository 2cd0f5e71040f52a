"""How steps of plans use the values of a worker."""

import jax.numpy as jnp
import pytest

import jdag
from jdag.errors import JdagError
from tests.tools.error_texts import fails_with
from tests.tools.face_cases import total


def returned(ctx, leaf):
    return leaf


def sent(ctx, leaf):
    return ctx.call("c", total, leaf)


@pytest.mark.parametrize("program", [returned, sent])
@pytest.mark.parametrize("worker", ["a", "b"])
def test_a_deleted_leaf_that_a_step_passes_on_is_named(program, worker):
    with jdag.simulate(["a", "b", "c"], seed=0) as cluster:
        array, step = jnp.ones(3), jdag.compile(program, cluster)
        leaf = cluster.put(worker, array)
        step(leaf)
        array.delete()
        for _ in range(2):
            with fails_with(JdagError, "runtime.leaf_was_deleted"):
                step(leaf)
