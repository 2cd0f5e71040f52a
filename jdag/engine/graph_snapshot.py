"""A fragment as plain data, for `ctx.graph()` and for drawing.

The numbers of awaited cotangents of the last pass are computed again from its roots and
from the send slots that it counted, by the same walk over edges.
"""

from collections.abc import Iterable
from enum import Enum

from jdag.engine.graph import CallNode, Fragment, LeafEnd, LocalVertex, RecvEnd, Value
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
from jdag.engine.worker_pass import Due, walk


class Need(Enum):
    """Whether the last pass waited for the cotangent of a send."""

    NONE = ""  # No pass reached this fragment.
    NEEDED = "needed"  # The pass waited for the cotangent, and it arrived.
    UNNEEDED = "unneeded"  # SMART mode: the pass did not mark the send.
    OWED = "owed"  # The pass waited, but the cotangent never arrived.


class DrawnNode(Record, gc=False):
    """A recorded vjp: keys of its tracked inputs and outputs."""

    path: Path
    function: Name
    call_site: Name
    inputs: Keys
    outputs: Keys
    spent: bool
    awaited: U64  # Number of cotangents in the last pass, one per edge.


class DrawnEnd(Record, gc=False):
    """A send or recv: its peer, and the keys of its tracked slots on this worker."""

    path: Path
    peer: Worker
    values: Keys
    awaited: U64  # Number of cotangents in the last pass: for a send, 0 or 1.
    need: Need = Need.NONE  # Only set for sends.


class DrawnLeaf(Record, gc=False):
    """A leaf, and the versions of the leaf that the context read."""

    leaf: LeafId
    versions: Keys
    awaited: U64


class DrawnPass(Record, gc=False):
    number: U64
    mode: Mode
    outcome: Outcome


class DrawnEdge(Record, gc=False):
    """A value with its producer and one consumer, such as `node (0, 1)`."""

    value: Key
    producer: Name
    consumer: Name


class GraphSnapshot(Record, gc=False):
    """One worker's fragment of a context's graph."""

    nodes: Several[DrawnNode]
    sends: Several[DrawnEnd]
    recvs: Several[DrawnEnd]
    leaves: Several[DrawnLeaf]
    edges: Several[DrawnEdge]
    last: DrawnPass | None


def snapshot(fragment: Fragment) -> GraphSnapshot:
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
    return GraphSnapshot(nodes, sends, recvs, leaves, tuple(edges), last)


def _name(vertex: LocalVertex | None) -> str:
    match vertex:
        case CallNode(path=path):
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
        # Owed sends of a failed pass depend on timing.
        waits = past.outcome in (Outcome.STUCK, Outcome.EXPIRED)
        return Need.OWED if waits else Need.NONE
    return Need.NEEDED if path in past.counted else Need.UNNEEDED


def _awaited(fragment: Fragment) -> dict[LocalVertex, int]:
    past, dues = fragment.past, dict[LocalVertex, Due]()
    if past is not None:
        values = tuple([fragment.values[root.key] for root in past.roots])
        for path, slots in past.counted.items():
            inputs = fragment.sends[path].inputs
            values += tuple(
                [v for v, on in zip(inputs, slots, strict=True) if on and v]
            )
        walk([((), 0, values)], dues)
    return {vertex: due.remaining for vertex, due in dues.items()}
