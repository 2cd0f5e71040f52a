"""Small programs whose result depends on the event order if a bug is planted."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import jdag
from jdag.scenario import Case

W = np.array([0.1, 0.7, 1.3], np.float32)


class Planted(NamedTuple):
    """A program, its workers, and the maximum number of each fault in a run."""

    program: Case | Callable[[Any], Any]
    workers: str
    faults: Mapping[str, int] = {}


def scaled(w: Any, x: Any) -> Any:
    return jnp.sin(w * x)


def both(w: Any, x: Any) -> Any:
    return jnp.sin(w * x), jnp.cos(w + x)


def total(*terms: Any) -> Any:
    return sum(jnp.sum(term) for term in terms)


def terms(ctx: Any, params: Any) -> Any:
    w = params["w"]
    return ctx.call("a", total, *[ctx.call(worker, scaled, w, w) for worker in "bcd"])


def diamond(ctx: Any, params: Any) -> Any:
    w, v = params["w"], params["v"]
    left, right = ctx.call("b", both, w, v)
    one, two = ctx.call("c", scaled, left, v), ctx.call("d", scaled, right, left)
    return ctx.call("b", total, one, two), ctx.call("c", total, two, one, left)


@jdag.program
def inner(ctx: Any, w: Any, x: Any) -> Any:
    y = ctx.call("b", scaled, w, x)
    return ctx.call("c", scaled, y, w), y


def nested(cluster: Any) -> Any:
    w, v = cluster.put("b", W), cluster.put("c", W + 1)
    with cluster.context() as ctx:
        y, z = ctx.call("c", inner, w, v)
        u = ctx.call("b", inner, y, v)[0]
        ctx.backward(ctx.call("a", total, y, z, u))
        return jdag.fetch((ctx.gradient(w), ctx.gradient(v)))


def training(cluster: Any) -> Any:
    w, v = cluster.put("b", W), cluster.put("c", W + 1)
    for _ in range(2):
        with cluster.context() as ctx:
            y = ctx.call("c", scaled, w, v)
            ctx.backward(ctx.call("b", total, ctx.call("b", scaled, y, w)))
            for leaf in (w, v):
                cluster.update(lambda w, g: w - 0.5 * g, leaf, ctx.gradient(leaf))
            late = ctx.call("c", total, w)
            late.fetch()
    return {"w": w, "v": v}


def hooked(cluster: Any) -> Any:
    w = cluster.put("b", W)
    with cluster.context() as ctx:
        y = ctx.call("b", scaled, w, w)
        ctx.on_cotangent(y, lambda g: 2.0 * g)
        parts = [ctx.call(worker, scaled, y, w) for worker in "cad"]
        ctx.on_cotangent(y, lambda g: g + 1.0)
        ctx.backward(ctx.call("a", total, *parts), retain_graph=True)
        ctx.backward(ctx.call("c", total, *parts))
        return jdag.fetch(ctx.gradient(w))


def planned(cluster: Any) -> Any:
    params = {"w": cluster.put("b", W), "v": cluster.put("c", W + 1)}

    def loss(ctx: Any, params: Any, x: Any) -> Any:
        y = ctx.call("b", scaled, params["w"], x)
        return ctx.call("a", total, ctx.call("c", scaled, params["v"], y))

    step = jdag.compile(loss, cluster)
    for number in range(2):
        value, found = step.value_and_grad(params, W * number)
    return value, found


def several(cluster: Any) -> Any:
    w = cluster.put("d", W)
    with cluster.context() as ctx:
        tasks = [ctx.start(worker, inner, w, w) for worker in "bc"]
        parts = [task.result()[0] for task in tasks]
        ctx.backward(ctx.call("a", total, *parts))
        return jdag.fetch(ctx.gradient(w))


def many(ctx: Any, params: Any) -> Any:
    w = params["w"]
    parts = [ctx.call("bcd"[n % 3], scaled, w, n + 1.0) for n in range(18)]
    parts += [ctx.call("b", scaled, w, n + 0.5) for n in range(5)]
    return ctx.call("a", total, *parts)


def stepped(cluster: Any) -> Any:
    w, v = cluster.put("b", W), cluster.put("c", W + 1)

    def loss(ctx: Any, params: Any, x: Any) -> Any:
        y = ctx.call("b", scaled, params["w"], x)
        return ctx.call("a", total, ctx.call("c", scaled, params["v"], y))

    step = jdag.compile(loss, cluster)
    for number in range(2):
        value, _ = step.value_and_grad({"w": w, "v": v}, W * number)
        for leaf in (w, v):
            cluster.update(lambda w: 0.5 * w, leaf)
    return value, jdag.fetch((w, v))


def crossed(ctx: Any, params: Any, workers: str) -> Any:
    """Use a leaf of b in several calls; each cotangent arrives in its own message."""
    w = params["w"]
    inner = [ctx.call("b", scaled, w, n + 0.3) for n in range(len(workers))]
    given = zip(workers, inner, strict=True)
    parts = [ctx.call(worker, scaled, value, 0.7) for worker, value in given]
    return ctx.call("a", total, *parts)


PARAMS = {"w": W, "v": W + 1}
ON_B = {"w": np.linspace(0.1, 3.0, 32, dtype=np.float32)}, {"w": "b"}
PLACES = {"w": "b", "v": "c"}
PROGRAMS: Mapping[str, Planted] = {
    "terms": Planted(Case(terms, {"w": W}, {"w": "b"}), "abcd"),
    "between": Planted(Case(partial(crossed, workers="ccd"), *ON_B), "abcd"),
    "zipped": Planted(Case(partial(crossed, workers="ccdd"), *ON_B), "abcd"),
    "diamond": Planted(Case(diamond, PARAMS, PLACES, passes=2), "abcd"),
    "fast": Planted(Case(diamond, PARAMS, PLACES, mode="fast"), "abcd"),
    "nested": Planted(nested, "abc"),
    "training": Planted(training, "abc"),
    "hooked": Planted(hooked, "abcd"),
    "planned": Planted(planned, "abc"),
    "many": Planted(Case(many, {"w": W}, {"w": "b"}), "abcd"),
    "stepped": Planted(stepped, "abc"),
    "several": Planted(several, "abcd"),
    "lossy": Planted(
        Case(terms, {"w": W}, {"w": "b"}), "abcd", {"drop": 1, "duplicate": 1}
    ),
    "crash": Planted(Case(diamond, PARAMS, PLACES), "abcd", {"crash": 1, "rejoin": 1}),
}
