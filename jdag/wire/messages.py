"""Messages as bytes: an envelope, followed by the elements of small values.

An envelope holds a message and the types of the values that it carries, in the order of
`landing(message)`; 4 bytes before it hold its length. Fields that are opaque to engines
are encoded as bytes before (`_CLOSED`).

All fields are decoded to what was encoded, except: the function of a call or assignment
becomes its spec (`jdag.wire.specs`); the shape of a root, version or hook becomes an
`ArrayType`; the function of a run or hook, arguments and results stay a view of their
bytes, which the receiver reads (`jdag.processes.functions.unmarshal`). The `exception`
of a failure is not sent. A decoded message encodes to the same bytes. Data that cannot
be written or read raises a ProtocolError.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any, get_args

from msgspec.msgpack import Decoder, Encoder
from msgspec.structs import replace

from jdag.engine.arrays import ArrayType
from jdag.engine.functions import name_of
from jdag.engine.graph_snapshot import GraphSnapshot
from jdag.engine.messages import (
    Assign,
    Assignment,
    Attach,
    Ended,
    Fail,
    Message,
    Prepare,
    Primal,
    Reading,
    Released,
    Return,
    Run,
    Several,
    Start,
    Stepped,
    Tell,
)
from jdag.engine.names import WORKERS_MAX, Failure, Record, Worker, incarnated
from jdag.errors import SHOWN_MAX, ProtocolError, abridged
from jdag.wire.arrays import type_of
from jdag.wire.encoding import CHECKED_BYTES, bounded, check_of, decoded, encoded
from jdag.wire.specs import spec_of
from jdag.wire.trees import COUNT_BYTES, tree_size, write_tree

WHOLE_MAX = 256  # Failures of one message that are sent with full texts.
COPIED_BYTES = 1 << 16  # Below this a copy is faster than a view.

Data = Callable[..., Any]  # As `write_tree`.
Close = Callable[[Any, Data], Any]


class Envelope(Record):
    """A message and the types of its values, as encoded."""

    message: Message
    kinds: Several[ArrayType]


_decoder: Decoder[Envelope] = Decoder(Envelope)
_drawings: Decoder[GraphSnapshot | None] = Decoder(GraphSnapshot | None)
_check_drawing = check_of(GraphSnapshot | None)


def _sendable(value: Any) -> Any:
    if hasattr(value, "spec") or hasattr(value, "pair"):
        return spec_of(value)
    raise TypeError(f"{value!r} of type {type(value).__name__} is no data")


_encode = Encoder(enc_hook=_sendable).encode


def _bare(failure: Failure | None, whole: bool = True) -> Failure | None:
    """A failure without its exception and, unless `whole`, with shortened texts."""
    if failure is None or (whole and failure.exception is None):
        return failure
    if whole:
        return replace(failure, exception=None)
    text = abridged(failure.message, SHOWN_MAX)
    return replace(failure, message=text, traceback="", exception=None)


def _with_failures(message: Any, _: Any) -> Any:
    if not any(message.failures):
        return message
    before = count()  # Failures before this one.
    found = [one and _bare(one, next(before) < WHOLE_MAX) for one in message.failures]
    return replace(message, failures=tuple(found))


def _with_failure(message: Any, _: Any) -> Any:
    return replace(message, failure=_bare(message.failure))


def _with_specs(message: Prepare, _: Any) -> Prepare:
    segments = [
        one
        if isinstance(one.function, bytes)
        else replace(one, function=spec_of(one.function))
        for one in message.segments
    ]
    return replace(message, segments=tuple(segments))


def _with_types(parts: Sequence[Assignment]) -> tuple[Assignment, ...]:
    return tuple([replace(p, avals=tuple(map(type_of, p.avals))) for p in parts])


# For messages with opaque fields: replace these by bytes.
_CLOSED: dict[type[Any], Close] = {
    Prepare: _with_specs,
    Primal: _with_failures,
    Reading: _with_failures,
    Released: _with_failures,
    Fail: _with_failure,
    Ended: _with_failure,
    Stepped: _with_failure,
    Run: lambda run, data: replace(
        run,
        function=data(run.function, opaque=True),
        arguments=data(run.arguments),
    ),
    Return: lambda message, data: replace(
        message, result=data(message.result), failure=_bare(message.failure)
    ),
    Tell: lambda message, data: replace(message, data=data(message.data)),
    Attach: lambda message, data: replace(
        message,
        hook=replace(
            message.hook,
            function=data(message.hook.function, opaque=True),
            aval=type_of(message.hook.aval),
        ),
    ),
    Start: lambda message, _: replace(
        message,
        roots=tuple([replace(r, aval=type_of(r.aval)) for r in message.roots]),
    ),
    Assign: lambda message, _: replace(message, parts=_with_types(message.parts)),
}
_CHECKS = {kind: check_of(kind) for kind in get_args(Message)}


def _sealed(message: Message, kinds: Sequence[ArrayType], data: Data) -> bytes:
    close = _CLOSED.get(message.__class__)
    closed = message if close is None else close(message, data)
    whole = encoded(Envelope(closed, tuple(kinds)), _encode)
    return whole if len(whole) <= CHECKED_BYTES else bounded(_decoder, whole)


# Of an envelope without types, and its length, beside those of its message.
_AROUND_BYTES = COUNT_BYTES + 2


def size(message: Message, values: Sequence[Any]) -> tuple[int, int]:
    """Bytes of the values, and of message, headers and values together.

    Args:
        message: any of `jdag.engine.messages`.
        values: the values it carries: arrays, abstract values, Python numbers.
    """
    if not values and message.__class__ not in _CLOSED:
        nbytes = len(encoded(message, _encode))
        if nbytes <= CHECKED_BYTES:
            return 0, _AROUND_BYTES + nbytes
    beside = 0

    def measured(tree: Any, **how: Any) -> bytes:
        nonlocal beside
        nbytes = tree_size(tree, **how)
        # Arrays may be abstract: the envelope holds no bytes, so add their length.
        beside += nbytes + (0 if nbytes < 1 << 8 else 1 if nbytes < 1 << 16 else 3)
        return b""

    kinds = [type_of(value) for value in values]
    envelope = len(_sealed(message, kinds, measured)) + beside
    elements = sum([kind.nbytes for kind in kinds])
    return elements, COUNT_BYTES + envelope + elements


class Codec:
    """Encodes and decodes the messages of one cluster.

    Args:
        workers: their names.
        name: names a function or class in nested data.
    """

    __slots__ = ("_data", "names", "workers")

    def __init__(
        self, workers: Sequence[Worker], name: Callable[[Any], str] = name_of
    ) -> None:
        if len(workers) > WORKERS_MAX:
            raise ProtocolError(f"{len(workers)} workers: allowed are {WORKERS_MAX}")
        self._data: Data = partial(write_tree, name=name)
        self.names = len(workers)
        self.workers = set(workers)

    def joined(self, name: str, incarnation: int) -> None:
        """Accept this incarnation of a worker in messages from now on."""
        self.workers.add(incarnated(name, incarnation))

    def encode(self, message: Message, kinds: Sequence[ArrayType] = ()) -> bytes:
        """The bytes of a message and of the types of the values that it carries."""
        envelope = _sealed(message, kinds, self._data)
        return len(envelope).to_bytes(COUNT_BYTES, "little") + envelope

    def decode_drawing(self, data: bytes) -> GraphSnapshot | None:
        """Decode a drawing."""
        found: GraphSnapshot | None = decoded(_drawings, data)
        _check_drawing(found, self)
        return found

    def decode(self, data: bytes) -> tuple[Message, tuple[ArrayType, ...], int]:
        """A message, the types of its values, and the offset of their elements."""
        end = COUNT_BYTES + int.from_bytes(data[:COUNT_BYTES], "little")
        if end > len(data):
            raise ProtocolError(f"a message of {end} bytes; {len(data)} are there")
        whole = data if end < COPIED_BYTES else memoryview(data)
        envelope: Envelope = decoded(_decoder, whole[COUNT_BYTES:end])
        message, kinds = envelope.message, envelope.kinds
        _CHECKS[message.__class__](message, self)
        return message, kinds, end
