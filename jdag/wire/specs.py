"""Specs: functions for given argument types, as bytes.

A spec holds everything another process needs to build the same forward/vjp pair, if it
allows the names: the function by name, the structure of its arguments with statics, the
types of its inputs and outputs (weak types included), which of these are tracked, and
devices. Equal functions have equal specs, and True and 1 different ones, so specs serve
as keys. A function that cannot be named travels as its export, which is sent
separately; its spec holds the export's digest.

A structure is an item (`jdag.wire.trees`): nodes are tuples, lists, dicts, None, or a
`TreeNode` of class, static data and children. Parts that cannot travel become `Opaque`,
so every function has a spec. Decoding bytes that are no spec raises a ProtocolError.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any
from weakref import WeakKeyDictionary

from msgspec import Meta
from msgspec.msgpack import Decoder

from jdag.engine.arrays import HOLE, ArrayType
from jdag.engine.functions import name_of, remote
from jdag.engine.messages import Several
from jdag.engine.names import Mask, Name, Record
from jdag.engine.segments import SegmentNode, Slots
from jdag.errors import ProtocolError
from jdag.wire.arrays import type_of
from jdag.wire.encoding import bounded, decoded, encoded
from jdag.wire.trees import (
    Bytes,
    DictItem,
    Item,
    ListItem,
    Opaque,
    Part,
    TreeNode,
    TupleItem,
    check_depth,
    pack,
)

_Device = Name | None


class DevicePlacement(Record):
    """Where a call computes, where its cotangents go, and where its outputs go.

    None is the default device; in place of a tuple, for all of them.
    """

    device: _Device = None
    in_devices: Several[_Device] | None = None
    out_devices: Several[_Device] | None = None


class Body(Record):
    """A function for given argument types, as data.

    Attributes:
        function, arguments: items; the structure of the arguments.
        own: number of leading arguments that are the function itself.
        digest: of the export that replaces function and arguments; empty: by name.
        avals, tracked: of the arguments.
        out_avals, out_tracked: of the outputs.
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


def structure_item(
    treedef: Any,
    leaves: Iterator[Any],
    name: Callable[[Any], str] = name_of,
    depth: int = 0,
) -> Any:
    """A JAX treedef as an item; `leaves` are `HOLE` or statics."""
    check_depth(depth)
    node, below = treedef.node_data(), depth + 1
    if node is None:
        leaf = next(leaves)
        if leaf is HOLE:
            return HOLE
        return Part(pack(leaf, opaque=True, depth=below, name=name))
    kind, data = node
    children = tuple(
        [structure_item(c, leaves, name, below) for c in treedef.children()]
    )
    if kind is type(None):
        return None
    if kind is tuple:
        return TupleItem(children)
    if kind is list:
        return ListItem(children)
    packed = pack(data, opaque=True, depth=below, name=name)
    if kind is dict and all(type(key) is str for key in data):
        return DictItem(tuple(zip(packed.items, children, strict=True)))
    return TreeNode(name(kind), (packed, *children))


class SegmentBody(Record):
    """A `jdag.compute.segments.SegmentFunction` as data; `pairs` are specs."""

    pairs: Several[Bytes]
    avals: Several[ArrayType]
    bundles: Slots
    nodes: Several[SegmentNode]
    outputs: Slots
    carries: Several[Slots]
    calls: Several[tuple[Name, Name]]
    exact: bool


_segments: Decoder[SegmentBody] = Decoder(SegmentBody)
_decoder: Decoder[Any] = Decoder(tuple[DevicePlacement, Body])
_made: WeakKeyDictionary[Any, bytes] = WeakKeyDictionary()  # Of pairs.
# A spec is an array of two: places, which may be exchanged, and a body.
_PAIR = b"\x92"
_NOWHERE = _PAIR + encoded(DevicePlacement())  # All is on the default device.


def spec_of(pair: Any) -> bytes:
    """The spec of a pair (`jdag.compute.pairs`), cached, or of a segment.

    A pair that was built from a spec has it in its attribute `spec`.
    """
    if hasattr(pair, "nodes"):
        return segment_spec(pair, tuple(map(spec_of, pair.pairs)))
    known: bytes | None = getattr(pair, "spec", None)
    if known is None:
        known = _made.get(pair)
    if known is not None:
        return known
    bare = pair.pair
    if bare is not pair:
        places = DevicePlacement(pair.device, pair.in_devices, pair.out_devices)
        found = placed_spec(spec_of(bare), places)
    else:
        found = exported_spec(pair, pair.source.digest)
    _made[pair] = found
    return found


def segment_spec(function: Any, pairs: tuple[bytes, ...]) -> bytes:
    """The spec of a segment, given those of its pairs."""
    rest = {name: getattr(function, name) for name in SegmentBody.__struct_fields__[2:]}
    avals = tuple(map(type_of, function.avals))
    return bounded(_segments, encoded(SegmentBody(pairs, avals, **rest)))


def read_segment(spec: bytes) -> SegmentBody:
    """Decode the spec of a segment."""
    body: SegmentBody = decoded(_segments, spec)
    return body


def exported_spec(
    pair: Any, digest: bytes, name: Callable[[Any], str] = name_of
) -> bytes:
    """The spec of a pair by the digest of its export; by name without `digest`."""
    function = arguments = None
    own = 0
    if not digest:
        template = pair.source.template
        function = pack(pair.source.fn, opaque=True, name=name)
        own = template.own
        try:
            arguments = structure_item(template.treedef, iter(template.leaves), name)
        except ProtocolError:  # They are nested too deep.
            function = arguments = Opaque(pair.name)
    return encoded_spec(
        Body(
            pair.name,
            function,
            arguments,
            own,
            digest,
            tuple(map(type_of, pair.avals)),
            pair.tracked,
            tuple(map(type_of, pair.out_avals)),
            pair.out_tracked,
        )
    )


def encoded_spec(body: Body) -> bytes:
    """The spec of a function on the default device."""
    return bounded(_decoder, _NOWHERE + encoded(body))


@remote
@dataclass(init=False, eq=False)
class PairData:
    """A pair among the arguments of a program; it travels as its spec."""

    spec: bytes

    def __init__(self, pair: Any, spec: bytes = b"") -> None:
        self.pair = pair
        self.spec = spec or spec_of(pair)


def placed_spec(spec: bytes, places: DevicePlacement) -> bytes:
    """The spec with another device placement."""
    return _PAIR + encoded(places) + spec[len(_NOWHERE) :]


def read_spec(spec: bytes) -> tuple[DevicePlacement, Body]:
    """Decode a spec to its device placement and body."""
    found: tuple[DevicePlacement, Body] = decoded(_decoder, spec)
    return found
