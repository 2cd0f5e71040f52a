"""Programs as data, which Hypothesis draws and shrinks: calls on leaves over workers.

Inputs:  workers, owners of leaves, calls by worker, function and arguments.
Outputs: a `jdag.scenario.Case`; JSON data, and a program from such data.

All arrays have the same shape and there are few functions, so that compiled functions
are reused.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from jdag.scenario.case import Case

SIZE = 3


def _scale(x: Any, y: Any) -> Any:
    return jnp.sin(x) * y


def _mix(x: Any, y: Any) -> Any:
    return jnp.tanh(x + 0.5 * y)


def _halve(x: Any, y: Any) -> Any:
    return 0.5 * x


def _total(*terms: Any) -> Any:
    return sum([jnp.sum(term) for term in terms])


FUNCTIONS = {"scale": _scale, "mix": _mix, "halve": _halve}


@dataclass(frozen=True)
class DrawnCall:
    """A call. Arguments are indices into the leaves, followed by earlier results."""

    worker: str
    function: str
    arguments: tuple[int, int]


@dataclass(frozen=True)
class Program:
    """A program of one context.

    Attributes:
        workers: names of the workers; the program runs on the first.
        leaves: the owner of each leaf.
        calls: the calls in program order; the root is the sum of the last `terms`
            values.
        terms: number of values in the sum, which the last worker computes.
        passes: number of backward passes.
        mode: mode of the passes, "smart" or "fast".
    """

    workers: tuple[str, ...]
    leaves: tuple[str, ...]
    calls: tuple[DrawnCall, ...]
    terms: int = 1
    passes: int = 1
    mode: Literal["smart", "fast"] = "smart"

    def case(self) -> Case:
        """Return the program as a `jdag.scenario.Case`, which has an oracle."""
        names = [f"w{number}" for number in range(len(self.leaves))]
        steps = np.linspace(0.1, 1.3, SIZE, dtype=np.float32)

        def program(ctx: Any, params: Mapping[str, Any]) -> Any:
            values = [params[name] for name in names]
            for call in self.calls:
                arguments = [values[number] for number in call.arguments]
                values.append(
                    ctx.call(call.worker, FUNCTIONS[call.function], *arguments)
                )
            return ctx.call(self.workers[-1], _total, *values[-self.terms :])

        return Case(
            program,
            params={name: steps + number for number, name in enumerate(names)},
            placement=dict(zip(names, self.leaves, strict=True)),
            passes=self.passes,
            mode=self.mode,
        )

    def data(self) -> dict[str, Any]:
        """Return the program as JSON data, which `program_of` reads."""
        return asdict(self)


def program_of(data: Mapping[str, Any]) -> Program:
    """Return the program that this data, a result of `Program.data`, describes."""
    calls = [
        DrawnCall(**{**c, "arguments": tuple(c["arguments"])}) for c in data["calls"]
    ]
    lists = {name: tuple(data[name]) for name in ("workers", "leaves")}
    return Program(**{**data, **lists, "calls": tuple(calls)})
