"""Jobs on the devices of all workers of one run.

Inputs:  `compute(host, job, cause)` when an engine asks for a job.
Outputs: Computed, to that engine, when the job's time is over. The job is computed when
         its time begins; its values are held from then on, but not visible to the
         engine until it ends.

Invariants: a device runs one job at a time, or two that a schedule has as one, and
chooses it after the other events of that time, but before timers; each job runs once,
unless its worker dies; `busy_ns` is the total cost of started jobs.
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
_Ready = tuple[Any, int, int]  # A job, the record that asked for it, and when it did.


class _Device:
    """A device of one incarnation of the worker `name`, and the jobs ready for it.

    It is `busy` while a job runs or it is about to choose one; `finish` is the record
    of the last finish. `device` is which one it is, None for the worker's default.
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
    """All devices of one run; `busy_ns` is how long those of each worker computed.

    `models` has the costs of each worker.
    """

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._timeline = env.timeline
        self.models = models(env.settings.devices, env.workers)
        self._devices: dict[tuple[Worker, str | None], _Device] = {}
        schedule = env.settings.schedule
        self._steps: Mapping[str, Sequence[ScheduleStep]] = (
            schedule.lists if schedule else {}
        )
        # By worker, pair and action, as far as jobs have asked for them.
        self._costs: dict[tuple[str, Any, str], int] = {}
        self.busy_ns = dict.fromkeys(env.workers, 0)
        self._ran: dict[tuple[str, Any], Job] = {}  # By worker and function.

    @property
    def functions(self) -> list[tuple[str, str, str]]:
        """What ran so far: worker, name, and name with the types of inputs."""
        jobs = [(worker, job) for (worker, _), job in self._ran.items()]
        return [(worker, *of) for worker, job in jobs for of in functions_of(job)]

    def compute(self, host: WorkerRuntime, job: Job, cause: int) -> None:
        """Have a device compute a job; see `jdag.runtime.worker_runtime.Driver`."""
        device = self._device(host, host.machine.device_of(job))
        device.ready.add(job, (job, cause, self._timeline.now_ns))
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
        """Have a device that is free choose a job, after the other events of now."""
        if not device.busy and len(device.ready):
            device.busy = True
            now_ns = self._timeline.now_ns
            self._timeline.push(now_ns, BEGIN, (self._begin, host, device))

    def skip(self, host: WorkerRuntime, skip: Skip | Listed) -> None:
        """Have the worker's list wait no more for jobs that will not come."""
        device = self._device(host, None)  # Only that one follows the list.
        device.ready.skip(skip)
        self._choose(host, device)

    @property
    def stalled(self) -> list[str]:
        """What lists wait for while other jobs of them are ready."""
        waits = [device.ready.stalled for device in self._devices.values()]
        return [wait for wait in waits if wait]

    def waits_for(self, worker: Worker) -> str:
        """The action for which the list of a worker waits; "" for none."""
        device = self._devices.get((worker, None))
        return "" if device is None else device.ready.waits_for

    def forget(self, worker: Worker | None) -> None:
        """Drop the jobs of a lost worker; None: of all workers."""
        for where in [of for of in self._devices if worker in (None, of[0])]:
            del self._devices[where]

    def _begin(self, host: WorkerRuntime, device: _Device) -> None:
        device.busy = False
        found = device.ready.take() if host.alive else ()
        if not found:
            return
        device.busy = True
        env, now_ns = self._env, self._timeline.now_ns
        name = device.name
        costs = self._costs_ns(name, found)
        if env.faults.slow:
            costs = [env.faults.stretched_ns(name, cost, now_ns) for cost in costs]
        cost_ns = sum(costs)
        self.busy_ns[name] += cost_ns
        computed: list[Computed] = []
        finish = (self._finish, host, device, computed)
        for (job, asked, added_ns), cost in zip(found, costs, strict=True):
            behind = device.finish if now_ns > added_ns else NO_CAUSE
            env.recorder.started(host.worker, job, cost, asked=asked, behind=behind)
            if not host.alive:
                return  # Recording may trigger a crash (`Crash.at_index`).
            try:
                error: BaseException | None = host.machine.run(job)
            except BaseException as interrupt:
                # Main gets the interrupt; waiters of this job must not wait for ever.
                failure = failure_of(interrupt, host.worker, job.path, blamed_name(job))
                computed.append(Computed(job.id, failure))
                self._timeline.push(now_ns + cost_ns, EVENT, finish)
                for left in found[len(computed) :]:
                    device.ready.add(left[0], left)
                raise
            failed = None
            if error is not None:
                failed = failure_of(error, host.worker, job.path, blamed_name(job))
            computed.append(Computed(job.id, failed))
        if cost_ns:
            self._timeline.push(now_ns + cost_ns, EVENT, finish)
        else:
            self._finish(host, device, computed)

    def _costs_ns(self, name: str, found: Sequence[_Ready]) -> Sequence[int]:
        """How long jobs that run as one take on a device of a worker."""
        job, model = found[0][0], self.models[name]
        for each, _, _ in found:
            self._ran.setdefault((name, getattr(each, "function", None)), each)
        if model is FREE_DEVICE:
            return [0] * len(found)
        if len(found) > 1 or not isinstance(job, _OF_PAIRS):
            return model.costs_ns([job for job, _, _ in found])
        of = (name, job.function, job.action)
        cost_ns = self._costs.get(of)
        if cost_ns is None:
            cost_ns = self._costs[of] = model.cost_ns(job)
        return (cost_ns,)

    def _finish(
        self, host: WorkerRuntime, device: _Device, computed: list[Computed]
    ) -> None:
        """The jobs that a device ran as one have ended."""
        device.busy = False
        for each in computed:
            if host.alive:
                device.finish = host.handle(each)
        if host.alive:
            self._choose(host, device)
