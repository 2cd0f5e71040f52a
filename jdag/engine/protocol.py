"""The interface of engines and drivers: jobs, events and effects, as data.

Values are opaque: a `Key` names a value, and the driver stores it. Functions, shapes,
and the arguments and results of programs are opaque to the engine, too. This module
also exports `names` and `messages`.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from msgspec import Struct

from jdag.engine.messages import *
from jdag.engine.names import *
from jdag.engine.segments import Slots

# ruff: noqa: F403, F405


class Forward(Struct, frozen=True):
    """Run a function: read `inputs`, write `outputs` and, if tracked, `residuals`."""

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
    """A job of a pass. `path` is the path of the job's call, transfer, root or hook."""

    id: int
    context: ContextId
    phase: int  # The number of the pass.
    path: Path


class Vjp(PassJob, frozen=True):
    """Run a recorded vjp. Then drop the addends and, if `last`, the residuals."""

    function: Any
    residuals: Key
    cotangents: tuple[tuple[Key, ...], ...]  # Addends for each output of the call.
    outputs: tuple[Key, ...]  # One key for each tracked input.
    last: bool
    tag: Tag | None = None
    action: ClassVar[str] = "B"


class VjpInputs(Vjp, frozen=True, kw_only=True):
    """The first half of a recorded vjp: cotangents of all inputs but the weights."""

    weights: Mask  # Which tracked inputs are weights.
    stash: Key  # Intermediate values for the second half.
    action: ClassVar[str] = "I"


class VjpWeights(PassJob, frozen=True):
    """The second half of a recorded vjp: cotangents of the weights. Drops `stash`."""

    function: Any
    stash: Key
    weights: Mask
    outputs: tuple[Key, ...]
    tag: Tag | None = None
    action: ClassVar[str] = "W"


class Sum(PassJob, frozen=True):
    """Sum `base` and cotangents from left to right; then drop all but `base`."""

    addends: tuple[Key, ...]
    base: Key | None
    output: Key


class Fill(PassJob, frozen=True):
    aval: Any
    value: int
    output: Key


class Apply(PassJob, frozen=True):
    """Apply a hook to a cotangent.

    `output` is the key of the replacement, and the input is dropped. If `output` is
    None, the hook only observes, and the input is kept.
    """

    function: Any
    input: Key
    output: Key | None


class RunSegment(PassJob, frozen=True):
    """Run a segment of a plan. `phase` is the step, `path` has the segment's index.

    The driver appends the outputs to `results`. `freed` has the sizes of the inputs in
    the slots `last`, which no other job reads. `kept` has the keys of constants and
    leaves among the inputs, for a trace. `sent` has the indices of outputs for others.
    """

    function: Any
    inputs: list[Any]
    needs: Slots
    makes: Slots
    last: Slots
    freed: tuple[int, int]
    tag: Tag | None = None
    action: str = ""
    kept: tuple[Key, ...] = ()
    sent: tuple[int, ...] = ()
    results: list[Any] = []

    def keys(self, slots: Slots) -> tuple[Key, ...]:
        return tuple([SlotKey(self.context, self.phase, slot) for slot in slots])


class CompileSegment(PassJob, frozen=True):
    function: Any


Job = (
    Forward | Vjp | VjpInputs | VjpWeights | Sum | Fill | Apply | RunSegment
    | CompileSegment
)  # fmt: skip


def made_by(job: Job) -> tuple[Key, ...]:
    match job:
        case Forward() if job.residuals is not None:
            return (*job.outputs, job.residuals)
        case VjpInputs():
            return (*job.outputs, job.stash)
        case Forward() | Vjp() | VjpWeights():
            return job.outputs
        case RunSegment():
            return job.keys(job.makes)
        case CompileSegment():
            return ()
        case Sum() | Fill():
            return (job.output,)
        case Apply():
            return () if job.output is None else (job.output,)


