"""Names and plain data in messages, jobs and events.

Names are global: a key means the same value on every worker. Annotations bound every
number, string and tuple of a struct in messages; decoding enforces the bounds. A struct
is encoded as an array of its fields, so new fields and tags are only appended.
"""

import re
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, dataclass_transform

from msgspec import Meta, Struct

from jdag.engine.arrays import ArrayType

# Names of workers: a pattern, and its description in errors.
NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
NAMES = "at most 64 letters, digits, _, - and ., beginning with a letter or digit"
ITEMS_MAX = 1 << 24  # Items of a tuple in a message.
SLOTS_MAX = 1 << 20  # Slots of one call or transfer.
PATH_MAX = 1 << 12  # Numbers in a path: the nesting depth of programs.
NAME_MAX = 1 << 16  # Characters of a name.
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

# Data that is opaque to engines. Messages contain the data as bytes, but no exceptions.
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
    """Base of all structs in messages."""


class Tag(Record, gc=False):
    """The pipeline stage and micro-batch of a call.

    If `listed`, a schedule orders the call's jobs. If `halves`, the schedule has I and
    W as separate actions.
    """

    stage: U32
    micro_batch: U32
    listed: bool = False
    halves: bool = False


# A path contains call numbers, from the top frame down. Paths define program order.
Path = Annotated[tuple[U32, ...], Meta(max_length=PATH_MAX)]

# A restarted worker is a new worker: messages to, from or about its predecessor do not
# concern the new worker. So each incarnation has its own name: first `ps0`, then
# `ps0#1`, `ps0#2`.
Worker = Annotated[str, Meta(min_length=1, max_length=NAME_MAX)]
Workers = Annotated[tuple[Worker, ...], Meta(max_length=ITEMS_MAX)]
_INCARNATION = "#"  # A separator that names of workers cannot contain.


def incarnated(name: str, incarnation: int) -> Worker:
    return f"{name}{_INCARNATION}{incarnation}" if incarnation else name


def named(worker: Worker) -> str:
    return worker.partition(_INCARNATION)[0]


def incarnation_of(worker: Worker) -> int:
    return int(worker.partition(_INCARNATION)[2] or 0)


WORKERS_MAX = 1 << 16  # A context's id has 16 bits for the worker.


