"""Replicas over workers: functions to call there, and sums in a given order."""

from functools import reduce
from operator import add

import jax
import jax.numpy as jnp
import numpy as np

from jdag.collectives.routes import routes_from, routes_up

WORKERS = ("m", "a", "b", "c", "d")
REPLICAS = WORKERS[1:]
SHAPES = {"b": (3,), "w": (9, 5)}
NAMES = tuple(SHAPES)


def bits(tree):
    return b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))


def zeros():
    return {name: jnp.zeros(shape, jnp.float32) for name, shape in SHAPES.items()}


def weighed(params, factors):
    each = [jnp.sum(params[name] * factors[name]) for name in sorted(params)]
    return reduce(add, each)


def fit(params, x, y):
    hidden = jnp.tanh(x @ params["w"] + params["b"])
    return jnp.sum((hidden - y) ** 2)


def total(*losses):
    return reduce(add, losses)


def factors(number, shapes):
    random = np.random.default_rng(number)
    return {
        name: np.asarray(random.normal(size=shape), np.float32)
        for name, shape in shapes.items()
    }


def one_part(trees, names):
    return np.concatenate([np.ravel(trees[name]) for name in names])


def added_up(route, vectors):
    def at(replica):
        below = [at(child) for child in route.children(replica)]
        return reduce(add, [vectors[replica], *below])

    return [at(replica) for replica in route.children(None)]


def expected(how, trees, names, *, among, source=None):
    vectors = [one_part(tree, names) for tree in trees]
    count = len(vectors)
    routes = routes_up(count, how) if among else routes_from(source, count, how)
    cuts = [len(vectors[0]) * part // len(routes) for part in range(1, len(routes))]
    parts = list(zip(*[np.split(vector, cuts) for vector in vectors], strict=True))
    found = [
        reduce(add, added_up(route, part))
        for route, part in zip(routes, parts, strict=True)
    ]
    return np.concatenate(found)


def sent(cluster, since=0):
    found: dict[str, dict[tuple[str, str], int]] = {}
    for record in cluster.trace.of_kind("send"):
        said = record.named
        if record.index >= since and said["payload_bytes"]:
            link = (record.worker, said["destination"])
            kind = found.setdefault(said["message"], {})
            kind[link] = kind.get(link, 0) + said["payload_bytes"]
    return found
