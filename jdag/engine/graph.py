"""One worker's fragment of a context: values, vertices, edges and the calls it issued.

A vertex accumulates cotangents. Cotangents of its `outputs` arrive; cotangents of its
`inputs` leave. There are four kinds, here with cotangents in -> cotangents out:

    CallNode  a recorded vjp: tracked results of a call -> its tracked arguments
    SendEnd   the sending end of a transfer: a Cotangent message -> the sent values
    RecvEnd   the receiving end: the received values -> a Cotangent message
    LeafEnd   accumulates the gradient of a leaf: its versions -> nothing

Invariants: an edge is (vertex, position in its `inputs`), and the value there names its
producer; a node is spent at most once, and so is each slot of a send (FAST passes do
not wait for spent slots); a value settles once.
"""

from collections.abc import Callable
from typing import Any, ClassVar

from msgspec import Struct
from msgspec.structs import replace

from jdag.engine.protocol import (
    ContextId,
    Failure,
    Hook,
    Key,
    LeafId,
    Path,
    Release,
    Return,
    Tag,
    Tell,
    Worker,
)


class Value:
    """An opaque value: its storage key, producer and users, and whether it failed."""

    __slots__ = (
        "failure", "index", "key", "producer", "settled", "stored", "users", "waiters",
    )  # fmt: skip

    def __init__(
        self, key: Key, producer: "LocalVertex | None" = None, index: int = 0
    ) -> None:
        self.key = key
        self.stored = key  # Differs for a gradient: the key of its sum.
        self.producer = producer
        self.index = index
        self.settled = False
        self.failure: Failure | None = None
        self.waiters: Any = ()  # A list of `Pending` while some wait.
        self.users = 1  # One for the programs that can name the value: see `lifetimes`.


class Version(Value):
    """A version of a leaf. The leaf itself counts as a user of the newest version.

    Until a version has settled, it is a user of the previous version (`before`). If the
    update is withdrawn, the version takes the array of `before`.
    """

    __slots__ = ("before", "leaf")

    def __init__(
        self, key: Key, leaf: "LeafVersions", before: "Version | None"
    ) -> None:
        super().__init__(key)
        self.leaf = leaf
        self.before = before


class LeafVersions(Struct, eq=False):
    aval: Any
    newest: int = -1
    forgotten: bool = False
    versions: dict[int, Version] = {}


class Pending(Struct, eq=False):
    missing: int
    callback: Callable[..., None]
    args: tuple[Any, ...]


class CallNode(Struct, eq=False):
    """A call that runs here. With tracked inputs and outputs, it records a vjp."""

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
    waited: bool = False  # Its cotangents are complete, but its forward has not run.
    tag: Tag | None = None


class SendEnd(Struct, eq=False):
    """The sending end of a transfer. In `inputs`, None stands for an untracked slot."""

    path: Path
    destination: Worker
    inputs: tuple[Value | None, ...]
    function: str
    call_site: str
    spent: list[bool]


class RecvEnd(Struct, eq=False):
    path: Path
    source: Worker
    avals: list[Any]
    outputs: tuple[Value, ...] = ()
    tracked: tuple[bool, ...] = ()  # The call sets this and `avals`.


class LeafEnd(Struct, eq=False):
    """Accumulates the gradient of one leaf in one context. It is never spent.

    `read` is the version that the context reads: the newest version at its first read.
    After its program assigns to the leaf, the next read takes the newest version again.
    Assignments of other programs do not change `read`.
    """

    path: ClassVar[Path] = ()  # A leaf belongs to no call.
    leaf: LeafId
    aval: Any
    gradient: Value | None = None  # The committed gradient.
    outputs: tuple[Value, ...] = ()
    read: Value | None = None


LocalVertex = CallNode | RecvEnd | LeafEnd  # The producers of values.

# The copies of a value. Key: the copy's worker, and whether the copy is tracked.
_Copies = dict[tuple[Worker, bool], Key]


class FrameRecord(Struct, eq=False):
    path: Path
    issuer: Worker | None  # The caller's worker, or None at the top level.
    unhandled: int = 0  # Sent calls, ships and hooks that are not known to be handled.
    launched: dict[Path, Worker] = {}  # The running programs that this frame called.
    news: list[Return | Tell] = []  # Messages that the program has not taken.
    taken: int = 0  # Number of `news` that the program has taken.
    collector: int = 0  # Waiter of a Collected event, if the program waits for `news`.
    asker: int = 0  # Waiter of an Asked event, if the program waits for an answer.
    moved: dict[Key, _Copies] = {}
    versions: dict[LeafId, Key] = {}  # By leaf, the last version that was transferred.
    notices: dict[Worker, list[Key]] = {}  # Discards to be sent: see `lifetimes`.
    workers: dict[Worker, None] = {}  # Workers that may participate.
    listed: dict[Worker, None] = {}  # Workers with scheduled calls of this frame.
    lost: Failure | None = None  # The first loss among `workers`.


class Fragment(Struct, eq=False):
    context: ContextId
    owner: Worker
    values: dict[Key, Value] = {}
    nodes: dict[Path, CallNode] = {}
    sends: dict[Path, SendEnd] = {}
    recvs: dict[tuple[Path, Worker], RecvEnd] = {}
    leaves: dict[LeafId, LeafEnd] = {}
    # Hooks in order of path. Key: a leaf, or the key of an output.
    hooks: dict[Key | LeafId, tuple[Hook, ...]] = {}
    frames: dict[Path, FrameRecord] = {}
    pending: int = 0  # Calls that have not run, and values not yet sent.
    failures: list[Failure] = []  # Failures that originated here.
    live: Any = None  # The `worker_pass.Pass` in progress here.
    past: Any = None  # The last pass that ended here, for graph snapshots.
    ended: int = 0  # The number of the last pass that ended.
    released: bool = False  # Whether the context is released; its jobs may still run.
    release: tuple[Worker, Release] | None = None  # To be answered at `pending` == 0.
    listed: bool = False  # Whether a schedule orders the jobs of its tagged calls.
    tags: list[Tag] = []

    def tag(self, node: CallNode) -> Tag | None:
        tag = node.tag
        return replace(tag, listed=False) if tag and not self.listed else tag


def describe(vertex: LocalVertex | SendEnd) -> str:
    match vertex:
        case CallNode(function=function, path=path, call_site=site):
            return f"{getattr(function, 'name', function)} (call {path}, {site})"
        case SendEnd(function=function, path=path, call_site=site):
            return f"the send to {function} (call {path}, {site})"
        case RecvEnd(path=path, source=source):
            return f"the recv from {source!r} of call {path}"
        case _:
            return f"{vertex.leaf}"
