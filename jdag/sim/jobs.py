"""Jobs on the devices of all workers of one run.

Inputs:  `compute(host, job, cause)` when an engine asks for a job.
Outputs: Computed, to that engine, when the job's time is over. The job is computed when
         its time begins; its values are held from then on, but not visible to the
         engine until it ends.

Invariants: a device runs one job at a time, and chooses it after the other events of
that time, but before timers; each job runs once, unless its worker dies; `busy_ns` is
the total cost of started jobs.
"""

from typing import Any

from jdag.compute.machine import job_name
from jdag.engine.protocol import Computed, Failure, Job, Worker, named
from jdag.runtime.chooser import Chooser, ReadyJobs
from jdag.runtime.failures import failure_of
from jdag.runtime.host import Host
from jdag.runtime.recorder import NO_CAUSE
from jdag.sim.devices import models
from jdag.sim.environment import Environment
from jdag.sim.timeline import BEGIN, EVENT


class Device:
    """A device of one incarnation of the worker `name`, and the jobs ready for it.

    It is `busy` while a job runs or it is about to choose one; `finish` is the record
    of the last finish.
    """

    __slots__ = ("busy", "finish", "name", "ready")

    def __init__(self, name: str, chooser: Chooser) -> None:
        self.name = name
        self.ready = ReadyJobs(chooser, name)
        self.busy = False
        self.finish = NO_CAUSE


class Jobs:
    """All devices of one run; `busy_ns` is how long those of each worker computed."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._timeline = env.timeline
        self._models = models(env.settings.devices, env.workers)
        self._devices: dict[tuple[Worker, str | None], Device] = {}
        self.busy_ns = dict.fromkeys(env.workers, 0)

    def compute(self, host: Host, job: Job, cause: int) -> None:
        """Have a device compute a job; see `jdag.runtime.host.Driver`."""
        where = host.worker, host.machine.device_of(job)
        device = self._devices.get(where)
        if device is None:
            device = Device(named(host.worker), self._env.chooser)
            self._devices[where] = device
        now_ns = self._timeline.now_ns
        device.ready.add(job, (job, cause, now_ns))
        if not device.busy:
            device.busy = True
            self._timeline.push(now_ns, BEGIN, (self._begin, host, device))

    def forget(self, worker: Worker | None) -> None:
        """Drop the jobs of a lost worker; None: of all workers."""
        for where in [of for of in self._devices if worker in (None, of[0])]:
            del self._devices[where]

    def _begin(self, host: Host, device: Device) -> None:
        device.busy = False
        found = device.ready.take() if host.alive else None
        if found is None:
            return
        device.busy = True
        job, asked, added_ns = found
        env, now_ns = self._env, self._timeline.now_ns
        name = device.name
        cost_ns = self._models[name].cost_ns(job)
        if env.faults.slow:
            cost_ns = env.faults.stretched_ns(name, cost_ns, now_ns)
        self.busy_ns[name] += cost_ns
        behind = device.finish if now_ns > added_ns else NO_CAUSE
        env.recorder.started(host.worker, job, cost_ns, asked=asked, behind=behind)
        if not host.alive:
            return  # Recording may trigger a crash (`Crash.at_index`).
        failure, finish = None, (self._finish, host, device, job)
        try:
            error: BaseException | None = host.machine.run(job)
        except BaseException as interrupt:
            # Main gets the interrupt; waiters of this job must not wait for ever.
            failure = failure_of(interrupt, host.worker, job.path, job_name(job))
            self._timeline.push(now_ns + cost_ns, EVENT, (*finish, failure))
            raise
        if error is not None:
            failure = failure_of(error, host.worker, job.path, job_name(job))
        if cost_ns:
            self._timeline.push(now_ns + cost_ns, EVENT, (*finish, failure))
        else:
            self._finish(host, device, job, failure)

    def _finish(
        self, host: Host, device: Device, job: Any, failure: Failure | None
    ) -> None:
        if not host.alive:
            return
        device.busy = False
        device.finish = host.handle(Computed(job.id, failure))
        if host.alive and not device.busy and len(device.ready):
            device.busy = True
            now_ns = self._timeline.now_ns
            self._timeline.push(now_ns, BEGIN, (self._begin, host, device))
