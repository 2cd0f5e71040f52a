"""Names and plain data in messages, jobs and events.

Names are global: a key means the same value on every worker. Structs that travel bound
every number, text and tuple by annotations, which the wire enforces. A struct is
encoded as an array of its fields, so fields and tags are only ever appended.
"""

import re
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, dataclass_transform

from msgspec import Meta, Struct

from jdag.engine.arrays import ArrayType

# Of a worker; both drivers take the same.
NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
NAMES = "letters, digits, _, - and ., beginning with a letter or digit, at most 64"
ITEMS_MAX = 1 << 24  # Of a tuple in a message.
SLOTS_MAX = 1 << 20  # Of one call or transfer.
PATH_MAX = 1 << 12  # Numbers in a path: the nesting depth of programs.
NAME_MAX = 1 << 16  # Characters of a text that names something.
TEXT_MAX = 1 << 28
DATA_MAX_BYTES = 1 << 30

U16 = Annotated[int, Meta(ge=0, le=(1 << 16) - 1)]
U32_MAX = (1 << 32) - 1
U32 = Annotated[int, Meta(ge=0, le=U32_MAX)]
U48 = Annotated[int, Meta(ge=0, le=(1 << 48) - 1)]
U64 = Annotated[int, Meta(ge=0)]  # The wire has no ints of more than 64 bits.
Name = Annotated[str, Meta(max_length=NAME_MAX)]
_Text = Annotated[str, Meta(max_length=TEXT_MAX)]
Mask = Annotated[tuple[bool, ...], Meta(max_length=SLOTS_MAX)]

# What is opaque to engines travels as bytes, which the wire encodes and decodes.
# Exceptions do not travel.
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
    """Base of everything that travels."""


class Tag(Record, gc=False):
    """Which stage of which micro-batch a call is.

    `listed`: a schedule says when its jobs run; `halves`: I and W are listed apart.
    """

    stage: U32
    micro_batch: U32
    listed: bool = False
    halves: bool = False


# Call numbers from the top frame down: the order of everything.
Path = Annotated[tuple[U32, ...], Meta(max_length=PATH_MAX)]

# A restarted worker is a new worker: messages to, from or about its predecessor do not
# concern it. So each incarnation has its own name: `ps0` first, then `ps0#1`, `ps0#2`.
Worker = Annotated[str, Meta(min_length=1, max_length=NAME_MAX)]
Workers = Annotated[tuple[Worker, ...], Meta(max_length=ITEMS_MAX)]
_AGAIN = "#"  # Not in the name of a worker.


def incarnated(name: str, incarnation: int) -> Worker:
    """The engines' name of an incarnation of this worker."""
    return f"{name}{_AGAIN}{incarnation}" if incarnation else name


def named(worker: Worker) -> str:
    """The name of the worker without its incarnation."""
    return worker.partition(_AGAIN)[0]


def incarnation_of(worker: Worker) -> int:
    """How often this worker had been started before."""
    return int(worker.partition(_AGAIN)[2] or 0)


WORKERS_MAX = 1 << 16  # A context's id has 16 bits for the worker.


def is_name(name: object) -> bool:
    """Whether this is an allowed name of a worker."""
    return isinstance(name, str) and re.fullmatch(NAME, name) is not None


class ContextId(Record, order=True, gc=False, cache_hash=True):
    """Identifies a context: its owner's number, a 48-bit counter, the incarnation."""

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


class ObjectId(Record, tag=14, order=True, cache_hash=True):
    """Identifies a Python object on a worker, by the program call that made it."""

    context: ContextId
    path: Path
    worker: Worker
    name: Name  # Of its class, for errors.

    def __str__(self) -> str:
        path = ".".join(map(str, self.path))
        return f"{self.name} {self.context}/{path} on {self.worker!r}"


class LeafId(Record, order=True, gc=False, cache_hash=True):
    """Identifies a leaf: the worker that keeps it, and a 64-bit number.

    The number is the maker's number (16 bits), its incarnation (16), whether no
    cotangent flows to it whatever its dtype (1), and a counter (31).
    """

    worker: Worker
    number: U64

    @classmethod
    def made_by(
        cls, maker: int, incarnation: int, counter: int, worker: Worker
    ) -> "LeafId":
        """The id of a leaf on `worker`, by its maker and the last 32 bits."""
        assert incarnation < 1 << 16 and counter < 1 << 32, (incarnation, counter)
        return cls(worker, maker << 48 | incarnation << 32 | counter)

    @property
    def untracked(self) -> bool:
        """Whether it was made as a leaf without gradients."""
        return bool(self.number >> 31 & 1)

    @property
    def label(self) -> str:
        """Its number for readers, by maker and counter."""
        maker, incarnation = self.number >> 48, self.number >> 32 & (1 << 16) - 1
        by = incarnated(str(maker), incarnation)
        by = f"{by}." if by != "0" else ""
        return f"leaf {by}{self.number & (1 << 31) - 1}"

    def __str__(self) -> str:
        return f"{self.label} on {self.worker}"


