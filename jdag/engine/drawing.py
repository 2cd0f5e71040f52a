"""A fragment as plain data, for `ctx.graph()` and for drawing."""

from typing import NamedTuple

from jdag.engine.graph import Fragment, Value
from jdag.engine.vocabulary import Key, LeafId, Path, Worker


class DrawnNode(NamedTuple):
    """A recorded vjp: keys of its tracked inputs and outputs."""

    path: Path
    function: str
    call_site: str
    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...]
    spent: bool


class DrawnEnd(NamedTuple):
    """An end of a transfer: its peer, and the keys of its tracked slots here."""

    path: Path
    peer: Worker
    values: tuple[Key, ...]


class DrawnLeaf(NamedTuple):
    """A leaf that the context read here, and which versions of it."""

    leaf: LeafId
    versions: tuple[Key, ...]


class DrawnEdge(NamedTuple):
    """A value and who made it and who uses it, by path; forward direction."""

    value: Key
    producer: str
    consumer: str


class Drawing(NamedTuple):
    """The part of a context's graph that one worker owns."""

    nodes: tuple[DrawnNode, ...]
    sends: tuple[DrawnEnd, ...]
    recvs: tuple[DrawnEnd, ...]
    leaves: tuple[DrawnLeaf, ...]
    edges: tuple[DrawnEdge, ...]


def draw(fragment: Fragment) -> Drawing:
    """Read a fragment off, in program order."""
    used: dict[Key, None] = {}
    edges: list[DrawnEdge] = []
    made: dict[Key, str] = {}
    for node in fragment.nodes.values():
        made.update((value.key, f"node {node.path}") for value in node.outputs)
    for recv in fragment.recvs.values():
        made.update((value.key, f"recv {recv.path}") for value in recv.outputs)
    for leaf in fragment.leaves.values():
        made.update((value.key, str(leaf.leaf)) for value in leaf.outputs)

    def use(values: tuple[Value, ...], consumer: str) -> tuple[Key, ...]:
        for value in values:
            used[value.key] = None
            edges.append(DrawnEdge(value.key, made.get(value.key, "nothing"), consumer))
        return tuple(value.key for value in values)

    nodes = tuple(
        DrawnNode(
            node.path,
            str(getattr(node.function, "name", node.function)),
            node.call_site,
            use(node.inputs, f"node {node.path}"),
            tuple(value.key for value in node.outputs),
            node.spent,
        )
        for _, node in sorted(fragment.nodes.items())
    )
    sends = tuple(
        DrawnEnd(
            send.path,
            send.destination,
            use(tuple(v for v in send.inputs if v is not None), f"send {send.path}"),
        )
        for _, send in sorted(fragment.sends.items())
    )
    recvs = tuple(
        DrawnEnd(
            recv.path,
            recv.source,
            tuple(recv.outputs[slot].key for slot, on in enumerate(recv.tracked) if on),
        )
        for _, recv in sorted(fragment.recvs.items())
        if True in recv.tracked
    )
    leaves = tuple(
        DrawnLeaf(leaf, tuple(value.key for value in end.outputs if value.key in used))
        for leaf, end in sorted(fragment.leaves.items())
    )
    return Drawing(nodes, sends, recvs, leaves, tuple(edges))
