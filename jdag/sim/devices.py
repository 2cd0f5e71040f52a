"""Costs of jobs on the devices of workers, in virtual time."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jdag.compute.xla_cost import xla_cost
from jdag.engine.functions import name_of, transferred
from jdag.engine.protocol import (
    Apply,
    CompileSegment,
    Fill,
    Job,
    RunSegment,
    Sum,
    Vjp,
)
from jdag.errors import ScenarioError, unusable
from jdag.runtime.tables import NS, is_ns

_COSTS = {
    2: ("forward_ns", "backward_ns"),
    3: ("forward_ns", "input_grad_ns", "weight_grad_ns"),
}

# The function that `ctx.move` calls.
MOVED = name_of(transferred)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Times of functions from XLA's counts of their operations and bytes.

    A forward or a vjp takes the larger of flops / `flops_per_s` and bytes accessed /
    `bytes_per_s`, each rounded up to whole ns; see `jdag.compute.xla_cost`.

    Source: Williams, Waterman, Patterson, "Roofline: An Insightful Visual Performance
    Model for Multicore Architectures", CACM 2009.

    Raises:
        ScenarioError: a rate that is not an int or below 1; names it.
    """

    flops_per_s: int
    bytes_per_s: int

    def __post_init__(self) -> None:
        for key in ("flops_per_s", "bytes_per_s"):
            rate = getattr(self, key)
            if type(rate) is not int or rate < 1:
                raise ScenarioError(unusable(key, rate, "an integer >= 1"))

    def time_ns(self, flops: int, nbytes: int) -> int:
        """How long so many operations and bytes take."""
        pairs = ((flops, self.flops_per_s), (nbytes, self.bytes_per_s))
        return max([-(-count * 1_000_000_000 // rate) for count, rate in pairs])


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """The durations of jobs on a device, in nanoseconds of virtual time.

    A forward takes `forward_ns`, a vjp `backward_ns`; a sum of cotangents, a fill with
    zeros or ones and a hook `sum_ns`. `functions` overrides these: it maps a function's
    name, as `module:name` or `name`, to (forward_ns, backward_ns), or to F, I and W:
    (forward_ns, input_grad_ns, weight_grad_ns), whose whole vjp takes I + W. `ctx.move`
    is free unless `functions` has an entry for the function that it calls
    (`transferred`). `roofline` takes the place of `forward_ns` and `backward_ns`: other
    functions take as long as it says. A compiled step has several functions in one
    segment, so there each needs an entry.

    Raises:
        ScenarioError: a time that is not an int or below 0, or a roofline that is none;
            names it. While a run goes on: a segment of a plan has a function without an
            entry, and there is a roofline.
    """

    forward_ns: int = 0
    backward_ns: int = 0
    sum_ns: int = 0
    functions: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    roofline: Roofline | None = None

    def __post_init__(self) -> None:
        for key in ("forward_ns", "backward_ns", "sum_ns"):
            _need_ns(key, getattr(self, key))
        if not isinstance(self.functions, Mapping):
            allowed = 'costs by name: {"module:name": (forward_ns, backward_ns)}'
            raise ScenarioError(unusable("functions", self.functions, allowed))
        for name, costs in self.functions.items():
            if not isinstance(costs, tuple) or len(costs) not in (2, 3):
                allowed = f"two, forward_ns and backward_ns, each {NS}, or three"
                allowed += ", forward_ns, input_grad_ns and weight_grad_ns"
                raise ScenarioError(unusable(f"functions[{name!r}]", costs, allowed))
            for key, cost_ns in zip(_COSTS[len(costs)], costs, strict=True):
                _need_ns(f"functions[{name!r}].{key}", cost_ns)
        if not isinstance(self.roofline, Roofline | None):
            allowed = "a Roofline, or None"
            raise ScenarioError(unusable("roofline", self.roofline, allowed))

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
            return sum([count * self._cost_ns(*part) for part, count in parts])
        kind = "vjp" if isinstance(job, Vjp) else "forward"
        if self.roofline is not None and self._costs(job.function.name) is None:
            return self.roofline.time_ns(*xla_cost(job.function.pair, kind))
        return self._cost_ns(job.function.name, kind)

    def _costs(self, name: str) -> tuple[int, ...] | None:
        functions = self.functions
        costs = functions.get(name) or functions.get(name.rpartition(":")[2])
        return (0, 0) if costs is None and name == MOVED else costs

    def _cost_ns(self, name: str, kind: str) -> int:
        if kind not in ("forward", "vjp"):
            return self.sum_ns
        costs = self._costs(name)
        if costs is None:
            if self.roofline is not None:
                allowed = "an entry for each function of a compiled step"
                raise ScenarioError(unusable("functions", name, allowed))
            costs = (self.forward_ns, self.backward_ns)
        return sum(costs[1:]) if kind == "vjp" else costs[0]


def _need_ns(key: str, value: object) -> None:
    if not is_ns(value):
        raise ScenarioError(unusable(key, value, NS))


FREE = DeviceModel()

Devices = DeviceModel | Mapping[str, DeviceModel] | None


def models(devices: Devices, workers: Sequence[str]) -> dict[str, DeviceModel]:
    """Return the model of each worker; the default is free.

    Raises:
        ScenarioError: names an unknown worker, or a value that is not a DeviceModel.
    """
    if devices is None or isinstance(devices, DeviceModel):
        return dict.fromkeys(workers, devices or FREE)
    if not isinstance(devices, Mapping):
        allowed = "a DeviceModel, or a mapping of workers to them"
        raise ScenarioError(unusable("devices", devices, allowed))
    for worker, model in devices.items():
        if worker not in workers:
            allowed = "one of " + ", ".join(workers)
            raise ScenarioError(unusable("devices: worker", worker, allowed))
        if not isinstance(model, DeviceModel):
            raise ScenarioError(
                unusable(f"devices[{worker!r}]", model, "a DeviceModel")
            )
    return {worker: devices.get(worker, FREE) for worker in workers}
