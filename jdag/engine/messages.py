"""Messages between engines; `landing` gives the keys of the values that they carry.

A message is plain data. The wire encodes it as bytes; the driver attaches the values
and stores them at the receiver under the keys that `landing(message)` gives.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter
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
    """A recv that a call creates: its source, and which of the slots are tracked."""

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
    """Base of messages about a pass of a context, or a step of a plan, by its number.

    A plan has the id of a context.
    """

    context: ContextId
    number: U32


class Call(OfCall, tag=0):
    """Issuer to callee: run `function` on these inputs. Carries the constants."""

    function: Function
    inputs: Keys
    tracked: Mask  # Which inputs are edges.
    outputs: Mask  # Which outputs are tracked.
    incoming: Several[Incoming]
    call_site: Name
    discarded: Keys = ()  # No program can name these any more.
    tag: Tag | None = None


class Ship(OfCall, tag=1):
    """Issuer to an owner of arguments: send these to the callee of this path."""

    destination: Worker
    keys: Keys
    tracked: Mask
    function: Name  # The function that is called there.
    call_site: Name
    discarded: Keys = ()


class Acknowledge(Record, tag=2):
    """To the issuer: the calls, ships or assignments of these paths have arrived."""

    context: ContextId | None
    paths: Several[Path]


def acknowledged_at_once(messages: Sequence[Acknowledge]) -> list[Acknowledge]:
    """As few messages as say the same, in the same order."""
    if len(messages) == 1:
        return [*messages]
    return [
        Acknowledge(context, tuple([path for one in same for path in one.paths]))
        for context, same in groupby(messages, attrgetter("context"))
    ]


class Primal(OfCall, tag=3):
    """Send to recv: the values of a transfer, or the failure of each missing one."""

    source: Worker
    failures: Several[Failure | None]


class Run(OfCall, tag=4):
    """Issuer to worker: run a program there. `arguments` are data: refs and statics."""

    function: Data
    arguments: Data
    call_site: Name
    objects: Several[ObjectId] = ()  # On that worker, which it is handed.


class Return(OfCall, tag=5):
    """The program of this path ended; `workers` may hold parts of the context."""

    result: Data
    failure: Failure | None
    workers: Workers
    notices: Several[Notice]


class Tell(OfCall, tag=22):
    """The program of this path asks the one that called it, or is answered by that."""

    data: Data
    answers: bool


class Discard(Record, tag=21):
    """A program frame to an owner: no program can name these values any more."""

    context: ContextId
    keys: Keys


class Read(Record, tag=6):
    """Request values; untracked. Never creates a context."""

    request: U64
    keys: Keys


class Reading(Record, tag=7):
    """Answer to a Read: the values, or the failure of each missing one."""

    request: U64
    failures: Several[Failure | None]


class Assignment(Record):
    """New versions of one worker's leaves: from values, or by a function there."""

    path: Path  # The message's path, then the index among all parts assigned with it.
    function: Function | None  # None: the values come with the message.
    inputs: Keys
    outputs: Keys
    avals: Several[Shape]
    call_site: Name

    @property
    def worker(self) -> Worker:
        """The owner of these leaves."""
        leaf: LeafId = self.outputs[0].name
        return leaf.worker


class Assign(Record, tag=8):
    """Make versions of leaves, each part independently, in order.

    Carries the values of parts without a function, and the constants of functions, each
    once even if several functions use it.
    """

    path: Path  # (number,): leaves are assigned outside contexts, in one order.
    parts: Several[Assignment]


class Forget(Record, tag=9):
    """Drop these leaves, all versions."""

    leaves: _Leaves


class Attach(Record, tag=20):
    """Issuer to the owner of a value: apply this hook to its cotangents."""

    context: ContextId
    key: Key  # An output, or any version of a leaf.
    hook: Hook


class Start(Numbered, tag=10):
    """Owner to a worker with roots: count; if `go`, begin. Carries given cotangents."""

    roots: Several[Root]
    mode: Mode
    retain: bool
    go: bool
    credit: Credit
    owed: _Change


class Marked(Record, gc=False):
    """Slots of a transfer, by its path, that the roots newly need."""

    path: Path
    slots: Mask


class Mark(Numbered, tag=19):
    """Recv to send, in SMART mode: the slots of these transfers that the roots need."""

    transfers: Several[Marked]
    retain: bool
    credit: Credit
    owed: _Change


class Go(Numbered, tag=11):
    """Owner to a worker with announced roots: begin."""

    retain: bool
    credit: Credit
    owed: _Change


class Cotangent(Numbered, tag=12):
    """Recv to send: cotangents of a transfer's slots; absent = symbolic zero."""

    path: Path
    present: Mask
    retain: bool
    credit: Credit
    owed: _Change


class Answer(Numbered, tag=13):
    """To the owner: this worker is passive. Returns credit and change in owed sends.

    All messages of a pass carry these two (`jdag.engine.credit`).
    """

    credit: Credit
    owed: _Change


class Fail(Numbered, tag=14):
    """To the worker that first sent a message of the pass: it cannot finish."""

    failure: Failure


