"""What engines say to each other; `landing` names the values that ride along.

A message is data. The wire turns it into bytes; the driver attaches the values and
stores them, where they land, under the keys that `landing(message)` gives.
"""

from typing import Any, NamedTuple

from jdag.engine.names import (
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
)
from jdag.engine.weight import Weight


class Incoming(NamedTuple):
    """A recv that a call makes: who sends, and which of the slots are tracked."""

    source: Worker
    tracked: tuple[bool, ...]


class Notice(NamedTuple):
    """Values on a worker that no program can name any more."""

    worker: Worker
    keys: tuple[Key, ...]


@data
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
    discarded: tuple[Key, ...] = ()  # These are not named any more.


@data
class Ship:
    """Issuer to an owner of arguments: send these to where this path's call runs."""

    context: ContextId
    path: Path
    destination: Worker
    keys: tuple[Key, ...]
    tracked: tuple[bool, ...]
    function: str  # For whom: the name of the function that is called there.
    call_site: str
    discarded: tuple[Key, ...] = ()


@data
class Acknowledge:
    """To the issuer: the call, ship or assignment of this path has arrived."""

    context: ContextId | None
    path: Path


@data
class Primal:
    """Send to recv: the values of a transfer, or for a slot why there is none."""

    context: ContextId
    path: Path
    source: Worker
    failures: tuple[Failure | None, ...]


@data
class Run:
    """Issuer to worker: run a program there. `arguments` are data: refs and statics."""

    context: ContextId
    path: Path
    function: Any
    arguments: Any
    call_site: str


@data
class Return:
    """The program of this path ended; it touched these workers."""

    context: ContextId
    path: Path
    result: Any
    failure: Failure | None
    workers: tuple[Worker, ...]
    notices: tuple[Notice, ...]


@data
class Discard:
    """An activation to an owner: no program can name these values any more."""

    context: ContextId
    keys: tuple[Key, ...]


@data
class Read:
    """Asks for values; untracked. Never makes a context."""

    request: int
    keys: tuple[Key, ...]


@data
class Reading:
    """Answers a read, with the values or with why there are none."""

    request: int
    failures: tuple[Failure | None, ...]


@data
class Assignment:
    """New versions of leaves of one worker: from values, or by a function there."""

    path: Path  # That of the message, then the place among all assigned with it.
    function: Any  # None: the values come with the message.
    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...]
    avals: tuple[Any, ...]
    call_site: str

    @property
    def worker(self) -> Worker:
        """Who keeps these leaves."""
        leaf: LeafId = self.outputs[0].name
        return leaf.worker


@data
class Assign:
    """Make versions of leaves, each part by itself, in order.

    Carries the values of parts without a function, and the constants that functions
    take, each once however many take it.
    """

    path: Path  # (number,): leaves are assigned outside contexts, in one order.
    parts: tuple[Assignment, ...]


@data
class Forget:
    """Drop these leaves, all versions."""

    leaves: tuple[LeafId, ...]


@data
class Attach:
    """Issuer to the owner of a value: have this hook see its cotangents."""

    context: ContextId
    key: Key  # An output, or any version of a leaf.
    hook: Hook


@data
class Start:
    """Owner to a worker with roots: count, and if `go` begin. Carries cotangents."""

    context: ContextId
    number: int  # Of the pass.
    roots: tuple[Root, ...]
    mode: Mode
    retain: bool
    go: bool
    weight: Weight
    owed: int


class Marked(NamedTuple):
    """Slots of a transfer, by its path, that the roots are newly known to need."""

    path: Path
    slots: tuple[bool, ...]


@data
class Mark:
    """Recv to send, in SMART mode: what the roots need of these transfers."""

    context: ContextId
    number: int
    transfers: tuple[Marked, ...]
    retain: bool
    weight: Weight
    owed: int


@data
class Go:
    """Owner to a worker whose roots it announced: begin."""

    context: ContextId
    number: int
    retain: bool
    weight: Weight
    owed: int


@data
class Cotangent:
    """Recv to send: cotangents of a transfer's slots; absent = symbolic zero."""

    context: ContextId
    number: int
    path: Path
    present: tuple[bool, ...]
    retain: bool
    weight: Weight
    owed: int


@data
class Answer:
    """To the owner: nothing of the pass goes on here; weight and change in owed sends.

    All messages of a pass carry these two (`jdag.engine.weight`).
    """

    context: ContextId
    number: int
    weight: Weight
    owed: int


@data
class Fail:
    """To whom one first heard of the pass from: it cannot finish."""

    context: ContextId
    number: int
    failure: Failure


@data
class End:
    """Owner to every participant: the pass is over."""

    context: ContextId
    number: int
    outcome: Outcome
    retain: bool


@data
class Ended:
    """Answers End: sends still owed, leaves that now have a gradient.

    `failure`: a hook that saw one raised.
    """

    context: ContextId
    number: int
    owed: tuple[Owed, ...]
    leaves: tuple[LeafId, ...]
    stale: tuple[Stale, ...]  # Of these leaves.
    failure: Failure | None


@data
class Release:
    """Owner to every participant: forget it, at once if `abort`, else when quiet.

    `live` are the counters of the owner's contexts that are still open: every other up
    to this one is gone, which is all that a worker remembers.
    """

    context: ContextId
    live: tuple[int, ...]
    abort: bool


@data
class Released:
    """Answers Release: the failures that began here, first in program order first."""

    context: ContextId
    failures: tuple[Failure, ...]


# What carries a part of a pass's weight.
Weighted = Start | Mark | Go | Cotangent | Answer

Message = (
    Call | Ship | Acknowledge | Primal | Run | Return | Read | Reading | Assign | Forget
    | Attach | Start | Mark | Go | Cotangent | Answer | Fail | End | Ended | Release
    | Released | Discard
)  # fmt: skip


def landing(message: Message) -> tuple[Key, ...]:
    """The keys under which the values that ride with a message are stored."""
    match message:
        case Cotangent(context=context, number=number, path=path, present=present):
            return tuple(
                [
                    Key("cotangent", context, (number, path), slot)
                    for slot, here in enumerate(present)
                    if here
                ]
            )
        case Primal(context=context, path=path, source=source, failures=failures):
            return tuple(
                [
                    Key("received", context, (path, source), slot)
                    for slot, failure in enumerate(failures)
                    if failure is None
                ]
            )
        case Call(inputs=inputs, context=context, path=path):
            return tuple(
                [key for key in inputs if key.kind == "constant" and key.name == path]
            )
        case Assign(parts=parts):
            keys = [key for part in parts for key in _carried(part)]
            return tuple(dict.fromkeys(keys))
        case Start(context=context, number=number, roots=roots):
            return tuple(
                [
                    Key("seed", context, number, root.number)
                    for root in roots
                    if root.given
                ]
            )
        case Reading(request=request, failures=failures):
            return tuple(
                [
                    Key("reading", None, request, index)
                    for index, failure in enumerate(failures)
                    if failure is None
                ]
            )
        case _:
            return ()


def _carried(part: Assignment) -> tuple[Key, ...]:
    if part.function is None:
        return part.outputs
    return tuple([key for key in part.inputs if key.kind == "constant"])
