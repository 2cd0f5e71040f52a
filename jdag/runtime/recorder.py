"""The recorder of engines' events and effects, and of drivers' actions on them.

Inputs:  from `jdag.runtime.worker_runtime` each event before its engine handles it, and
         effects of `RECORDED` before they are carried out; from drivers, the events of
         messages, jobs and workers elsewhere.
Outputs: the records of a trace (`jdag.runtime.trace`), with the causes of each.
Invariants: the record that produced a value is known until the value is used up or
    dropped; a record's index is -1 if there is no trace.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, get_args

from jdag.compute.machine import inputs_kept, inputs_used_up, job_name
from jdag.engine.functions import name_of
from jdag.engine.protocol import (
    Acknowledged,
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
    StepFrame,
    Tag,
    incarnated,
    made_by,
)
from jdag.runtime.trace import Trace

# The record of a job's start, its detail, the job, and its end time if it has ended.
_Running = tuple[int, tuple[Any, ...], Job, int | None]

NO_CAUSE = -1
RECORDED = frozenset((Drop, Resume, Spawn))  # Drivers record the other effects.


class Recorder:
    def __init__(self, trace: Trace, clock: Any) -> None:
        self.trace = trace
        self.note = trace.at(clock)
        # By worker, the record that produced each value. By worker and job id, the job.
        self._producers: dict[str, dict[Key, int]] = defaultdict(dict)
        self._running: dict[tuple[str, int], _Running] = {}
        self._events: dict[int, str] = {}  # By waiter, the name of its event.

    def watch(self, look: Callable[[int], None]) -> None:
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
        fields: tuple[Any, ...],
    ) -> int:
        """Record an engine's event and the values that came with it. Return its index.

        `fields` are the `trace_fields` of a message at its sender, if known.
        """
        kind = event.__class__
        detail: tuple[Any, ...]
        if kind is Computed:
            return self._computed(worker, event)
        if kind is Arrived:
            record_kind = "deliver"
            detail = (event.sender, *(fields or trace_fields(event.message)))
        elif kind is Acknowledged:
            record_kind = "deliver"
            detail = (event.sender, *acknowledgement_fields(event.count))
        elif kind is Lost:
            record_kind, detail = "lost", (event.worker,)
        elif kind is Joined:
            record_kind, detail = "joined", (incarnated(event.name, event.incarnation),)
        else:
            waiter = getattr(event, "waiter", None)
            if waiter is not None:
                self._events[waiter] = kind.__name__
            record_kind, detail = "issue", trace_fields(event)
        record = self.note(record_kind, worker, detail, causes)
        if keys:
            producers = self._producers[worker]
            for key in keys:
                producers[key] = record
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
            producers = self._producers[worker]
            for key in made_by(job):
                producers[key] = record
        return record

    def effect(self, worker: str, effect: Any, cause: int) -> int:
        kind = effect.__class__
        if kind is Drop:
            pop = self._producers[worker].pop
            for key in effect.keys:
                pop(key, None)
            return cause
        if kind is Resume:
            return self._resume(worker, effect, cause)
        name = name_of(effect.function)
        return self.note("spawn", worker, (*trace_fields(effect)[1:], name), (cause,))

    def _resume(self, worker: str, resume: Resume, cause: int) -> int:
        event = self._events.pop(resume.waiter, None)
        if event is None:
            return cause
        if event == "Fetched":  # The program now owns these values.
            for key in resume.result:
                if isinstance(key, ReadingKey):
                    self._producers[worker].pop(key, None)
        return self.note("resume", worker, (resume.waiter, event), (cause,))

    # ---------------------------------------------------- actions of drivers on effects

    def causes(self, worker: str, cause: int, keys: Sequence[Key]) -> tuple[int, ...]:
        producers = self._producers[worker]
        causes = {cause: None}
        for key in keys:
            causes[producers.get(key, cause)] = None
        return tuple(causes)

    def needs(self, worker: str, job: Job, request: int) -> dict[int, None]:
        """Return a job's causes and `request`. Forget producers of inputs used up."""
        producers = self._producers[worker]
        causes = {request: None}
        for key in inputs_kept(job):
            causes[producers.get(key, request)] = None
        for key in inputs_used_up(job):
            causes[producers.pop(key, request)] = None
        return causes

    def started(
        self, worker: str, job: Job, cost_ns: int, *, request: int, behind: int
    ) -> None:
        """Record that a job starts now, and reads its inputs.

        `cost_ns` is the duration of the job, `request` the record that requested it,
        and `behind` the record of the job that it waited for (-1: it did not wait).
        """
        causes = self.needs(worker, job, request)
        if behind >= 0:
            causes[behind] = None
        detail = _job_fields(job, cost_ns)
        record = self.note("start", worker, detail, tuple(causes))
        self._running[worker, job.id] = (record, detail, job, None)

    def ran(
        self, worker: str, job: Job, causes: Iterable[int], began_ns: int, ended_ns: int
    ) -> int:
        detail = _job_fields(job, ended_ns - began_ns)
        record = self.trace.add(began_ns, "start", worker, detail, tuple(causes))
        self._running[worker, job.id] = (record, detail, job, ended_ns)
        return record + 1


class NoRecorder:
    """Has the interface of a simulation's recorder, but records nothing."""

    trace = None

    def watch(self, look: Callable[[int], None]) -> None: ...

    def note(self, *_: Any) -> int:
        return NO_CAUSE

    input = effect = note

    def causes(self, *_: Any) -> tuple[int, ...]:
        return ()

    def started(self, *_: Any, **__: int) -> None: ...


def _job_fields(job: Any, cost_ns: int) -> tuple[Any, ...]:
    kind = _KINDS[job.__class__]
    tag: Tag | None = getattr(job, "tag", None)
    # The job's action in a pipeline, such as 0F3.
    action = f"{tag.stage}{job.action}{tag.micro_batch}" if tag is not None else ""
    label, name = _label(job.context), job_name(job)
    return (kind, label, job.phase, job.path, name, action, cost_ns)


_KINDS = {kind: kind.__name__.lower() for kind in get_args(Job)}


def trace_fields(thing: Message | Event | Effect) -> tuple[str, str, int, Path]:
    """Return kind, context ("" if none), pass (0 if none) and path for a trace."""
    kind: Any = thing.__class__
    has_context, has_number, has_path = HAS[kind]
    fields: Any = thing
    label = _label(fields.context) if has_context else ""
    number = fields.number if has_number else 0
    name = kind.__name__
    if kind is StepFrame:  # The beginning of a step; values of a step, or its end.
        name = "Step" if fields.begins else "Hop" if fields.slots else "Stepped"
    return (name, label, number, fields.path if has_path else ())


def acknowledgement_fields(count: int) -> tuple[str, str, int, Path]:
    """Return the `trace_fields` of a frame without messages."""
    return ("Acknowledge", "", count, ())


@lru_cache(4096)
def _label(context: ContextId | None) -> str:
    return "" if context is None else str(context)


# For each class of messages, events and effects: whether it has context, pass, path.
HAS: Mapping[type, tuple[bool, ...]] = {
    cls: tuple([hasattr(cls, name) for name in ("context", "number", "path")])
    for union in (Message, Event, Effect)
    for cls in get_args(union)
}
