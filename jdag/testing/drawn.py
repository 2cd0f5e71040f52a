"""Programs as data, for Hypothesis to draw and to shrink: calls on leaves over workers.

Inputs:  workers, the owners of leaves, calls by worker, function and arguments.
Outputs: a `jdag.scenario.Case`; data that JSON can hold, and back.

All arrays have one shape and functions are few, so that compiled functions are reused.
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
    """A call; arguments are numbers of values: first the leaves, then earlier calls."""

    worker: str
    function: str
    arguments: tuple[int, int]


@dataclass(frozen=True)
class Program:
    """A program of one context.

    Attributes:
        workers: their names; the program runs on the first.
        leaves: the owner of each.
        calls: in the order of the program; its root is the sum of the last `terms`.
        terms: how many values are summed, by the last worker.
        passes: how often the backward pass is repeated.
        mode: of the passes.
    """

    workers: tuple[str, ...]
    leaves: tuple[str, ...]
    calls: tuple[DrawnCall, ...]
    terms: int = 1
    passes: int = 1
    mode: Literal["smart", "fast"] = "smart"

    def case(self) -> Case:
        """The program as a case, which has an oracle."""
        names = [f"w{number}" for number in range(len(self.leaves))]
        steps = np.linspace(0.1, 1.3, SIZE, dtype=np.float32)

        def program(ctx: Any, params: Mapping[str, Any]) -> Any:
            values = [params[name] for name in names]
            for call in self.calls:
                given = [values[number] for number in call.arguments]
                values.append(ctx.call(call.worker, FUNCTIONS[call.function], *given))
            return ctx.call(self.workers[-1], _total, *values[-self.terms :])

        return Case(
            program,
            params={name: steps + number for number, name in enumerate(names)},
            placement=dict(zip(names, self.leaves, strict=True)),
            passes=self.passes,
            mode=self.mode,
        )

    def data(self) -> dict[str, Any]:
        """What `program_of` makes the program of, as JSON can hold it."""
        return asdict(self)


def program_of(data: Mapping[str, Any]) -> Program:
    """The program that this was the data of."""
    calls = [
        DrawnCall(**{**c, "arguments": tuple(c["arguments"])}) for c in data["calls"]
    ]
    lists = {name: tuple(data[name]) for name in ("workers", "leaves")}
    return Program(**{**data, **lists, "calls": tuple(calls)})
