"""What tests of streams share: ends that are connected, and moving bytes by turns."""

import os
import queue
import random
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any

from jdag.processes.net.greeting import OPENING, ConnectionPair, opening
from jdag.processes.net.listener import Listener, dial
from jdag.processes.net.streams import SocketStream, Stream
from jdag.processes.net.tls import Tls

DEADLINE_MS = 60_000
PAIR = ConnectionPair("ps0#3", "w", "what they share")
RECEIVED = 41


def sockets(kind: str) -> tuple[socket.socket, socket.socket]:
    if kind == "unix":
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


@contextmanager
def streams(kind: str) -> Iterator[tuple[Stream, Stream]]:
    near, far = (SocketStream(end, f"the {kind} peer") for end in sockets(kind))
    try:
        yield near, far
    finally:
        near.close()
        far.close()


def wait(stream: Stream, event: int) -> None:
    poller = select.poll()
    poller.register(stream.fileno(), select.POLLOUT if stream.wants_write() else event)
    assert stream.pending() or poller.poll(DEADLINE_MS), f"{stream.peer} hangs"


def soon(
    holds: Callable[[], bool], every_ms: int = 1, most_ms: int = DEADLINE_MS
) -> None:
    for _ in range(0, most_ms, every_ms):
        if holds():
            return
        threading.Event().wait(every_ms / 1e3)
    raise AssertionError(f"{holds} does not come to hold")


def descriptors() -> set[tuple[str, str]]:
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # As the one that lists them is, by now.
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


@contextmanager
def no_new_descriptors() -> Iterator[None]:
    """Hold that each file that is open in the end was open before; in the end, soon.

    Others may be closed meanwhile: what earlier tests left goes at any time.
    """
    before = descriptors()
    yield
    soon(lambda: descriptors() <= before)


class Gate:
    """The listener of `w`, who may dial it, and who has come in."""

    def __init__(self, address: str, tls: Tls | None = None) -> None:
        self.pairs = [PAIR._replace(dialler="ps0"), PAIR]
        self.came: queue.Queue[tuple[str, Stream, int]] = queue.Queue()
        self.listener = Listener(
            address,
            tls=tls,
            pairs=lambda: self.pairs,
            admit=lambda worker, names: RECEIVED,
            take=lambda *arrival: self.came.put(arrival),
        )
        self.address = self.listener.address

    def dial(self, received: int = 8, **settings: Any) -> tuple[Stream, Stream]:
        stream, theirs = self.dialled(PAIR, received, **settings)
        worker, far, told = self.came.get(timeout=60)
        assert (theirs, worker, told) == (RECEIVED, PAIR.dialler, received)
        return stream, far

    def dialled(
        self, pair: ConnectionPair = PAIR, received: int = 8, **settings: Any
    ) -> tuple[Stream, int]:
        return dial(self.address, pair, received, **{"timeout_s": 60, **settings})

    def raw(self) -> socket.socket:
        kind, name, *port = self.address.split(":")
        if kind == "unix":
            near = socket.socket(socket.AF_UNIX)
            near.connect(name.replace("@", "\0"))
            return near
        return socket.create_connection((name, int(port[0])), 20)

    def close(self) -> None:
        self.listener.close()
        while not self.came.empty():
            self.came.get()[1].close()


def hello_by(near: socket.socket) -> bytes:
    return hello_to(near.recv(OPENING.size, socket.MSG_WAITALL))


def hello_to(theirs: bytes) -> bytes:
    said = opening(8)
    return said + PAIR.proof("dialler", theirs, said)


def talk(stream: Stream, far: Stream) -> None:
    for near, other, said in ((stream, far, b"to"), (far, stream, b"fro")):
        send_all(near, said)
        assert receive(other, len(said)) == said
    stream.close()
    far.close()


def send_all(stream: Stream, data: bytes) -> None:
    left = memoryview(data)
    while left:
        try:
            left = left[stream.send([left]) :]
        except BlockingIOError:
            wait(stream, select.POLLOUT)
    flush(stream)


def pour(stream: Stream, data: bytes, chance: random.Random) -> None:
    at = 0
    while at < len(data):
        end = min(len(data), at + chance.randint(1, 300_000))
        cuts = [at]
        while cuts[-1] < end:
            cuts.append(cuts[-1] + chance.choice((0, 1, 7, chance.randint(1, 60_000))))
        try:
            at += stream.send([memoryview(data)[i:j] for i, j in pairwise(cuts)])
        except BlockingIOError:
            wait(stream, select.POLLOUT)
    flush(stream)


def flush(stream: Stream) -> None:
    while True:
        try:
            return stream.flush()
        except BlockingIOError:
            wait(stream, select.POLLOUT)


def receive(stream: Stream, count: int) -> bytes:
    into = memoryview(bytearray(count))
    came = 0
    while came < count:
        try:
            came += stream.recv_into(into[came:])
        except BlockingIOError:
            wait(stream, select.POLLIN)
    return bytes(into)
