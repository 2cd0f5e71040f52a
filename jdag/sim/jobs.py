"""Jobs on the devices of all workers of one run.

Inputs:  calls `compute(host, job, cause)`, for each job of an engine.
Outputs: a Computed event for that engine at the end of the job. A job's function is
         run at the start of the job, and the machine holds its values from then on, but
         the engine is notified only at the job's end.

Invariants: a device runs one job at a time, or two that a schedule runs as one. A
device chooses its next job after all other events of that time, but before timers. Each
job runs once, unless its worker is lost; `busy_ns` is the total cost of started jobs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jdag.compute.machine import blamed_name
from jdag.engine.protocol import (
    Computed,
    Forward,
    Job,
    Listed,
    Skip,
    Vjp,
    VjpWeights,
    Worker,
    named,
)
from jdag.runtime.chooser import Chooser
from jdag.runtime.failures import failure_of
from jdag.runtime.ready import ReadyJobs
from jdag.runtime.recorder import NO_CAUSE
from jdag.runtime.worker_runtime import WorkerRuntime
from jdag.schedules.actions import ScheduleStep
from jdag.sim.devices import FREE_DEVICE, functions_of, models
from jdag.sim.environment import Environment
from jdag.sim.timeline import BEGIN, EVENT

_OF_PAIRS = (Forward, Vjp, VjpWeights)
_Ready = tuple[Any, int, int]  # A job, the trace record of its request, its time in ns.


class _Device:
    """One device of an incarnation of the worker `name`, and the device's ready jobs.

    `busy` is set while a job runs, or while `_begin`, which chooses the next job, is on
    the timeline. `finish` is the trace record of the last job's end.
    """

    __slots__ = ("busy", "device", "finish", "name", "ready")

    def __init__(
        self,
        name: str,
        device: str | None,
        chooser: Chooser,
        steps: Sequence[ScheduleStep],
    ) -> None:
        self.name = name
        self.device = device
        self.ready = ReadyJobs(chooser, name, steps)
        self.busy = False
        self.finish = NO_CAUSE


class SimJobs:
    """All devices of one run. `busy_ns` has the computing time of each worker."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._timeline = env.timeline
        self.models = models(env.settings.devices, env.workers)
        self.calls_take_time = any([m.call_ns for m in self.models.values()])
        self._devices: dict[tuple[Worker, str | None], _Device] = {}
        schedule = env.settings.schedule
        self._steps: Mapping[str, Sequence[ScheduleStep]] = (
            schedule.lists if schedule else {}
        )
        # Cache of costs by worker, pair and action.
        self._costs: dict[tuple[str, Any, str], int] = {}
        self.busy_ns = dict.fromkeys(env.workers, 0)
        self._ran: dict[tuple[str, Any], Job] = {}  # By worker and function.

    @property
    def functions(self) -> list[tuple[str, str, str]]:
        """Return (worker, name, name with input types) of each function that ran."""
        jobs = [(worker, job) for (worker, _), job in self._ran.items()]
        return [(worker, *names) for worker, job in jobs for names in functions_of(job)]

    def compute(self, host: WorkerRuntime, job: Job, cause: int) -> None:
        name = host.machine.device_of(job)
        device = self._devices.get((host.worker, name)) or self._device(host, name)
        device.ready.add(job, (job, cause, self._timeline.now_ns))
        if not device.busy:
            self._choose(host, device)

    def _device(self, host: WorkerRuntime, name: str | None) -> _Device:
        device = self._devices.get((host.worker, name))
        if device is None:
            worker = named(host.worker)
            steps = () if name is not None else self._steps.get(worker, ())
            device = _Device(worker, name, self._env.chooser, steps)
            self._devices[host.worker, name] = device
        return device

    def _choose(self, host: WorkerRuntime, device: _Device) -> None:
        """Let an idle device choose a job after all other events of now."""
        device.busy = True
        now_ns = self._timeline.now_ns
        self._timeline.push(now_ns, BEGIN, (self._begin, host, device))

    def skip(self, host: WorkerRuntime, skip: Skip | Listed) -> None:
        device = self._device(host, None)  # Only default devices follow a schedule.
        device.ready.skip(skip)
        if len(device.ready) and not device.busy:
            self._choose(host, device)

    @property
    def stalled(self) -> list[str]:
        waits = [device.ready.stalled for device in self._devices.values()]
        return [wait for wait in waits if wait]

    def waits_for(self, worker: Worker) -> str:
        device = self._devices.get((worker, None))
        return "" if device is None else device.ready.waits_for

    def forget(self, worker: Worker | None) -> None:
        """Discard the devices and jobs of a lost worker, or of all workers (None)."""
        for key in [key for key in self._devices if worker in (None, key[0])]:
            del self._devices[key]

    def _begin(self, host: WorkerRuntime, device: _Device) -> None:
        device.busy = False
        batch = device.ready.take() if host.alive else ()
        if not batch:
            return
        device.busy = True
        env, now_ns = self._env, self._timeline.now_ns
        name = device.name
        costs = self._costs_ns(name, batch)
        if env.faults.slow:
            costs = [env.faults.stretched_ns(name, cost, now_ns) for cost in costs]
        cost_ns = sum(costs)
        self.busy_ns[name] += cost_ns
        computed: list[Computed] = []
        finish = (self._finish, host, device, computed)
        for (job, request, added_ns), cost in zip(batch, costs, strict=True):
            behind = device.finish if now_ns > added_ns else NO_CAUSE
            env.recorder.started(host.worker, job, cost, request=request, behind=behind)
            if not host.alive:
                return  # Recording may trigger a crash (`Crash.at_index`).
            try:
                error: BaseException | None = host.machine.run(job)
            except BaseException as interrupt:
                # The main program gets the interrupt. This job fails, so that no other
                # job waits for it indefinitely.
                failure = failure_of(interrupt, host.worker, job.path, blamed_name(job))
                computed.append(Computed(job.id, failure))
                self._timeline.push(now_ns + cost_ns, EVENT, finish)
                for unstarted in batch[len(computed) :]:
                    device.ready.add(unstarted[0], unstarted)
                raise
            failed = None
            if error is not None:
                failed = failure_of(error, host.worker, job.path, blamed_name(job))
            computed.append(Computed(job.id, failed))
        if cost_ns:
            self._timeline.push(now_ns + cost_ns, EVENT, finish)
        else:
            self._finish(host, device, computed)

    def _costs_ns(self, name: str, batch: Sequence[_Ready]) -> Sequence[int]:
        job, model = batch[0][0], self.models[name]
        for started, _, _ in batch:
            self._ran.setdefault((name, getattr(started, "function", None)), started)
        if model is FREE_DEVICE:
            return [0] * len(batch)
        if len(batch) > 1 or not isinstance(job, _OF_PAIRS):
            return model.costs_ns([job for job, _, _ in batch])
        key = (name, job.function, job.action)
        cost_ns = self._costs.get(key)
        if cost_ns is None:
            cost_ns = self._costs[key] = model.cost_ns(job)
        return (cost_ns,)

    def _finish(
        self, host: WorkerRuntime, device: _Device, computed: list[Computed]
    ) -> None:
        device.busy = False
        for each in computed:
            if host.alive:
                device.finish = host.handle(each)
        if len(device.ready) and not device.busy and host.alive:
            self._choose(host, device)
