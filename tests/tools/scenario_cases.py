"""Scenarios as texts, and programs as a user writes them, for the tests of both."""

import os
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import jdag
from jdag.api.drivers import simulate
from jdag.errors import ScenarioError
from jdag.scenario import Case, Run
from jdag.sim import LinkModel, Network

GOOD = """# Is it so?

name = "mine"
program = "shapes:chain"
workers = ["a", "b"]
x64 = true

[expect]
outcome = "finished"
"""

PROGRAM = "tests.tools.scenario_cases:{}"


def written(folder: Path, *more: str, **replaced: str) -> Path:
    """Write the good scenario into a folder, with lines replaced, and more at its end.

    `replaced` names the key of a line: its new text, "" to leave it out.
    """
    lines = GOOD.splitlines()
    for key, text in replaced.items():
        places = [n for n, line in enumerate(lines) if line.startswith(f"{key} =")]
        if places:
            lines[places[0]] = text
        else:
            lines.insert(2, text)
    path = folder / "mine.toml"
    path.write_text("\n".join([*lines, *more, ""]))
    return path


def scenario_of(folder: Path, program: str, *more: str, **replaced: str) -> Path:
    line = f'program = "{PROGRAM.format(program)}"'
    return written(folder, *more, program=line, **replaced)


def square(w):
    return jnp.sum(w * w)


def times(w, x):
    return w * x


def roots(w):
    return jnp.sqrt(w)


def one_leaf(workers, *, size: int = 3):
    def program(ctx, params):
        return ctx.call(workers[-1], square, params["w"])

    return Case(program, {"w": jnp.ones(size)}, {"w": workers[0]})


def tree(workers):
    def program(ctx, params):
        w = params["layer"]
        value = ctx.call(workers[-1], times, w["w"], w["b"])
        return ctx.call(workers[0], square, value)

    params = {"layer": {"w": jnp.arange(3.0), "b": jnp.ones(3)}}
    return Case(program, params, {"layer": workers[0]}, passes=3)


def no_scalar(workers):
    def program(ctx, params):
        return ctx.call(workers[0], times, params["w"], params["w"])

    return Case(program, {"w": jnp.ones(3)}, {"w": workers[0]})


def not_a_number(workers):
    def program(ctx, params):
        return ctx.call(workers[0], square, ctx.call(workers[0], roots, params["w"]))

    return Case(program, {"w": -jnp.ones(3)}, {"w": workers[0]})


class Mute(ScenarioError):
    def __str__(self) -> str:
        raise ValueError("no text")


def raises_without_text(workers):
    raise Mute


def raises_later_without_text(workers):
    def program(ctx, params):
        raise Mute

    return Case(program, {"w": jnp.ones(3)}, placement={"w": workers[0]})


def returns_without_repr(workers):
    class Shy:
        def __repr__(self) -> str:
            raise ValueError("no text")

    return Shy()


def raises(workers):
    def program(ctx, params):
        return ctx.no_such_method(params)

    return Case(program, {"w": jnp.ones(3)}, {"w": workers[0]})


def branches(workers):
    def program(ctx, params):
        value = ctx.call(workers[-1], times, params["w"], params["w"])
        again = value.fetch()[0] > 0
        return ctx.call(workers[0], square, value if again else params["w"])

    return Case(program, {"w": jnp.ones(3)}, {"w": workers[0]})


def leave(*_):
    sys.exit(0)


def exits(workers, *, where: str):
    if where == "factory":
        leave()

    def program(ctx, params):
        if where == "program":
            leave()
        if where == "a program of a worker":
            ctx.call(workers[-1], jdag.program(leave))
        value = ctx.call(workers[-1], times, params["w"], params["w"])
        if where == "hook":
            ctx.on_cotangent(value, leave)
        return ctx.call(workers[0], square, value)

    return Case(program, {"w": jnp.ones(3)}, {"w": workers[0]})


def dies(workers, *, code: int = 0):
    print("called")
    case = one_leaf(workers)

    def program(ctx, params):
        if code:
            os._exit(code)
        return case.program(ctx, params)

    return Case(program, case.params, case.placement)


def no_case(workers):
    return 3


def takes_nothing():
    """A program without workers."""


def places(workers, *, where: str = "", named: bool = True):
    case = one_leaf(workers)
    params = case.params if named else list(case.params.values())
    placement = {"w": where} if where else {}
    return Case(case.program, params, placement)  # type: ignore[arg-type]


def settings_of_all_kinds(
    workers, *, sizes: tuple[int, ...] = (), rate: float = 0.1, path: Path | None = None
):
    return one_leaf(workers, size=sum(sizes) or 1)


# What a player returns, by how it ends, if that is no good one.
RETURNED = {
    "nothing": None,
    "an object": {"outcome": "finished", "answer": object()},
    "a number for a name": {"outcome": "finished", 3: 42},
    "arrays": {"outcome": "finished", "answer": np.float32(42), "all": jnp.arange(3)},
}


class Player:
    def __init__(self, workers, end):
        self.figures = {"outcome": "how it ended", "answer": "a number of its own"}
        self.workers, self.end = workers, end

    def play(self, run):
        cluster = run.cluster(run.seeds[0])
        w = cluster.put(self.workers[0], jnp.ones(3))
        with cluster.context() as ctx:
            kept = ctx.call(self.workers[0], times, w, w)
            if self.end == "stuck":
                ctx.call(self.workers[1], times, kept, 2.0)
            if self.end == "lost":
                return {"outcome": "finished"}
            if self.end == "keeps a word":
                run.keep("word", (0, 1))
            if self.end == "drawn":
                run.draw(3)
            ctx.backward(ctx.call(self.workers[0], square, kept), mode="fast")
        run.keep(cluster, (3, 2) if self.end == "window" else (0, cluster.now_ns))
        return RETURNED.get(self.end, {"outcome": "finished", "answer": 42})


def player(workers, *, end: str = "good"):
    return Player(workers, end)


class Stage(Run):
    def __init__(self, workers, *, seeds=(0,), network=None, faults=(), **settings):
        self.workers, self.seeds = tuple(workers), tuple(seeds)
        self.network, self.faults, self.settings = network, faults, settings
        self.abstract = settings.get("values") == "abstract"
        self.troubled = bool(faults) or network is not None
        self.virtual = True
        self.compile = bool(settings.pop("compile", False))
        self.kept: Any = None
        self.drawn: Any = None
        self.shown = []

    def cluster(self, seed, *, clean=False):
        network, faults = (None, ()) if clean else (self.network, self.faults)
        return simulate(
            self.workers, seed=seed, network=network, faults=faults, **self.settings
        )

    def progress(self, done, total, **numbers):
        self.shown.append((done, total, numbers))

    def keep(self, cluster, window):
        self.kept = cluster, window

    def draw(self, drawings):
        self.drawn = drawings


class RealStage(Stage):
    def __init__(self, cluster):
        super().__init__(cluster.workers)
        self.virtual = False
        self.made = cluster

    def cluster(self, seed, *, clean=False):
        return self.made


JITTER = Network(LinkModel(latency_ns=10_000, jitter_ns=50_000))


def bits(array):
    return np.asarray(array).tobytes()