class AnyKey(Record, gc=False, cache_hash=True):
    """Names a value in a context, on one worker: `name` and `index` differ by kind."""

    kind: ClassVar[str]
    context: ContextId | None
    name: Any  # Each kind has a type of its own.
    index: U32

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.kind = cls.__name__.removesuffix("Key").lower()

    def __lt__(self, other: "AnyKey") -> bool:
        """Compare by kind, context, name and index; within a kind, program order."""
        if self.kind != other.kind:
            return self.kind < other.kind
        one = (self.context, self.name, self.index)
        return one < (other.context, other.name, other.index)


class OutputKey(AnyKey, tag=0):
    """Output `index` of the call of this path, where it ran."""

    name: Path


class ReceivedKey(AnyKey, tag=1):
    """Slot `index` of the transfer to a call from a worker, where it arrived."""

    name: tuple[Path, Worker]


class ConstantKey(AnyKey, tag=2):
    """Argument `index`, which goes with the call of this path."""

    name: Path


class LeafKey(AnyKey, tag=3):
    """Version `index` of a leaf, on the leaf's worker."""

    name: LeafId


class GradientKey(AnyKey, tag=4):
    """The gradient of a leaf in pass `index`, on the leaf's worker."""

    name: LeafId


class SeedKey(AnyKey, tag=5):
    """The cotangent given to root `index` of a pass, where the root lives."""

    name: U32


class CotangentKey(AnyKey, tag=6):
    """The cotangent of slot `index` of a transfer in a pass, at the send."""

    name: tuple[U32, Path]


class ReadingKey(AnyKey, tag=7):
    """Value `index` of a request, on the requesting worker."""

    name: U64


class NewestKey(AnyKey, tag=8):
    """The newest version of a leaf, whichever that is; `index` is 0."""

    name: LeafId


class ResidualsKey(AnyKey, tag=9):
    """The residuals of a call, where it ran; `index` is 0; never sent."""

    name: Path


class ScratchKey(AnyKey, tag=10):
    """Output `index` of a job, where that ran; never sent."""

    name: U64


class SlotKey(AnyKey, tag=11):
    """Slot `index` in a step of the plan `context`; step 0: a constant."""

    name: U32


if TYPE_CHECKING:
    Key = AnyKey
else:
    Key = (
        OutputKey | ReceivedKey | ConstantKey | LeafKey | GradientKey | SeedKey
        | CotangentKey | ReadingKey | NewestKey | ResidualsKey | ScratchKey
        | SlotKey
    )  # fmt: skip
Keys = Annotated[tuple[Key, ...], Meta(max_length=ITEMS_MAX)]


LEAF_KINDS = ("leaf", "newest")  # Of keys that name a version of a leaf.


class Failure(Record):
    """An error as a value: its holders, and computations on it, fail with it.

    `error` names a class of `jdag.errors`. `exception` is the original, in the process
    where it was raised (it does not travel). (`worker`, `path`) is the origin and
    identifies the failure.
    """

    error: Name
    message: _Text
    worker: Worker
    path: Path = ()
    function: Name = ""
    call_site: Name = ""
    traceback: _Text = ""
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
    EXPIRED = "expired"  # Its timeout has passed.


class Root(Record):
    """A starting point of a pass: a value, its shape, and if a cotangent is given."""

    key: Key
    aval: Shape
    given: bool
    number: U32  # Its index among all roots of the pass.


class Hook(Record):
    """A function applied to a complete cotangent on its worker, in order of path.

    If `replaces`, its result replaces the cotangent. Otherwise it observes the gradient
    that a pass adds to a leaf, once that has been accumulated.
    """

    path: Path
    function: Data
    replaces: bool
    aval: Shape  # Of the cotangent.
    call_site: Name


class Stale(Record, order=True, gc=False):
    """A leaf that was updated since a pass's forward read it."""

    leaf: LeafId
    newer: U32  # How many versions the newest is ahead of the oldest that was read.


class Owed(Record, order=True, gc=False):
    """A send that still waits for its cotangent, as a stuck pass reports it."""

    path: Path
    worker: Worker  # Where the send is.
    destination: Worker  # Where the cotangent should have come from.
    function: Name  # The function that was called with the sent values.
    call_site: Name
