"""Costs of jobs on the devices of workers, in virtual time."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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

# The function that `ctx.move` calls.
MOVED = name_of(transferred)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """The durations of jobs on a device, in nanoseconds of virtual time.

    A forward takes `forward_ns`, a vjp `backward_ns`; a sum of cotangents, a fill with
    zeros or ones and a hook `sum_ns`. `functions` overrides these: it maps a function's
    name, as `module:name` or `name`, to (forward_ns, backward_ns). `ctx.move` is free
    unless `functions` has an entry for the function that it calls (`transferred`).

    Raises:
        ScenarioError: a time that is not an int or below 0; names it.
    """

    forward_ns: int = 0
    backward_ns: int = 0
    sum_ns: int = 0
    functions: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key in ("forward_ns", "backward_ns", "sum_ns"):
            _need_ns(key, getattr(self, key))
        if not isinstance(self.functions, Mapping):
            allowed = 'costs by name: {"module:name": (forward_ns, backward_ns)}'
            raise ScenarioError(unusable("functions", self.functions, allowed))
        for name, costs in self.functions.items():
            if not isinstance(costs, tuple) or len(costs) != 2:
                allowed = f"two, forward_ns and backward_ns, each {NS}"
                raise ScenarioError(unusable(f"functions[{name!r}]", costs, allowed))
            for key, cost_ns in zip(("forward_ns", "backward_ns"), costs, strict=True):
                _need_ns(f"functions[{name!r}].{key}", cost_ns)

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
        return self._cost_ns(job.function.name, kind)

    def costs_ns(self, jobs: Sequence[Job]) -> list[int]:
        """Return the durations of jobs that run as one, which together are its own."""
        return [self.cost_ns(job) for job in jobs]

    def _cost_ns(self, name: str, kind: str) -> int:
        if kind not in ("forward", "vjp"):
            return self.sum_ns
        functions = self.functions
        costs = functions.get(name) or functions.get(name.rpartition(":")[2])
        if costs is None:
            is_move = name == MOVED
            costs = (0, 0) if is_move else (self.forward_ns, self.backward_ns)
        return costs[kind == "vjp"]


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
