"""Structs as bytes: msgspec, with errors of jdag and a check beyond types.

Annotations bound every number, string and tuple; msgspec enforces them before it
allocates. One further check follows (`CHECKS`): that named workers and owners of
contexts exist. Consistency of fields is not checked here: peers have proved their
identity, and a peer whose message raises an error is lost. Data that cannot be encoded
or decoded raises a ProtocolError with place and reason.
"""

import re
from collections.abc import Callable
from functools import cache
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


def _refuse_worker(worker: Worker, known: Known) -> None:
    raise ProtocolError(
        f"worker {abridged(repr(worker), SHOWN_MAX)}: the cluster has "
        f"{known.names} workers, but no worker of this name"
    )


def _refuse_owner(context: ContextId, known: Known) -> None:
    raise ProtocolError(
        f"a context of worker {context.number}: expected a worker from 0 to "
        f"{known.names - 1}"
    )


# Checks that msgspec cannot do: workers named in a message exist. An engine may use a
# name long after the message arrived, when its sender can no longer be identified.
# By type: the condition of a refusal, and the function that refuses.
CHECKS: dict[Any, tuple[str, _Check]] = {
    Worker: ("{} not in known.workers", _refuse_worker),
    ContextId: ("{}.number >= known.names", _refuse_owner),
}


@cache
def check_of(kind: Any) -> _Check:
    """Return a function that applies `CHECKS` to a value of this type and its parts.

    Its code is generated: no function is called for a part, since every message is
    checked.
    """
    space: dict[str, Any] = {}
    body = _check(kind, "value", space) or ["pass"]
    exec("\n ".join(["def check(value, known):", *body]), space)
    check: _Check = space["check"]
    return check


def _check(kind: Any, value: str, space: dict[str, Any]) -> list[str]:
    """Return the lines that check the expression `value`; `space` gets their names."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind in CHECKS:
        condition, refuse = CHECKS[kind]
        space[refuse.__name__] = refuse
        return [f"if {condition.format(value)}: {refuse.__name__}({value}, known)"]
    if origin is Annotated:
        return _check(parts[0], value, space)
    if origin in (Union, UnionType):
        return _check_union(parts, value, space)
    if origin is tuple and parts[1:] == (...,):
        item = re.split(r"\W", value)[0] + "_"
        return _under(f"for {item} in {value}:", _check(parts[0], item, space))
    places: list[tuple[str, Any]] = []
    if origin is tuple:
        places = [(f"{value}[{index}]", part) for index, part in enumerate(parts)]
    elif isinstance(kind, type) and issubclass(kind, Struct):
        hints = get_type_hints(kind, include_extras=True)
        places = [(f"{value}.{n}", hints[n]) for n in kind.__struct_fields__]
    return [line for place, part in places for line in _check(part, place, space)]


def _check_union(kinds: Any, value: str, space: dict[str, Any]) -> list[str]:
    kinds = [kind for kind in kinds if kind is not type(None)]
    if len(kinds) == 1:
        return _under(f"if {value} is not None:", _check(kinds[0], value, space))
    lines: list[str] = []
    for kind in kinds:
        cls = get_origin(kind) or kind
        space[cls.__name__] = cls
        word = "elif" if lines else "if"
        head = f"{word} {value}.__class__ is {cls.__name__}:"
        lines += _under(head, _check(kind, value, space))
    return lines


def _under(head: str, body: list[str]) -> list[str]:
    return [head, *[f" {line}" for line in body]] if body else []
