"""The interface of engines and drivers: jobs, events, effects and their parts.

Everything here is data. Values are opaque: a `Key` names one, the driver holds it.
Functions, shapes and the arguments and results of programs are opaque too: the engine
passes them on unread. Names and messages are defined in modules of their own and
re-exported here.
"""

from typing import Any, ClassVar

from msgspec import Struct

from jdag.engine.messages import *
from jdag.engine.names import *

# ruff: noqa: F403, F405


class Forward(Struct, frozen=True):
    """Run a function: read `inputs`, write `outputs`, keep `residuals` if tracked."""

    id: int
    context: ContextId | None
    path: Path
    function: Any
    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...]
    residuals: Key | None
    tag: Tag | None = None
    phase: ClassVar[int] = 0
    action: ClassVar[str] = "F"


class PassJob(Struct, frozen=True):
    """A job of a pass; `path` is that of its call, transfer, root or hook."""

    id: int
    context: ContextId
    phase: int  # The number of the pass.
    path: Path


class Vjp(PassJob, frozen=True):
    """Run a recorded vjp: a tuple of addends per output, an output per tracked input.

    The addends are dropped afterwards; if this is the last use, the residuals too.
    """

    function: Any
    residuals: Key
    cotangents: tuple[tuple[Key, ...], ...]
    outputs: tuple[Key, ...]
    last: bool
    tag: Tag | None = None
    action: ClassVar[str] = "B"


class VjpInputs(Vjp, frozen=True, kw_only=True):
    """The first half of a recorded vjp: all but the cotangents of `weights`.

    It writes `stash`, which holds what the second half needs.
    """

    weights: Mask  # Of the tracked inputs.
    stash: Key
    action: ClassVar[str] = "I"


class VjpWeights(PassJob, frozen=True):
    """The second half of a recorded vjp: the cotangents of `weights`.

    The stash is dropped afterwards.
    """

    function: Any
    stash: Key
    weights: Mask
    outputs: tuple[Key, ...]
    tag: Tag | None = None
    action: ClassVar[str] = "W"


class Sum(PassJob, frozen=True):
    """Add cotangents left to right, `base` first if given; `base` is kept."""

    addends: tuple[Key, ...]
    base: Key | None
    output: Key


class Fill(PassJob, frozen=True):
    """Make an array of zeros or ones of the given shape and dtype."""

    aval: Any
    value: int
    output: Key


class Apply(PassJob, frozen=True):
    """Apply a hook to a cotangent; `output` holds the result that replaces it.

    Without an output the hook only observes, and the input is kept; otherwise the input
    is dropped.
    """

    function: Any
    input: Key
    output: Key | None


class RunSegment(PassJob, frozen=True):
    """Run a segment of a plan; `phase` is the step, `path` has the segment's index.

    `last` are those inputs that no other job reads: they are dropped when it begins.
    """

    function: Any
    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...]
    last: tuple[Key, ...]
    tag: Tag | None = None
    action: str = ""


class CompileSegment(PassJob, frozen=True):
    """Compile a segment of a plan."""

    function: Any


Job = (
    Forward | Vjp | VjpInputs | VjpWeights | Sum | Fill | Apply | RunSegment
    | CompileSegment
)  # fmt: skip


def made_by(job: Job) -> tuple[Key, ...]:
    """The values that a job makes."""
    match job:
        case Forward() if job.residuals is not None:
            return (*job.outputs, job.residuals)
        case VjpInputs():
            return (*job.outputs, job.stash)
        case Forward() | Vjp() | VjpWeights() | RunSegment():
            return job.outputs
        case CompileSegment():
            return ()
        case Sum() | Fill():
            return (job.output,)
        case Apply():
            return () if job.output is None else (job.output,)


class Computed(Struct, frozen=True):
    """A job is done: its outputs are held, or it failed and none are."""

    job: int
    failure: Failure | None = None


class Arrived(Struct, frozen=True):
    """A message arrived; its values are already stored under `landing(message)`."""

    sender: Worker
    message: Message


class Lost(Struct, frozen=True):
    """An incarnation of a worker is gone for good; `why` is the cause, if known."""

    worker: Worker
    why: str = ""


class Joined(Struct, frozen=True):
    """The worker of this name joined again; all its former incarnations are gone.

    A Lost event for these is not required first. Repeating the event has no effect.
    """

    name: str
    incarnation: int


class Argument(Struct, frozen=True):
    """An argument as its issuer knows it: key, owner, and whether it is tracked."""

    key: Key
    owner: Worker
    tracked: bool


class OfFrame(Struct, frozen=True):
    """Base of what concerns a frame, or one call of it, by its path."""

    context: ContextId
    path: Path


class Wait(Struct, frozen=True):
    """Base of events about a program that waits, until its waiter is resumed."""

    waiter: int
    context: ContextId


class Opened(Struct, frozen=True):
    """A program opened a context here: this engine owns it."""

    context: ContextId


class Issued(OfFrame, frozen=True):
    """A program frame here calls a function. Its constants are already stored."""

    worker: Worker
    function: Any
    name: str
    arguments: tuple[Argument, ...]
    outputs: tuple[bool, ...]
    call_site: str
    discarded: tuple[tuple[Key, Worker], ...] = ()  # It no longer names these.
    tag: Tag | None = None


class Discarded(OfFrame, frozen=True):
    """The frame of this path is about to wait and no longer names these keys."""

    keys: tuple[tuple[Key, Worker], ...]


class Launched(OfFrame, frozen=True):
    """A program here calls a program, which runs at the same time."""

    worker: Worker
    function: Any
    arguments: Any
    call_site: str
    objects: tuple[ObjectId, ...] = ()  # On that worker, among the arguments.


