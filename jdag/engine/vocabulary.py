"""The words that engines, drivers and the wire share: keys, jobs, messages, events, effects.

Everything here is data. Values are opaque: a `Key` names one, a driver holds it. Functions,
shapes and the arguments and results of programs are opaque too; the engine passes them on and
never looks inside.

Names are global. A key means the same value whoever says it, so a message carries keys, and
`landing(message)` tells a driver under which keys to store the values that came with it.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, NamedTuple

Path = tuple[
    int, ...
]  # Call numbers from the top activation down: the order of everything.
Worker = str


class ContextId(NamedTuple):
    """Names a context: 16 bits of its owner's number, 48 of a counter; incarnation."""

    number: int
    counter: int
    incarnation: int

    @property
    def id(self) -> int:
        """The 64-bit id, as PyTorch writes it: the worker's number in its top 16 bits."""
        return self.number << 48 | self.counter

    def __str__(self) -> str:
        return f"{self.number}.{self.counter}"


class LeafId(NamedTuple):
    """Names a leaf: who keeps it, and its number in the order in which leaves were put."""

    worker: Worker
    number: int

    def __str__(self) -> str:
        return f"leaf {self.number} on {self.worker}"


class Key(NamedTuple):
    """Names a value.

    kind        name            index
    output      path of call    which output             where the call ran
    received    (path, source)  slot of the transfer     where the transfer went
    constant    path            position of the argument where the call runs
    leaf        LeafId          version                  on the leaf's worker
    gradient    LeafId          pass                     on the leaf's worker
    seed        pass            number of the root       where the root lives
    cotangent   (pass, path)    slot of the transfer     on the send's worker
    reading     request         number in the request    where it was asked
    scratch     job             which output             nowhere but here
    """

    kind: str
    context: ContextId | None
    name: Any
    index: int


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as a value: what holds it, and whoever computes on it, fails with it.

    `error` names a class of `jdag.errors`; `exception` is the original where this process
    has it (it does not travel). (`worker`, `path`) is where it began and identifies it.
    """

    error: str
    message: str
    worker: Worker
    path: Path = ()
    function: str = ""
    call_site: str = ""
    traceback: str = ""
    route: tuple[Worker, ...] = ()  # From the owner down to where it failed.
    exception: BaseException | None = None


class Outcome(Enum):
    """How a pass ended."""

    FINISHED = "finished"
    FAILED = "failed"
    STUCK = "stuck"


# ---------------------------------------------------------------------------- jobs


@dataclass(frozen=True, slots=True)
class Forward:
    """Run a function: read `inputs`, write `outputs`, keep `residuals` if it is tracked."""

    id: int
    context: ContextId | None
    path: Path
    function: Any
    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...]
    residuals: Key | None
    phase: ClassVar[int] = 0


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class Sum:
    """Add cotangents left to right: `base` first where there is one (it is kept)."""

    id: int
    context: ContextId
    phase: int
    path: Path
    addends: tuple[Key, ...]
    base: Key | None
    output: Key


@dataclass(frozen=True, slots=True)
class Fill:
    """Make an array of zeros or ones of the given shape and dtype."""

    id: int
    context: ContextId
    phase: int
    path: Path
    aval: Any
    value: int
    output: Key


Job = Forward | Vjp | Sum | Fill


# ------------------------------------------------------------------- forward messages


class Incoming(NamedTuple):
    """A recv that a call makes: who sends, and which of the slots are tracked."""

    source: Worker
    tracked: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """Issuer to callee: run `function` on these inputs. Carries the constants."""

    context: ContextId
    path: Path
    function: Any
    inputs: tuple[Key, ...]
    tracked: tuple[bool, ...]  # Which inputs are edges.
    outputs: tuple[bool, ...]  # Which outputs are tracked.
    incoming: tuple[Incoming, ...]
    call_site: str


@dataclass(frozen=True, slots=True)
class Ship:
    """Issuer to the owner of arguments: send these to where the call of this path runs."""

    context: ContextId
    path: Path
    destination: Worker
    keys: tuple[Key, ...]
    tracked: tuple[bool, ...]
    function: str  # For whom: the name of the function that is called there.
    call_site: str


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """To the issuer: the call, ship or assignment of this path has arrived."""

    context: ContextId | None
    path: Path


@dataclass(frozen=True, slots=True)
class Primal:
    """Send to recv: the values of a transfer, or for a slot why there is none."""

    context: ContextId
    path: Path
    source: Worker
    failures: tuple[Failure | None, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Issuer to worker: run a program there. `arguments` are data: refs and statics."""

    context: ContextId
    path: Path
    function: Any
    arguments: Any
    call_site: str