class Computed(Struct, frozen=True):
    """A job is done: either the driver stores its outputs, or the job failed."""

    job: int
    failure: Failure | None = None


class Arrived(Struct, frozen=True):
    """A message arrived. Its values are already stored under `landing(message)`.

    Those of a StepFrame are not stored, but in `values`.
    """

    sender: Worker
    message: Message
    values: Sequence[Any] = ()


class Acknowledged(Struct, frozen=True):
    """The next `count` messages of `ACKNOWLEDGED` to `sender` have been handled there.

    They are counted in the order of sending. One event of a larger count has the same
    effects as several events.
    """

    sender: Worker
    count: int


class Lost(Struct, frozen=True):
    """An incarnation of a worker is lost for ever. `why` is the cause, if known."""

    worker: Worker
    why: str = ""


class Joined(Struct, frozen=True):
    """The worker of this name joined again. All its former incarnations are lost.

    No Lost event is required first. Repeating the event has no effect.
    """

    name: str
    incarnation: int


class Argument(Struct, frozen=True):
    """An argument of a call: key, owner, and whether the argument is tracked."""

    key: Key
    owner: Worker
    tracked: bool


class OfFrame(Struct, frozen=True):
    """Base of events and effects of the frame, or of the call of a frame, at `path`."""

    context: ContextId
    path: Path


class Wait(Struct, frozen=True):
    """Base of events of a program that waits until `waiter` is resumed."""

    waiter: int
    context: ContextId


class Opened(Struct, frozen=True):
    context: ContextId


class Issued(OfFrame, frozen=True):
    """A program on this worker calls a function. The call's constants are stored."""

    worker: Worker
    function: Any
    name: str
    arguments: tuple[Argument, ...]
    outputs: tuple[bool, ...]
    call_site: str
    discarded: tuple[tuple[Key, Worker], ...] = ()  # Keys without refs.
    tag: Tag | None = None


class Discarded(OfFrame, frozen=True):
    """The frame of this path has no refs to these keys, and is about to wait."""

    keys: tuple[tuple[Key, Worker], ...]


class Launched(OfFrame, frozen=True):
    worker: Worker
    function: Any
    arguments: Any
    call_site: str
    objects: tuple[ObjectId, ...] = ()  # Arguments that are hosted objects.


class Collected(Wait, frozen=True):
    """The frame of this path waits for messages from programs that it launched.

    The result contains the messages after the first `taken` messages: a Return for each
    program that ended, a Tell for each request. The result is empty if the timeout
    passes first.
    """

    path: Path
    taken: int
    timeout_ns: int | None  # None: no limit.


class TimedOut(Wait, frozen=True):
    path: Path


class Asked(Wait, frozen=True):
    """A program sends its caller a request. The result is a pair (data, failure)."""

    path: Path
    data: Any


class Answered(OfFrame, frozen=True):
    """A program here answers a request of the program of this path."""

    data: Any


class Returned(OfFrame, frozen=True):
    """The program of this path ended here. `failure` is set if the program raised."""

    result: Any
    failure: Failure | None
    discarded: tuple[tuple[Key, Worker], ...] = ()  # Keys without refs.


class Awaited(Wait, frozen=True):
    """The owner's top frame waits until everything that it issued is acknowledged."""


class Fetched(Struct, frozen=True):
    """A program here waits for values. For each, the result has a key or a failure."""

    waiter: int
    keys: tuple[tuple[Key, Worker], ...]


class Assigned(Struct, frozen=True):
    """A program here assigns to leaves on any workers: all parts are sent, or no part.

    The constants and values that the messages carry are already stored.
    """

    path: Path
    parts: tuple[Assignment, ...]


class Dropped(Struct, frozen=True):
    leaves: tuple[LeafId, ...]


class Differentiated(Wait, frozen=True):
    """The owner's top frame requests a pass. The result is a `PassResult`.

    Given cotangents are already stored under their seed keys.
    """

    roots: tuple[tuple[Worker, Root], ...]
    mode: Mode
    retain: bool
    timeout_ns: int | None  # None: no limit.


