"""Messages between engines, as plain data.

`jdag.wire` encodes a message as bytes. A message may carry values. The driver sends
them with it, and stores them at the receiver under the keys `landing(message)`.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta

from jdag.engine.credit import Credit
from jdag.engine.names import (
    ITEMS_MAX,
    U32,
    U48,
    U64,
    ConstantKey,
    ContextId,
    CotangentKey,
    Data,
    Failure,
    Function,
    Hook,
    Key,
    Keys,
    LeafId,
    Mask,
    Mode,
    Name,
    ObjectId,
    Outcome,
    Owed,
    Path,
    ReadingKey,
    ReceivedKey,
    Record,
    Root,
    SeedKey,
    Shape,
    SlotKey,
    Stale,
    Tag,
    Worker,
    Workers,
    incarnated,
)
from jdag.engine.segments import Slots
from jdag.errors import ProtocolError

_T = TypeVar("_T")
Several = Annotated[tuple[_T, ...], Meta(max_length=ITEMS_MAX)]
_Leaves = Several[LeafId]
_Change = Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]


class Incoming(Record, gc=False):
    """A recv that a call creates: its source, and whether each slot is tracked."""

    source: Worker
    tracked: Mask


class Notice(Record, gc=False):
    """Values on a worker that no program can name any more."""

    worker: Worker
    keys: Keys


class OfCall(Record):
    """Base of messages about a call, ship or program, identified by its path."""

    context: ContextId
    path: Path


class Numbered(Record):
    """Base of messages about a pass of a context or a step of a plan.

    `number` is the number of the pass or step. A plan has the id of a context.
    """

    context: ContextId
    number: U32


class Call(OfCall, tag=0):
    """Asks the callee to run `function` on these inputs. Carries the constants."""

    function: Function
    inputs: Keys
    tracked: Mask  # Whether each input is tracked.
    outputs: Mask  # Whether each output is tracked.
    incoming: Several[Incoming]
    call_site: Name
    discarded: Keys = ()  # Keys that no program can name any more.
    tag: Tag | None = None


class Ship(OfCall, tag=1):
    """Asks the owner of arguments to send these values to the callee of this path."""

    destination: Worker
    keys: Keys
    tracked: Mask
    function: Name  # The name of the called function.
    call_site: Name
    discarded: Keys = ()


class Primal(OfCall, tag=2):
    """Carries a transfer's values. `failures` has None for each value that is sent."""

    source: Worker
    failures: Several[Failure | None]


class Run(OfCall, tag=3):
    """Asks a worker to run a program. `arguments` contains its encoded arguments."""

    function: Data
    arguments: Data
    call_site: Name
    objects: Several[ObjectId] = ()  # The hosted objects that the program uses.


class Return(OfCall, tag=4):
    """Reports the end of a program. `workers` may have fragments of the context."""

    result: Data
    failure: Failure | None
    workers: Workers
    notices: Several[Notice]


class Tell(OfCall, tag=5):
    """A request of the program of this path to its caller, or the caller's answer."""

    data: Data
    answers: bool  # Whether this message is the answer.


class Discard(Record, tag=6):
    """Tells a worker that no program can name these values any more."""

    context: ContextId
    keys: Keys


class Read(Record, tag=7):
    """Requests values without gradients. A Read never creates a fragment."""

    request: U64
    keys: Keys


class Reading(Record, tag=8):
    """The answer to a Read: its values, and a failure for each missing value."""

    request: U64
    failures: Several[Failure | None]


class Assignment(Record):
    """New versions of leaves on one worker: sent values, or results of a function."""

    path: Path  # The message's path, then the index of this part of the assignment.
    function: Function | None  # If None, the message carries the values.
    inputs: Keys
    outputs: Keys
    avals: Several[Shape]
    call_site: Name

    @property
    def worker(self) -> Worker:
        leaf: LeafId = self.outputs[0].name
        return leaf.worker


class Assign(Record, tag=9):
    """Asks to create versions of leaves, in order. Each part may fail independently.

    Carries the values of parts without a function, and each constant of functions once,
    even if several functions use it.
    """

    path: Path  # (number,), counted by the issuer.
    parts: Several[Assignment]


class Forget(Record, tag=10):
    leaves: _Leaves


class Attach(Record, tag=11):
    """Asks the worker of a value to apply this hook to the value's cotangents."""

    context: ContextId
    key: Key  # An output, or any version of a leaf.
    hook: Hook


class Start(Numbered, tag=12):
    """Asks a worker with roots to count dependencies and, if `go`, to run the pass.

    Carries the roots' given cotangents.
    """

    roots: Several[Root]
    mode: Mode
    retain: bool
    go: bool
    credit: Credit
    owed: _Change


class Marked(Record, gc=False):
    path: Path
    slots: Mask


class Mark(Numbered, tag=13):
    """In SMART mode, tells a sending worker which slots of transfers the roots need."""

    transfers: Several[Marked]
    retain: bool
    credit: Credit
    owed: _Change


class Go(Numbered, tag=14):
    """Asks a worker with roots to run the pass."""

    retain: bool
    credit: Credit
    owed: _Change


class Cotangent(Numbered, tag=15):
    """Returns a transfer's cotangents to its sender. Slots not `present` are zeros."""

    path: Path
    present: Mask
    retain: bool
    credit: Credit
    owed: _Change


class Answer(Numbered, tag=16):
    """Tells the owner that this worker is passive, and returns its credit.

    All messages of a pass carry credit and the change in owed sends
    (`jdag.engine.credit`).
    """

    credit: Credit
    owed: _Change


