"""Structs as bytes: msgspec, with errors of jdag and a check beyond types.

Annotations bound every number, string and tuple; msgspec enforces them before it
allocates. One further check follows (`CHECKS`): that named workers and owners of
contexts exist. Consistency of fields is not checked here: peers have proved their
identity, and a peer whose message raises an error is lost. Data that cannot be encoded
or decoded raises a ProtocolError with place and reason.
"""

from collections.abc import Callable
from functools import cache
from operator import attrgetter, itemgetter
from types import UnionType
from typing import Annotated, Any, Protocol, Union, get_args, get_origin, get_type_hints

from msgspec import MsgspecError, Struct
from msgspec.msgpack import Decoder, Encoder

from jdag.engine.names import ContextId, Worker
from jdag.errors import SHOWN_MAX, ProtocolError, abridged

CHECKED_BYTES = 4096  # Smaller data cannot contain a part that exceeds its limit.


class Known(Protocol):
    names: int  # Number of workers.
    workers: set[Worker]  # All incarnations of all workers.


_Check = Callable[[Any, Known], None]


_encode = Encoder().encode


def encoded(value: Any, encode: Callable[[Any], bytes] = _encode) -> bytes:
    """Return the bytes of a struct. Lone surrogates in strings are escaped."""
    try:
        return encode(value)
    except UnicodeEncodeError:
        return encoded(_escaped(value), encode)
    except (OverflowError, TypeError, ValueError, RecursionError) as error:
        reason = abridged(str(error), SHOWN_MAX)
        raise ProtocolError(
            f"{type(value).__name__} cannot be sent: {reason}"
        ) from error


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
    try:
        return decoder.decode(data)
    except (MsgspecError, ValueError, RecursionError) as error:
        reason = abridged(str(error), SHOWN_MAX)
        raise ProtocolError(f"{len(data)} bytes cannot be read: {reason}") from error


def bounded(decoder: "Decoder[Any]", data: bytes) -> bytes:
    if len(data) > CHECKED_BYTES:
        decoded(decoder, data)
    return data


# ------------------------------------------------------------------------------ checks


def _worker(worker: Worker, known: Known) -> None:
    if worker not in known.workers:
        raise ProtocolError(
            f"worker {abridged(repr(worker), SHOWN_MAX)}: the cluster has "
            f"{known.names} workers, but no worker of this name"
        )


def _owner(context: ContextId, known: Known) -> None:
    if context.number >= known.names:
        raise ProtocolError(
            f"a context of worker {context.number}: expected a worker from 0 to "
            f"{known.names - 1}"
        )


# Checks that msgspec cannot do: workers named in a message exist. An engine may use a
# name long after the message arrived, when its sender can no longer be identified.
CHECKS: dict[Any, _Check] = {Worker: _worker, ContextId: _owner}


@cache
def check_of(kind: Any) -> _Check:
    if kind in CHECKS:
        return CHECKS[kind]
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return check_of(parts[0])
    if origin in (Union, UnionType):
        return _of_union({get_origin(part) or part: check_of(part) for part in parts})
    if origin is tuple and parts[1:] == (...,):
        return _of_each(check_of(parts[0]))
    checks: list[tuple[Callable[[Any], Any], _Check]] = []
    if origin is tuple:
        checks = [(itemgetter(i), check_of(part)) for i, part in enumerate(parts)]
    elif isinstance(kind, type) and issubclass(kind, Struct):
        hints = get_type_hints(kind, include_extras=True)
        names = kind.__struct_fields__
        checks = [(attrgetter(name), check_of(hints[name])) for name in names]
    return _of_parts([(get, check) for get, check in checks if check is not _nothing])


def _nothing(value: Any, known: Known) -> None: ...


def _of_parts(checks: list[tuple[Callable[[Any], Any], _Check]]) -> _Check:
    if not checks:
        return _nothing
    if len(checks) == 1:
        ((get_it, check_it),) = checks
        return lambda value, known: check_it(get_it(value), known)

    def check_parts(value: Any, known: Known) -> None:
        for get, check in checks:
            check(get(value), known)

    return check_parts


def _of_union(checks: dict[Any, _Check]) -> _Check:
    is_optional = len(checks) == 2 and type(None) in checks
    checks = {part: check for part, check in checks.items() if check is not _nothing}
    if not checks:
        return _nothing
    if is_optional:
        (check_it,) = checks.values()
        return lambda value, known: None if value is None else check_it(value, known)

    def check_member(value: Any, known: Known) -> None:
        check = checks.get(type(value))
        if check is not None:
            check(value, known)

    return check_member


def _of_each(check: _Check) -> _Check:
    def check_each(values: tuple[Any, ...], known: Known) -> None:
        for value in values:
            check(value, known)

    return _nothing if check is _nothing else check_each
