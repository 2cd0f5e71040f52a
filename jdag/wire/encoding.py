"""Structs as bytes: msgspec, with jdag's errors and checks beyond its types.

Annotations bound every number, text and tuple; msgspec enforces them before it
allocates. Further checks follow: that workers and owners of contexts are known, and the
table `RELATIONS`. Data that cannot be written or read raises a ProtocolError with place
and reason.
"""

from collections.abc import Callable
from functools import cache
from operator import attrgetter, itemgetter
from types import UnionType
from typing import Annotated, Any, Protocol, Union, get_args, get_origin, get_type_hints

from msgspec import MsgspecError, Struct
from msgspec.msgpack import Decoder, Encoder

from jdag.engine.arrays import ArrayType, check_possible
from jdag.engine.credit import Credit, credit_of, units_of
from jdag.engine.messages import Assignment, Call, Ship
from jdag.engine.names import ContextId, ResidualsKey, ScratchKey, Worker
from jdag.errors import SHOWN_MAX, ProtocolError, cut

CHECKED_BYTES = 4096  # Smaller data cannot exceed a limit on its parts.


class Known(Protocol):
    """The workers that messages may name: their number, and all incarnations."""

    names: int
    workers: set[Worker]


Check = Callable[[Any, Known], None]


_encode = Encoder().encode


def encoded(value: Any, encode: Callable[[Any], bytes] = _encode) -> bytes:
    """The bytes of a struct; text that is not Unicode is escaped."""
    try:
        return encode(value)
    except UnicodeEncodeError:
        return encoded(_escaped(value), encode)
    except (OverflowError, TypeError, ValueError, RecursionError) as error:
        said = cut(str(error), SHOWN_MAX)
        raise ProtocolError(f"{type(value).__name__} cannot travel: {said}") from error


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, tuple):
        return tuple(map(_escaped, value))
    if isinstance(value, Struct):
        fields = [getattr(value, name) for name in value.__struct_fields__]
        return type(value)(*map(_escaped, fields))
    return value


def decoded(decoder: "Decoder[Any]", data: bytes | memoryview) -> Any:
    """Decode bytes, or raise ProtocolError."""
    try:
        return decoder.decode(data)
    except (MsgspecError, ValueError, RecursionError) as error:
        said = cut(str(error), SHOWN_MAX)
        raise ProtocolError(f"{len(data)} bytes cannot be read: {said}") from error


def bounded(decoder: "Decoder[Any]", data: bytes) -> bytes:
    """Return bytes, or raise ProtocolError if they exceed a limit of their decoder."""
    if len(data) > CHECKED_BYTES:
        decoded(decoder, data)
    return data


# ------------------------------------------------------------------------------ checks


def _worker(worker: Worker, known: Known) -> None:
    if worker not in known.workers:
        raise ProtocolError(
            f"worker {cut(repr(worker), SHOWN_MAX)}: the cluster has {known.names} "
            "workers, and none is called that"
        )


def _owner(context: ContextId, known: Known) -> None:
    if context.number >= known.names:
        raise ProtocolError(
            f"context's worker {context.number}: the cluster has {known.names} workers"
        )


def _part_of_whole(credit: Credit, _: Known) -> None:
    # Otherwise adding it to another credit could create an int of that many bits.
    units, halvings = units_of(credit), credit.halvings
    if units.bit_length() > halvings and units != 1 << halvings:
        raise ProtocolError(
            f"a credit of {units.bit_length()} bits, halved {halvings} times, is more"
            " than the whole"
        )
    if isinstance(credit.units, bytes) and credit != credit_of(units, halvings):
        raise ProtocolError(
            f"a credit of {units.bit_length()} bits is written as {len(credit.units)}"
            " bytes"
        )


def _stays(key: Any, _: Known) -> None:
    raise ProtocolError(f"a key of kind {key.kind!r} cannot travel")


def _alike(one: str, other: str) -> Check:

    def check(value: Any, _: Known) -> None:
        here, there = len(getattr(value, one)), len(getattr(value, other))
        if here != there:
            raise ProtocolError(
                f"{type(value).__name__} of {here} {one} and {there} {other}: allowed"
                " is the same number"
            )

    return check


RELATIONS: dict[type[Struct], Check] = {
    ArrayType: lambda kind, _: check_possible(kind),
    ContextId: _owner,
    Credit: _part_of_whole,
    ResidualsKey: _stays,
    ScratchKey: _stays,
    Call: _alike("inputs", "tracked"),
    Ship: _alike("keys", "tracked"),
    Assignment: _alike("outputs", "avals"),
}


@cache
def check_of(kind: Any) -> Check:
    """The check for a type: raises ProtocolError for values that are not allowed."""
    if kind == Worker:
        return _worker
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return check_of(parts[0])
    if origin in (Union, UnionType):
        return _of_union({get_origin(part) or part: check_of(part) for part in parts})
    if origin is tuple and parts[1:] == (...,):
        return _of_each(check_of(parts[0]))
    found: list[tuple[Callable[[Any], Any], Check]] = []
    if origin is tuple:
        found = [(itemgetter(at), check_of(part)) for at, part in enumerate(parts)]
    elif isinstance(kind, type) and issubclass(kind, Struct):
        hints = get_type_hints(kind, include_extras=True)
        names = kind.__struct_fields__
        found = [(attrgetter(name), check_of(hints[name])) for name in names]
    checks = [(get, check) for get, check in found if check is not _nothing]
    return _of_parts(checks, RELATIONS.get(kind))


def _nothing(value: Any, known: Known) -> None:
    """The check of types that allow every value."""


def _of_parts(
    checks: list[tuple[Callable[[Any], Any], Check]], relation: Check | None
) -> Check:
    """The check of a value by its parts, each with a getter, and by `relation`."""
    if not checks:
        return relation or _nothing
    if len(checks) == 1 and relation is None:
        ((get_it, check_it),) = checks
        return lambda value, known: check_it(get_it(value), known)

    def check_parts(value: Any, known: Known) -> None:
        for get, check in checks:
            check(get(value), known)
        if relation is not None:
            relation(value, known)

    return check_parts


def _of_union(checks: dict[Any, Check]) -> Check:
    is_optional = len(checks) == 2 and type(None) in checks
    checks = {part: check for part, check in checks.items() if check is not _nothing}
    if not checks:
        return _nothing
    if is_optional:
        (check_it,) = checks.values()
        return lambda value, known: None if value is None else check_it(value, known)

    def check_one(value: Any, known: Known) -> None:
        check = checks.get(type(value))
        if check is not None:
            check(value, known)

    return check_one if checks else _nothing


def _of_each(check: Check) -> Check:
    def check_each(values: tuple[Any, ...], known: Known) -> None:
        for value in values:
            check(value, known)

    return _nothing if check is _nothing else check_each
