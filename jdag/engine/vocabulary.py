"""The words that engines and drivers share: jobs, events, effects and their parts.

Everything here is data. Values are opaque: a `Key` names one, a driver holds it.
Functions, shapes and the arguments and results of programs are opaque too; the engine
passes them on and never looks inside. Names and messages have modules of their own and
are found here as well.
"""

from typing import Any, ClassVar, NamedTuple

from jdag.engine.messages import (
    Acknowledge,
    Answer,
    Assign,
    Assignment,
    Attach,
    Call,
    Cotangent,
    Discard,
    End,
    Ended,
    Fail,
    Forget,
    Go,
    Incoming,
    Mark,
    Marked,
    Message,
    Notice,
    Primal,
    Read,
    Reading,
    Release,
    Released,
    Return,
    Run,
    Ship,
    Start,
    Weighted,
    landing,
)
from jdag.engine.names import (
    LEAF_KINDS,
    WORKERS_MAX,
    ContextId,
    Failure,
    Hook,
    Key,
    LeafId,
    Mode,
    Outcome,
    Owed,
    Path,
    Root,
    Stale,
    Worker,
    data,
    incarnated,
    incarnation_of,
    is_name,
    is_newest,
    named,
)

__all__ = [
    "LEAF_KINDS",
    "WORKERS_MAX",
    "Acknowledge",
    "Alarm",
    "Answer",
    "Apply",
    "Argument",
    "Arrived",
    "Assign",
    "Assigned",
    "Assignment",
    "Attach",
    "Attached",
    "Awaited",
    "Call",
    "Compute",
    "Computed",
    "ContextId",
    "Cotangent",
    "Differentiated",
    "Discard",
    "Discarded",
    "Drop",
    "Dropped",
    "Effect",
    "End",
    "Ended",
    "Event",
    "Expired",
    "Fail",
    "Failure",
    "Fetched",
    "Fill",
    "Forget",
    "Forward",
    "Go",
    "Hook",
    "Incoming",
    "Issued",
    "Job",
    "Joined",
    "Key",
    "Launched",
    "LeafId",
    "Left",
    "Lost",
    "Mark",
    "Marked",
    "Message",
    "Mode",
    "Notice",
    "Opened",
    "Outcome",
    "Owed",
    "PassResult",
    "Path",
    "Primal",
    "Read",
    "Reading",
    "Release",
    "Released",
    "Resume",
    "Return",
    "Returned",
    "Root",
    "Run",
    "Send",
    "Ship",
    "Spawn",
    "Stale",
    "Start",
    "Sum",
    "Vjp",
    "Weighted",
    "Worker",
    "incarnated",
    "incarnation_of",
    "is_name",
    "is_newest",
    "landing",
    "named",
]


@data
class Forward:
    """Run a function: read `inputs`, write `outputs`, keep `residuals` if tracked."""

    id: int
    context: ContextId | None
    path: Path
    function: Any
    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...]
    residuals: Key | None
    phase: ClassVar[int] = 0


@data
class Vjp:
    """Run a recorded vjp: one tuple of addends an output, one output a tracked input.

    The addends are dropped afterwards; the residuals too when this use is the last.
    """

    id: int
    context: ContextId
    phase: int  # The number of the pass.
    path: Path
    function: Any
    residuals: Key
    cotangents: tuple[tuple[Key, ...], ...]
    outputs: tuple[Key, ...]
    last: bool


@data
class Sum:
    """Add cotangents left to right: `base` first where there is one (it is kept)."""

    id: int
    context: ContextId
    phase: int
    path: Path
    addends: tuple[Key, ...]
    base: Key | None
    output: Key


@data
class Fill:
    """Make an array of zeros or ones of the given shape and dtype."""

    id: int
    context: ContextId
    phase: int
    path: Path
    aval: Any
    value: int
    output: Key


@data
class Apply:
    """Hand a cotangent to a hook: `output` is what it gives in its place.

    Without an output the hook only sees it. The input is dropped, unless it is kept.
    """

    id: int
    context: ContextId
    phase: int
    path: Path  # Of the hook.
    function: Any
    input: Key
    output: Key | None


Job = Forward | Vjp | Sum | Fill | Apply


@data
class Computed:
    """A job is done: its outputs are held, or it failed and they are not."""

    job: int
    failure: Failure | None = None


@data
class Arrived:
    """A message arrived; its values are already stored under `landing(message)`."""

    sender: Worker
    message: Message


