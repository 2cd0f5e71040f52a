"""One worker's part of a context: values, vertices, edges and the calls it issued.

A vertex is a point where cotangents are accumulated. All four kinds have the same
shape: cotangents of `outputs` arrive, cotangents of `inputs` leave.

    CallNode a recorded vjp: tracked results of a call in, its tracked arguments out
    SendEnd  the sending end of a transfer: a cotangent message in, the sent values out
    RecvEnd  the receiving end: the received values in, a cotangent message out
    LeafEnd  accumulates the gradient of a leaf: its versions in, nothing out

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
    """A value as the engine sees it: its storage key, and if it settled or failed."""

    __slots__ = (
        "failure", "index", "key", "producer", "settled", "stored", "users", "waiters",
    )  # fmt: skip

    def __init__(
        self, key: Key, producer: "LocalVertex | None" = None, index: int = 0
    ) -> None:
        self.key = key
        self.stored = key  # A gradient is stored under the key of its sum.
        self.producer = producer
        self.index = index
        self.settled = False
        self.failure: Failure | None = None
        self.waiters: list[Pending] = []
        self.users = 1  # The program is one of them: see `lives`.


class Version(Value):
    """A version of a leaf; being the newest of a leaf that is kept is one use of it.

    While a version is being made it uses the one before, whose array it takes over if
    the update is withdrawn.
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
    """A callback that runs once, when every value that it waits for has settled."""

    missing: int
    then: Callable[[], None]


class CallNode(Struct, eq=False):
    """A call that runs here; a recorded vjp if it has tracked inputs and outputs."""

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
    tag: Tag | None = None


class SendEnd(Struct, eq=False):
    """The sending end of a transfer; None in `inputs` is an untracked slot."""

    path: Path
    destination: Worker
    inputs: tuple[Value | None, ...]
    function: str
    call_site: str
    spent: list[bool]


class RecvEnd(Struct, eq=False):
    """The receiving end of a transfer, created by its call or by earlier data."""

    path: Path
    source: Worker
    avals: list[Any]
    outputs: tuple[Value, ...] = ()
    tracked: tuple[bool, ...] = ()  # Known from the call on, as are `avals`.


class LeafEnd(Struct, eq=False):
    """Accumulates the gradient of one leaf in one context. It is never spent.

    `read` is the version that the context reads as the newest: the newest at its first
    read, regardless of other programs' assignments, until its own program assigns.
    """

    path: ClassVar[Path] = ()  # Of no call.
    leaf: LeafId
    aval: Any
    gradient: Value | None = None  # The committed one.
    outputs: tuple[Value, ...] = ()
    read: Value | None = None


LocalVertex = CallNode | RecvEnd | LeafEnd  # What a value comes from.

# The copies of a value, by where they are and whether they are tracked.
_Copies = dict[tuple[Worker, bool], Key]


class FrameRecord(Struct, eq=False):
    """One run of a program here: what it issued, and its unfinished waits."""

    path: Path
    issuer: Worker | None  # Waits for its return; None at the top level.
    # By path and receiver. For a ship: the callee that waits, and its number of slots.
    unacknowledged: dict[tuple[Path, Worker], tuple[Worker, int] | None] = {}
    launched: dict[Path, Worker] = {}  # Programs that it called and that run.
    news: list[Return | Tell] = []  # Of these; the first `taken` were collected before.
    taken: int = 0
    collector: int = 0  # The waiter of its Collected, if it waits for news.
    asker: int = 0  # The waiter of its Asked, if it waits for an answer.
    moved: dict[Key, _Copies] = {}
    versions: dict[LeafId, Key] = {}  # The last ones transferred.
    notices: dict[Worker, list[Key]] = {}  # See `lives`.
    workers: dict[Worker, None] = {}  # That participate, or may;
    listed: dict[Worker, None] = {}  # those with calls of it that a schedule lists.
    lost: Failure | None = None  # The first loss among `workers`.


class Fragment(Struct, eq=False):
    """The part of a context that one worker owns."""

    context: ContextId
    owner: Worker
    values: dict[Key, Value] = {}
    nodes: dict[Path, CallNode] = {}
    sends: dict[Path, SendEnd] = {}
    recvs: dict[tuple[Path, Worker], RecvEnd] = {}
    leaves: dict[LeafId, LeafEnd] = {}
    # By leaf, or by key of an output; in order of path.
    hooks: dict[Key | LeafId, tuple[Hook, ...]] = {}
    frames: dict[Path, FrameRecord] = {}
    pending: int = 0  # Calls not yet run and values not yet shipped.
    failures: list[Failure] = []  # Those that originated here.
    live: Any = None  # The `share.Pass` in progress here.
    past: Any = None  # The last pass that ended here, for a drawing.
    ended: int = 0  # The number of the last pass that ended.
    gone: bool = False  # Released; its jobs may still run.
    release: tuple[Worker, Release] | None = None  # Waits for `pending` == 0.
    listed: bool = False  # A schedule says when jobs of calls here run;
    tags: list[Tag] = []  # of these calls.

    def tag(self, node: CallNode) -> Tag | None:
        """The tag of the jobs of a call from now on."""
        tag = node.tag
        return replace(tag, listed=False) if tag and not self.listed else tag


def describe(vertex: LocalVertex | SendEnd) -> str:
    """Describe a vertex for an error: its kind, call and call site."""
    match vertex:
        case CallNode(function=function, path=path, call_site=site):
            return f"{getattr(function, 'name', function)} (call {path}, {site})"
        case SendEnd(function=function, path=path, call_site=site):
            return f"the send to {function} (call {path}, {site})"
        case RecvEnd(path=path, source=source):
            return f"the recv from {source!r} of call {path}"
        case _:
            return f"{vertex.leaf}"
