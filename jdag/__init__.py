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

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from jdag import errors, parallel, sim
from jdag.cluster import Cluster
from jdag.compute.pytrees import static
from jdag.context import Context
from jdag.drivers import connect, launch, simulate
from jdag.errors import JdagError
from jdag.functions import program, unjitted
from jdag.hvp import hvp
from jdag.oracle import oracle
from jdag.ref import Ref, fetch, stop_gradient
from jdag.transform import value_and_grad

if TYPE_CHECKING:
    from jdag.optim import Optimizer

try:
    __version__ = version("jdag")
except PackageNotFoundError:  # From a checkout that is not installed.
    __version__ = "0+unknown"

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

# Found at first use: it loads optax, which a worker without an optimizer never needs.
_LATER = {"Optimizer": "jdag.optim"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_LATER[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({**globals(), **_LATER})
