"""The words that engines and drivers share: jobs, events, effects and their parts.

Everything here is data. Values are opaque: a `Key` names one, a driver holds it.
Functions, shapes and the arguments and results of programs are opaque too; the engine
passes them on and never looks inside. Names and messages have modules of their own and
are found here as well.
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
    phase: ClassVar[int] = 0


class PassJob(Struct, frozen=True):
    """A job of a pass; its path is that of the call, transfer, root or hook."""

    id: int
    context: ContextId
    phase: int  # The number of the pass.
    path: Path


class Vjp(PassJob, frozen=True):
    """Run a recorded vjp: one tuple of addends an output, one output a tracked input.

    The addends are dropped afterwards; the residuals too when this use is the last.
    """

    function: Any
    residuals: Key
    cotangents: tuple[tuple[Key, ...], ...]
    outputs: tuple[Key, ...]
    last: bool


class Sum(PassJob, frozen=True):
    """Add cotangents left to right: `base` first where there is one (it is kept)."""

    addends: tuple[Key, ...]
    base: Key | None
    output: Key


class Fill(PassJob, frozen=True):
    """Make an array of zeros or ones of the given shape and dtype."""

    aval: Any
    value: int
    output: Key


class Apply(PassJob, frozen=True):
    """Hand a cotangent to a hook: `output` is what it gives in its place.

    Without an output the hook only sees it. The input is dropped, unless it is kept.
    """

    function: Any
    input: Key
    output: Key | None


Job = Forward | Vjp | Sum | Fill | Apply


class Computed(Struct, frozen=True):
    """A job is done: its outputs are held, or it failed and they are not."""

    job: int
    failure: Failure | None = None


class Arrived(Struct, frozen=True):
    """A message arrived; its values are already stored under `landing(message)`."""

    sender: Worker
    message: Message


class Lost(Struct, frozen=True):
    """An incarnation of a worker is gone for good; `why`, if the driver knows that."""

    worker: Worker
    why: str = ""


class Joined(Struct, frozen=True):
    """The worker of this name takes part again; all its former incarnations are gone.

    They need not have been lost before. To tell it twice is to tell it once.
    """

    name: str
    incarnation: int


class Argument(Struct, frozen=True):
    """An argument as its issuer knows it: a value, where it lives, tracked or not."""

    key: Key
    owner: Worker
    tracked: bool


class Opened(Struct, frozen=True):
    """A program opened a context here: this engine owns it."""

    context: ContextId


class Issued(Struct, frozen=True):
    """A program frame here calls a function. Its constants are already stored."""

    context: ContextId
    path: Path
    worker: Worker
    function: Any
    name: str
    arguments: tuple[Argument, ...]
    outputs: tuple[bool, ...]
    call_site: str
    discarded: tuple[tuple[Key, Worker], ...] = ()  # What it can name no more.


class Discarded(Struct, frozen=True):
    """The frame of this path is about to wait; it can name these no more."""

    context: ContextId
    path: Path
    keys: tuple[tuple[Key, Worker], ...]


class Launched(Struct, frozen=True):
    """A program here calls a program and waits: Resume brings (result, failure)."""

    waiter: int
    context: ContextId
    path: Path
    worker: Worker
    function: Any
    arguments: Any
    call_site: str


class Returned(Struct, frozen=True):
    """The program of this path, which ran here, ended. `failure`: it raised."""

    context: ContextId
    path: Path
    result: Any
    failure: Failure | None
    discarded: tuple[tuple[Key, Worker], ...] = ()  # What nobody can name any more.


class Awaited(Struct, frozen=True):
    """The owner's top frame waits until all that it issued has arrived."""

    waiter: int
    context: ContextId


class Fetched(Struct, frozen=True):
    """A program here waits for values: Resume brings a key or a failure for each."""

    waiter: int
    keys: tuple[tuple[Key, Worker], ...]


class Assigned(Struct, frozen=True):
    """A program here makes versions of leaves, on any workers: of all or of none.

    What they are made from, constants or values, is already stored.
    """

    path: Path
    parts: tuple[Assignment, ...]


class Dropped(Struct, frozen=True):
    """A program here drops leaves."""

    leaves: tuple[LeafId, ...]


class Differentiated(Struct, frozen=True):
    """The owner's top frame asks for a pass: Resume brings a `PassResult`.

    Cotangents that were given are already stored under their seed keys.
    """

    waiter: int
    context: ContextId
    roots: tuple[tuple[Worker, Root], ...]
    mode: Mode
    retain: bool
    timeout_ns: int | None  # None: it may take as long as it does.


class Expired(Struct, frozen=True):
    """The time that a pass was given is over."""

    context: ContextId
    number: int


class Attached(Struct, frozen=True):
    """A program frame here hooks a value, here or on another worker."""

    context: ContextId
    worker: Worker
    key: Key
    hook: Hook


class Left(Struct, frozen=True):
    """The owner's top frame leaves the context: Resume brings unseen failures."""

    waiter: int
    context: ContextId


Event = (
    Computed | Arrived | Lost | Joined | Opened | Issued | Discarded | Launched
    | Returned | Awaited | Fetched | Assigned | Dropped | Attached | Differentiated
    | Expired | Left
)  # fmt: skip


class Send(Struct, frozen=True):
    """Send a message with these values, in the order of `landing(message)`."""

    to: Worker
    message: Message
    values: tuple[Key, ...] = ()
    zeros: tuple[Any, ...] = ()  # Shapes of the zeros that it does without.


class Compute(Struct, frozen=True):
    """Run a job when the device is free; then tell `Computed`."""

    job: Job


class Drop(Struct, frozen=True):
    """These values are not needed any more. A key that is not held is no error."""

    keys: tuple[Key, ...]


class Spawn(Struct, frozen=True):
    """Start a program as the frame of this path; when it ends tell `Returned`."""

    context: ContextId
    path: Path
    function: Any
    arguments: Any
    call_site: str


class Resume(Struct, frozen=True):
    """What a program waits for is here; the event that named the waiter says what."""

    waiter: int
    result: Any


class Alarm(Struct, frozen=True):
    """Tell `event` when so much time has passed, unless the waiter is resumed first."""

    waiter: int
    event: Expired
    after_ns: int


Effect = Send | Compute | Drop | Spawn | Resume | Alarm


class PassResult(Struct, frozen=True):
    """How a pass ended, for the program that asked for it.

    A finished one has a failure where a hook raised that saw a gradient.
    """

    number: int
    outcome: Outcome
    failure: Failure | None
    owed: tuple[Owed, ...]
    leaves: tuple[LeafId, ...]  # Those that it reached, in order; none unless finished.
    stale: tuple[Stale, ...] = ()  # Those of them that were updated since, in order.
