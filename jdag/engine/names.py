"""Names and plain data that messages, jobs and events are made of.

Names are global: a key means the same value whoever says it.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def data(cls: type[T]) -> type[T]:
    """A frozen dataclass with slots: the type checker refuses all writes.

    At run time it is not frozen: `object.__setattr__` for each field would double the
    cost of making one, and several are made for each node.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)


# Call numbers from the top activation down: the order of everything.
Path = tuple[int, ...]

# A worker that comes back is another one: nothing that was said of the former one, or
# is on its way to or from it, is of it. So each incarnation has a name of its own: the
# first the worker's, `ps0`, the others `ps0#1`, `ps0#2`, ...
Worker = str
_AGAIN = "#"  # Not in the name of a worker.


def incarnated(name: str, incarnation: int) -> Worker:
    """What engines call an incarnation of the worker of this name."""
    return f"{name}{_AGAIN}{incarnation}" if incarnation else name


def named(worker: Worker) -> str:
    """The name of the worker of which this is an incarnation."""
    return worker.partition(_AGAIN)[0]


def incarnation_of(worker: Worker) -> int:
    """How often this worker had been started before."""
    return int(worker.partition(_AGAIN)[2] or 0)


WORKERS_MAX = 1 << 16  # A context's id has 16 bits for the worker.


def is_name(name: object) -> bool:
    """Whether a worker can be called that."""
    if not isinstance(name, str) or not name.isprintable():
        return False  # A sign that nobody sees makes two names look like one.
    return bool(name) and _AGAIN not in name


class ContextId(NamedTuple):
    """Names a context: 16 bits of its owner's number, 48 of a counter; incarnation."""

    number: int
    counter: int
    incarnation: int

    @property
    def id(self) -> int:
        """The 64-bit id: the worker's number in its top 16 bits."""
        return self.number << 48 | self.counter

    def __str__(self) -> str:
        return f"{incarnated(str(self.number), self.incarnation)}.{self.counter}"


class LeafId(NamedTuple):
    """Names a leaf: who keeps it; who made it, and how many it had made before.

    Of its 64 bits 16 are the maker's number, then 16 that of its incarnation.
    """

    worker: Worker
    number: int

    @classmethod
    def made_by(
        cls, maker: int, incarnation: int, counter: int, worker: Worker
    ) -> "LeafId":
        """The name of the leaf, on a worker, of this maker and counter."""
        assert incarnation < 1 << 16 and counter < 1 << 32, (incarnation, counter)
        return cls(worker, maker << 48 | incarnation << 32 | counter)

    def __str__(self) -> str:
        maker, incarnation = self.number >> 48, self.number >> 32 & (1 << 16) - 1
        by = incarnated(str(maker), incarnation)
        by = f"{by}." if by != "0" else ""
        return f"leaf {by}{self.number & (1 << 32) - 1} on {self.worker}"


class Key(NamedTuple):
    """Names a value.

    kind        name            index
    output      path of call    which output             where the call ran
    received    (path, source)  slot of the transfer     where the transfer went
    constant    path            position of the argument where the call runs
    leaf        LeafId          version                  on the leaf's worker
    newest      LeafId          0: which, it says        the leaf's worker
    gradient    LeafId          pass                     on the leaf's worker
    seed        pass            number of the root       where the root lives
    cotangent   (pass, path)    slot of the transfer     on the send's worker
    reading     request         number in the request    where it was asked
    residuals   path of call    0                        where the call ran
    scratch     job             which output             nowhere but here
    """

    kind: str
    context: ContextId | None
    name: Any
    index: int  # type: ignore[assignment]  # Hides tuple.index, unused.


LEAF_KINDS = ("leaf", "newest")  # Of keys that name a version of a leaf.


def is_newest(key: Key) -> bool:
    """Whether a key means whichever version of a leaf is the newest."""
    return key.kind == "newest"


@data
class Failure:
    """An error as a value: what holds it, and whoever computes on it, fails with it.

    `error` names a class of `jdag.errors`; `exception` is the original where this
    process has it (it does not travel). (`worker`, `path`) is where it began and
    identifies it.
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


class Mode(Enum):
    """Which sends a pass waits for: all of the context, or those that roots need."""

    FAST = "fast"
    SMART = "smart"


class Outcome(Enum):
    """How a pass ended."""

    FINISHED = "finished"
    FAILED = "failed"
    STUCK = "stuck"
    EXPIRED = "expired"  # It was given a time, and that is over.


class Root(NamedTuple):
    """Where a pass starts: a value, its shape, and whether a cotangent is carried."""

    key: Key
    aval: Any
    given: bool
    number: int  # Its place among all roots of the pass.


class Hook(NamedTuple):
    """A function of a complete cotangent, applied where that is; in order of path.

    `replaces`: what it returns takes the cotangent's place. Else it sees a leaf's
    gradient of a pass once that has been accumulated.
    """

    path: Path
    function: Any
    replaces: bool
    aval: Any  # Of the cotangent.
    call_site: str


class Stale(NamedTuple):
    """A leaf that was updated since a pass's forward read it."""

    leaf: LeafId
    newer: int  # By so many versions the newest is newer than the oldest that was read.


class Owed(NamedTuple):
    """A send that waited for its cotangent: what a stuck pass names."""

    path: Path
    worker: Worker  # Where the send is.
    destination: Worker  # Who never sent the cotangent.
    function: str  # The function that was called with what was sent.
    call_site: str
