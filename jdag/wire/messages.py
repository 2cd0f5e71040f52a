"""Messages as bytes: a length of 4 bytes, an envelope, and elements of small values.

An envelope has a message and the types of the values that it carries, in the order of
`landing(message)`. Fields that are opaque to engines are encoded first, as bytes
(`_CLOSED`).

Decoding returns the encoded fields, with these exceptions: the function of a call or
assignment becomes its spec (`jdag.wire.specs`); the shape of a root, version or hook
becomes an `ArrayType`; the function of a run or hook, arguments and results remain a
view of their bytes, which the receiver decodes (`jdag.processes.functions.unmarshal`).
The `exception` of a failure is not sent. A decoded message encodes to the same bytes.
Data that cannot be encoded or decoded raises a ProtocolError.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import count
from struct import Struct
from typing import Any

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
    StepFrame,
    Stepped,
    Tell,
)
from jdag.engine.names import WORKERS_MAX, Failure, Record, Worker, incarnated
from jdag.errors import SHOWN_MAX, ProtocolError, abridged
from jdag.wire.arrays import type_of
from jdag.wire.encoding import CHECKED_BYTES, bounded, check_of, decoded, encoded
from jdag.wire.specs import spec_of
from jdag.wire.trees import COUNT_BYTES, tree_size, write_tree

WHOLE_MAX = 256  # Number of failures per message that are sent with full texts.
COPIED_BYTES = 1 << 16  # For fewer bytes a copy is faster than a view.
STEP = Struct("<QQ")  # Number and base of a step frame, before its head.

Data = Callable[..., Any]  # `write_tree`, or a replacement for it.
Close = Callable[[Any, Data], Any]


class Envelope(Record):
    message: Message
    kinds: Several[ArrayType]


_decoder: Decoder[Envelope] = Decoder(Envelope)
_snapshots: Decoder[GraphSnapshot | None] = Decoder(GraphSnapshot | None)
_check_snapshot = check_of(GraphSnapshot | None)


def _sendable(value: Any) -> Any:
    if hasattr(value, "spec") or hasattr(value, "pair"):
        return spec_of(value)
    raise TypeError(f"{value!r} of type {type(value).__name__} cannot be sent")


_encode = Encoder(enc_hook=_sendable).encode


def _bare(failure: Failure | None, full_text: bool = True) -> Failure | None:
    """Return a failure without its exception. Unless `full_text`, shorten its texts."""
    if failure is None or (full_text and failure.exception is None):
        return failure
    if full_text:
        return replace(failure, exception=None)
    text = abridged(failure.message, SHOWN_MAX)
    return replace(failure, message=text, traceback="", exception=None)


def _with_failures(message: Any, _: Any) -> Any:
    if not any(message.failures):
        return message
    counter = count()
    bare = [f and _bare(f, next(counter) < WHOLE_MAX) for f in message.failures]
    return replace(message, failures=tuple(bare))


def _with_failure(message: Any, _: Any) -> Any:
    if message.failure is None:
        return message
    return replace(message, failure=_bare(message.failure))


def _with_specs(message: Prepare, _: Any) -> Prepare:
    segments = [
        segment
        if isinstance(segment.function, bytes)
        else replace(segment, function=spec_of(segment.function))
        for segment in message.segments
    ]
    return replace(message, segments=tuple(segments))


def _with_types(parts: Sequence[Assignment]) -> tuple[Assignment, ...]:
    return tuple([replace(p, avals=tuple(map(type_of, p.avals))) for p in parts])


# For each message with opaque fields, a function that replaces these by bytes.
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


def _sealed(data: Data, message: Message, kinds: Sequence[ArrayType] = ()) -> bytes:
    close = _CLOSED.get(message.__class__)
    closed = message if close is None else close(message, data)
    try:
        envelope = _encode(Envelope(closed, tuple(kinds)))
    except (OverflowError, TypeError, ValueError, RecursionError):
        envelope = encoded(Envelope(closed, tuple(kinds)), _encode)  # Or its error.
    if len(envelope) > CHECKED_BYTES:
        bounded(_decoder, envelope)
    return len(envelope).to_bytes(COUNT_BYTES, "little") + envelope


def blank(frame: StepFrame) -> StepFrame:
    """Return the frame without numbers, whose encoding is the same in each step."""
    return replace(frame, number=0, base=0)


# Bytes of the length prefix, and of an envelope without message and types.
_OVERHEAD_BYTES = COUNT_BYTES + 2


def size(message: Message, values: Sequence[Any]) -> tuple[int, int]:
    """Return the bytes of the values, and the bytes of message, headers and values."""
    if isinstance(message, StepFrame):
        elements, nbytes = _step_size(blank(message), tuple(map(type_of, values)))
        return elements, STEP.size + nbytes
    return _size(message, values)


def _size(message: Message, values: Sequence[Any]) -> tuple[int, int]:
    is_plain = message.__class__ not in _CLOSED
    if is_plain or (isinstance(message, Primal) and not any(message.failures)):
        nbytes, elements = len(encoded(message, _encode)), 0
        for value in values:
            header_bytes, value_bytes = _bytes_of(type_of(value))
            nbytes += header_bytes
            elements += value_bytes
        if nbytes <= CHECKED_BYTES and len(values) < 16:
            return elements, _OVERHEAD_BYTES + nbytes + elements
    trees = 0

    def measured(tree: Any, **options: Any) -> bytes:
        nonlocal trees
        nbytes = tree_size(tree, **options)
        # Encode an empty tree, since arrays may be abstract. Add the size of the tree,
        # and the longer length prefix that msgpack needs for it.
        trees += nbytes + (0 if nbytes < 1 << 8 else 1 if nbytes < 1 << 16 else 3)
        return b""

    kinds = [type_of(value) for value in values]
    head = len(_sealed(measured, message, kinds)) + trees
    elements = sum([kind.nbytes for kind in kinds])
    return elements, head + elements


_step_size = lru_cache(4096)(_size)  # Of a frame that is the same in each step.


@lru_cache(4096)
def _bytes_of(kind: ArrayType) -> tuple[int, int]:
    return len(encoded(kind)), kind.nbytes


class Codec:
    """The codec of a cluster's messages. `name` names functions in nested data.

    `encode` takes a message, and the types of its values.
    """

    __slots__ = ("encode", "names", "workers")

    def __init__(
        self, workers: Sequence[Worker], name: Callable[[Any], str] = name_of
    ) -> None:
        if len(workers) > WORKERS_MAX:
            raise ProtocolError(
                f"{len(workers)} workers: expected at most {WORKERS_MAX}"
            )
        self.encode = partial(_sealed, partial(write_tree, name=name))
        self.names = len(workers)
        self.workers = set(workers)

    def joined(self, name: str, incarnation: int) -> None:
        self.workers.add(incarnated(name, incarnation))

    def decode_drawing(self, data: bytes) -> GraphSnapshot | None:
        graph: GraphSnapshot | None = decoded(_snapshots, data)
        _check_snapshot(graph, self)
        return graph

    def decode(
        self, data: bytes | memoryview
    ) -> tuple[Message, tuple[ArrayType, ...], int]:
        """Return the message, its values' types, and the offset of their elements."""
        end = COUNT_BYTES + int.from_bytes(data[:COUNT_BYTES], "little")
        if end > len(data):
            raise ProtocolError(
                f"a message of {end} bytes, but only {len(data)} were received"
            )
        source = data if end < COPIED_BYTES else memoryview(data)
        try:
            envelope = _decoder.decode(source[COUNT_BYTES:end])
        except Exception:
            envelope = decoded(_decoder, source[COUNT_BYTES:end])  # With its error.
        message, kinds = envelope.message, envelope.kinds
        check_of(message.__class__)(message, self)
        return message, kinds, end
