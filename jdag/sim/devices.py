"""The devices of a worker: what jobs cost, and which of the ready ones runs next.

`DeviceModel` says what a job costs, in virtual time; `Device` is the state of one run:
jobs wait in the chooser's order and run one at a time.

Inputs:  `add(job, ...)` when the engine asks for a job, `begin(now_ns)` when the device
         may choose, `end()` when what runs is done.
Outputs: from `begin` the task that runs from now on, and for how long.

Invariants: at most one job runs; each that was added runs once, unless the worker dies;
`busy_ns` is the sum of what ran.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from jdag.engine.functions import name_of, transferred
from jdag.engine.protocol import Apply, Failure, Fill, Forward, Job, Sum, Vjp
from jdag.errors import ScenarioError, unusable
from jdag.runtime.chooser import Chooser, ReadyJobs
from jdag.runtime.tables import NS, is_ns
from jdag.sim.faults import Faults

# The function that `ctx.move` calls.
MOVED = name_of(transferred)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """What each job takes on a device, in nanoseconds of virtual time.

    A forward takes `forward_ns`, a vjp `backward_ns`; a sum of cotangents, a fill with
    zeros or ones and a hook `sum_ns`. `functions` has the exceptions: a function's
    name, with its module as `module:name` or without, and its (forward_ns,
    backward_ns). Moving a value is no work for a device: `ctx.move` takes nothing,
    unless `functions` names what it calls (`transferred`).

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
        """What a job takes by itself."""
        match job:
            case Forward():
                return self._of(job.function.name)[0]
            case Vjp():
                return self._of(job.function.name)[1]
            case Sum() | Fill() | Apply():
                return self.sum_ns
            case _:
                assert_never(job)

    def _of(self, name: str) -> tuple[int, int]:
        costs = self.functions.get(name)
        if costs is None:
            costs = self.functions.get(name.rpartition(":")[2])
        if costs is None:
            return (0, 0) if name == MOVED else (self.forward_ns, self.backward_ns)
        return costs


def _need_ns(key: str, value: object) -> None:
    if not is_ns(value):
        raise ScenarioError(unusable(key, value, NS))


FREE = DeviceModel()

Devices = DeviceModel | Mapping[str, DeviceModel] | None


def models(devices: Devices, workers: Sequence[str]) -> dict[str, DeviceModel]:
    """The model of each worker: one for all, or by name; none given is free of cost.

    Raises:
        ScenarioError: a worker that is not there, or what is no model; names it.
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


class Task:
    """A job on a device.

    `asked` is the record of what made the engine ask for it, `behind` that of the job
    that it had to wait for (-1: for none); `failure` is what came of it, if it failed.
    """

    __slots__ = ("added_ns", "asked", "behind", "cost_ns", "device", "failure", "job")

    def __init__(self, job: Job, asked: int, added_ns: int, device: "Device") -> None:
        self.job = job
        self.device = device
        self.asked = asked
        self.added_ns = added_ns
        self.behind = -1
        self.cost_ns = 0
        self.failure: Failure | None = None


class Device:
    """A device of one worker: `running` is its task, None while it has none.

    `called` is for the driver to note that it has already arranged for a `begin`;
    `finish` is the record of the last finish.
    """

    __slots__ = (
        *("_chooser", "_faults", "_model", "_ready", "_worker"),
        *("busy_ns", "called", "finish", "running"),
    )

    def __init__(
        self, worker: str, model: DeviceModel, chooser: Chooser, faults: Faults
    ) -> None:
        self._worker = worker
        self._model = model
        self._chooser = chooser
        self._faults = faults
        self._ready = ReadyJobs(chooser, worker)
        self.finish = -1
        self.running: Task | None = None
        self.called = False
        self.busy_ns = 0

    @property
    def wanting(self) -> bool:
        """Whether it could begin a job and no event for that is scheduled."""
        return self.running is None and not self.called and len(self._ready) > 0

    def beside(self) -> "Device":
        """Another device of the same worker, with the same costs and policy."""
        return Device(self._worker, self._model, self._chooser, self._faults)

    def add(self, job: Job, asked: int, now_ns: int) -> None:
        """One more job is ready."""
        self._ready.add(job, Task(job, asked, now_ns, self))

    def begin(self, now_ns: int) -> Task | None:
        """The task that runs from now on for its `cost_ns`; None if there is none."""
        assert self.running is None, self.running
        task: Task | None = self._ready.take()
        if task is None:
            return None
        cost_ns = self._model.cost_ns(task.job)
        task.cost_ns = self._faults.stretched_ns(self._worker, cost_ns, now_ns)
        if now_ns > task.added_ns:
            task.behind = self.finish
        self.running = task
        self.busy_ns += task.cost_ns
        return task

    def end(self) -> None:
        """The task that ran is done."""
        assert self.running is not None, self._worker
        self.running = None

    def stop(self) -> None:
        """Forget all that runs and waits: the worker is gone."""
        self._ready.clear()
        self.running = None
