"""Messages as bytes: the layout of each, its exact size, writing and reading it.

A message is a byte for its type and its fields in the order of `jdag.engine.messages`.
The values that ride along follow it, in the order of `landing(message)`: of each a
header and its bytes (`jdag.wire.arrays`). What kinds of fields take is written in
`jdag.wire.encoding`, `keys` and `trees` (arguments and results of programs).

One table says it all: writing, reading and measuring go by it. Measuring looks only at
fields that have no fixed size, since the simulator asks for each message.

What reads back as it was: everything but these. The function of a call or assignment
is its spec (`FunctionData`), that of a run or hook nested data; the shape of a root,
version or hook is an `ArrayType`; in arguments and results see `jdag.wire.trees`. A
failure's `exception` stays where it was raised. All of this writes as the same bytes
again.
"""

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, NamedTuple

from jdag.engine.vocabulary import (
    Acknowledge,
    Answer,
    Assign,
    Assignment,
    Attach,
    Call,
    Cotangent,
    Discard,
    End,
    Ended,
    Fail,
    Failure,
    Forget,
    Go,
    Hook,
    Incoming,
    Mark,
    Marked,
    Message,
    Mode,
    Notice,
    Outcome,
    Owed,
    Primal,
    Read,
    Reading,
    Release,
    Released,
    Return,
    Root,
    Run,
    Ship,
    Stale,
    Start,
    Worker,
    incarnated,
    landing,
)
from jdag.engine.weight import Weight
from jdag.errors import SHOWN_MAX, ProtocolError, cut
from jdag.wire.arrays import ARRAY_TYPE, ARRAY_TYPES, ArrayType, sizes
from jdag.wire.cursors import Reader, Writer
from jdag.wire.encoding import (
    CONTEXT,
    CONTEXT_MAYBE,
    FLAG,
    LEAF,
    MASK,
    NAME,
    PASS,
    PATH,
    REQUEST,
    TEXT,
    WORKER,
    WORKERS,
    Layout,
    alike,
    integer,
    many,
    maybe,
    record,
)
from jdag.wire.keys import KEY
from jdag.wire.specs import portable
from jdag.wire.trees import BYTES, TREE

WHOLE_MAX = 256  # Failures of one message with all that there is to say of them.


class FunctionData(NamedTuple):
    """A function for certain arguments as it travels: see `jdag.wire.specs`."""

    spec: bytes


def _choice(kind: type[Enum], what: str) -> Layout:
    """One of a few, by its place: a byte."""
    members = tuple(kind)

    def read(reader: Reader) -> Enum:
        number = reader.integer(1, what)
        if number >= len(members):
            raise ProtocolError(f"{what} {number}: allowed is 0 to {len(members) - 1}")
        return members[number]

    def write(writer: Writer, member: Enum) -> None:
        writer.out.append(members.index(member))

    return Layout(1, None, write, read)


OUTCOME = _choice(Outcome, "outcome")
MODE = _choice(Mode, "mode")
PROGRAM = Layout(
    TREE.fixed,
    lambda program: TREE.size(portable(program, arrays=True)) - TREE.fixed,
    lambda writer, program: TREE.write(writer, portable(program, arrays=True)),
    TREE.read,
)
FAILURE = record(
    Failure,
    error=NAME,
    message=TEXT,
    worker=WORKER,
    path=PATH,
    function=NAME,
    call_site=NAME,
    traceback=TEXT,
    route=WORKERS,
)
FUNCTION = Layout(
    BYTES.fixed,
    lambda function: len(function.spec),
    lambda writer, function: BYTES.write(writer, function.spec),
    lambda reader: FunctionData(BYTES.read(reader)),
)


def _shorter(failures: Sequence[Failure | None]) -> Sequence[Failure | None]:
    """Failures as they travel in one message: all but the first say less."""
    if len(failures) <= WHOLE_MAX:
        return failures
    there = [place for place, one in enumerate(failures) if one is not None]
    shorter = list(failures)
    for place in there[WHOLE_MAX:]:
        one = shorter[place]
        assert one is not None, place
        text = cut(one.message, SHOWN_MAX)
        shorter[place] = replace(one, message=text, traceback="")
    return shorter