class Fail(Numbered, tag=17):
    """Tells the sender of the pass's first message that the pass cannot finish here."""

    failure: Failure


class End(Numbered, tag=18):
    """Tells every participant that the pass is over."""

    outcome: Outcome
    retain: bool


class Ended(Numbered, tag=19):
    """The answer to End: sends still owed, and leaves that have a new gradient."""

    owed: Several[Owed] = ()
    leaves: _Leaves = ()
    stale: Several[Stale] = ()  # Leaves that were updated later.
    failure: Failure | None = None  # Raised by an observing hook.


class Release(Record, tag=20):
    """Asks every participant to forget the context: if `abort`, immediately.

    `live` lists the counters of the owner's open contexts. All other contexts of the
    owner up to this one are released.
    """

    context: ContextId
    live: Several[U48]
    abort: bool


class Released(Record, tag=21):
    """Answer to Release: failures that originated on this worker, in program order."""

    context: ContextId
    failures: Several[Failure]


class Listing(Numbered, tag=22):
    """Tells a worker with scheduled calls that all calls of a context are issued.

    If `number` is 0, the program waits, so only the forwards of these calls can occur.
    Otherwise the pass of this number begins. If `marked`, the pass needs only the
    marked nodes, otherwise possibly all nodes.
    """

    marked: bool


class Outgoing(Record):
    to: Worker
    slots: Slots


class Segment(Record):
    """One job of a plan: its input slots, its output slots, and the slots it sends.

    Under a schedule each action is a separate segment.
    """

    function: Function
    needs: Slots
    makes: Slots
    hops: Several[Outgoing] = ()
    tag: Tag | None = None  # Under a schedule: stage and micro-batch of the action.
    action: Literal["", "F", "B", "I", "W"] = ""


class Slotted(Record):
    leaf: LeafId
    slot: U32


class Prepare(Numbered, tag=23):
    """Asks a worker to compile its part of a plan. Carries the constants."""

    segments: Several[Segment]
    constants: Slots
    reads: Several[Slotted]
    stages: Several[Slotted]
    updates: Slots  # Segments that compute new versions from the newest versions.
    reports: bool  # Whether the owner waits for a report of each step.


class StepFrame(Numbered, tag=24):
    """Carries values of a step: its inputs, or outputs of segments.

    A frame that `begins` comes from the owner, which has committed step `base` (0: none
    yet); any other frame without values reports that the sender's part is done.
    """

    slots: Slots
    base: U32
    begins: bool


class Stepped(Numbered, tag=25):
    """Tells the owner that a step failed or, with number 0, that a segment compiled."""

    failure: Failure | None


class Settle(Numbered, tag=26):
    """Asks a worker to commit a step or to drop it."""

    commits: bool
    over: bool  # Whether to forget the plan afterwards.


# Messages that the receiver's driver acknowledges when it has handled them.
ACKNOWLEDGED = frozenset((Call, Ship, Attach, Assign, Settle))

# Messages that only the owner of their context or plan may send.
FROM_OWNER = frozenset((Start, Go, End, Release, Prepare, Settle))

# Messages that carry a part of a pass's credit.
Credited = Start | Mark | Go | Cotangent | Answer

Message = (
    Call | Ship | Primal | Run | Return | Read | Reading | Assign | Forget
    | Attach | Start | Mark | Go | Cotangent | Answer | Fail | End | Ended | Release
    | Released | Discard | Tell | Listing | Prepare | StepFrame | Stepped | Settle
)  # fmt: skip


def check_owner(message: Any, sender: Worker, names: Sequence[str]) -> None:
    """Raise ProtocolError if a message of `FROM_OWNER` is not sent by the owner.

    Other wrong messages about a context affect only their sender, or raise an error
    later.
    """
    context = message.context
    owner = incarnated(names[context.number], context.incarnation)
    if owner != sender:
        name = f"a {type(message).__name__} of {context}"
        raise ProtocolError(
            f"{name} came from {sender!r}, but only {owner!r} may send it"
        )


def landing(message: Message) -> tuple[Key, ...]:
    keys = LANDING.get(message.__class__)
    return () if keys is None else tuple(keys(message))


def _of_assign(message: Assign) -> list[Key]:
    keys: dict[Key, None] = {}
    for part in message.parts:
        if part.function is None:
            keys.update(dict.fromkeys(part.outputs))
        else:
            keys.update((key, None) for key in part.inputs if type(key) is ConstantKey)
    return list(keys)


# For each message that may carry values, a function that returns their keys.
LANDING: dict[type, Callable[[Any], list[Key]]] = {
    Cotangent: lambda message: [
        CotangentKey(message.context, (message.number, message.path), slot)
        for slot, present in enumerate(message.present)
        if present
    ],
    Primal: lambda message: [
        ReceivedKey(message.context, (message.path, message.source), slot)
        for slot, failure in enumerate(message.failures)
        if failure is None
    ],
    Call: lambda message: [
        key
        for key in message.inputs
        if type(key) is ConstantKey and key.name == message.path
    ],
    Assign: _of_assign,
    Start: lambda message: [
        SeedKey(message.context, message.number, root.number)
        for root in message.roots
        if root.given
    ],
    Prepare: lambda message: [
        SlotKey(message.context, 0, slot) for slot in message.constants
    ],
    StepFrame: lambda message: [
        SlotKey(message.context, message.number, slot) for slot in message.slots
    ],
    Reading: lambda message: [
        ReadingKey(None, message.request, slot)
        for slot, failure in enumerate(message.failures)
        if failure is None
    ],
}