class Collected(Wait, frozen=True):
    """The frame of this path waits for news of the programs that it launched.

    Resume gives those after the first `taken`: a Return for each program that ended, a
    Tell for each that asks. None come if the timeout passes first.
    """

    path: Path
    taken: int
    timeout_ns: int | None  # None: no limit.


class TimedOut(Wait, frozen=True):
    """The timeout of a Collected has passed."""

    path: Path


class Asked(Wait, frozen=True):
    """The program of this path asks its caller: Resume gives (data, failure)."""

    path: Path
    data: Any


class Answered(OfFrame, frozen=True):
    """A program here answers the program of this path, which it launched."""

    data: Any


class Returned(OfFrame, frozen=True):
    """The program of this path, which ran here, ended; `failure` if it raised."""

    result: Any
    failure: Failure | None
    discarded: tuple[tuple[Key, Worker], ...] = ()  # No program names these any more.


class Awaited(Wait, frozen=True):
    """The owner's top frame waits until everything that it issued has arrived."""


class Fetched(Struct, frozen=True):
    """A program here waits for values: Resume gives a key or a failure for each."""

    waiter: int
    keys: tuple[tuple[Key, Worker], ...]


class Assigned(Struct, frozen=True):
    """A program here makes versions of leaves on any workers: all are sent, or none.

    The constants and values that they are made from are already stored.
    """

    path: Path
    parts: tuple[Assignment, ...]


class Dropped(Struct, frozen=True):
    """A program here drops leaves."""

    leaves: tuple[LeafId, ...]


class Differentiated(Wait, frozen=True):
    """The owner's top frame requests a pass: Resume gives a `PassResult`.

    Given cotangents are already stored under their seed keys.
    """

    roots: tuple[tuple[Worker, Root], ...]
    mode: Mode
    retain: bool
    timeout_ns: int | None  # None: no limit.


class Expired(Struct, frozen=True):
    """The timeout of a pass has passed."""

    context: ContextId
    number: int


class Attached(Struct, frozen=True):
    """A program frame here attaches a hook to a value, here or on another worker."""

    context: ContextId
    worker: Worker
    key: Key
    hook: Hook


class Planned(Struct, frozen=True):
    """A program here made a plan: prepare it on these workers.

    Its constants are already stored. A step gives the `results`, which come here.
    """

    context: ContextId
    parts: tuple[tuple[Worker, Prepare], ...]
    results: tuple[int, ...]


class Compiled(Wait, frozen=True):
    """A program here waits until more than `seen` segments are compiled.

    Resume gives their number, or the failure of one.
    """

    seen: int


class Stepping(Wait, frozen=True):
    """A program here runs a step: Resume gives the results' keys, or the failure.

    The inputs, for each worker in turn, are already stored.
    """

    number: int
    inputs: tuple[tuple[Worker, tuple[int, ...]], ...]


class Unplanned(Struct, frozen=True):
    """No program names a plan any more."""

    context: ContextId


class Left(Wait, frozen=True):
    """The owner's top frame leaves the context: Resume gives unseen failures."""


Event = (
    Computed | Arrived | Lost | Joined | Opened | Issued | Discarded | Launched
    | Collected | TimedOut | Asked | Answered | Returned | Awaited | Fetched | Assigned
    | Dropped | Attached | Differentiated | Expired | Left | Planned | Compiled
    | Stepping | Unplanned
)  # fmt: skip


class Send(Struct, frozen=True):
    """Send a message with these values, in the order of `landing(message)`."""

    to: Worker
    message: Message
    values: tuple[Key, ...] = ()
    zeros: tuple[Any, ...] = ()  # Shapes of the symbolic zeros, which are not sent.


class Compute(Struct, frozen=True):
    """Run a job when the device is free; then report `Computed`."""

    job: Job


class Drop(Struct, frozen=True):
    """These values are not needed any more. Keys that are not held are ignored."""

    keys: tuple[Key, ...]


class Spawn(OfFrame, frozen=True):
    """Start a program as the frame of this path; report `Returned` when it ends."""

    function: Any
    arguments: Any
    call_site: str
    objects: tuple[ObjectId, ...] = ()  # It alone is handed these, until then.


class Resume(Struct, frozen=True):
    """Resume a waiting program; the event that named the waiter defines the result."""

    waiter: int
    result: Any


class Alarm(Struct, frozen=True):
    """Report `event` after this time, unless the waiter is resumed first."""

    waiter: int
    event: Expired | TimedOut
    after_ns: int


class Skip(Struct, frozen=True):
    """Of this call no jobs with these actions will be asked for; None: of any call.

    `number` is the step, if the context is a plan's.
    """

    context: ContextId
    tag: Tag | None
    actions: str
    number: int = 0


class Listed(Struct, frozen=True):
    """Of a schedule's list a context, or step `number` of a plan, has these alone."""

    context: ContextId
    actions: tuple[tuple[str, Tag], ...]
    number: int = 0


Effect = Send | Compute | Drop | Spawn | Resume | Alarm | Skip | Listed


class PassResult(Struct, frozen=True):
    """How a pass ended, for the program that requested it.

    A finished pass has a failure if an observing hook raised.
    """

    number: int
    outcome: Outcome
    failure: Failure | None
    owed: tuple[Owed, ...]
    leaves: tuple[LeafId, ...]  # Leaves it reached, in order; empty unless finished.
    stale: tuple[Stale, ...] = ()  # Leaves of these that were updated since, in order.
