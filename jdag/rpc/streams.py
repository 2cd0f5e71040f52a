"""Streams of bytes between two nodes, which never block.

A loop owns the ends of its streams: it asks for bytes or hands some over when epoll
says so, and on each kind of stream in the same way. Nothing here frames or resends.

Invariants: `recv_into` and `send` move at least one byte or raise; what they raise
besides BlockingIOError is a ConnectionError with the other end's address and the
reason, and after it the stream is only to be closed. No call raises a signal. A
descriptor that came over a Unix socket is taken, or closed with the stream.
"""

import array
import errno
import os
import socket
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from jdag.errors import reason
from jdag.rpc.certified import Shown

# Over loopback TCP 64 MiB took 17 ms with 1 MiB, 27 with what Linux gives by itself
# (Unix sockets: 15 to 16 with either), and more brings little.
SOCKET_BUFFER_BYTES = 1 << 20

# One call takes no more views than this on Linux (IOV_MAX).
VIEWS_MAX = 1024

# A node passes a descriptor for each new piece of shared memory, which are few.
DESCRIPTORS_MAX = 64
_DESCRIPTOR = array.array("i").itemsize
_NO_MORE_DESCRIPTORS = (errno.ETOOMANYREFS, errno.ENOMEM, errno.ENOBUFS)
_ANCILLARY_BYTES = socket.CMSG_SPACE(_DESCRIPTOR)
_TRUNCATED = int(socket.MSG_CTRUNC)  # As an enum, it takes a microsecond to look at.


class Stream(Protocol):
    """One end of a connection to another node; see the module for what holds of all."""

    local: bool
    """Whether both ends are on one host and descriptors can be passed."""

    peer: str
    """The other end as messages name it."""

    @property
    def shown(self) -> Shown:
        """The names in the certificate that the other end showed; None without TLS."""

    def fileno(self) -> int:
        """Give what epoll watches; -1 once closed."""

    def recv_into(self, view: memoryview) -> int:
        """Fill the front of a view, return how many bytes.

        Raises BlockingIOError if there are none, ConnectionError at the end.
        """

    def send(self, views: Sequence[memoryview]) -> int:
        """Take bytes from the front of some views, return how many.

        The views are of bytes, or are bytes, and not all of them are empty. Raises
        BlockingIOError if there is no room, ConnectionError at the end.
        """

    def pending(self) -> bool:
        """Whether bytes are here that epoll does not see."""

    def wants_write(self) -> bool:
        """Whether bytes that were taken wait here for room to write: see `flush`."""

    def flush(self) -> None:
        """Hand over what was taken and waits here; BlockingIOError if there is no room.

        What the other end sees may wait for it, so call it when all is sent; reading
        and sending do as much.
        """

    def send_segment(self, views: Sequence[memoryview], descriptor: int) -> int:
        """Send, with a descriptor beside the first byte; only where `local`.

        The caller keeps its descriptor. Raises OSError if the kernel passes no more
        descriptors now: nothing was sent, and the stream is as it was.
        """

    def take_segment(self) -> int:
        """Give the first descriptor that came and was not yet taken.

        It has come when the byte has that it was sent with. The caller closes it.
        Raises ConnectionError if there is none, and OSError in place of a descriptor
        that this process had no room for (EMFILE).
        """

    def close(self) -> None:
        """Close this end; may be called again."""


class SocketStream:
    """A plain TCP or Unix socket that is connected, and from now on the stream's."""

    shown: Shown = None

    def __init__(self, connected: socket.socket, peer: str) -> None:
        self.peer = peer
        self.local = connected.family == socket.AF_UNIX
        self._socket = connected
        self._descriptors: deque[int | None] = deque()
        connected.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connected.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
        if not self.local:
            # Small messages are what callers wait for.
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        """See Stream."""
        return self._socket.fileno()

    def recv_into(self, view: memoryview) -> int:
        """See Stream."""
        try:
            if self.local:
                count = self._with_descriptors(view)
            else:
                count = self._socket.recv_into(view)
        except BlockingIOError:
            raise
        except OSError as error:
            raise broken(self.peer, error) from error
        if not count:
            raise ended(self.peer)
        if len(self._descriptors) > DESCRIPTORS_MAX:
            raise ConnectionError(
                f"{self.peer} passed over {DESCRIPTORS_MAX} descriptors that no frame"
                " announced"
            )
        return count

    def _with_descriptors(self, view: memoryview) -> int:
        """Receive; a descriptor whose bytes are read without it would be lost."""
        count, ancillary, flags, _ = self._socket.recvmsg_into(
            (view,), _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
        )
        if not ancillary and not flags & _TRUNCATED:
            return count
        came = array.array("i")
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                came.frombytes(data[: len(data) - len(data) % _DESCRIPTOR])
        # Each of ours comes alone: one that is missing found no room in this process.
        self._descriptors.extend(came or (None,))
        return count

    def send(self, views: Sequence[memoryview]) -> int:
        """See Stream."""
        try:
            count = self._socket.sendmsg(views[:VIEWS_MAX], (), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            raise
        except OSError as error:
            raise broken(self.peer, error) from error
        return count or self.send(_filled(views))

    def pending(self) -> bool:
        """See Stream."""
        return False

    def wants_write(self) -> bool:
        """See Stream."""
        return False

    def flush(self) -> None:
        """See Stream."""

    def send_segment(self, views: Sequence[memoryview], descriptor: int) -> int:
        """See Stream."""
        assert self.local, self.peer
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
        try:
            return self._socket.sendmsg(
                _filled(views)[:VIEWS_MAX], (rights,), socket.MSG_NOSIGNAL
            )
        except BlockingIOError:
            raise
        except OSError as error:
            if error.errno in _NO_MORE_DESCRIPTORS:
                raise
            raise broken(self.peer, error) from error

    def take_segment(self) -> int:
        """See Stream."""
        if not self._descriptors:
            raise ConnectionError(
                f"{self.peer} announced shared memory and passed none"
            )
        descriptor = self._descriptors.popleft()
        if descriptor is None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return descriptor

    def close(self) -> None:
        """See Stream."""
        self._socket.close()
        while self._descriptors:
            descriptor = self._descriptors.popleft()
            if descriptor is not None:
                os.close(descriptor)


def ended(peer: str) -> ConnectionError:
    """Say that the other end closed the connection."""
    return ConnectionError(f"{peer} closed the connection")


def broken(peer: str, error: OSError) -> ConnectionError:
    """Say why a connection cannot be used any more."""
    return ConnectionError(f"the connection to {peer} broke: {reason(error)}")


def _filled(views: Sequence[memoryview]) -> list[memoryview]:
    filled = [view for view in views if len(view)]
    assert filled, "a stream was asked to send nothing"
    return filled
