"""Distributed autograd for JAX: programs over workers, simulated, proved and run.

A program calls plain JAX functions on named workers; what comes back are refs. One
backward pass then runs over all of them, and gradients stay where their leaves are:

    with jdag.simulate(["trainer", "ps"], seed=0) as cluster:
        w = cluster.put("ps", jnp.ones((8, 1)))
        with cluster.context() as ctx:
            loss = ctx.call("ps", mean_square, w, x)
            ctx.backward(loss)
            gradient = ctx.gradient(w).fetch()

What a simulated cluster is made of (links, faults, devices) is in `jdag.sim`, and what
spreads a function over the devices of one process in `jdag.parallel`.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # To import typing takes as long as all else here.
if TYPE_CHECKING:
    from typing import Any

    from jdag import errors, parallel, sim
    from jdag.cluster import Cluster
    from jdag.compute.pytrees import static
    from jdag.context import Context
    from jdag.drivers import connect, launch, simulate
    from jdag.errors import JdagError
    from jdag.functions import program, unjitted
    from jdag.hessian import hvp
    from jdag.optim import Optimizer
    from jdag.ref import Ref, fetch, stop_gradient
    from jdag.reference import oracle
    from jdag.transform import value_and_grad

__all__ = [
    "Cluster",
    "Context",
    "JdagError",
    "Optimizer",
    "Ref",
    "connect",
    "errors",
    "fetch",
    "hvp",
    "launch",
    "oracle",
    "parallel",
    "program",
    "sim",
    "simulate",
    "static",
    "stop_gradient",
    "unjitted",
    "value_and_grad",
]

# Imported at first use: JAX takes seconds to import, and commands and workers handle
# signals before that. The value is the module that defines the name, "" for a module.
_LATER = {
    "Cluster": "jdag.cluster",
    "Context": "jdag.context",
    "JdagError": "jdag.errors",
    "Optimizer": "jdag.optim",
    "Ref": "jdag.ref",
    "connect": "jdag.drivers",
    "errors": "",
    "fetch": "jdag.ref",
    "hvp": "jdag.hessian",
    "launch": "jdag.drivers",
    "oracle": "jdag.reference",
    "parallel": "",
    "program": "jdag.functions",
    "sim": "",
    "simulate": "jdag.drivers",
    "static": "jdag.compute.pytrees",
    "stop_gradient": "jdag.ref",
    "unjitted": "jdag.functions",
    "value_and_grad": "jdag.transform",
}


def _version() -> str:
    metadata = import_module("importlib.metadata")
    try:
        return str(metadata.version("jdag"))
    except metadata.PackageNotFoundError:  # From a checkout that is not installed.
        return "0+unknown"


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return globals().setdefault(name, _version())
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _LATER[name]
    found = (
        getattr(import_module(home), name) if home else import_module(f"jdag.{name}")
    )
    return globals().setdefault(name, found)


def __dir__() -> list[str]:
    return sorted({**globals(), **_LATER})