class End(Numbered, tag=15):
    """Owner to every participant: the pass is over."""

    outcome: Outcome
    retain: bool


class Ended(Numbered, tag=16):
    """Answer to End: sends still owed, and leaves that now have a gradient.

    `failure`: an observing hook raised.
    """

    owed: Several[Owed] = ()
    leaves: _Leaves = ()
    stale: Several[Stale] = ()  # Of these leaves.
    failure: Failure | None = None


class Release(Record, tag=17):
    """Owner to every participant: forget it, at once if `abort`, else when quiet.

    `live` lists the counters of the owner's open contexts. Every other context up to
    this one is gone; a worker remembers no more than that.
    """

    context: ContextId
    live: Several[U48]
    abort: bool


class Released(Record, tag=18):
    """Answer to Release: failures that originated here, in program order."""

    context: ContextId
    failures: Several[Failure]


class Listing(Numbered, tag=28):
    """To a worker with listed calls: all are there, and which actions may come.

    Of pass 0, their forwards: a program waits. Else a pass begins, which needs what it
    has `marked`, or in FAST anything.
    """

    marked: bool


class Outgoing(Record):
    """Values that go to another worker when a segment has run."""

    to: Worker
    slots: Slots


class Segment(Record):
    """What one job of a plan computes: slots that it needs and makes, and sends.

    Under a schedule each action is a segment of its own.
    """

    function: Function
    needs: Slots
    makes: Slots
    hops: Several[Outgoing] = ()
    tag: Tag | None = None  # Of the action that it is.
    action: Literal["", "F", "B", "I", "W"] = ""


class Slotted(Record):
    """A leaf, and the slot of the version that a step reads or makes."""

    leaf: LeafId
    slot: U32


class Prepare(Numbered, tag=23):
    """Owner to a worker: its part of a plan. Carries the constants; compile it."""

    segments: Several[Segment]
    constants: Slots
    reads: Several[Slotted]
    stages: Several[Slotted]
    updates: Slots  # Segments that make what is staged, from the newest versions.
    reports: bool  # Whether the owner waits for a Stepped of each step.


class Step(Numbered, tag=24):
    """Owner to a worker: run your segments. Carries the inputs of the step.

    If `commits`, the step before succeeded everywhere: commit it first.
    """

    slots: Slots
    commits: bool


class Hop(Numbered, tag=25):
    """Worker to worker: values that a segment made for others."""

    slots: Slots


class Stepped(Numbered, tag=26):
    """To the owner: a step has run here, or failed; step 0: a segment is compiled."""

    failure: Failure | None


class Settle(Numbered, tag=27):
    """Owner to a worker: the step is over; commit it, or drop it; `over`: all of it."""

    commits: bool
    over: bool


# Of these messages one alone may be the sender: the owner of the context or plan.
FROM_OWNER = frozenset((Start, Go, End, Release, Prepare, Step, Settle))

# Messages that carry a part of a pass's credit.
Credited = Start | Mark | Go | Cotangent | Answer

Message = (
    Call | Ship | Acknowledge | Primal | Run | Return | Read | Reading | Assign | Forget
    | Attach | Start | Mark | Go | Cotangent | Answer | Fail | End | Ended | Release
    | Released | Discard | Tell | Listing | Prepare | Step | Hop | Stepped | Settle
)  # fmt: skip


def check_owner(message: Any, sender: Worker, names: Sequence[str]) -> None:
    """Raise ProtocolError if one of `FROM_OWNER` is by another worker than the owner.

    All else that a peer says wrongly of a context concerns it alone, or raises.
    """
    context = message.context
    owner = incarnated(names[context.number], context.incarnation)
    if owner != sender:
        what = f"a {type(message).__name__} of {context}"
        raise ProtocolError(f"{what} came from {sender!r}: its owner is {owner!r}")


def landing(message: Message) -> tuple[Key, ...]:
    """The keys under which the values that a message carries are stored."""
    keys = _LANDING.get(message.__class__)
    return () if keys is None else tuple(keys(message))


def _of_assign(message: Assign) -> list[Key]:
    keys: dict[Key, None] = {}
    for part in message.parts:
        if part.function is None:
            keys.update(dict.fromkeys(part.outputs))
        else:
            keys.update((key, None) for key in part.inputs if type(key) is ConstantKey)
    return list(keys)


def _of_step(message: Step | Hop) -> list[Key]:
    context, number = message.context, message.number
    return [SlotKey(context, number, slot) for slot in message.slots]


_LANDING: dict[type, Callable[[Any], list[Key]]] = {
    Cotangent: lambda message: [
        CotangentKey(message.context, (message.number, message.path), slot)
        for slot, here in enumerate(message.present)
        if here
    ],
    Primal: lambda message: [
        ReceivedKey(message.context, (message.path, message.source), slot)
        for slot, why in enumerate(message.failures)
        if why is None
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
    Step: _of_step,
    Hop: _of_step,
    Reading: lambda message: [
        ReadingKey(None, message.request, slot)
        for slot, why in enumerate(message.failures)
        if why is None
    ],
}