@dataclass(frozen=True, slots=True)
class Return:
    """The program of this path ended; it touched these workers."""

    context: ContextId
    path: Path
    result: Any
    failure: Failure | None
    workers: tuple[Worker, ...]


@dataclass(frozen=True, slots=True)
class Read:
    """Asks for values; untracked. Never makes a context."""

    request: int
    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """Answers a read, with the values or with why there are none."""

    request: int
    failures: tuple[Failure | None, ...]


@dataclass(frozen=True, slots=True)
class Assign:
    """Make versions of leaves: from the values carried, or by a function run there."""

    path: Path  # (number,): leaves are assigned outside contexts, in one order.
    function: Any  # None: the values come with the message.
    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...]
    avals: tuple[Any, ...]
    call_site: str


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop these leaves, all versions."""

    leaves: tuple[LeafId, ...]


# ------------------------------------------------------------------ backward messages


class Root(NamedTuple):
    """Where a pass starts: a value, its shape, and whether a cotangent is carried."""

    key: Key
    aval: Any
    given: bool
    number: int  # Its place among all roots of the pass.


@dataclass(frozen=True, slots=True)
class Start:
    """Owner to a worker with roots: walk, and if `go` begin. Engages. Carries cotangents."""

    context: ContextId
    number: int  # Of the pass.
    roots: tuple[Root, ...]
    retain: bool
    go: bool


@dataclass(frozen=True, slots=True)
class Go:
    """Owner to a worker whose roots it announced: begin. Engages."""

    context: ContextId
    number: int
    retain: bool


@dataclass(frozen=True, slots=True)
class Cotangent:
    """Recv to send: cotangents of a transfer's tracked slots; absent = symbolic zero."""

    context: ContextId
    number: int
    path: Path
    present: tuple[bool, ...]
    retain: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """To whom engaged or told: this message is done with; change in sends owed."""

    context: ContextId
    number: int
    owed: int


@dataclass(frozen=True, slots=True)
class Fail:
    """To the parent in the tree: the pass cannot finish."""

    context: ContextId
    number: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class End:
    """Owner to every participant: the pass is over."""

    context: ContextId
    number: int
    outcome: Outcome
    retain: bool


class Owed(NamedTuple):
    """A send that waited for its cotangent: what a stuck pass names."""

    path: Path
    worker: Worker  # Where the send is.
    destination: Worker  # Who never sent the cotangent.
    function: str  # The function that was called with what was sent.
    call_site: str


