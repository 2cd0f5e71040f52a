"""What a function for certain arguments is, as bytes: its spec.

It has all that another process needs to make the same forward/vjp pair, if it may make
what is named: the function, by name; the structure of its arguments with the statics
among them; the types of arrays that it takes and returns, weak types included; which of
these are tracked; and devices. Equal functions have equal specs, True and 1 apart, so
that specs are keys. A function that cannot be named travels as its export, which is
sent beside: the spec then has the digest of that.

A structure is nested data (`jdag.wire.trees`): tuples, lists, dicts and None are
themselves, other nodes a `Node` of their class, of their static data, then of their
children. What cannot travel at all is `Opaque`: a spec can be written of everything.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from msgspec import Meta
from msgspec.msgpack import Decoder
from msgspec.structs import replace

from jdag.engine.functions import Applied, is_program, is_unjitted, name_of
from jdag.engine.messages import Several
from jdag.engine.names import Mask, Name, Record
from jdag.errors import ProtocolError
from jdag.wire.arrays import ArrayType, check_possible
from jdag.wire.encoding import bounded, decoded, encoded
from jdag.wire.trees import (
    DEPTH_MAX,
    HOLE,
    Bytes,
    Item,
    Named,
    Node,
    Opaque,
    Part,
    form,
    pack,
    unpack,
)

Device = Name | None

APPLIED = f"{Applied.__module__}:{Applied.__qualname__}"


class Places(Record):
    """Where a call computes, where its cotangents go, and where its outputs go.

    None is the default device; in place of a tuple, for all.
    """

    device: Device = None
    in_devices: Several[Device] | None = None
    out_devices: Several[Device] | None = None


class Body(Record):
    """A function for certain arguments as data.

    Attributes:
        name: what it is called.
        function: the function as nested data.
        arguments: the structure of its arguments.
        own: how many arguments, the first ones, are the function itself.
        digest: of its export, in place of function and arguments; empty, by name.
        avals, tracked: of its arguments.
        out_avals, out_tracked: of its outputs.
    """

    name: Name
    function: Item
    arguments: Item
    own: Annotated[int, Meta(ge=0, le=255)]
    digest: Bytes
    avals: Several[ArrayType]
    tracked: Mask
    out_avals: Several[ArrayType]
    out_tracked: Mask

    @property
    def tracked_avals(self) -> list[ArrayType]:
        """The types of arguments that are tracked."""
        both = zip(self.avals, self.tracked, strict=True)
        return [aval for aval, is_tracked in both if is_tracked]


def portable(value: Any, *, arrays: bool = False) -> Any:
    """Return a function or a static as nested data, opaque where it cannot travel.

    Nor do arrays, unless it says so: what a compiled function holds of them goes with
    its export.
    """
    return _portable(value, arrays, 0)


def _portable(value: Any, arrays: bool, depth: int) -> Any:
    if isinstance(value, Applied):
        return Node(APPLIED, (value.name, is_unjitted(value), is_program(value)))
    try:
        if depth < DEPTH_MAX // 2:
            return _taken(value, arrays, depth + 1)
    except (ProtocolError, TypeError):  # A dict's key may, as data, not be one.
        pass
    return Opaque(name_of(type(value)))


def _taken(value: Any, arrays: bool, depth: int) -> Any:
    kind, content = form(value)
    match kind:
        case "array" | "numpy" | "scalar":
            return value if arrays else Opaque(name_of(type(value)))
        case "ref":
            return Opaque(name_of(type(value)))
        case "node":
            name, parts = content
            return Node(name, tuple([_portable(part, arrays, depth) for part in parts]))
        case "tuple" | "list":
            items = [_portable(item, arrays, depth) for item in content]
            return tuple(items) if kind == "tuple" else items
        case "dict":
            return {
                _portable(key, arrays, depth): _portable(item, arrays, depth)
                for key, item in content
            }
        case "named":
            return Named(content)
        case _:
            return value


def structure(treedef: Any, leaves: Sequence[Any]) -> Any:
    """Return a structure of JAX as nested data; `leaves` are `HOLE` or statics."""
    return _structure(treedef, iter(leaves))


def _structure(treedef: Any, leaves: Iterator[Any]) -> Any:
    node = treedef.node_data()
    if node is None:
        leaf = next(leaves)
        return HOLE if leaf is HOLE else Part(portable(leaf))
    kind, data = node
    children = [_structure(child, leaves) for child in treedef.children()]
    if kind is type(None):
        return None
    if kind is tuple:
        return tuple(children)
    if kind is list:
        return children
    if kind is dict and all(type(key) is str for key in data):
        return dict(zip(data, children, strict=True))
    return Node(name_of(kind), (portable(data), *children))


_decoder: Decoder[Any] = Decoder(tuple[Places, Body])
# A spec is an array of two: places, which may be exchanged, and a body.
_PAIR = b"\x92"
_NOWHERE = _PAIR + encoded(Places())  # All is on the default device.


def spec_of(body: Body) -> bytes:
    """The spec of what computes on the default device.

    Where the data are nested too deep they are opaque.
    """
    try:
        data = (pack(body.function), pack(body.arguments))
    except ProtocolError:
        data = (Opaque(body.name), Opaque(body.name))
    packed = replace(body, function=data[0], arguments=data[1])
    return bounded(_decoder, _NOWHERE + encoded(packed))


def placed_spec(spec: bytes, places: Places) -> bytes:
    """The spec of the same with places."""
    return _PAIR + encoded(places) + spec[len(_NOWHERE) :]


def read_spec(spec: bytes) -> tuple[Places, Body]:
    """What a spec says.

    Raises:
        ProtocolError: it is none, or its numbers of arguments and outputs disagree.
    """
    places: Places
    places, body = decoded(_decoder, spec)
    for kind in (*body.avals, *body.out_avals):
        check_possible(kind)
    body = replace(
        body, function=unpack(body.function), arguments=unpack(body.arguments)
    )
    nowhere = (places.in_devices is None, places.out_devices is None)
    if nowhere not in ((True, True), (False, False)) or (
        nowhere[0] and places.device is not None
    ):
        raise ProtocolError(f"the spec of {body.name} has a part of {places}")
    counts = (
        ("arguments", body.avals, body.tracked),
        ("outputs", body.out_avals, body.out_tracked),
        ("tracked arguments", body.tracked_avals, places.in_devices),
        ("outputs", body.out_avals, places.out_devices),
    )
    for what, known, said in counts:
        if said is not None and len(known) != len(said):
            raise ProtocolError(
                f"the spec of {body.name} has {len(known)} {what} and says something "
                f"of {len(said)}"
            )
    return places, body
