"""Programs of `cluster.run` that are handed an optimizer, known by their names."""

import jax.numpy as jnp

from jdag import program
from jdag.errors import WorkerLost
from tests.conformance.functions import dies_forward, total


def weighed(w, x):
    return jnp.sum(w * x)


def curved(w, x):
    return jnp.sum(jnp.sin(w * x))


def steps(loss, params, rows, optimizer, cluster):
    """A step for each row; the gradient of a leaf depends on the row and its place."""
    for row in rows:
        with cluster.context() as ctx:
            each = [
                ctx.call(leaf.worker, loss, leaf, row + 0.25 * place)
                for place, leaf in enumerate(params.values())
            ]
            ctx.backward(*each)
            optimizer.step(ctx)


def steps_by(gradients, params, optimizer, cluster):
    """A step by gradients that a function computes where the leaves are."""
    with cluster.context() as ctx:
        given = {
            key: ctx.call(leaf.worker, gradients, leaf) for key, leaf in params.items()
        }
        optimizer.step(ctx, given)


def steps_until_lost(victim, params, optimizer, cluster):
    """Step, see the victim die, step again."""
    with cluster.context() as ctx:
        ctx.backward(ctx.call("d", total, *params), retain_graph=True)
        optimizer.step(ctx)
        try:
            ctx.call(victim, dies_forward, params[0]).fetch()
        except WorkerLost:
            optimizer.step(ctx)


def drops(optimizer, cluster):
    optimizer.drop()


@program
def in_a_context(ctx, optimizer):
    optimizer.step(ctx)


def saves(folder, optimizer, cluster):
    cluster.save(folder, optimizer=optimizer)
