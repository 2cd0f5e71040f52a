"""The recorder of engines' events and effects, and of what drivers do with them.

Inputs:  of hosts (`jdag.runtime.worker_runtime`), each event before its engine handles
         it, and effects of `RECORDED` before they are carried out; of drivers, what
         happens to messages, jobs and workers elsewhere.
Outputs: the records of a trace (`jdag.runtime.trace`), with the causes of each.
Invariants: what made a value is known from the record that says so until the value is
    used up or dropped; a record's index is -1 where no trace is kept.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, get_args

from jdag.compute.machine import job_name, kept, used_up
from jdag.engine.functions import name_of
from jdag.engine.protocol import (
    Arrived,
    Computed,
    ContextId,
    Drop,
    Effect,
    Event,
    Job,
    Joined,
    Key,
    Lost,
    Message,
    Path,
    ReadingKey,
    Resume,
    Spawn,
    Tag,
    incarnated,
    made_by,
)
from jdag.runtime.trace import Trace

# The record of a job's start, its detail, the job, and when it has ended if it has.
_Running = tuple[int, tuple[Any, ...], Job, int | None]

NO_CAUSE = -1
RECORDED = frozenset((Drop, Resume, Spawn))  # Drivers record the other effects.


class Recorder:
    """Writes what happens to a trace."""

    def __init__(self, trace: Trace, clock: Any) -> None:
        self.trace = trace
        self.note = trace.at(clock)
        # By worker: the record that made each value; the jobs that run, with the record
        # and the detail of their start.
        self._made: dict[str, dict[Key, int]] = defaultdict(dict)
        self._running: dict[tuple[str, int], _Running] = {}
        self._asked: dict[int, str] = {}  # By waiter, the event that named it.

    def watch(self, look: Callable[[int], None]) -> None:
        """Call `look` with the number of records after each one."""
        note = self.note

        def note_and_look(
            kind: str, worker: str, detail: tuple[Any, ...], causes: tuple[int, ...]
        ) -> int:
            record = note(kind, worker, detail, causes)
            look(record + 1)
            return record

        self.note = note_and_look

    # ---------------------------------------------------- events and effects of engines

    def input(
        self,
        worker: str,
        event: Any,
        causes: tuple[int, ...],
        keys: Sequence[Key],
        told: tuple[Any, ...],
    ) -> int:
        """Record an event of an engine, and values held with it; return the index.

        Of a message `told` is its `trace_fields` when it left, if they are known.
        """
        kind = event.__class__
        detail: tuple[Any, ...]
        if kind is Computed:
            return self._computed(worker, event)
        if kind is Arrived:
            what, detail = (
                "deliver",
                (event.sender, *(told or trace_fields(event.message))),
            )
        elif kind is Lost:
            what, detail = "lost", (event.worker,)
        elif kind is Joined:
            what, detail = "joined", (incarnated(event.name, event.incarnation),)
        else:
            waiter = getattr(event, "waiter", None)
            if waiter is not None:
                self._asked[waiter] = kind.__name__
            what, detail = "issue", trace_fields(event)
        record = self.note(what, worker, detail, causes)
        if keys:
            self._made[worker].update(dict.fromkeys(keys, record))
        return record

    def _computed(self, worker: str, event: Computed) -> int:
        start, detail, job, ended_ns = self._running.pop((worker, event.job))
        failure = event.failure
        detail = (*detail, "" if failure is None else failure.error)
        if ended_ns is None:
            record = self.note("finish", worker, detail, (start,))
        else:
            record = self.trace.add(ended_ns, "finish", worker, detail, (start,))
        if failure is None:
            self._made[worker].update(dict.fromkeys(made_by(job), record))
        return record

    def effect(self, worker: str, effect: Any, cause: int) -> int:
        """Record one of `RECORDED`; return the cause of what it brings about."""
        kind = effect.__class__
        if kind is Drop:
            pop = self._made[worker].pop
            for key in effect.keys:
                pop(key, None)
            return cause
        if kind is Resume:
            return self._resume(worker, effect, cause)
        name = name_of(effect.function)
        return self.note("spawn", worker, (*trace_fields(effect)[1:], name), (cause,))

    def _resume(self, worker: str, resume: Resume, cause: int) -> int:
        asked = self._asked.pop(resume.waiter, None)
        if asked is None:
            return cause
        if asked == "Fetched":  # The program takes these values.
            for key in resume.result:
                if isinstance(key, ReadingKey):
                    self._made[worker].pop(key, None)
        return self.note("resume", worker, (resume.waiter, asked), (cause,))

    # ---------------------------------------------------- what drivers do with effects

    def causes(self, worker: str, cause: int, keys: Sequence[Key]) -> tuple[int, ...]:
        """Return the causes of a message that carries values: what made each counts."""
        made = self._made[worker]
        causes = {cause: None}
        for key in keys:
            causes[made.get(key, cause)] = None
        return tuple(causes)

    def needs(self, worker: str, job: Job, asked: int) -> dict[int, None]:
        """Return the causes of a job; what it reads for the last time is gone.

        `asked` is the record of what made the engine ask for it.
        """
        made = self._made[worker]
        causes = {asked: None}
        for key in kept(job):
            causes[made.get(key, asked)] = None
        for key in used_up(job):
            causes[made.pop(key, asked)] = None
        return causes

    def started(
        self, worker: str, job: Job, cost_ns: int, *, asked: int, behind: int
    ) -> None:
        """Record that a job runs from now on, and reads its inputs.

        `cost_ns` is how long it takes, `asked` as for `needs`, `behind` the record of
        the job that it waited for; -1 if for none.
        """
        causes = self.needs(worker, job, asked)
        if behind >= 0:
            causes[behind] = None
        detail = _said_of(job, cost_ns)
        record = self.note("start", worker, detail, tuple(causes))
        self._running[worker, job.id] = (record, detail, job, None)

    def ran(
        self, worker: str, job: Job, causes: Iterable[int], began_ns: int, ended_ns: int
    ) -> int:
        """Record that a job has run, at these times, before its Computed is handled.

        The record of its end will be the next one; returns its index.
        """
        detail = _said_of(job, ended_ns - began_ns)
        record = self.trace.add(began_ns, "start", worker, detail, tuple(causes))
        self._running[worker, job.id] = (record, detail, job, ended_ns)
        return record + 1


class NoRecorder:
    """Takes what a simulation's recorder does, and keeps nothing."""

    trace = None

    def watch(self, look: Callable[[int], None]) -> None:
        """There are no records to look at."""

    def note(self, *said: Any) -> int:
        """No record."""
        del said
        return NO_CAUSE

    input = effect = note

    def causes(self, *said: Any) -> tuple[int, ...]:
        """No causes."""
        del said
        return ()

    def started(self, *said: Any, **of: int) -> None:
        """Nothing is kept."""


def _said_of(job: Any, cost_ns: int) -> tuple[Any, ...]:
    kind = job.__class__.__name__.lower()
    tag: Tag | None = getattr(job, "tag", None)
    # The action of a pipeline that it is, such as 0F3.
    action = f"{tag.stage}{job.action}{tag.micro_batch}" if tag is not None else ""
    of = (kind, _label(job.context), job.phase, job.path)
    return (*of, job_name(job), action, cost_ns)


def trace_fields(thing: Message | Event | Effect) -> tuple[str, str, int, Path]:
    """Return kind, context ("": none), pass (0: none) and path for a trace."""
    kind: Any = thing.__class__
    has_context, has_number, has_path = HAS[kind]
    given: Any = thing
    label = _label(given.context) if has_context else ""
    number = given.number if has_number else 0
    return (kind.__name__, label, number, given.path if has_path else ())


@lru_cache(4096)
def _label(context: ContextId | None) -> str:
    return "" if context is None else str(context)


# Of each class of messages, events and effects: whether it has context, pass and path.
HAS: Mapping[type, tuple[bool, ...]] = {
    cls: tuple([hasattr(cls, name) for name in ("context", "number", "path")])
    for union in (Message, Event, Effect)
    for cls in get_args(union)
}