@dataclass(frozen=True, slots=True)
class Ended:
    """Answers End: sends still owed, and leaves that now have a gradient."""

    context: ContextId
    number: int
    owed: tuple[Owed, ...]
    leaves: tuple[LeafId, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Owner to every participant: forget the context, at once if `abort`, else when quiet.

    `live` are the counters of the owner's contexts that are still open: every other up to
    this one is gone, which is all that a worker remembers.
    """

    context: ContextId
    live: tuple[int, ...]
    abort: bool


@dataclass(frozen=True, slots=True)
class Released:
    """Answers Release: the failures that began here, first in program order first."""

    context: ContextId
    failures: tuple[Failure, ...]


Message = (
    Call | Ship | Acknowledge | Primal | Run | Return | Read | Reading | Assign | Forget
    | Start | Go | Cotangent | Answer | Fail | End | Ended | Release | Released
)  # fmt: skip


def landing(message: Message) -> tuple[Key, ...]:
    """The keys under which the values that ride with a message are stored where it lands."""
    match message:
        case Cotangent(context=context, number=number, path=path, present=present):
            name = (number, path)
            return tuple(
                Key("cotangent", context, name, slot)
                for slot, here in enumerate(present)
                if here
            )
        case Primal(context=context, path=path, source=source, failures=failures):
            name = (path, source)
            return tuple(
                Key("received", context, name, slot)
                for slot, failure in enumerate(failures)
                if failure is None
            )
        case Call(inputs=inputs, context=context, path=path):
            return tuple(
                key for key in inputs if key.kind == "constant" and key.name == path
            )
        case Assign(function=None, outputs=outputs):
            return outputs
        case Assign(inputs=inputs):
            return tuple(key for key in inputs if key.kind == "constant")
        case Start(context=context, number=number, roots=roots):
            return tuple(
                Key("seed", context, number, root.number)
                for root in roots
                if root.given
            )
        case Reading(request=request, failures=failures):
            return tuple(
                Key("reading", None, request, index)
                for index, failure in enumerate(failures)
                if failure is None
            )
        case _:
            return ()


# ----------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Computed:
    """A job is done: its outputs are held, or it failed and they are not."""

    job: int
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message arrived; its values are already stored under `landing(message)`."""

    sender: Worker
    message: Message


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker is gone for good."""

    worker: Worker


class Argument(NamedTuple):
    """An argument of a call as its issuer knows it: a value, where it lives, tracked."""

    key: Key
    owner: Worker
    tracked: bool


@dataclass(frozen=True, slots=True)
class Opened:
    """A program opened a context here: this engine owns it."""

    context: ContextId


@dataclass(frozen=True, slots=True)
class Issued:
    """An activation here calls a function. Constants are already stored under their keys."""

    context: ContextId
    path: Path
    worker: Worker
    function: Any
    name: str
    arguments: tuple[Argument, ...]
    outputs: tuple[bool, ...]
    call_site: str


@dataclass(frozen=True, slots=True)
class Launched:
    """An activation here calls a program, and waits: Resume brings its result."""

    waiter: int
    context: ContextId
    path: Path
    worker: Worker
    function: Any
    arguments: Any
    call_site: str


@dataclass(frozen=True, slots=True)
class Returned:
    """The program of this path, which ran here, ended. `failure`: it raised."""

    context: ContextId
    path: Path
    result: Any
    failure: Failure | None


@dataclass(frozen=True, slots=True)
class Fetched:
    """A program here waits for values: Resume brings a key or a failure for each."""

    waiter: int
    keys: tuple[tuple[Key, Worker], ...]


@dataclass(frozen=True, slots=True)
class Assigned:
    """A program here makes versions of leaves on `worker`. Outputs are leaf keys."""

    path: Path
    worker: Worker
    function: Any
    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...]
    avals: tuple[Any, ...]
    call_site: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """A program here drops leaves."""

    leaves: tuple[LeafId, ...]


@dataclass(frozen=True, slots=True)
class Differentiated:
    """The owner's top activation asks for a pass: Resume brings a `PassResult`.

    Cotangents that were given are already stored under their seed keys.
    """

    waiter: int
    context: ContextId
    roots: tuple[tuple[Worker, Root], ...]
    retain: bool


@dataclass(frozen=True, slots=True)
class Left:
    """The owner's top activation leaves the context: Resume brings unseen failures."""

    waiter: int
    context: ContextId


Event = (
    Computed | Arrived | Lost | Opened | Issued | Launched | Returned | Fetched | Assigned
    | Dropped | Differentiated | Left
)  # fmt: skip


# ---------------------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message, with the values of these keys, in the order of `landing(message)`."""

    to: Worker
    message: Message
    values: tuple[Key, ...] = ()


@dataclass(frozen=True, slots=True)
class Compute:
    """Run a job when the device is free; then tell `Computed`."""

    job: Job


@dataclass(frozen=True, slots=True)
class Drop:
    """These values are not needed any more. A key that is not held is no error."""

    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start a program as the activation of this path; when it ends tell `Returned`."""

    context: ContextId
    path: Path
    function: Any
    arguments: Any
    call_site: str


@dataclass(frozen=True, slots=True)
class Resume:
    """What a program waits for is here: its result (see the event that named the waiter)."""

    waiter: int
    result: Any


Effect = Send | Compute | Drop | Spawn | Resume


class PassResult(NamedTuple):
    """How a pass ended, for the program that asked for it."""

    number: int
    outcome: Outcome
    failure: Failure | None
    owed: tuple[Owed, ...]
    leaves: tuple[LeafId, ...]  # Every leaf of the context with a gradient, in order.
