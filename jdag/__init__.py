"""Distributed autograd for JAX: simulate, check and run programs over many workers.

A program calls plain JAX functions on named workers; a call returns refs to its
results. One backward pass then runs over all workers, and each gradient stays on the
worker of its leaf:

    with jdag.simulate(["trainer", "ps"], seed=0) as cluster:
        w = cluster.put("ps", jnp.ones((8, 1)))
        with cluster.context() as ctx:
            loss = ctx.call("ps", mean_square, w, x)
            ctx.backward(loss)
            gradient = ctx.gradient(w).fetch()

`jdag.sim` describes simulated clusters: links, faults, devices. `jdag.parallel` spreads
a function over the devices of a process. `jdag.schedules` has pipeline schedules.
`jdag.explore` runs a program under many event orders, chosen by `jdag.strategies`.
"""

from __future__ import annotations

from importlib import import_module

from jdag.gone import GONE, removal_message

TYPE_CHECKING = False  # Importing typing would double the import time of this module.
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

# Names that are imported at first use: JAX takes seconds to import, and commands and
# workers install signal handlers before that.
_NAMES_BY_MODULE = {
    "jdag": "errors parallel schedules sim testing",
    "jdag.api.cluster": "Cluster",
    "jdag.api.drivers": "connect launch simulate",
    "jdag.api.hvp": "hvp",
    "jdag.api.oracle": "oracle",
    "jdag.api.pipeline": "Pipeline pipeline",
    "jdag.api.value_and_grad": "value_and_grad",
    "jdag.compute.configuration": "sum_in_float32",
    "jdag.compute.pytrees": "static",
    "jdag.context.context": "Context",
    "jdag.context.hosted": "Hosted",
    "jdag.context.refs": "Ref fetch stop_gradient",
    "jdag.context.tasks": "Task wait",
    "jdag.engine.functions": "program unjitted",
    "jdag.errors": "JdagError",
    "jdag.lab": "strategies",
    "jdag.lab.calibration": "calibrate",
    "jdag.lab.exploration": "explore",
    "jdag.lab.failures": "replay",
    "jdag.lab.prediction": "predict",
    "jdag.lab.retiming": "retime",
    "jdag.lab.sweep": "sweep",
    "jdag.plans.compiling": "CompiledStep compile",
    "jdag.training.optimizer": "Optimizer",
}
_MODULES = {
    name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        versions = import_module("jdag.runtime.versions")
        return globals().setdefault(name, versions.version_of())
    if f"{__name__}.{name}" in GONE:
        raise AttributeError(removal_message(f"{__name__}.{name}"))
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _MODULES[name] == "jdag":
        return import_module(f"jdag.{name}")
    module = import_module(_MODULES[name])
    return globals().setdefault(name, getattr(module, name))


def __dir__() -> list[str]:
    return sorted({**globals(), **_MODULES})