def _many_failures(item: Layout) -> Layout:
    whole = many(item, "failures")
    return Layout(
        whole.fixed,
        lambda failures: whole.size(_shorter(failures)) - whole.fixed,
        lambda writer, failures: whole.write(writer, _shorter(failures)),
        whole.read,
    )


FAILURES = _many_failures(maybe(FAILURE))
KEYS = many(KEY, "keys")
LEAVES = many(LEAF, "leaves")
COUNTER = integer(6, "context's counter")
OWED = record(
    Owed, path=PATH, worker=WORKER, destination=WORKER, function=NAME, call_site=NAME
)
STALE = record(Stale, leaf=LEAF, newer=integer(4, "number of versions"))
ROOT = record(
    Root, key=KEY, aval=ARRAY_TYPE, given=FLAG, number=integer(4, "root's number")
)
NOTICE = record(Notice, worker=WORKER, keys=KEYS)
INCOMING = record(Incoming, source=WORKER, tracked=MASK)
MARKED = record(Marked, path=PATH, slots=MASK)
HOOK = record(
    Hook, path=PATH, function=PROGRAM, replaces=FLAG, aval=ARRAY_TYPE, call_site=NAME
)
CHANGE = integer(4, "change in sends owed", signed=True)


HALVINGS_MAX = 1 << 20
_HALVINGS = integer(4, "halvings of a weight")
_UNITS_BYTES = integer(2, "bytes of a weight")


def _units_bytes(weight: Weight) -> int:
    return (weight.units.bit_length() + 7) >> 3


def _write_weight(writer: Writer, weight: Weight) -> None:
    units, halvings = weight
    size = _units_bytes(weight)
    if halvings > HALVINGS_MAX:
        raise ProtocolError(
            f"halvings of a weight = {halvings} cannot travel: allowed is an int from 0"
            f" to {HALVINGS_MAX}"
        )
    _HALVINGS.write(writer, halvings)
    _UNITS_BYTES.write(writer, size)
    writer.integer(units, size, "units of a weight")


def _read_weight(reader: Reader) -> Weight:
    halvings = _HALVINGS.read(reader)
    units = reader.integer(_UNITS_BYTES.read(reader), "units of a weight")
    # Else who adds it to another makes numbers of as many bits as it says.
    if halvings > HALVINGS_MAX:
        raise ProtocolError(
            f"halvings of a weight = {halvings}: allowed is 0 to {HALVINGS_MAX}"
        )
    if units.bit_length() > halvings and units != 1 << halvings:
        raise ProtocolError(
            f"a weight of {units.bit_length()} bits, halved {halvings} times, is more"
            " than the whole"
        )
    return Weight(units, halvings)


WEIGHT = Layout(6, _units_bytes, _write_weight, _read_weight)
ASSIGNMENT = alike(
    record(
        Assignment,
        path=PATH,
        function=maybe(FUNCTION),
        inputs=KEYS,
        outputs=KEYS,
        avals=ARRAY_TYPES,
        call_site=NAME,
    ),
    "outputs",
    "avals",
)