class Expired(Struct, frozen=True):
    context: ContextId
    number: int


class Attached(Struct, frozen=True):
    """A program on this worker attaches a hook to a value, here or elsewhere."""

    context: ContextId
    worker: Worker
    key: Key
    hook: Hook


class Planned(Struct, frozen=True):
    """A program here compiled a plan: prepare it on these workers.

    Its constants are already stored. `results`: the slots that a step returns.
    `slots`: those of its inputs, in order; `inputs`: those that each worker needs.
    """

    context: ContextId
    parts: tuple[tuple[Worker, Prepare], ...]
    results: tuple[int, ...]
    slots: tuple[int, ...]
    inputs: tuple[tuple[Worker, tuple[int, ...]], ...]


class Compiled(Wait, frozen=True):
    """A program here waits until more than `seen` segments are compiled.

    The result is the number of compiled segments, or a failure.
    """

    seen: int


class Stepping(Wait, frozen=True):
    """A program here runs a step. The result is a tuple of its values, or a failure."""

    number: int
    values: Sequence[Any]  # Its inputs, in the order of `Planned.slots`.


class Unplanned(Struct, frozen=True):
    """No program has a reference to this plan."""

    context: ContextId


class Left(Wait, frozen=True):
    """The owner's top frame leaves the context. The result is a tuple of failures."""


Event = (
    Computed | Arrived | Acknowledged | Lost | Joined | Opened | Issued | Discarded
    | Launched | Collected | TimedOut | Asked | Answered | Returned | Awaited | Fetched
    | Assigned | Dropped | Attached | Differentiated | Expired | Left | Planned
    | Compiled | Stepping | Unplanned
)  # fmt: skip


class Send(Struct, frozen=True):
    """Send a message with these values, in the order of `landing(message)`."""

    to: Worker
    message: Message
    values: tuple[Key, ...] = ()
    zeros: tuple[Any, ...] = ()  # Shapes of symbolic zeros, for statistics. Not sent.
    given: tuple[Any, ...] = ()  # The values of a StepFrame themselves.


class Compute(Struct, frozen=True):
    """Run a job when the device is free. Then report `Computed`."""

    job: Job


class Drop(Struct, frozen=True):
    """Delete these values. Keys that are not stored are ignored."""

    keys: tuple[Key, ...]


class Spawn(OfFrame, frozen=True):
    """Start a program as the frame of this path. Report `Returned` when it ends."""

    function: Any
    arguments: Any
    call_site: str
    objects: tuple[ObjectId, ...] = ()  # Locked for this program until it ends.


class Resume(Struct, frozen=True):
    """Resume a waiting program. The event with this waiter defines the result."""

    waiter: int
    result: Any


class Alarm(Struct, frozen=True):
    """Report `event` after this time, unless the waiter is resumed first."""

    waiter: int
    event: Expired | TimedOut
    after_ns: int


class Skip(Struct, frozen=True):
    """No more jobs of these actions will run for a call or, if no tag, for any call."""

    context: ContextId
    tag: Tag | None
    actions: str
    number: int = 0  # The number of the step, if the context is a plan.


class Listed(Struct, frozen=True):
    """Only these actions of a schedule will run in a context, or in a plan's step."""

    context: ContextId
    actions: tuple[tuple[str, Tag], ...]
    number: int = 0


Effect = Send | Compute | Drop | Spawn | Resume | Alarm | Skip | Listed


class PassResult(Struct, frozen=True):
    """The result of a pass. If it finished, `failure` comes from an observing hook."""

    number: int
    outcome: Outcome
    failure: Failure | None
    owed: tuple[Owed, ...]
    leaves: tuple[LeafId, ...]  # Leaves with new gradients, sorted.
    stale: tuple[Stale, ...] = ()  # Leaves updated after the forward, sorted.
