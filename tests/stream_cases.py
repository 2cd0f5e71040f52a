"""What tests of streams share: ends that are connected, and moving bytes by turns."""

import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from jdag.rpc.streams import SocketStream, Stream

DEADLINE_MS = 60_000


def sockets(kind: str) -> tuple[socket.socket, socket.socket]:
    """Two connected sockets of a kind: `unix` or `tcp`."""
    if kind == "unix":
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


@contextmanager
def streams(kind: str) -> Iterator[tuple[Stream, Stream]]:
    """Two connected streams of a kind, closed at the end."""
    near, far = (SocketStream(end, f"the {kind} peer") for end in sockets(kind))
    try:
        yield near, far
    finally:
        near.close()
        far.close()


def wait(stream: Stream, event: int) -> None:
    """Wait until a stream is ready, not for ever."""
    poller = select.poll()
    poller.register(stream.fileno(), select.POLLOUT if stream.wants_write() else event)
    assert stream.pending() or poller.poll(DEADLINE_MS), f"{stream.peer} hangs"


def soon(
    holds: Callable[[], bool], every_ms: int = 1, most_ms: int = DEADLINE_MS
) -> None:
    """Wait until something holds that others bring about, not for ever."""
    for _ in range(0, most_ms, every_ms):
        if holds():
            return
        threading.Event().wait(every_ms / 1e3)
    raise AssertionError(f"{holds} does not come to hold")


def descriptors() -> set[tuple[str, str]]:
    """The open files of this process: the number of each, and what it is."""
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


def send_all(stream: Stream, data: bytes) -> None:
    """Send every byte, waiting for room."""
    left = memoryview(data)
    while left:
        try:
            left = left[stream.send([left]) :]
        except BlockingIOError:
            wait(stream, select.POLLOUT)
    flush(stream)


def flush(stream: Stream) -> None:
    """Wait until what was taken has left."""
    while True:
        try:
            return stream.flush()
        except BlockingIOError:
            wait(stream, select.POLLOUT)


def receive(stream: Stream, count: int) -> bytes:
    """Wait for as many bytes."""
    into = memoryview(bytearray(count))
    came = 0
    while came < count:
        try:
            came += stream.recv_into(into[came:])
        except BlockingIOError:
            wait(stream, select.POLLIN)
    return bytes(into)
