"""What one worker owns of a context: values, vertices, edges and the calls it issued.

A vertex is a place where cotangents meet. There are four kinds, alike in shape:
`outputs` are the values whose cotangents come in, `inputs` the values whose cotangents
go out.

    Node     a recorded vjp: tracked results of a call in, its tracked arguments out
    SendEnd  the sending end of a transfer: a cotangent message in, what was sent out
    RecvEnd  the receiving end: what was received in, a cotangent message out
    LeafEnd  where the gradient of a leaf accumulates: its versions in, nothing out

Invariants: an edge is (a vertex, a place in its `inputs`), and the value there names
its producer; a node is spent once and for ever, and so is each slot of a send, which
says that FAST passes need not wait for it; a value settles once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jdag.engine.phases import Ownership
from jdag.engine.protocol import (
    ContextId,
    Failure,
    Hook,
    Key,
    LeafId,
    Mode,
    Outcome,
    Path,
    ReceivedKey,
    Release,
    Root,
    Worker,
)


class Value:
    """A value as the engine knows it: where it is stored, if it is there or failed."""

    __slots__ = (
        "failure", "index", "key", "producer", "settled", "stored", "users", "waiters",
    )  # fmt: skip

    def __init__(self, key: Key, producer: "Vertex | None", index: int) -> None:
        self.key = key
        self.stored = key  # A gradient is stored under the key of the sum that made it.
        self.producer = producer
        self.index = index
        self.settled = False
        self.failure: Failure | None = None
        self.waiters: list[Pending] = []
        self.users = 1  # Who needs it, the program among them: see `lives`.


class Pending:
    """Something that runs once, when every value it waits for has settled."""

    __slots__ = ("missing", "then")

    def __init__(self, missing: int, then: Callable[[], None]) -> None:
        self.missing = missing
        self.then = then


class Node:
    """A call that runs here; a recorded vjp where it has tracked inputs and outputs."""

    __slots__ = (
        "arguments", "call_site", "done", "failure", "function", "inputs", "outputs",
        "path", "residuals", "results", "spent", "waited",
    )  # fmt: skip

    def __init__(self, path: Path, function: Any, call_site: str) -> None:
        self.path = path
        self.function = function
        self.call_site = call_site
        self.arguments: tuple[Value, ...] = ()
        self.results: tuple[Value, ...] = ()
        self.inputs: tuple[Value, ...] = ()
        self.outputs: tuple[Value, ...] = ()
        self.residuals: Key | None = None
        self.done = False
        self.failure: Failure | None = None
        self.spent = False
        self.waited = False  # A live pass has all its cotangents and waits for it.


class SendEnd:
    """The sending end of a transfer; in `inputs`, None is a slot not tracked."""

    __slots__ = (
        "call_site",
        "destination",
        "function",
        "inputs",
        "outputs",
        "path",
        "spent",
    )

    def __init__(
        self,
        path: Path,
        destination: Worker,
        inputs: tuple[Value | None, ...],
        function: str,
        call_site: str,
    ) -> None:
        self.path = path
        self.destination = destination
        self.inputs = inputs
        self.outputs: tuple[Value, ...] = ()
        self.function = function
        self.call_site = call_site
        self.spent = [value is None for value in inputs]


class RecvEnd:
    """The receiving end of a transfer: made by its call, or by data that came first."""

    __slots__ = ("avals", "inputs", "outputs", "path", "source", "tracked")

    def __init__(
        self, context: ContextId, path: Path, source: Worker, slots: int
    ) -> None:
        self.path = path
        self.source = source
        self.inputs: tuple[Value, ...] = ()
        self.tracked: tuple[bool, ...] = ()  # These two are known from the call on.
        self.avals: list[Any] = [None] * slots
        self.outputs = tuple(
            Value(ReceivedKey(context, (path, source), slot), self, slot)
            for slot in range(slots)
        )


class LeafEnd:
    """Where the gradient of one leaf accumulates in one context. It is never spent.

    `read` is the version that the context reads as the newest: the one that was when it
    first did, whoever makes others meanwhile, until its own program does.
    """

    __slots__ = ("aval", "current", "gradient", "inputs", "leaf", "outputs", "read")

    def __init__(self, leaf: LeafId, aval: Any) -> None:
        self.leaf = leaf
        self.aval = aval
        self.gradient: Key | None = None  # The committed one, where it is stored.
        self.current: Value | None = None  # The same as a value.
        self.inputs: tuple[Value, ...] = ()
        self.outputs: tuple[Value, ...] = ()
        self.read: Value | None = None


Vertex = Node | SendEnd | RecvEnd | LeafEnd

# The copies of a value, by where they are and whether they are tracked.
Copies = dict[tuple[Worker, bool], Key]


@dataclass(slots=True)
class ProgramFrame:
    """One run of a program here: what it issued and what it still waits for."""

    path: Path
    issuer: Worker | None  # Who waits for it; None for the top level.
    # By path and to whom: of a ship, who waits for how many slots.
    unacknowledged: dict[tuple[Path, Worker], tuple[Worker, int] | None] = field(
        default_factory=dict
    )
    launched: dict[Path, tuple[int, Worker]] = field(default_factory=dict)
    moved: dict[Key, Copies] = field(default_factory=dict)
    versions: dict[LeafId, Key] = field(default_factory=dict)  # That were moved last.
    notices: dict[Worker, list[Key]] = field(default_factory=dict)  # See `lives`.
    workers: dict[Worker, None] = field(default_factory=dict)
    lost: Failure | None = None  # The first loss of a worker of these.


class Past(NamedTuple):
    """A pass that ended, as far as a drawing of this fragment needs it."""

    number: int
    mode: Mode
    outcome: Outcome
    roots: tuple[Root, ...]
    counted: Mapping[Path, Sequence[bool]]  # Of sends here, the slots that were.
    owed: tuple[Path, ...]  # Of these the ones that were never answered.


class Fragment:
    """The part of a context that one worker owns."""

    __slots__ = (
        "context",
        "ended",
        "failures",
        "frames",
        "gone",
        "hooks",
        "leaves",
        "live",
        "nodes",
        "owner",
        "ownership",
        "past",
        "pending",
        "recvs",
        "release",
        "sends",
        "values",
    )  # fmt: skip

    def __init__(self, context: ContextId, owner: Worker) -> None:
        self.context = context
        self.owner = owner
        self.values: dict[Key, Value] = {}
        self.nodes: dict[Path, Node] = {}
        self.sends: dict[Path, SendEnd] = {}
        self.recvs: dict[tuple[Path, Worker], RecvEnd] = {}
        self.leaves: dict[LeafId, LeafEnd] = {}
        # Of a leaf, or of an output by its key; in order of path.
        self.hooks: dict[Key | LeafId, tuple[Hook, ...]] = {}
        self.frames: dict[Path, ProgramFrame] = {}
        self.pending = 0  # Calls that have not run and values that were not shipped.
        self.failures: list[Failure] = []  # Those that began here.
        self.live: Any = None  # The `share.Pass` in progress here.
        self.gone = False  # It was released; jobs of it may still run.
        self.ended = 0  # The number of the last pass that ended.
        self.past: Past | None = None  # The last pass that came by here.
        self.release: tuple[Worker, Release] | None = None  # Waits for `pending` == 0.
        self.ownership: Ownership | None = None  # On the context's owner alone.


def path_of(vertex: Vertex) -> Path:
    """The path of the call that made a vertex; a leaf has none."""
    return () if isinstance(vertex, LeafEnd) else vertex.path


def describe(vertex: Vertex) -> str:
    """Name a vertex for an error: what it is, of which call, from where."""
    match vertex:
        case Node(function=function, path=path, call_site=site):
            return f"{getattr(function, 'name', function)} (call {path}, {site})"
        case SendEnd(function=function, path=path, call_site=site):
            return f"the send to {function} (call {path}, {site})"
        case RecvEnd(path=path, source=source):
            return f"the recv from {source!r} of call {path}"
        case _:
            return f"{vertex.leaf}"
