"""A fragment as plain data, for `ctx.graph()` and for drawing.

What the last pass awaited is worked out anew from its roots and from the slots of sends
that it counted here: edges are counted as it counted them.
"""

from collections.abc import Iterable
from enum import Enum

from jdag.engine.graph import Fragment, LeafEnd, Node, RecvEnd, Value, Vertex
from jdag.engine.messages import Several
from jdag.engine.names import (
    U64,
    Key,
    Keys,
    LeafId,
    Mode,
    Name,
    Outcome,
    Path,
    Record,
    Worker,
)
from jdag.engine.share import Due, walk


class Need(Enum):
    """What the last pass that came by made of a send."""

    NONE = ""  # None came by.
    NEEDED = "needed"  # Its cotangent was waited for, and came.
    UNNEEDED = "unneeded"  # SMART: its mark never came, so nobody waited.
    OWED = "owed"  # Its cotangent was waited for, and never came.


class DrawnNode(Record, gc=False):
    """A recorded vjp: keys of its tracked inputs and outputs."""

    path: Path
    function: Name
    call_site: Name
    inputs: Keys
    outputs: Keys
    spent: bool
    awaited: U64  # Cotangents, one an edge, in the last pass.


class DrawnEnd(Record, gc=False):
    """An end of a transfer: its peer, and the keys of its tracked slots here."""

    path: Path
    peer: Worker
    values: Keys
    awaited: U64  # Cotangents in the last pass: of a send 1 message, if it was counted.
    need: Need = Need.NONE  # Of a send.


class DrawnLeaf(Record, gc=False):
    """A leaf that the context read here, and which versions of it."""

    leaf: LeafId
    versions: Keys
    awaited: U64


class DrawnPass(Record, gc=False):
    """The last pass that came by a fragment."""

    number: U64
    mode: Mode
    outcome: Outcome


class DrawnEdge(Record, gc=False):
    """A value and who made it and who uses it, by path; forward direction."""

    value: Key
    producer: Name
    consumer: Name


class Drawing(Record, gc=False):
    """The part of a context's graph that one worker owns."""

    nodes: Several[DrawnNode]
    sends: Several[DrawnEnd]
    recvs: Several[DrawnEnd]
    leaves: Several[DrawnLeaf]
    edges: Several[DrawnEdge]
    last: DrawnPass | None


def draw(fragment: Fragment) -> Drawing:
    """Read a fragment off, in program order."""
    used: dict[Key, None] = {}
    edges: list[DrawnEdge] = []

    def use(values: Iterable[Value | None], consumer: str) -> tuple[Key, ...]:
        keys = []
        for value in values:
            if value is not None:
                used[value.key] = None
                edges.append(DrawnEdge(value.key, _name(value.producer), consumer))
                keys.append(value.key)
        return tuple(keys)

    awaited = _awaited(fragment)
    past = fragment.past
    nodes = tuple(
        DrawnNode(
            node.path,
            str(getattr(node.function, "name", node.function)),
            node.call_site,
            use(node.inputs, f"node {node.path}"),
            tuple(value.key for value in node.outputs),
            node.spent,
            awaited.get(node, 0),
        )
        for _, node in sorted(fragment.nodes.items())
    )
    sends = tuple(
        DrawnEnd(
            send.path,
            send.destination,
            use(send.inputs, f"send {send.path}"),
            int(past is not None and send.path in past.counted),
            _need(fragment, send.path),
        )
        for _, send in sorted(fragment.sends.items())
    )
    recvs = tuple(
        DrawnEnd(
            recv.path,
            recv.source,
            tuple(recv.outputs[slot].key for slot, on in enumerate(recv.tracked) if on),
            awaited.get(recv, 0),
        )
        for _, recv in sorted(fragment.recvs.items())
        if True in recv.tracked
    )
    leaves = tuple(
        DrawnLeaf(
            leaf,
            tuple(value.key for value in end.outputs if value.key in used),
            awaited.get(end, 0),
        )
        for leaf, end in sorted(fragment.leaves.items())
    )
    last = None if past is None else DrawnPass(past.number, past.mode, past.outcome)
    return Drawing(nodes, sends, recvs, leaves, tuple(edges), last)


def _name(vertex: Vertex | None) -> str:
    match vertex:
        case Node(path=path):
            return f"node {path}"
        case RecvEnd(path=path):
            return f"recv {path}"
        case LeafEnd(leaf=leaf):
            return str(leaf)
        case _:
            return "nothing"


def _need(fragment: Fragment, path: Path) -> Need:
    past = fragment.past
    if past is None:
        return Need.NONE
    if path in past.owed:
        # What it is owed in a pass that failed is a matter of timing.
        waits = past.outcome in (Outcome.STUCK, Outcome.EXPIRED)
        return Need.OWED if waits else Need.NONE
    return Need.NEEDED if path in past.counted else Need.UNNEEDED


def _awaited(fragment: Fragment) -> dict[Vertex, int]:
    """Of each vertex, how many edges the last pass counted to it."""
    past, dues = fragment.past, dict[Vertex, Due]()
    if past is not None:
        values = [fragment.values[root.key] for root in past.roots]
        for path, slots in past.counted.items():
            inputs = fragment.sends[path].inputs
            values.extend(v for v, on in zip(inputs, slots, strict=True) if on and v)
        walk(values, dues)
    return {vertex: due.remaining for vertex, due in dues.items()}
