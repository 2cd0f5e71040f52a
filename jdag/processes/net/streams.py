"""Non-blocking streams of bytes between two nodes.

The loop that owns a stream receives and sends when epoll says so. Streams through TLS
(`jdag.processes.net.tls`) are used alike. Nothing here frames or resends.

Invariants: `recv_into` and `send` move at least one byte or raise. Besides
BlockingIOError they raise only ConnectionError, with the peer's address and the reason;
after it the stream can only be closed. No call raises a signal. A descriptor that came
over a Unix socket is taken, or closed with the stream.
"""

import array
import errno
import os
import socket
from collections import deque
from collections.abc import Sequence

from jdag.errors import reason
from jdag.processes.net.peer_identity import Names

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
# As enums, they take a microsecond to look at.
_TRUNCATED = int(socket.MSG_CTRUNC)
_CLOSED_BY_EXEC = int(socket.MSG_CMSG_CLOEXEC)
_NO_SIGNAL = int(socket.MSG_NOSIGNAL)


class SocketStream:
    """One end of a plain TCP or Unix connection; the stream owns the socket.

    Attributes:
        peer: the other end, as error messages name it.
        local: whether both ends are on one host, so that descriptors can be passed.
        certificate: the names in the certificate of the other end; None without TLS,
            and nothing before the handshake is done.
        buffered: whether bytes may wait inside of it, so that `pending` and `flush`
            are to be called.
    """

    certificate: Names = None
    buffered = False

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
        """Return the descriptor that epoll watches; -1 once closed."""
        return self._socket.fileno()

    def recv_into(self, view: memoryview) -> int:
        """Fill the front of a view, return how many bytes.

        Raises:
            BlockingIOError: there are none now.
            ConnectionError: there will be no more.
        """
        try:
            if not self.local:
                count = self._socket.recv_into(view)
            else:  # A descriptor whose bytes are read without it would be lost.
                count, beside, flags, _ = self._socket.recvmsg_into(
                    (view,), _ANCILLARY_BYTES, _CLOSED_BY_EXEC
                )
                if beside or flags & _TRUNCATED:
                    self._keep_descriptors(beside)
        except BlockingIOError:
            raise
        except OSError as error:
            raise broken(self.peer, error) from error
        if not count:
            raise peer_closed(self.peer)
        return count

    def _keep_descriptors(self, ancillary: Sequence[tuple[int, int, bytes]]) -> None:
        came = array.array("i")
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                came.frombytes(data[: len(data) - len(data) % _DESCRIPTOR])
        # Each of ours comes alone: one that is missing found no room in this process.
        self._descriptors.extend(came or (None,))
        if len(self._descriptors) > DESCRIPTORS_MAX:
            raise ConnectionError(
                f"over {DESCRIPTORS_MAX} descriptors came that no frame announced"
            )

    def send(self, views: Sequence[memoryview]) -> int:
        """Take bytes from the front of some views, not all empty; return how many.

        Raises:
            BlockingIOError: there is no room now.
            ConnectionError: the connection has ended.
        """
        try:
            count = self._socket.sendmsg(views[:VIEWS_MAX], (), _NO_SIGNAL)
        except BlockingIOError:
            raise
        except OSError as error:
            raise broken(self.peer, error) from error
        return count or self.send(_filled(views))

    def pending(self) -> bool:
        """Whether bytes are here that epoll does not see."""
        return False

    def wants_write(self) -> bool:
        """Whether bytes that were taken wait here for room to write: see `flush`."""
        return False

    def flush(self) -> None:
        """Write what was taken and waits here, or raise BlockingIOError.

        It is for after the last `send`: `recv_into` and `send` do as much.
        """

    def send_segment(self, views: Sequence[memoryview], descriptor: int) -> int:
        """Send, with a descriptor beside the first byte; only where `local`.

        The caller keeps its descriptor.

        Raises:
            OSError: the kernel passes no more descriptors now: nothing was sent, and
                the stream is as it was.
        """
        assert self.local, self.peer
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
        try:
            return self._socket.sendmsg(
                _filled(views)[:VIEWS_MAX], (rights,), _NO_SIGNAL
            )
        except BlockingIOError:
            raise
        except OSError as error:
            if error.errno in _NO_MORE_DESCRIPTORS:
                raise
            raise broken(self.peer, error) from error

    def take_segment(self) -> int:
        """Return the first descriptor that came and was not yet taken.

        It has come when the byte has that it was sent with. The caller closes it.

        Raises:
            ConnectionError: there is none.
            OSError: this process had no room for it (EMFILE).
        """
        if not self._descriptors:
            raise ConnectionError(
                f"{self.peer} announced shared memory and passed none"
            )
        descriptor = self._descriptors.popleft()
        if descriptor is None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return descriptor

    def close(self) -> None:
        """Close this end; may be called again."""
        self._socket.close()
        while self._descriptors:
            descriptor = self._descriptors.popleft()
            if descriptor is not None:
                os.close(descriptor)


Stream = SocketStream  # That of TLS derives from it.


def peer_closed(peer: str) -> ConnectionError:
    """Say that the other end closed the connection."""
    return ConnectionError(f"{peer} closed the connection")


def broken(peer: str, error: OSError) -> ConnectionError:
    """Say why a connection cannot be used any more."""
    return ConnectionError(f"the connection to {peer} broke: {reason(error)}")


def _filled(views: Sequence[memoryview]) -> list[memoryview]:
    filled = [view for view in views if len(view)]
    assert filled, "a stream was asked to send nothing"
    return filled