@data
class Lost:
    """An incarnation of a worker is gone for good; `why`, if the driver knows that."""

    worker: Worker
    why: str = ""


@data
class Joined:
    """The worker of this name takes part again; all its former incarnations are gone.

    They need not have been lost before. To tell it twice is to tell it once.
    """

    name: str
    incarnation: int


class Argument(NamedTuple):
    """An argument as its issuer knows it: a value, where it lives, tracked or not."""

    key: Key
    owner: Worker
    tracked: bool


@data
class Opened:
    """A program opened a context here: this engine owns it."""

    context: ContextId


@data
class Issued:
    """An activation here calls a function. Its constants are already stored."""

    context: ContextId
    path: Path
    worker: Worker
    function: Any
    name: str
    arguments: tuple[Argument, ...]
    outputs: tuple[bool, ...]
    call_site: str
    discarded: tuple[tuple[Key, Worker], ...] = ()  # What it can name no more.


@data
class Discarded:
    """The activation of this path is about to wait; it can name these no more."""

    context: ContextId
    path: Path
    keys: tuple[tuple[Key, Worker], ...]


@data
class Launched:
    """A program here calls a program and waits: Resume brings (result, failure)."""

    waiter: int
    context: ContextId
    path: Path
    worker: Worker
    function: Any
    arguments: Any
    call_site: str


@data
class Returned:
    """The program of this path, which ran here, ended. `failure`: it raised."""

    context: ContextId
    path: Path
    result: Any
    failure: Failure | None
    discarded: tuple[tuple[Key, Worker], ...] = ()  # What nobody can name any more.


@data
class Awaited:
    """The owner's top activation waits until all that it issued has arrived."""

    waiter: int
    context: ContextId


@data
class Fetched:
    """A program here waits for values: Resume brings a key or a failure for each."""

    waiter: int
    keys: tuple[tuple[Key, Worker], ...]


@data
class Assigned:
    """A program here makes versions of leaves, on any workers: of all or of none.

    What they are made from, constants or values, is already stored.
    """

    path: Path
    parts: tuple[Assignment, ...]


@data
class Dropped:
    """A program here drops leaves."""

    leaves: tuple[LeafId, ...]


@data
class Differentiated:
    """The owner's top activation asks for a pass: Resume brings a `PassResult`.

    Cotangents that were given are already stored under their seed keys.
    """

    waiter: int
    context: ContextId
    roots: tuple[tuple[Worker, Root], ...]
    mode: Mode
    retain: bool
    timeout_ns: int | None  # None: it may take as long as it does.


@data
class Expired:
    """The time that a pass was given is over."""

    context: ContextId
    number: int


@data
class Attached:
    """An activation here hooks a value, here or on another worker."""

    context: ContextId
    worker: Worker
    key: Key
    hook: Hook


@data
class Left:
    """The owner's top activation leaves the context: Resume brings unseen failures."""

    waiter: int
    context: ContextId


Event = (
    Computed | Arrived | Lost | Joined | Opened | Issued | Discarded | Launched
    | Returned | Awaited | Fetched | Assigned | Dropped | Attached | Differentiated
    | Expired | Left
)  # fmt: skip


@data
class Send:
    """Send a message with these values, in the order of `landing(message)`."""

    to: Worker
    message: Message
    values: tuple[Key, ...] = ()
    zeros: tuple[Any, ...] = ()  # Shapes of the zeros that it does without.


@data
class Compute:
    """Run a job when the device is free; then tell `Computed`."""

    job: Job


@data
class Drop:
    """These values are not needed any more. A key that is not held is no error."""

    keys: tuple[Key, ...]


@data
class Spawn:
    """Start a program as the activation of this path; when it ends tell `Returned`."""

    context: ContextId
    path: Path
    function: Any
    arguments: Any
    call_site: str


@data
class Resume:
    """What a program waits for is here; the event that named the waiter says what."""

    waiter: int
    result: Any


@data
class Alarm:
    """Tell `event` when so much time has passed, unless the waiter is resumed first."""

    waiter: int
    event: Expired
    after_ns: int


Effect = Send | Compute | Drop | Spawn | Resume | Alarm


class PassResult(NamedTuple):
    """How a pass ended, for the program that asked for it.

    A finished one has a failure where a hook raised that saw a gradient.
    """

    number: int
    outcome: Outcome
    failure: Failure | None
    owed: tuple[Owed, ...]
    leaves: tuple[LeafId, ...]  # Those that it reached, in order; none unless finished.
    stale: tuple[Stale, ...] = ()  # Those of them that were updated since, in order.
