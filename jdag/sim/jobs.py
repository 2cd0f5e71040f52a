"""Jobs on simulated devices: chosen, computed when they start, noted in the trace.

Told:  `add(host, job, record)` when an engine asks for a job; `begin(host, device)` and
       `finish(host, task)` when the actions of these names are due.
Gives: those two actions to the timeline; from `begin` a task that takes no time, which
       is over at once; from `finish` the record of the task's end.
"""

from jdag.compute.machine import failure_of, job_name
from jdag.engine.vocabulary import Job
from jdag.runtime.trace import Note
from jdag.sim.carriage import BEGIN, EVENT
from jdag.sim.devices import Device, Task
from jdag.sim.host import Host
from jdag.sim.notes import job_place, kept, made, used_up
from jdag.sim.timeline import Timeline


class Jobs:
    """All jobs of one run; their state is in the devices of the hosts."""

    __slots__ = ("_note", "_timeline")

    def __init__(self, timeline: Timeline, note: Note) -> None:
        self._timeline = timeline
        self._note = note

    def add(self, host: Host, job: Job, record: int) -> None:
        """An engine asks for a job, because of `record`."""
        device = host.on(host.machine.device_of(job))
        device.add(job, record, self._timeline.now_ns)
        self.call(host, device)

    def call(self, host: Host, device: Device) -> None:
        """Let an idle device choose, once all that happens now has happened."""
        if device.wanting:
            device.called = True
            self._timeline.push(self._timeline.now_ns, BEGIN, ("begin", host, device))

    def begin(self, host: Host, device: Device) -> Task | None:
        """Start and compute a device's next job; return its task if it is over at once.

        The values that it makes are held from now on, but nobody knows until it ends.
        """
        device.called = False
        task = device.begin(self._timeline.now_ns) if host.alive else None
        if task is None:
            return None
        job, made_by = task.job, host.made
        gone = used_up(job)
        causes = {task.asked: None}
        for key in (*kept(job), *gone):
            causes[made_by.get(key, task.asked)] = None
        if task.behind >= 0:
            causes[task.behind] = None
        task.detail = (*job_place(job), task.cost_ns)
        task.start = self._note("start", host.worker, task.detail, tuple(causes))
        if not host.alive:
            return None
        for key in gone:
            made_by.pop(key, None)
        self._compute(host, task)
        if not task.cost_ns:
            return task
        self._finish_later(host, task)
        return None

    def _compute(self, host: Host, task: Task) -> None:
        job = task.job
        try:
            error: BaseException | None = host.machine.run(job)
        except BaseException as interrupt:
            # It is main's to know, but who waits for this job must not wait for ever.
            task.failure = failure_of(interrupt, host.worker, job.path, job_name(job))
            self._finish_later(host, task)
            raise
        if error is not None:
            task.failure = failure_of(error, host.worker, job.path, job_name(job))

    def _finish_later(self, host: Host, task: Task) -> None:
        at_ns = self._timeline.now_ns + task.cost_ns
        self._timeline.push(at_ns, EVENT, ("finish", host, task))

    def finish(self, host: Host, task: Task) -> int:
        """The time of a task is over; return the record that says so."""
        failure = task.failure
        detail = (*task.detail, "" if failure is None else failure.error)
        record = self._note("finish", host.worker, detail, (task.start,))
        if host.alive:
            task.device.end(record)
            if failure is None:
                for key in made(task.job):
                    host.made[key] = record
        return record
