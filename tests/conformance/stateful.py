"""What the suite calls on workers of `jdag.unjitted` and `cluster.keep`, by name."""

import jax.numpy as jnp
import numpy as np

from jdag import unjitted

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
    """Carry a state from context to context, on another worker."""
    h = xs[0]
    for x in xs:
        with cluster.context() as ctx:
            h = cluster.keep(ctx.call("d", cell, w, h, x))
    return h