def is_name(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(NAME, name) is not None


class ContextId(Record, order=True, gc=False, cache_hash=True):
    """Identifies a context: number and incarnation of its owner, and a counter."""

    number: U16
    counter: U48
    incarnation: U32

    @property
    def id(self) -> int:
        return self.number << 48 | self.counter

    def __str__(self) -> str:
        return f"{incarnated(str(self.number), self.incarnation)}.{self.counter}"


class ObjectId(Record, tag=14, order=True, cache_hash=True):
    """Identifies a hosted object by the program call that created it."""

    context: ContextId
    path: Path
    worker: Worker
    name: Name  # The name of its class, for errors.

    def __str__(self) -> str:
        path = ".".join(map(str, self.path))
        return f"{self.name} {self.context}/{path} on {self.worker!r}"


class LeafId(Record, order=True, gc=False, cache_hash=True):
    """Identifies a leaf: the worker that stores it, and a 64-bit number.

    The number contains the creator's worker number (16 bits) and incarnation (16), a
    bit that is set for untracked leaves, and a counter (31).
    """

    worker: Worker
    number: U64

    @classmethod
    def made_by(
        cls, maker: int, incarnation: int, counter: int, worker: Worker
    ) -> "LeafId":
        assert incarnation < 1 << 16 and counter < 1 << 32, (incarnation, counter)
        return cls(worker, maker << 48 | incarnation << 32 | counter)

    @property
    def untracked(self) -> bool:
        """Whether the leaf has no gradients, whatever its dtype."""
        return bool(self.number >> 31 & 1)

    @property
    def label(self) -> str:
        """A short name: `leaf 2`, or `leaf 1.2` if worker 1 created the leaf."""
        maker, incarnation = self.number >> 48, self.number >> 32 & (1 << 16) - 1
        creator = incarnated(str(maker), incarnation)
        prefix = f"{creator}." if creator != "0" else ""
        return f"leaf {prefix}{self.number & (1 << 31) - 1}"

    def __str__(self) -> str:
        return f"{self.label} on {self.worker}"


class AnyKey(Record, gc=False, cache_hash=True):
    """Names a value on one worker. The kind of key defines `name` and `index`."""

    kind: ClassVar[str]
    context: ContextId | None
    name: Any  # Subclasses define the type.
    index: U32

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.kind = cls.__name__.removesuffix("Key").lower()

    def __lt__(self, other: "AnyKey") -> bool:
        """Order by kind, context, name, index. Within a kind this is program order."""
        if self.kind != other.kind:
            return self.kind < other.kind
        fields = (self.context, self.name, self.index)
        return fields < (other.context, other.name, other.index)


class OutputKey(AnyKey, tag=0):
    """Output `index` of the call of this path, on the callee."""

    name: Path


class ReceivedKey(AnyKey, tag=1):
    """Slot `index` of the transfer from a worker to a call, on the callee."""

    name: tuple[Path, Worker]


class ConstantKey(AnyKey, tag=2):
    """Constant argument `index`, sent with the call of this path."""

    name: Path


class LeafKey(AnyKey, tag=3):
    """Version `index` of a leaf, on the leaf's worker."""

    name: LeafId


class GradientKey(AnyKey, tag=4):
    """The gradient of a leaf in pass `index`, on the leaf's worker."""

    name: LeafId


class SeedKey(AnyKey, tag=5):
    """The initial cotangent of root `index` in pass `name`, on the root's worker."""

    name: U32


class CotangentKey(AnyKey, tag=6):
    """The cotangent of slot `index` of a transfer in a pass, at the transfer's send."""

    name: tuple[U32, Path]


class ReadingKey(AnyKey, tag=7):
    """Value `index` of the answer to a Read, on the requesting worker."""

    name: U64


class NewestKey(AnyKey, tag=8):
    """The newest version of a leaf when the message arrives. `index` is 0."""

    name: LeafId


class ResidualsKey(AnyKey, tag=9):
    """The residuals of a call, on the callee. `index` is 0. Never sent."""

    name: Path


class ScratchKey(AnyKey, tag=10):
    """Output `index` of a job, on the job's worker. Never sent."""

    name: U64


class SlotKey(AnyKey, tag=11):
    """Slot `index` in step `name` of the plan `context`. Step 0 has the constants."""

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


LEAF_KINDS = ("leaf", "newest")  # Kinds of keys that name a version of a leaf.


class Failure(Record):
    """An error in place of a value. Computations on the value fail with this error.

    `error` names a class of `jdag.errors`. `exception` is the original exception; only
    the process that raised it has it. (`worker`, `path`) is the origin and identifies
    the failure.
    """

    error: Name
    message: _Text
    worker: Worker
    path: Path = ()
    function: Name = ""
    call_site: Name = ""
    traceback: _Text = ""
    route: Workers = ()  # From the context's owner to the worker that failed.
    exception: OwnException = None


class Mode(Enum):
    """A FAST pass waits for all sends, a SMART pass for the sends that roots need."""

    FAST = "fast"
    SMART = "smart"


class Outcome(Enum):
    FINISHED = "finished"
    FAILED = "failed"
    STUCK = "stuck"
    EXPIRED = "expired"  # The pass exceeded its timeout.


class Root(Record):
    key: Key
    aval: Shape
    given: bool  # Whether the program gives the root's cotangent, instead of ones.
    number: U32  # The root's index among all roots of the pass.


class Hook(Record):
    """A function that runs on complete cotangents of a value, on the value's worker.

    If `replaces`, its result replaces the cotangent. Otherwise the hook observes the
    gradient that a pass adds to a leaf, after this gradient was accumulated. Hooks run
    in order of path.
    """

    path: Path
    function: Data
    replaces: bool
    aval: Shape  # The shape of the cotangent.
    call_site: Name


class Stale(Record, order=True, gc=False):
    """A leaf that was updated after the forward of a pass read it."""

    leaf: LeafId
    newer: U32  # Number of versions after the oldest version that the forward read.


class Owed(Record, order=True, gc=False):
    """A send that still waits for its cotangent when a pass ends."""

    path: Path
    worker: Worker  # The worker of the send.
    destination: Worker  # The worker of the recv, which has not sent the cotangent.
    function: Name  # The function that was called with the sent values.
    call_site: Name
