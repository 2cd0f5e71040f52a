"""Names and plain data that messages, jobs and events are made of.

Names are global: a key means the same value on every worker. What travels is a struct
whose annotations bound every number, text and tuple: the wire reads no others. On the
wire a struct is an array of its fields, so fields and tags are only appended.
"""

from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, dataclass_transform

from msgspec import Meta, Struct

from jdag.engine.arrays import ArrayType

ITEMS_MAX = 1 << 24  # Of a tuple in a message.
SLOTS_MAX = 1 << 20  # Of one call or transfer.
PATH_MAX = 1 << 12  # Numbers in a path: so deep programs may call each other.
NAME_MAX = 1 << 16  # Characters of a text that names something.
TEXT_MAX = 1 << 28
DATA_MAX_BYTES = 1 << 30

U16 = Annotated[int, Meta(ge=0, le=(1 << 16) - 1)]
U32 = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
U48 = Annotated[int, Meta(ge=0, le=(1 << 48) - 1)]
U64 = Annotated[int, Meta(ge=0)]  # The wire has no ints of more than 64 bits.
Name = Annotated[str, Meta(max_length=NAME_MAX)]
Text = Annotated[str, Meta(max_length=TEXT_MAX)]
Mask = Annotated[tuple[bool, ...], Meta(max_length=SLOTS_MAX)]

# What is opaque to engines travels as bytes; the wire makes them, and reads them. An
# exception stays in its process.
if TYPE_CHECKING:
    Function = Any
    Shape = Any
    Data = Any
    OwnException = BaseException | None
else:
    Function = Annotated[bytes, Meta(max_length=DATA_MAX_BYTES)]
    Shape = ArrayType
    Data = Annotated[memoryview, Meta(max_length=DATA_MAX_BYTES)]
    OwnException = None


@dataclass_transform(frozen_default=True)
class Record(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What travels."""


# Call numbers from the top frame down: the order of everything.
Path = Annotated[tuple[U32, ...], Meta(max_length=PATH_MAX)]

# A worker that comes back is another one: nothing that was said of the former one, or
# is on its way to or from it, is of it. So each incarnation has a name of its own: the
# first the worker's, `ps0`, the others `ps0#1`, `ps0#2`, ...
Worker = Annotated[str, Meta(min_length=1, max_length=NAME_MAX)]
Workers = Annotated[tuple[Worker, ...], Meta(max_length=ITEMS_MAX)]
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


class ContextId(Record, order=True, gc=False, cache_hash=True):
    """Names a context: 16 bits of its owner's number, 48 of a counter; incarnation."""

    number: U16
    counter: U48
    incarnation: U32

    @property
    def id(self) -> int:
        """The 64-bit id: the worker's number in its top 16 bits."""
        return self.number << 48 | self.counter

    def __str__(self) -> str:
        again = f"{_AGAIN}{self.incarnation}" if self.incarnation else ""
        return f"{self.number}{again}.{self.counter}"


class LeafId(Record, order=True, gc=False, cache_hash=True):
    """Names a leaf: who keeps it; who made it, and how many it had made before.

    Of its 64 bits 16 are the maker's number, then 16 that of its incarnation.
    """

    worker: Worker
    number: U64

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


class AnyKey(Record, gc=False, cache_hash=True):
    """Names a value: `context`, `name` and `index`, by `kind`.

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

    kind: ClassVar[str]
    context: ContextId | None
    name: Any  # Each kind has a type of its own.
    index: U32

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.kind = cls.__name__.removesuffix("Key").lower()

    def __lt__(self, other: "AnyKey") -> bool:
        """By kind, context, name and index: in program order, where that counts."""
        if self.kind != other.kind:
            return self.kind < other.kind
        one = (self.context, self.name, self.index)
        return one < (other.context, other.name, other.index)


class OutputKey(AnyKey, tag=0):
    """An output of a call."""

    name: Path


class ReceivedKey(AnyKey, tag=1):
    """A slot of a transfer that arrived."""

    name: tuple[Path, Worker]


class ConstantKey(AnyKey, tag=2):
    """An argument that goes with its call."""

    name: Path


class LeafKey(AnyKey, tag=3):
    """A version of a leaf."""

    name: LeafId


class GradientKey(AnyKey, tag=4):
    """The gradient of a leaf in a pass."""

    name: LeafId


class SeedKey(AnyKey, tag=5):
    """A cotangent that a pass was given."""

    name: U32


class CotangentKey(AnyKey, tag=6):
    """A cotangent that arrived."""

    name: tuple[U32, Path]


class ReadingKey(AnyKey, tag=7):
    """A value that was read."""

    name: U64


class NewestKey(AnyKey, tag=8):
    """Whichever version of a leaf is the newest."""

    name: LeafId


class ResidualsKey(AnyKey, tag=9):
    """The residuals of a call; never leaves its worker."""

    name: Path


class ScratchKey(AnyKey, tag=10):
    """What a job makes for others of its worker; never leaves that."""

    name: U64


if TYPE_CHECKING:
    Key = AnyKey
else:
    Key = (
        OutputKey | ReceivedKey | ConstantKey | LeafKey | GradientKey | SeedKey
        | CotangentKey | ReadingKey | NewestKey | ResidualsKey | ScratchKey
    )  # fmt: skip
Keys = Annotated[tuple[Key, ...], Meta(max_length=ITEMS_MAX)]


LEAF_KINDS = ("leaf", "newest")  # Of keys that name a version of a leaf.


class Failure(Record):
    """An error as a value: what holds it, and whoever computes on it, fails with it.

    `error` names a class of `jdag.errors`; `exception` is the original where this
    process has it (it does not travel). (`worker`, `path`) is where it began and
    identifies it.
    """

    error: Name
    message: Text
    worker: Worker
    path: Path = ()
    function: Name = ""
    call_site: Name = ""
    traceback: Text = ""
    route: Workers = ()  # From the owner down to where it failed.
    exception: OwnException = None


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


class Root(Record):
    """Where a pass starts: a value, its shape, and whether a cotangent is carried."""

    key: Key
    aval: Shape
    given: bool
    number: U32  # Its place among all roots of the pass.


class Hook(Record):
    """A function of a complete cotangent, applied where that is; in order of path.

    `replaces`: what it returns takes the cotangent's place. Else it sees a leaf's
    gradient of a pass once that has been accumulated.
    """

    path: Path
    function: Data
    replaces: bool
    aval: Shape  # Of the cotangent.
    call_site: Name


class Stale(Record, order=True, gc=False):
    """A leaf that was updated since a pass's forward read it."""

    leaf: LeafId
    newer: U32  # By so many versions the newest is newer than the oldest that was read.


class Owed(Record, order=True, gc=False):
    """A send that waited for its cotangent: what a stuck pass names."""

    path: Path
    worker: Worker  # Where the send is.
    destination: Worker  # Who never sent the cotangent.
    function: Name  # The function that was called with what was sent.
    call_site: Name
