"""Specs: functions for given argument types, as bytes.

A spec contains everything that another process needs to build the same forward/vjp
pair, if it allows the names: the function by name, the structure of its arguments with
statics, the types of its inputs and outputs (weak types included), which of these are
tracked, and devices. Specs are cache keys: equal functions have equal specs; the
statics True and 1 have different ones. A function without a usable name is sent as its
export, in a separate frame; its spec has the digest of the export.

A structure is an item (`jdag.wire.trees`): nodes are tuples, lists, dicts, None, or a
`TreeNode` of class, static data and children. Parts that cannot be sent become
`Opaque`, so every function has a spec. Decoding other bytes raises a ProtocolError.
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
    """The devices of a call, of the cotangents of its inputs, and of its outputs.

    None is the default device. None in place of a tuple means the default device for
    all inputs or outputs.
    """

    device: _Device = None
    in_devices: Several[_Device] | None = None
    out_devices: Several[_Device] | None = None


class Body(Record):
    """A function for given argument types, as data.

    Attributes:
        function, arguments: the function, and the structure of its arguments, as items.
        own: number of leading arguments that are part of the function itself.
        digest: digest of the export that replaces function and arguments, or empty.
        avals, tracked: types of the arguments, and which are tracked.
        out_avals, out_tracked: the same for the outputs.
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
    """A `jdag.compute.segments.SegmentFunction` as data. `pairs` are specs."""

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
_specs: WeakKeyDictionary[Any, bytes] = WeakKeyDictionary()  # By pair.
# A spec is an array of two items: a placement, which may be replaced, and a body.
_PAIR = b"\x92"
_DEFAULT_PLACEMENT = _PAIR + encoded(DevicePlacement())


def spec_of(pair: Any) -> bytes:
    if hasattr(pair, "nodes"):
        return segment_spec(pair, tuple(map(spec_of, pair.pairs)))
    spec: bytes | None = getattr(pair, "spec", None)
    if spec is None:
        spec = _specs.get(pair)
    if spec is not None:
        return spec
    bare = pair.pair
    if bare is not pair:
        places = DevicePlacement(pair.device, pair.in_devices, pair.out_devices)
        spec = placed_spec(spec_of(bare), places)
    else:
        spec = exported_spec(pair, pair.source.digest)
    _specs[pair] = spec
    return spec


def segment_spec(function: Any, pairs: tuple[bytes, ...]) -> bytes:
    rest = {name: getattr(function, name) for name in SegmentBody.__struct_fields__[2:]}
    avals = tuple(map(type_of, function.avals))
    return bounded(_segments, encoded(SegmentBody(pairs, avals, **rest)))


def read_segment(spec: bytes) -> SegmentBody:
    body: SegmentBody = decoded(_segments, spec)
    return body


def exported_spec(
    pair: Any, digest: bytes, name: Callable[[Any], str] = name_of
) -> bytes:
    function = arguments = None
    own = 0
    if not digest:
        template = pair.source.template
        function = pack(pair.source.fn, opaque=True, name=name)
        own = template.own
        try:
            arguments = structure_item(template.treedef, iter(template.leaves), name)
        except ProtocolError:  # The arguments are nested too deep.
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
    return bounded(_decoder, _DEFAULT_PLACEMENT + encoded(body))


@remote
@dataclass(init=False, eq=False)
class PairData:
    """A pair among the arguments of a program. The pair is sent as its spec."""

    spec: bytes

    def __init__(self, pair: Any, spec: bytes = b"") -> None:
        self.pair = pair
        self.spec = spec or spec_of(pair)


def placed_spec(spec: bytes, places: DevicePlacement) -> bytes:
    return _PAIR + encoded(places) + spec[len(_DEFAULT_PLACEMENT) :]


def read_spec(spec: bytes) -> tuple[DevicePlacement, Body]:
    placed: tuple[DevicePlacement, Body] = decoded(_decoder, spec)
    return placed
