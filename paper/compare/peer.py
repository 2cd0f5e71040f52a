"""The peer's side: PyTorch's RPC over TensorPipe and its distributed autograd.

    PYTHON -m paper.compare.peer [--quick] [--pin one]

It runs in a Python environment with torch. After each row it prints a JSON object with
all rows so far. Calls use the peer's fastest method: operators of torch or, where it
has no operator, Python functions. Stages of the MLP pass their outputs to each other by
remote refs.
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
    """Return the argument, so that a tensor makes a round trip."""
    return value


class Stage(torch.nn.Module):
    """A layer of the MLP; the object is on the layer's worker."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        weight, bias = rows.weights(width)[number]
        self.weight = torch.nn.Parameter(torch.from_numpy(weight))
        self.bias = torch.nn.Parameter(torch.from_numpy(bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the layer; input and output are (batch, width)."""
        return torch.tanh(torch.addmm(self.bias, x, self.weight))


def parameters(stage: Any) -> list[Any]:
    """Return remote refs to a stage's parameters. Runs on the stage's worker."""
    return [rpc.RRef(parameter) for parameter in stage.local_value().parameters()]


def forward(stage: Any, x: Any) -> torch.Tensor:
    """Apply a stage to a tensor or a remote ref. Runs on the stage's worker."""
    return stage.local_value()(x if isinstance(x, torch.Tensor) else x.to_here())


def gradient(stage: Any, context: int) -> torch.Tensor:
    """Return the gradient of a stage's weight. Runs on the stage's worker."""
    return autograd.get_gradients(context)[stage.local_value().weight]


class Peer:
    """PyTorch's implementation of the rows; see `rows.Side`."""

    def __init__(self) -> None:
        self.leaf = torch.from_numpy(rows.leaf()).requires_grad_()
        self.factors = [torch.from_numpy(rows.factor(i)) for i in range(7)]
        self.stages: dict[int, list[Any]] = {}
        self.batches: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.optimizers: dict[int, Any] = {}

    def array(self, value: np.ndarray) -> torch.Tensor:
        """Return a tensor that shares the array's memory."""
        return torch.from_numpy(value)

    def add(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Add by an operator of torch, without a context, since this is fastest."""
        return rpc.rpc_sync(rows.WORKERS[0], torch.add, args=(one, other))

    def identity(self, value: torch.Tensor) -> torch.Tensor:
        """Call the Python function `identity` on a worker."""
        return rpc.rpc_sync(rows.WORKERS[0], identity, args=(value,))

    def chain(self, trips: int) -> rows.Phases:
        """Wait for each product, then send it as an argument of the next call."""
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
        """Start all calls without waiting, then wait for all products."""
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
        """Run several passes over one retained graph."""
        with autograd.context() as context:
            loss = self._chained(1)
            yield None
            for _ in range(passes):
                autograd.backward(context, [loss], retain_graph=True)
            yield autograd.get_gradients(context)[self.leaf]

    def prepare(self, width: int) -> None:
        """Make each stage on its worker, and one optimizer for all stages."""
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
        """Fetch the gradients with one request for each stage."""
        with autograd.context() as context:
            autograd.backward(context, [self._loss(width)])
            return [
                rpc.rpc_sync(stage.owner(), gradient, args=(stage, context)).numpy()
                for stage in self.stages[width]
            ]

    def step(self, width: int) -> float:
        """Step. The peer's optimizer waits until all workers have stepped."""
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
        """Call each worker, which reads its own peak memory."""
        return [
            rpc.rpc_sync(worker, rows.peak_bytes, args=("self",))
            for worker in rows.WORKERS
        ]

    def cores(self) -> dict[str, list[int]]:
        """Call each worker, which reads its own cores."""
        return {name: rpc.rpc_sync(name, pinning.held) for name in rows.WORKERS}


def join(name: str, meeting: str) -> None:
    """Join the RPC group as `name`; `meeting` is the URI of the rendezvous file."""
    names = (CALLER, *rows.WORKERS)
    options = rpc.TensorPipeRpcBackendOptions(init_method=meeting, rpc_timeout=120)
    rpc.init_rpc(
        name,
        rank=names.index(name),
        world_size=len(names),
        rpc_backend_options=options,
    )


def main(arguments: Sequence[str]) -> None:
    """Run as a worker after `--worker NAME URI`, otherwise as the caller."""
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
            for worker in workers:  # They would wait indefinitely.
                worker.kill()
            raise
        for worker in workers:
            worker.wait(timeout=60)


if __name__ == "__main__":
    main(sys.argv[1:])
