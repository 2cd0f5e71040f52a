"""Nodes of one process whose connections break, or who die, at a chosen frame.

Every node's frames are counted as it sends them, over all its connections. At the n-th
a `Tap` does what it is told: it cuts that connection, at the frame's begin or in its
middle, or it ends the node as kill -9 ends a process: at once, in whatever it does,
without another word, its sockets closed.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import Any

from jdag.api.cluster import Cluster
from jdag.errors import JoinError
from jdag.processes.net.streams import SocketStream
from jdag.processes.node import Node, SessionOver
from jdag.wire.frames import FRAME_BYTES, unpack_header
from tests.tools.rpc_nodes import joined_by, made, whereabouts

CUT, KILL = "cut", "kill"


class Killed(SessionOver):
    """The node of the thread that runs is dead, and so is the thread."""


class Tap:
    """What a node sends, counted; by `plan` it does something at the n-th frame."""

    def __init__(self) -> None:
        self.frames = 0
        self.dead = self.buried = self.tripped = False
        self.wires: list[Wire] = []
        self.sending = threading.Lock()
        self._at = 0
        self._act = CUT

    def plan(self, at: int, act: str) -> None:
        """At the frame of this number from now on, counted from 1."""
        with self.sending:
            self.frames, self._at, self._act, self.tripped = 0, at, act, False

    def until(self, frames: Sequence[tuple[int, int]]) -> int | None:
        """Where to stop, in bytes with these frames; None if none of them is the one.

        At its begin, where its number is even; else in its middle.
        """
        place = self._at - self.frames - 1
        if self._at == 0 or not 0 <= place < len(frames):
            return None
        start, end = frames[place]
        return start if self._at % 2 else (start + end) // 2

    def trip(self, wire: "Wire") -> None:
        self._at, self.tripped = 0, True
        if self._act == KILL:
            self.kill()
            raise Killed
        wire.end()
        raise ConnectionError("cut")

    def kill(self) -> None:
        self.dead = True
        for wire in self.wires:
            wire.end()


class Wire:
    def __init__(self, stream: SocketStream, tap: Tap) -> None:
        self._stream = stream
        self._tap = tap
        self._left, self._header = 0, b""  # Of the frame that is under way.
        self.local = self.buffered = False
        self.peer = stream.peer
        self.fileno, self.close = stream.fileno, stream.close
        self.pending, self.wants_write = stream.pending, stream.wants_write
        self.flush = stream.flush
        self.take_segment = self.send_segment = None
        tap.wires.append(self)

    def end(self) -> None:
        if self.fileno() >= 0:
            self._stream._socket.shutdown(2)

    def recv_into(self, view: memoryview) -> int:
        self._check()
        return self._stream.recv_into(view)

    def send(self, views: Sequence[Any]) -> int:
        self._check()
        with self._tap.sending:
            return self._send(b"".join(views))

    def _send(self, data: bytes) -> int:
        frames, _, _ = self._walk(data)
        stop = self._tap.until(frames)
        taken = 0
        if stop != 0:
            taken = self._stream.send([memoryview(data)[:stop]])
        frames, self._left, self._header = self._walk(data[:taken])
        self._tap.frames += len(frames)
        if taken == stop:
            self._tap.trip(self)
        return taken

    def _check(self) -> None:
        if self._tap.buried:
            raise ConnectionError("it is dead")
        if self._tap.dead:
            raise Killed

    def _walk(self, data: bytes) -> tuple[list[tuple[int, int]], int, bytes]:
        """Where frames begin and end in what comes next; what is then under way."""
        frames: list[tuple[int, int]] = []
        left, header, place = self._left, self._header, 0
        while place < len(data):
            if left:
                step = min(left, len(data) - place)
                left -= step
                place += step
                continue
            if not header:
                frames.append((place, len(data)))
            step = min(FRAME_BYTES - len(header), len(data) - place)
            header += data[place : place + step]
            place += step
            if len(header) == FRAME_BYTES:
                left, header = unpack_header(header).length, b""
                if frames:
                    frames[-1] = (frames[-1][0], min(place + left, len(data)))
        return frames, left, header


class Breaking:
    """A cluster of nodes of this process, each behind a tap; the first is main."""

    def __init__(self, workers: Sequence[str], allow: Sequence[str]) -> None:
        self.workers = tuple(workers)
        self.allow = allow
        self.nodes: dict[str, Node] = {}
        self.taps: dict[str, Tap] = {}
        self.threads: dict[str, threading.Thread] = {}
        self._turn = threading.Lock()  # One connection is made at a time.
        self._opened: list[Node] = []
        self.incarnations = dict.fromkeys(workers, 0)
        for worker in workers:
            home = self._make(worker)
            if worker == workers[0]:
                self.cluster = Cluster(home, self.nodes[worker].port)
        for node in self.nodes.values():
            for other in self.nodes.values():
                if other is not node:
                    node.joined(other.name, other.incarnation)
        for here, there in combinations(workers, 2):
            self.connect(here, there)
            self.nodes[here]._session.members[there].is_dialled = True
        for worker in workers:
            self._begin(worker)

    def _make(self, worker: str) -> Any:
        home: Any
        node: Node
        home, node = made(
            worker,
            self.workers,
            self.allow,
            incarnations=dict(self.incarnations),
            dial=lambda peer, received: self._dial(node, peer, received),
            deadline_s=600.0,
        )
        self.nodes[worker], self.taps[worker] = node, Tap()
        self._opened.append(node)
        return home

    def _begin(self, worker: str) -> None:
        node = self.nodes[worker]

        def run() -> None:
            try:
                node.run(spin=False)
            except Killed:
                return

        thread = threading.Thread(target=run, name=f"loop of {worker}", daemon=True)
        self.threads[worker] = thread
        thread.start()

    def connect(self, one: str, other: str) -> None:
        with self._turn:
            ends = joined_by(self.nodes[one], self.nodes[other])
            for worker, (stream, peer, received) in zip(
                (one, other), ends, strict=True
            ):
                node = self.nodes[peer]
                wire: Any = Wire(stream, self.taps[worker])
                self.nodes[worker].adopt(peer, node.incarnation, wire, received)

    def _dial(self, near: Node, peer: str, received: int) -> tuple[Any, int]:
        worker = near.name
        if self.nodes[worker] is not near:
            raise JoinError(f"incarnation {near.incarnation} of {worker!r} is gone")
        if self.taps[peer].dead or self.taps[worker].dead:
            raise JoinError(f"cannot reach {peer!r}", reached=False, absent=True)
        far = self.nodes[peer]
        with self._turn:
            ends = joined_by(near, far)
            stream = ends[1][0]
            wire: Any = Wire(stream, self.taps[peer])
            far.adopt(worker, near.incarnation, wire, received)
            mine: Any = Wire(ends[0][0], self.taps[worker])
            return mine, ends[0][2]

    def wait_until_over(self, worker: str) -> None:
        self.threads[worker].join(30)
        assert not self.threads[worker].is_alive(), worker

    def again(self, worker: str, *, alive: bool = False) -> None:
        if not alive:
            self.taps[worker].buried = True
            self.nodes[worker].close()
        self.incarnations[worker] += 1
        self._make(worker)
        node = self.nodes[worker]
        for other in self.workers:
            if other != worker:
                node.joined(other, self.incarnations[other])
                members = self.nodes[other]._session.members
                place = whereabouts(node.incarnation, self.allow)
                # Main dials all, whoever joins others.
                is_main = other == self.workers[0]
                members.attach(worker, node.incarnation, place, is_dialled=is_main)
                self.nodes[other].joined(worker, node.incarnation)
                node._session.members[other].is_dialled = not is_main
        for other in self.workers:
            if other != worker:
                self.connect(worker, other)
        self._begin(worker)

    def close(self) -> None:
        for tap in self.taps.values():
            tap.buried = tap.dead
        for node in self._opened:
            node.close()


@contextmanager
def breaking(
    workers: Sequence[str] = ("a", "b", "c"), allow: Sequence[str] = ("tests", "jdag")
) -> Iterator[Breaking]:
    opened = Breaking(workers, allow)
    try:
        yield opened
    finally:
        opened.close()
