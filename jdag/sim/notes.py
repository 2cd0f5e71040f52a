"""What the trace says of messages, events and jobs: plain data for its details."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args

from jdag.compute.machine import job_name
from jdag.engine.vocabulary import (
    Apply,
    ContextId,
    Effect,
    Event,
    Fill,
    Forward,
    Job,
    Key,
    Message,
    Path,
    Sum,
    Vjp,
)

Place = tuple[str, int, Path]  # Context ("" for none), pass (0 for none), path.

_CONTEXT, _PASS, _PATH = "context", "number", "path"


def _placer(cls: type) -> Callable[[Any], Place]:
    """What tells the place of things of a class, by the fields that it has."""
    fields: Iterable[str] = cls.__annotations__
    has = tuple(name in fields for name in (_CONTEXT, _PASS, _PATH))
    match has:
        case (True, False, True):
            return lambda thing: (_label(thing.context), 0, thing.path)
        case (True, True, True):
            return lambda thing: (_label(thing.context), thing.number, thing.path)
        case (True, True, False):
            return lambda thing: (_label(thing.context), thing.number, ())
        case (True, False, False):
            return lambda thing: (_label(thing.context), 0, ())
        case (False, False, True):
            return lambda thing: ("", 0, thing.path)
        case _:
            return lambda thing: ("", 0, ())


def _label(context: ContextId | None) -> str:
    if context is None:
        return ""
    if context.incarnation:
        return str(context)
    return f"{context.number}.{context.counter}"


# For each class of messages, events and effects: where in the program one belongs.
PLACE: Mapping[type, Callable[[Any], Place]] = {
    cls: _placer(cls) for union in (Message, Event, Effect) for cls in get_args(union)
}


def event_detail(event: Event) -> tuple[Any, ...]:
    """Which event, and where in the program it belongs."""
    return (type(event).__name__, *PLACE[type(event)](event))


def note_nothing(
    kind: str, worker: str, detail: tuple[Any, ...], causes: tuple[int, ...]
) -> int:
    """Stand in for a trace where none is kept."""
    del kind, worker, detail, causes
    return -1


def job_place(job: Job) -> tuple[Any, ...]:
    """Kind, context, pass, path and function of a job."""
    kind = type(job).__name__.lower()
    return (kind, _label(job.context), job.phase, job.path, job_name(job))


def used_up(job: Job) -> tuple[Key, ...]:
    """The values that a job reads and that are gone afterwards."""
    match job:
        case Vjp():
            addends = tuple([key for keys in job.cotangents for key in keys])
            return (*addends, job.residuals) if job.last else addends
        case Sum():
            return job.addends
        case Apply():
            return () if job.output is None else (job.input,)
        case _:
            return ()


def kept(job: Job) -> tuple[Key, ...]:
    """The values that a job reads and that stay."""
    match job:
        case Forward():
            return job.inputs
        case Vjp():
            return () if job.last else (job.residuals,)
        case Sum():
            return () if job.base is None else (job.base,)
        case Fill():
            return ()
        case Apply():
            return (job.input,) if job.output is None else ()


def made(job: Job) -> tuple[Key, ...]:
    """The values that a job makes."""
    match job:
        case Forward():
            return (
                job.outputs if job.residuals is None else (*job.outputs, job.residuals)
            )
        case Vjp():
            return job.outputs
        case Sum() | Fill():
            return (job.output,)
        case Apply():
            return () if job.output is None else (job.output,)
