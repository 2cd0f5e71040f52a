"""Durations of jobs on the workers' devices, in virtual time."""

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta, field

from jdag.compute.pairs import typed_name
from jdag.engine.functions import name_of, transferred
from jdag.engine.protocol import (
    Apply,
    CompileSegment,
    Fill,
    Forward,
    Job,
    RunSegment,
    Sum,
    Vjp,
    VjpWeights,
)
from jdag.errors import CostWarning, ScenarioError, unusable
from jdag.settings.validation import COUNT, NS, NS_MAX, Settings, where
from jdag.sim.xla_cost import xla_cost

# Forms of names: `name`, `module:name`, `module:name(types)`, `partial(module:name)`.
_NAME = r"[^:()\s]+|[^:()\s]+:[^:()\s]+(@[^()\s]+)?(\(.*\))?|partial\(.+:.+\)"
_NAMES = "name, module:name or module:name(types), such as m:layer(float32[8,4])"
_TIMES = (
    "two integers >= 0, (forward_ns, backward_ns), or three, (forward_ns, "
    "input_grad_ns, weight_grad_ns)"
)
_FUNCTION = Annotated[str, Meta(pattern=rf"\A({_NAME})\Z", description=_NAMES)]


def _are_costs(costs: tuple[int, ...]) -> bool:
    return len(costs) in (2, 3) and all(0 <= cost_ns <= NS_MAX for cost_ns in costs)


_COSTS = Annotated[tuple[int, ...], where(_are_costs, _TIMES)]
_BY_NAME = Meta(description=f'costs by name, {{"module:name": (1, 2)}}: {_TIMES}')
# Name of the function that `ctx.move` calls.
MOVED = name_of(transferred)
# The action of each kind of node in a compiled segment. All other kinds are sums.
_ACTIONS = {"forward": "F", "vjp": "B", "input_grad": "I", "weight_grad": "W"}