# The place in this table is the type's number: only append.
LAYOUTS: dict[type[Any], Layout] = {
    Call: alike(
        record(
            Call,
            context=CONTEXT,
            path=PATH,
            function=FUNCTION,
            inputs=KEYS,
            tracked=MASK,
            outputs=MASK,
            incoming=many(INCOMING, "receives"),
            call_site=NAME,
            discarded=KEYS,
        ),
        "inputs",
        "tracked",
    ),
    Ship: alike(
        record(
            Ship,
            context=CONTEXT,
            path=PATH,
            destination=WORKER,
            keys=KEYS,
            tracked=MASK,
            function=NAME,
            call_site=NAME,
            discarded=KEYS,
        ),
        "keys",
        "tracked",
    ),
    Acknowledge: record(Acknowledge, context=CONTEXT_MAYBE, path=PATH),
    Primal: record(
        Primal, context=CONTEXT, path=PATH, source=WORKER, failures=FAILURES
    ),
    Run: record(
        Run,
        context=CONTEXT,
        path=PATH,
        function=PROGRAM,
        arguments=TREE,
        call_site=NAME,
    ),
    Return: record(
        Return,
        context=CONTEXT,
        path=PATH,
        result=TREE,
        failure=maybe(FAILURE),
        workers=WORKERS,
        notices=many(NOTICE, "notices"),
    ),
    Read: record(Read, request=REQUEST, keys=KEYS),
    Reading: record(Reading, request=REQUEST, failures=FAILURES),
    Assign: record(Assign, path=PATH, parts=many(ASSIGNMENT, "assignments")),
    Forget: record(Forget, leaves=LEAVES),
    Start: record(
        Start,
        context=CONTEXT,
        number=PASS,
        roots=many(ROOT, "roots"),
        mode=MODE,
        retain=FLAG,
        go=FLAG,
        weight=WEIGHT,
        owed=CHANGE,
    ),
    Go: record(
        Go, context=CONTEXT, number=PASS, retain=FLAG, weight=WEIGHT, owed=CHANGE
    ),
    Cotangent: record(
        Cotangent,
        context=CONTEXT,
        number=PASS,
        path=PATH,
        present=MASK,
        retain=FLAG,
        weight=WEIGHT,
        owed=CHANGE,
    ),
    Answer: record(Answer, context=CONTEXT, number=PASS, weight=WEIGHT, owed=CHANGE),
    Fail: record(Fail, context=CONTEXT, number=PASS, failure=FAILURE),
    End: record(End, context=CONTEXT, number=PASS, outcome=OUTCOME, retain=FLAG),
    Ended: record(
        Ended,
        context=CONTEXT,
        number=PASS,
        owed=many(OWED, "owed"),
        leaves=LEAVES,
        stale=many(STALE, "stale leaves"),
        failure=maybe(FAILURE),
    ),
    Release: record(
        Release, context=CONTEXT, live=many(COUNTER, "live contexts"), abort=FLAG
    ),
    Released: record(Released, context=CONTEXT, failures=_many_failures(FAILURE)),
    Mark: record(
        Mark,
        context=CONTEXT,
        number=PASS,
        transfers=many(MARKED, "transfers"),
        retain=FLAG,
        weight=WEIGHT,
        owed=CHANGE,
    ),
    Attach: record(Attach, context=CONTEXT, key=KEY, hook=HOOK),
    Discard: record(Discard, context=CONTEXT, keys=KEYS),
}
_TYPES = tuple(LAYOUTS)
TYPE_BYTES = 1
_WRITES = {kind: (number, LAYOUTS[kind].write) for number, kind in enumerate(_TYPES)}
_READS = {bytes((number,)): LAYOUTS[kind].read for number, kind in enumerate(_TYPES)}
_write_type, _read_type = ARRAY_TYPE.write, ARRAY_TYPE.read
_SIZES = {
    kind: (TYPE_BYTES + layout.fixed, layout.more) for kind, layout in LAYOUTS.items()
}


def size(message: Message, values: Sequence[Any]) -> tuple[int, int]:
    """How many bytes the values are, and message, headers and values together.

    Args:
        message: any of `jdag.engine.messages`.
        values: what rides with it: arrays, abstract values, Python numbers.

    Raises:
        ProtocolError: it has no layout, or holds something that cannot travel.
    """
    try:
        total, more = _SIZES[type(message)]
    except KeyError:
        raise _no_message(message) from None
    if more is not None:
        total += more(message)
    if not values:
        return 0, total
    elements, headers = sizes(values)
    return elements, total + headers + elements


