"""Programs that meet in collectives, which workers find by name."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdag.errors import CollectiveError
from tests.conformance.functions import dies_forward
from tests.tools import replica_cases
from tests.tools.replica_cases import SHAPES, factors, fit

HOW = ("owner", "tree", "ring")


def bits(tree):
    return replica_cases.bits(tree).hex()


_gradient = jax.jit(jax.grad(fit))


def number_of(cluster):
    return cluster.workers.index(cluster.here)


def own(cluster):
    return factors(number_of(cluster), SHAPES)


def all_kinds(among, cluster):
    tree, root = own(cluster), among[1]
    found: dict[str, Any] = {}
    for how in HOW:
        found[f"sum {how}"] = bits(cluster.all_reduce(tree, among, how))
        gathered = cluster.all_gather(tree, among, how)
        found[f"all {how}"] = "".join(map(bits, gathered))
        mine = {**tree, "of": cluster.here} if cluster.here == root else None
        given = cluster.broadcast(mine, root, among, how)
        found[f"one {how}"] = (given.pop("of"), bits(given))
    found["none"] = cluster.barrier(among)
    return found


def exchanges(among, cluster):
    tree, found = own(cluster), {}
    shares = [jax.tree.map(lambda x, n=n: x * 2.0**n, tree) for n in range(len(among))]
    for how in HOW:
        found[how] = bits(cluster.reduce_scatter(shares, among, how))
    found["all"] = bits(cluster.all_to_all(shares, among))
    return found


def trains(steps, how, cluster):
    first = {"w": jnp.asarray(own(cluster)["w"]), "b": jnp.zeros(5, jnp.float32)}
    params = cluster.broadcast(first, root=cluster.workers[1], how=how)
    rows = np.random.default_rng(number_of(cluster))
    found = []
    for _ in range(steps):
        x = rows.normal(size=(2, 9)).astype(np.float32)
        gradient = _gradient(params, x, 0.5)
        mean = cluster.all_reduce({"gradient": gradient, "rows": len(x)}, how=how)
        by = 0.1 / mean["rows"]
        params = jax.tree.map(lambda w, g, by=by: w - by * g, params, mean["gradient"])
        found.append(bits(params))
    return found


def said(call, *args, **options):
    try:
        return f"no error: {call(*args, **options)}"
    except CollectiveError as error:
        return str(error)


def returns(cluster):
    return cluster.here


def raises(cluster):
    raise ValueError("no more data")


def sums(cluster):
    return float(cluster.all_reduce(1.0))


def dies(cluster):
    with cluster.context() as ctx:
        ctx.call(cluster.here, dies_forward, 1.0).fetch()


def adds_of_length(length, cluster):
    text = said(cluster.all_reduce, {"w": jnp.ones(length)})
    return text, float(cluster.all_reduce(1.0))


def in_order(groups, cluster):
    texts = [said(cluster.all_reduce, 1.0, group) for group in groups]
    return texts, float(cluster.all_reduce(1.0))