class Roofline(Settings, frozen=True, kw_only=True):
    """Durations of functions from XLA's counts of floating-point operations and bytes.

    A forward or a vjp takes the larger of two times, each rounded up to whole ns: flops
    / `flops_per_s`, and bytes accessed / `bytes_per_s`. See `jdag.sim.xla_cost`.

    Source: Williams, Waterman, Patterson, "Roofline: An Insightful Visual Performance
    Model for Multicore Architectures", CACM 2009.

    Raises:
        ScenarioError: a rate is not an integer >= 1.
    """

    flops_per_s: COUNT
    bytes_per_s: COUNT

    def time_ns(self, flops: int, nbytes: int) -> int:
        """Return the time of `flops` operations that access `nbytes` bytes, in ns."""
        pairs = ((flops, self.flops_per_s), (nbytes, self.bytes_per_s))
        return max([-(-count * 1_000_000_000 // rate) for count, rate in pairs])


class DeviceModel(Settings, frozen=True, kw_only=True):
    """Durations of a device's jobs, in nanoseconds of virtual time.

    Attributes:
        forward_ns: a forward.
        backward_ns: a vjp.
        sum_ns: a sum of cotangents, a fill with zeros or ones, or a hook.
        input_grad_ns: the input half (I) of a vjp that a schedule splits; the weight
            half (W) takes the remaining time of `backward_ns`. None: half of
            `backward_ns`.
        overlap_ns: a forward and a backward that a schedule runs as one (OVERLAP_F_B).
            None: the sum of both.
        job_ns: overhead added to each job that runs a function.
        call_ns: time that a program on this worker spends on each of its calls.
        functions: durations by function name: (forward_ns, backward_ns), or
            (forward_ns, input_grad_ns, weight_grad_ns). A name is "name", "module:name"
            or, with input types, "module:name(float32[8,4])"; an entry with types takes
            precedence.
        roofline: a model for functions without an entry, in place of `forward_ns` and
            `backward_ns`. A compiled step joins several functions into one segment;
            each function of a compiled step needs an entry.

    `ctx.move` is free unless `functions` has an entry for `transferred`, the function
    that it calls. `jdag calibrate` measures `job_ns`, `call_ns` and `functions`.

    Raises:
        ScenarioError: a time is not an integer >= 0, a function name is malformed, or
            the roofline is not a `Roofline`. Raised during a run: there is a roofline,
            but a function of a compiled step has no entry.
    """

    forward_ns: NS = 0
    backward_ns: NS = 0
    sum_ns: NS = 0
    input_grad_ns: NS | None = None
    overlap_ns: NS | None = None
    job_ns: NS = 0
    call_ns: NS = 0
    functions: Annotated[Mapping[_FUNCTION, _COSTS], _BY_NAME] = field(
        default_factory=dict
    )
    roofline: Roofline | None = None

    def contradictions(self) -> Iterator[str]:
        """Yield an error if half of a vjp takes longer than the vjp."""
        if (self.input_grad_ns or 0) > self.backward_ns:
            allowed = f"an integer up to backward_ns = {self.backward_ns}"
            yield unusable("input_grad_ns", self.input_grad_ns, allowed)

    def cost_ns(self, job: Job) -> int:
        """Return the duration of a job in ns, without the effect of faults.

        A segment of a compiled step takes the sum of its parts.
        """
        if isinstance(job, Sum | Fill | Apply):
            return self.sum_ns
        if isinstance(job, CompileSegment):
            return 0
        if isinstance(job, RunSegment):
            ns = self.job_ns
            for (name, kind), count in Counter(job.function.costs).items():
                action = _ACTIONS.get(kind)
                ns += count * (self.named_ns(name, action) if action else self.sum_ns)
            return ns
        action = job.action if isinstance(job, Vjp | VjpWeights) else "F"
        pair = job.function
        costs = None
        if any(["(" in name for name in self.functions]):
            costs = self.functions.get(typed_name(pair))
        costs = costs or self._costs(pair.name) or self._default(pair, action)
        overhead_ns = 0 if pair.name == MOVED else self.job_ns
        return overhead_ns + self._cost_ns(costs, action)

    def entries(self, pair: str, typed: str) -> list[str]:
        """Return the keys of `functions` that match a function's names."""
        names = (typed, pair, pair.rpartition(":")[2])
        return [name for name in names if name in self.functions]

    def is_free(self, name: str) -> bool:
        """Whether a function without an entry takes 0 ns, perhaps by mistake."""
        is_meant = name == MOVED or name.startswith("jdag.") or not self.functions
        timed = self.forward_ns or self.backward_ns or self.job_ns or self.roofline
        return not (is_meant or timed)

    def costs_ns(self, jobs: Sequence[Job]) -> list[int]:
        """Return the duration in ns of each job. Several jobs run as one job."""
        costs = [self.cost_ns(job) for job in jobs]
        if len(jobs) > 1 and self.overlap_ns is not None:
            first = min(costs[0], self.overlap_ns)
            return [first, self.overlap_ns - first]
        return costs

    def named_ns(self, name: str, action: str) -> int:
        """Return the duration in ns of the action F, B, I or W of the function `name`.

        Raises:
            ScenarioError: there is a roofline, but the function has no entry.
        """
        costs = self._costs(name)
        if costs is None:
            if self.roofline is not None:
                allowed = "an entry for each function of a compiled step"
                raise ScenarioError(unusable("functions", name, allowed))
            costs = (self.forward_ns, self.backward_ns)
        return self._cost_ns(costs, action)

    def _costs(self, name: str) -> tuple[int, ...] | None:
        functions = self.functions
        costs = functions.get(name) or functions.get(name.rpartition(":")[2])
        return (0, 0) if costs is None and name == MOVED else costs

    def _default(self, pair: Any, action: str) -> tuple[int, ...]:
        """Return costs without an entry. With a roofline, use only that of `action`."""
        if self.roofline is None:
            return self.forward_ns, self.backward_ns
        kind = "forward" if action == "F" else "vjp"
        cost_ns = self.roofline.time_ns(*xla_cost(pair.pair, kind))
        return cost_ns, cost_ns

    def _cost_ns(self, costs: tuple[int, ...], action: str) -> int:
        forward_ns, *backward = costs
        if action == "F":
            return forward_ns
        if action == "B":
            return sum(backward)
        first = backward[0]
        if len(backward) == 1:
            first = first // 2 if self.input_grad_ns is None else self.input_grad_ns
        return first if action == "I" else max(0, sum(backward) - first)


def functions_of(job: Job) -> list[tuple[str, str]]:
    """Return (name, name with input types) of each function that a job runs."""
    if isinstance(job, RunSegment):
        names = [name for name, kind in job.function.costs if kind in _ACTIONS]
        return [(name, name) for name in dict.fromkeys(names)]
    if isinstance(job, Forward | Vjp | VjpWeights):
        return [(job.function.name, typed_name(job.function))]
    return []


def check_costs(
    models: Mapping[str, DeviceModel], ran: Iterable[tuple[str, str, str]]
) -> None:
    """Warn of entries of functions that did not run, and of functions without a cost.

    `ran` has (worker, name, name with input types) of each function that ran.
    """
    used, free = dict[str, None](), dict[str, None]()
    for worker, name, typed in ran:
        used |= dict.fromkeys(entries := models[worker].entries(name, typed))
        if not entries and models[worker].is_free(name):
            free[name] = None
    entered = dict.fromkeys([key for m in models.values() for key in m.functions])
    unused = [name for name in entered if name not in used]
    problems = [f"no function named {', '.join(unused)} ran"] * bool(unused)
    problems += [f"no cost is set for {', '.join(free)}, which took 0 ns"] * bool(free)
    if problems:
        warnings.warn(
            f"costs in DeviceModel(functions=): {'; '.join(problems)} (set the costs "
            "(0, 0) if a function should take 0 ns; `jdag run FILE --functions` lists "
            "all functions)",
            CostWarning,
            stacklevel=2,
        )


FREE_DEVICE = DeviceModel()

Devices = Annotated[
    Mapping[str, DeviceModel] | DeviceModel | None,
    Meta(description="a DeviceModel, or a mapping of workers to them"),
]


def models(devices: Devices, workers: Sequence[str]) -> dict[str, DeviceModel]:
    if not isinstance(devices, Mapping):
        return dict.fromkeys(workers, devices or FREE_DEVICE)
    for worker in devices:
        if worker not in workers:
            allowed = "one of " + ", ".join(workers)
            raise ScenarioError(unusable("devices: worker", worker, allowed))
    return {worker: devices.get(worker, FREE_DEVICE) for worker in workers}
