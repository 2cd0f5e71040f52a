"""Distributed autograd for JAX: programs over workers, simulated, proved and run.

A program calls plain JAX functions on named workers; what comes back are refs. One
backward pass then runs over all of them, and gradients stay where their leaves are:

    with jdag.simulate(["trainer", "ps"], seed=0) as cluster:
        w = cluster.put("ps", jnp.ones((8, 1)))
        with cluster.context() as ctx:
            loss = ctx.call("ps", mean_square, w, x)
            ctx.backward(loss)
            gradient = ctx.gradient(w).fetch()

What a simulated cluster is made of (links, faults, devices) is in `jdag.sim`, what
spreads a function over the devices of one process in `jdag.parallel`, and orders of the
work of pipelines in `jdag.schedules`. `jdag.explore` runs a program in many orders, by
`jdag.strategies`.
"""

from __future__ import annotations

from importlib import import_module

from jdag.gone import GONE, gone

TYPE_CHECKING = False  # To import typing takes as long as all else here.
if TYPE_CHECKING:
    from typing import Any

    from jdag import errors, parallel, schedules, sim, testing
    from jdag.api.cluster import Cluster
    from jdag.api.drivers import connect, launch, simulate
    from jdag.api.hvp import hvp
    from jdag.api.oracle import oracle
    from jdag.api.pipeline import Pipeline, pipeline
    from jdag.api.value_and_grad import value_and_grad
    from jdag.compute.configuration import sum_in_float32
    from jdag.compute.pytrees import static
    from jdag.context.context import Context
    from jdag.context.hosted import Hosted
    from jdag.context.refs import Ref, fetch, stop_gradient
    from jdag.context.tasks import Task, wait
    from jdag.engine.functions import program, unjitted
    from jdag.errors import JdagError
    from jdag.lab import strategies
    from jdag.lab.calibration import calibrate
    from jdag.lab.exploration import explore
    from jdag.lab.failures import replay
    from jdag.lab.prediction import predict
    from jdag.lab.retiming import retime
    from jdag.lab.sweep import sweep
    from jdag.plans.compiling import CompiledStep, compile
    from jdag.training.optimizer import Optimizer

__all__ = [
    "Cluster",
    "CompiledStep",
    "Context",
    "Hosted",
    "JdagError",
    "Optimizer",
    "Pipeline",
    "Ref",
    "Task",
    "calibrate",
    "compile",
    "connect",
    "errors",
    "explore",
    "fetch",
    "hvp",
    "launch",
    "oracle",
    "parallel",
    "pipeline",
    "predict",
    "program",
    "replay",
    "retime",
    "schedules",
    "sim",
    "simulate",
    "static",
    "stop_gradient",
    "strategies",
    "sum_in_float32",
    "sweep",
    "testing",
    "unjitted",
    "value_and_grad",
    "wait",
]

# Imported at first use: JAX takes seconds to import, and commands and workers handle
# signals before that. The value is the module that defines the name, "" for a module.
_LATER = {
    "Cluster": "jdag.api.cluster",
    "CompiledStep": "jdag.plans.compiling",
    "Context": "jdag.context.context",
    "Hosted": "jdag.context.hosted",
    "JdagError": "jdag.errors",
    "Optimizer": "jdag.training.optimizer",
    "Pipeline": "jdag.api.pipeline",
    "Ref": "jdag.context.refs",
    "Task": "jdag.context.tasks",
    "calibrate": "jdag.lab.calibration",
    "compile": "jdag.plans.compiling",
    "connect": "jdag.api.drivers",
    "errors": "",
    "explore": "jdag.lab.exploration",
    "fetch": "jdag.context.refs",
    "hvp": "jdag.api.hvp",
    "launch": "jdag.api.drivers",
    "oracle": "jdag.api.oracle",
    "parallel": "",
    "pipeline": "jdag.api.pipeline",
    "predict": "jdag.lab.prediction",
    "program": "jdag.engine.functions",
    "replay": "jdag.lab.failures",
    "retime": "jdag.lab.retiming",
    "schedules": "",
    "sim": "",
    "simulate": "jdag.api.drivers",
    "static": "jdag.compute.pytrees",
    "stop_gradient": "jdag.context.refs",
    "strategies": "jdag.lab",
    "sum_in_float32": "jdag.compute.configuration",
    "sweep": "jdag.lab.sweep",
    "testing": "",
    "unjitted": "jdag.engine.functions",
    "value_and_grad": "jdag.api.value_and_grad",
    "wait": "jdag.context.tasks",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        versions = import_module("jdag.runtime.versions")
        return globals().setdefault(name, versions.version_of())
    if f"{__name__}.{name}" in GONE:
        raise AttributeError(gone(f"{__name__}.{name}"))
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _LATER[name]
    found = (
        getattr(import_module(home), name) if home else import_module(f"jdag.{name}")
    )
    return globals().setdefault(name, found)


def __dir__() -> list[str]:
    return sorted({**globals(), **_LATER})
