"""Programs with optimizers, functions as Python and kept values, known by name."""

import jax.numpy as jnp
import numpy as np

from jdag import program, unjitted
from jdag.errors import WorkerLost
from tests.conformance.functions import dies_forward, total


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
    with cluster.context() as ctx:
        given = {
            key: ctx.call(leaf.worker, gradients, leaf) for key, leaf in params.items()
        }
        optimizer.step(ctx, given)


def steps_until_lost(victim, params, optimizer, cluster):
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


# ------------------------------------------------------------------ functions as Python


@unjitted
def largest(x, at_least):
    """The positive numbers in order, or so many of the largest; and how many."""
    numbers = np.asarray(x).ravel()
    count = max(int((numbers > 0).sum()), at_least)
    return {"best": np.sort(numbers)[-count:], "count": count}


@unjitted(shapes=lambda x, by: x)
def in_order(x, by):
    return np.asarray(x)[sorted(range(len(x)), key=lambda row: float(x[row, int(by)]))]


@unjitted
def fails_as_python(x):
    raise KeyError(f"nothing at {int(x)}")


# ------------------------------------------------------------- values that are kept


def cell(w, h, x):
    return jnp.tanh(h * w + x)


def carries(w, xs, cluster):
    h = xs[0]
    for x in xs:
        with cluster.context() as ctx:
            h = cluster.keep(ctx.call("d", cell, w, h, x))
    return h