def _no_message(message: object) -> ProtocolError:
    allowed = ", ".join(kind.__name__ for kind in _TYPES)
    return ProtocolError(f"{message!r} is no message: allowed are {allowed}")


class Codec:
    """Writes and reads the messages of one cluster, whose workers go by number.

    Raises:
        ProtocolError: more workers than the 2 bytes of a number can tell apart.
    """

    __slots__ = ("_names", "_numbers", "_workers")

    def __init__(self, workers: Sequence[Worker]) -> None:
        if len(workers) > 1 << 16:
            raise ProtocolError(f"{len(workers)} workers: allowed are {1 << 16}")
        self._names = tuple(workers)
        self._workers = dict(enumerate(workers))
        self._numbers = {worker: number for number, worker in enumerate(workers)}

    def joined(self, name: str, incarnation: int) -> None:
        """Know an incarnation of a worker from now on; others are refused.

        Raises:
            ProtocolError: it has joined more often than its numbers can tell.
        """
        number = self._names.index(name) + len(self._names) * incarnation
        if number >= 1 << 16:
            most = (1 << 16) // len(self._names) - 1
            raise ProtocolError(
                f"worker {name!r} joins for the {incarnation}th time: of "
                f"{len(self._names)} workers each may join {most} times"
            )
        worker = incarnated(name, incarnation)
        self._workers[number] = worker
        self._numbers[worker] = number

    def encode(self, message: Message) -> bytes:
        """The bytes of a message, without the values that ride with it.

        Raises:
            ProtocolError: a field holds what cannot travel; names field and value.
        """
        return self.encode_with(message, ())

    def encode_with(self, message: Message, kinds: Sequence[ArrayType]) -> bytes:
        """The bytes of a message and of the headers of the values that ride with it.

        Raises:
            ProtocolError: as `encode` does.
        """
        known = _WRITES.get(type(message))
        if known is None:
            raise _no_message(message)
        number, write = known
        writer = Writer(self._numbers)
        writer.out.append(number)
        write(writer, message)
        for kind in kinds:
            _write_type(writer, kind)
        return bytes(writer.out)

    def decode_with(self, data: bytes) -> tuple[Message, tuple[ArrayType, ...], int]:
        """A message, the types of its values, and where the elements of these begin.

        Raises:
            ProtocolError: as `decode` does; what is left is for the caller to judge.
        """
        reader = Reader(data, self._workers, len(self._names))
        message = self._read(reader)
        kinds = tuple([_read_type(reader) for _ in landing(message)])
        return message, kinds, len(data) - reader.left

    def decode(self, data: bytes) -> Message:
        """The message that these bytes are; nothing may be left over.

        Raises:
            ProtocolError: they are none; says where and what would have been right.
        """
        reader = Reader(data, self._workers, len(self._names))
        message = self._read(reader)
        if reader.left:
            raise ProtocolError(
                f"{reader.left} of {len(data)} bytes are left after a"
                f" {type(message).__name__}"
            )
        return message

    def encode_data(self, tree: Any) -> bytes:
        """The bytes of nested data, as arguments of programs travel."""
        writer = Writer(self._numbers)
        TREE.write(writer, tree)
        return bytes(writer.out)

    def decode_data(self, data: bytes) -> Any:
        """The nested data that these bytes are; see `jdag.wire.trees`.

        Raises:
            ProtocolError: they are none.
        """
        reader = Reader(data, self._workers, len(self._names))
        tree = TREE.read(reader)
        if reader.left:
            raise ProtocolError(f"{reader.left} of {len(data)} bytes are left")
        return tree

    def _read(self, reader: Reader) -> Message:
        read = _READS.get(reader.data[:TYPE_BYTES])
        if read is None:
            number = reader.integer(TYPE_BYTES, "type of a message")
            raise ProtocolError(
                f"type {number} of a message: allowed is 0 to {len(_TYPES) - 1}"
            )
        reader.offset = TYPE_BYTES
        message: Message = read(reader)
        return message
