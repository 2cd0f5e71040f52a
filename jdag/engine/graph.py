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

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from jdag.engine.protocol import (
    ContextId,
    Failure,
    Hook,
    Key,
    LeafId,
    Path,
    Release,
    Worker,
)


class Value:
    """A value as the engine knows it: where it is stored, if it is there or failed."""

    __slots__ = (
        "failure", "index", "key", "producer", "settled", "stored", "users", "waiters",
    )  # fmt: skip

    def __init__(
        self, key: Key, producer: "Vertex | None" = None, index: int = 0
    ) -> None:
        self.key = key
        self.stored = key  # A gradient is stored under the key of the sum that made it.
        self.producer = producer
        self.index = index
        self.settled = False
        self.failure: Failure | None = None
        self.waiters: list[Pending] = []
        self.users = 1  # Who needs it, the program among them: see `lives`.


class Version(Value):
    """A version of a leaf; being the newest of a leaf that is kept is one use of it.

    While it is being made it uses the version before, whose array it has if it is not
    made after all.
    """

    __slots__ = ("before", "leaf")

    def __init__(
        self, key: Key, leaf: "LeafVersions", before: "Version | None"
    ) -> None:
        super().__init__(key)
        self.leaf = leaf
        self.before = before


class LeafVersions(Struct, eq=False):
    """The versions of one leaf that are still held here."""

    aval: Any
    newest: int = -1
    forgotten: bool = False
    versions: dict[int, Version] = {}


class Pending(Struct, eq=False):
    """Something that runs once, when every value it waits for has settled."""

    missing: int
    then: Callable[[], None]


class Node(Struct, eq=False):
    """A call that runs here; a recorded vjp where it has tracked inputs and outputs."""

    path: Path
    function: Any
    call_site: str
    arguments: tuple[Value, ...] = ()
    results: tuple[Value, ...] = ()
    inputs: tuple[Value, ...] = ()
    outputs: tuple[Value, ...] = ()
    residuals: Key | None = None
    done: bool = False
    failure: Failure | None = None
    spent: bool = False
    waited: bool = False  # A live pass has all its cotangents and waits for it.


class SendEnd(Struct, eq=False):
    """The sending end of a transfer; in `inputs`, None is a slot not tracked."""

    path: Path
    destination: Worker
    inputs: tuple[Value | None, ...]
    function: str
    call_site: str
    spent: list[bool]


class RecvEnd(Struct, eq=False):
    """The receiving end of a transfer: made by its call, or by data that came first."""

    path: Path
    source: Worker
    avals: list[Any]
    outputs: tuple[Value, ...] = ()
    tracked: tuple[bool, ...] = ()  # Known from the call on, as are `avals`.


class LeafEnd(Struct, eq=False):
    """Where the gradient of one leaf accumulates in one context. It is never spent.

    `read` is the version that the context reads as the newest: the one that was when it
    first did, whoever makes others meanwhile, until its own program does.
    """

    leaf: LeafId
    aval: Any
    gradient: Value | None = None  # The committed one.
    outputs: tuple[Value, ...] = ()
    read: Value | None = None


Vertex = Node | RecvEnd | LeafEnd  # What a value comes from.

# The copies of a value, by where they are and whether they are tracked.
Copies = dict[tuple[Worker, bool], Key]


class ProgramFrame(Struct, eq=False):
    """One run of a program here: what it issued and what it still waits for."""

    path: Path
    issuer: Worker | None  # Who waits for it; None for the top level.
    # By path and to whom: of a ship, who waits for how many slots.
    unacknowledged: dict[tuple[Path, Worker], tuple[Worker, int] | None] = {}
    launched: dict[Path, tuple[int, Worker]] = {}
    moved: dict[Key, Copies] = {}
    versions: dict[LeafId, Key] = {}  # That were moved last.
    notices: dict[Worker, list[Key]] = {}  # See `lives`.
    workers: dict[Worker, None] = {}  # That have, or may have, a part in it.
    lost: Failure | None = None  # The first loss of a worker of these.


class Fragment(Struct, eq=False):
    """The part of a context that one worker owns."""

    context: ContextId
    owner: Worker
    values: dict[Key, Value] = {}
    nodes: dict[Path, Node] = {}
    sends: dict[Path, SendEnd] = {}
    recvs: dict[tuple[Path, Worker], RecvEnd] = {}
    leaves: dict[LeafId, LeafEnd] = {}
    # Of a leaf, or of an output by its key; in order of path.
    hooks: dict[Key | LeafId, tuple[Hook, ...]] = {}
    frames: dict[Path, ProgramFrame] = {}
    pending: int = 0  # Calls that have not run and values that were not shipped.
    failures: list[Failure] = []  # Those that began here.
    live: Any = None  # The `share.Pass` in progress here.
    past: Any = None  # The last one that ended here, for a drawing.
    ended: int = 0  # The number of the last pass that ended.
    gone: bool = False  # It was released; jobs of it may still run.
    release: tuple[Worker, Release] | None = None  # Waits for `pending` == 0.


def path_of(vertex: Vertex | SendEnd) -> Path:
    """The path of the call that made a vertex; a leaf has none."""
    return () if isinstance(vertex, LeafEnd) else vertex.path


def describe(vertex: Vertex | SendEnd) -> str:
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
