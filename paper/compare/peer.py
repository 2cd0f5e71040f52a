"""The peer's side: PyTorch's RPC over TensorPipe and its distributed autograd.

    PYTHON -m paper.compare.peer [--quick] [--pin one]

Run by the Python of an environment that has torch; prints a JSON object after each row,
of all so far. Calls use the fastest way that the peer has for each: its own operators
by name, Python functions where it has none. Stages of the MLP hand what they make to
each other by remote refs.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed import autograd, rpc
from torch.distributed.optim import DistributedOptimizer

from paper.compare import pinning, rows
from paper.compare.pinning import CALLER


def identity(value: torch.Tensor) -> torch.Tensor:
    """What goes there and back."""
    return value


class Stage(torch.nn.Module):
    """One layer of the MLP, on its worker."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        weight, bias = rows.weights(width)[number]
        self.weight = torch.nn.Parameter(torch.from_numpy(weight))
        self.bias = torch.nn.Parameter(torch.from_numpy(bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Layer of (batch, width)."""
        return torch.tanh(torch.addmm(self.bias, x, self.weight))


def parameters(stage: Any) -> list[Any]:
    """Remote refs of the parameters of a stage, on its worker."""
    return [rpc.RRef(parameter) for parameter in stage.local_value().parameters()]


def forward(stage: Any, x: Any) -> torch.Tensor:
    """A stage of what is here, or comes from where it is."""
    return stage.local_value()(x if isinstance(x, torch.Tensor) else x.to_here())


def gradient(stage: Any, context: int) -> torch.Tensor:
    """The gradient of the weight of a stage in a context, on its worker."""
    return autograd.get_gradients(context)[stage.local_value().weight]


class Peer:
    """PyTorch's side of the rows; see `rows.Side`."""

    def __init__(self) -> None:
        self.leaf = torch.from_numpy(rows.leaf()).requires_grad_()
        self.factors = [torch.from_numpy(rows.factor(i)) for i in range(7)]
        self.stages: dict[int, list[Any]] = {}
        self.batches: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.optimizers: dict[int, Any] = {}

    def array(self, value: np.ndarray) -> torch.Tensor:
        """A tensor of the same memory."""
        return torch.from_numpy(value)

    def add(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """By torch's own operator, outside of a context: its fastest."""
        return rpc.rpc_sync(rows.WORKERS[0], torch.add, args=(one, other))

    def identity(self, value: torch.Tensor) -> torch.Tensor:
        """By a Python function."""
        return rpc.rpc_sync(rows.WORKERS[0], identity, args=(value,))

    def chain(self, trips: int) -> rows.Phases:
        """Each reply comes back by itself, and goes out as an argument."""
        with autograd.context() as context:
            yield None
            loss = self._chained(trips)
            yield loss.item()
            autograd.backward(context, [loss])
            yield autograd.get_gradients(context)[self.leaf]

    def _chained(self, trips: int) -> torch.Tensor:
        value = self.leaf
        for number in range(trips):
            args = (value, self.factors[number % 7])
            value = rpc.rpc_sync(rows.WORKERS[0], torch.mul, args=args)
        return value.sum()

    def fan_out(self, calls: int) -> rows.Phases:
        """All calls at once, as futures."""
        with autograd.context() as context:
            yield None
            products = [
                rpc.rpc_async(
                    rows.place(number),
                    torch.mul,
                    args=(self.leaf, self.factors[number % 7]),
                )
                for number in range(calls)
            ]
            loss = torch.stack([product.wait() for product in products]).sum()
            yield loss.item()
            autograd.backward(context, [loss])
            yield autograd.get_gradients(context)[self.leaf]

    def retained(self, passes: int) -> rows.Phases:
        """Passes over the one graph, which they keep."""
        with autograd.context() as context:
            loss = self._chained(1)
            yield None
            for _ in range(passes):
                autograd.backward(context, [loss], retain_graph=True)
            yield autograd.get_gradients(context)[self.leaf]

    def prepare(self, width: int) -> None:
        """A module a stage, made on its worker; one optimizer over all parameters."""
        stages = [
            rpc.remote(rows.place(number), Stage, args=(width, number))
            for number in range(rows.STAGES)
        ]
        found = [
            ref
            for stage in stages
            for ref in rpc.rpc_sync(stage.owner(), parameters, args=(stage,))
        ]
        x, y = rows.batch(width)
        self.stages[width] = stages
        self.batches[width] = (torch.from_numpy(x), torch.from_numpy(y))
        self.optimizers[width] = DistributedOptimizer(
            torch.optim.SGD, found, lr=rows.LEARNING_RATE
        )

    def gradients(self, width: int) -> list[np.ndarray]:
        """One request for each stage, in the context."""
        with autograd.context() as context:
            autograd.backward(context, [self._loss(width)])
            return [
                rpc.rpc_sync(stage.owner(), gradient, args=(stage, context)).numpy()
                for stage in self.stages[width]
            ]

    def step(self, width: int) -> float:
        """The optimizer's step waits for all owners by itself."""
        with autograd.context() as context:
            loss = self._loss(width)
            autograd.backward(context, [loss])
            self.optimizers[width].step(context)
            return loss.item()

    def _loss(self, width: int) -> torch.Tensor:
        value, y = self.batches[width]
        *inner, last = self.stages[width]
        for stage in inner:
            value = rpc.remote(stage.owner(), forward, args=(stage, value))
        value = rpc.rpc_sync(last.owner(), forward, args=(last, value))
        return torch.mean((value - y) ** 2)

    def memory(self) -> list[int]:
        """Each worker reads its own."""
        return [
            rpc.rpc_sync(worker, rows.peak_bytes, args=("self",))
            for worker in rows.WORKERS
        ]

    def cores(self) -> dict[str, list[int]]:
        """By the same."""
        return {name: rpc.rpc_sync(name, pinning.held) for name in rows.WORKERS}


def join(name: str, meeting: str) -> None:
    """Take part under a name, the others of which meet at a file."""
    names = (CALLER, *rows.WORKERS)
    options = rpc.TensorPipeRpcBackendOptions(init_method=meeting, rpc_timeout=120)
    rpc.init_rpc(
        name,
        rank=names.index(name),
        world_size=len(names),
        rpc_backend_options=options,
    )


def main(arguments: Sequence[str]) -> None:
    """Be a worker where a name and a meeting place are given, else the caller."""
    if arguments[:1] == ["--worker"]:
        join(*arguments[1:3])
        rpc.shutdown()
        return
    given, wanted = rows.asked(__doc__), rows.of(rows.PEER)
    with tempfile.TemporaryDirectory() as folder:
        meeting = (Path(folder) / "meeting").as_uri()
        command = [sys.executable, "-m", "paper.compare.peer", "--worker"]
        with pinning.of_workers():
            workers = [
                subprocess.Popen([*command, name, meeting]) for name in rows.WORKERS
            ]
        try:
            join(CALLER, meeting)
            settings = {
                "torch": torch.__version__,
                "threads": torch.get_num_threads(),
            }
            for found in rows.measure(Peer(), given.repeats, wanted, given.pin):
                rows.tell({**found, "settings": settings})
            rpc.shutdown()
        except BaseException:
            for worker in workers:  # They would poll for ever.
                worker.kill()
            raise
        for worker in workers:
            worker.wait(timeout=60)


if __name__ == "__main__":
    main(sys.argv[1:])
