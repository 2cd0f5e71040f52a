"""Nodes in one process, joined by socket pairs: the real driver without processes."""

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import combinations
from typing import Any

from jdag.api.cluster import Cluster
from jdag.context.cluster_state import ClusterState
from jdag.context.program_runner import run_program
from jdag.processes.functions.decoder import FunctionDecoder
from jdag.processes.net.streams import SocketStream
from jdag.processes.node import Node
from jdag.processes.session.cluster_file import SessionSettings
from jdag.processes.session.membership import Membership
from jdag.processes.session.requests import WorkerAddress
from jdag.processes.session.session_info import SessionInfo


def place_of(
    worker: str,
    workers: Sequence[str],
    allow: Sequence[str],
    incarnations: Mapping[str, int] | None = None,
    **changed: Any,
) -> SessionInfo:
    numbers = incarnations or dict.fromkeys(workers, 0)
    members = Membership(worker, workers, numbers[worker])
    for name in workers:
        if name != worker:
            members.attach(name, numbers[name], whereabouts(numbers[name], allow))
    usual: dict[str, Any] = {
        "main": workers[0],
        "members": members,
        "dial": _undialled,
    }
    settings, rest = settings_of(workers, **changed)
    return SessionInfo(worker=worker, settings=settings, **{**usual, **rest})


def settings_of(
    workers: Sequence[str], **changed: Any
) -> tuple[SessionSettings, dict[str, Any]]:
    own = {key: changed[key] for key in changed if hasattr(SessionSettings, key)}
    rest = {key: changed[key] for key in changed if key not in own}
    return SessionSettings(workers, **own), rest


def whereabouts(incarnation: int, allow: Sequence[str]) -> WorkerAddress:
    return WorkerAddress(incarnation=incarnation, data="", allow=tuple(allow))


def _undialled(peer: str, received: int) -> tuple[Any, int]:
    raise OSError(f"nobody dials {peer} here")


def made(
    worker: str, workers: Sequence[str], allow: Sequence[str] = (), **changed: Any
) -> tuple[ClusterState, Node]:
    home = ClusterState(settings_of(workers, **changed)[0], abstract=False)
    node = Node(
        place_of(worker, workers, allow, **changed),
        run_program=partial(run_program, home),
        functions=FunctionDecoder(allow),
    )
    home.driver = node
    return home, node


def joined_by(one: Node, other: Node) -> list[tuple[SocketStream, str, int]]:
    """A pair of sockets between two nodes, from where their links stand.

    For each: its stream, the name of the other, how much that one has received.
    """
    ends = socket.socketpair()
    told = [one.received(other.name), other.received(one.name)]
    return [
        (SocketStream(ends[0], other.worker), other.name, told[1]),
        (SocketStream(ends[1], one.worker), one.name, told[0]),
    ]


def connect(one: Node, other: Node) -> None:
    ends = joined_by(one, other)
    for node, peer, end in zip((one, other), (other, one), ends, strict=True):
        stream, name, received = end
        node.adopt(name, peer.incarnation, stream, received)


@contextmanager
def cluster(
    workers: Sequence[str] = ("a", "b", "c"),
    allow: Sequence[str] = ("tests",),
    **changed: Any,
) -> Iterator[Any]:
    homes = {worker: made(worker, workers, allow, **changed) for worker in workers}
    nodes = {worker: node for worker, (_, node) in homes.items()}
    for node in nodes.values():
        for other in nodes.values():
            if other is not node:
                node.joined(other.worker, other.incarnation)
    for one, other in combinations(nodes.values(), 2):
        connect(one, other)
    for node in nodes.values():
        node.begin()
    home, main = homes[workers[0]]
    opened = Cluster(home, main.port)
    opened.nodes = nodes  # type: ignore[attr-defined]
    try:
        with opened:
            yield opened
    finally:
        for node in nodes.values():
            node.close()
