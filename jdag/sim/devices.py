"""Costs of jobs on the devices of workers, in virtual time."""

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

# As `name_of` and `typed_name` make them: `name`, `module:name`, `module:name(types)`.
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
# The function that `ctx.move` calls.
MOVED = name_of(transferred)
# Of the nodes of a segment; others are sums.
_ACTIONS = {"forward": "F", "vjp": "B", "input_grad": "I", "weight_grad": "W"}


class Roofline(Settings, frozen=True, kw_only=True):
    """Times of functions from XLA's counts of their operations and bytes.

    A forward or a vjp takes the larger of flops / `flops_per_s` and bytes accessed /
    `bytes_per_s`, each rounded up to whole ns; see `jdag.sim.xla_cost`.

    Source: Williams, Waterman, Patterson, "Roofline: An Insightful Visual Performance
    Model for Multicore Architectures", CACM 2009.

    Raises:
        ScenarioError: a rate that is not an int or below 1; names it.
    """

    flops_per_s: COUNT
    bytes_per_s: COUNT

    def time_ns(self, flops: int, nbytes: int) -> int:
        """How long so many operations and bytes take."""
        pairs = ((flops, self.flops_per_s), (nbytes, self.bytes_per_s))
        return max([-(-count * 1_000_000_000 // rate) for count, rate in pairs])


class DeviceModel(Settings, frozen=True, kw_only=True):
    """The durations of jobs on a device, in nanoseconds of virtual time.

    A forward takes `forward_ns`, a vjp `backward_ns`; a sum of cotangents, a fill with
    zeros or ones and a hook `sum_ns`. Where a schedule has the halves of a vjp apart,
    the first one (I, the cotangents of inputs) takes `input_grad_ns`, None for half of
    the vjp, and the second one (W, the gradients of weights) the rest. `functions`
    overrides these: it maps a function's name, as `module:name` or `name`, to
    (forward_ns, backward_ns), or to F, I and W: (forward_ns, input_grad_ns,
    weight_grad_ns). `ctx.move` is free unless `functions` has an entry for the function
    that it calls (`transferred`). A forward and a backward that run as one
    (OVERLAP_F_B) take `overlap_ns`, None for both. `roofline` takes the place of
    `forward_ns` and `backward_ns`: other functions take as long as it says. A compiled
    step has several functions in one segment, so there each needs an entry.

    An entry of a name with the types of its inputs, "module:name(float32[8,4])", goes
    before that of the name. What processes add, as `jdag calibrate` measures it, is
    `job_ns` to each job of a function, and `call_ns`, which a program on this worker
    takes for each of its calls.

    Raises:
        ScenarioError: a time that is not an int or below 0, a name that no function can
            have, or a roofline that is none; names it. While a run goes on: a segment
            of a plan has a function without an entry, and there is a roofline.
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
        """A half that is more than the whole."""
        if (self.input_grad_ns or 0) > self.backward_ns:
            allowed = f"an integer up to backward_ns = {self.backward_ns}"
            yield unusable("input_grad_ns", self.input_grad_ns, allowed)

    def cost_ns(self, job: Job) -> int:
        """Return the duration of a job, not counting faults.

        A segment of a plan takes as long as what it consists of, one after the other.
        """
        if isinstance(job, Sum | Fill | Apply):
            return self.sum_ns
        if isinstance(job, CompileSegment):
            return 0
        if isinstance(job, RunSegment):
            parts = Counter(job.function.costs).items()
            costs_ns = [count * self._part_ns(*part) for part, count in parts]
            return self.job_ns + sum(costs_ns)
        action = job.action if isinstance(job, Vjp | VjpWeights) else "F"
        pair = job.function
        costs = None
        if any(["(" in name for name in self.functions]):
            costs = self.functions.get(typed_name(pair))
        costs = costs or self._costs(pair.name) or self._default(pair, action)
        own_ns = 0 if pair.name == MOVED else self.job_ns
        return own_ns + self._cost_ns(costs, action)

    def entries(self, pair: str, typed: str) -> list[str]:
        """The names in `functions` that a function has."""
        names = (typed, pair, pair.rpartition(":")[2])
        return [name for name in names if name in self.functions]

    def is_free(self, name: str) -> bool:
        """Whether a function without an entry is so while others have one."""
        is_meant = name == MOVED or name.startswith("jdag.") or not self.functions
        timed = self.forward_ns or self.backward_ns or self.job_ns or self.roofline
        return not (is_meant or timed)

    def costs_ns(self, jobs: Sequence[Job]) -> list[int]:
        """Return the durations of jobs that run as one, which add up to its own."""
        costs = [self.cost_ns(job) for job in jobs]
        if len(jobs) > 1 and self.overlap_ns is not None:
            first = min(costs[0], self.overlap_ns)
            return [first, self.overlap_ns - first]
        return costs

    def named_ns(self, name: str, action: str) -> int:
        """The duration of the action F, B, I or W of a function, by its name.

        Raises:
            ScenarioError: it has no entry, and there is a roofline.
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
        """The costs of a function without an entry, as far as the action needs them."""
        if self.roofline is None:
            return self.forward_ns, self.backward_ns
        kind = "forward" if action == "F" else "vjp"
        cost_ns = self.roofline.time_ns(*xla_cost(pair.pair, kind))
        return cost_ns, cost_ns

    def _part_ns(self, name: str, kind: str) -> int:
        """The cost of a part of a segment."""
        if kind not in _ACTIONS:
            return self.sum_ns
        return self.named_ns(name, _ACTIONS[kind])

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
    """The functions that a job runs: their names, without types and with them."""
    if isinstance(job, RunSegment):
        names = [name for name, kind in job.function.costs if kind in _ACTIONS]
        return [(name, name) for name in dict.fromkeys(names)]
    if isinstance(job, Forward | Vjp | VjpWeights):
        return [(job.function.name, typed_name(job.function))]
    return []


def check_costs(
    models: Mapping[str, DeviceModel], ran: Iterable[tuple[str, str, str]]
) -> None:
    """Warn of names that no function has had, and of functions that had no cost.

    Args:
        models: of each worker.
        ran: worker, name and name with types of each function that was called.
    """
    used, free = dict[str, None](), dict[str, None]()
    for worker, name, typed in ran:
        used |= dict.fromkeys(entries := models[worker].entries(name, typed))
        if not entries and models[worker].is_free(name):
            free[name] = None
    given = dict.fromkeys([name for one in models.values() for name in one.functions])
    unused = [name for name in given if name not in used]
    said = [f"no function that ran has the name {', '.join(unused)}"] * bool(unused)
    said += [f"without a cost, so in 0 ns, ran {', '.join(free)}"] * bool(free)
    if said:
        warnings.warn(
            f"costs in DeviceModel(functions=): {'; '.join(said)} (name a function "
            "that is meant to be free, too; `jdag run FILE --functions` shows all)",
            CostWarning,
            stacklevel=2,
        )


FREE_DEVICE = DeviceModel()

Devices = Annotated[
    Mapping[str, DeviceModel] | DeviceModel | None,
    Meta(description="a DeviceModel, or a mapping of workers to them"),
]


def models(devices: Devices, workers: Sequence[str]) -> dict[str, DeviceModel]:
    """Return the model of each worker; the default is free.

    Raises:
        ScenarioError: names an unknown worker.
    """
    if not isinstance(devices, Mapping):
        return dict.fromkeys(workers, devices or FREE_DEVICE)
    for worker in devices:
        if worker not in workers:
            allowed = "one of " + ", ".join(workers)
            raise ScenarioError(unusable("devices: worker", worker, allowed))
    return {worker: devices.get(worker, FREE_DEVICE) for worker in workers}
