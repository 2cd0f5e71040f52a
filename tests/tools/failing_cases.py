"""What workers run while they are killed or stopped: it says that it runs, and waits.

A process of its own finds these in this module. The folder that `HERE` names is where
they say so, by a file of the name of the worker's process.
"""

import os
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jdag

HERE = "JDAG_TESTS_HERE"
WAITS_S = 30.0


def _wait() -> None:
    folder = Path(os.environ[HERE])
    (folder / str(os.getpid())).touch()
    for _ in range(int(WAITS_S / 0.02)):
        if not folder.joinpath(str(os.getpid())).exists():
            return
        threading.Event().wait(0.02)


def waits(x: Any) -> Any:
    jax.debug.callback(_wait)
    return 1.0 * x


@jax.custom_vjp
def _backward_waits(x: Any) -> Any:
    return x


_backward_waits.defvjp(lambda x: (x, None), lambda _, given: (waits(given),))


def backward_waits(x: Any) -> Any:
    return 1.0 * _backward_waits(x)


def lowered_after_waiting(leaf: Any, gradient: Any) -> Any:
    return leaf - waits(gradient)


def hook_waits(gradient: Any) -> None:
    del gradient
    _wait()


def total(*parts: Any) -> Any:
    return sum(jnp.sum(part * part) for part in parts)


def scaled(x: Any, k: Any) -> Any:
    return x * k


@jdag.program
def waits_as_program(ctx: Any, x: Any) -> Any:
    made = ctx.call(ctx.here, scaled, x, 2.0)
    _wait()
    return ctx.call(ctx.here, scaled, made, 3.0)


@jdag.program
def calls_c(ctx: Any, x: Any) -> Any:
    return ctx.call("b", scaled, ctx.call("c", waits, x), 2.0)


def runs_alone(cluster: Any) -> float:
    w = cluster.put(cluster.here, jnp.ones(3))
    _wait()
    return float(jnp.sum(w.fetch()))


def main(path: str) -> None:
    with jdag.connect(path, name="a") as cluster:
        w = cluster.put("b", jnp.ones(3))
        with cluster.context() as ctx:
            sys.stdout.write("begun\n")
            sys.stdout.flush()
            ctx.call("b", waits, w).fetch()
