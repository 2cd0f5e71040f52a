"""Non-blocking streams of bytes between two nodes.

The loop that owns a stream receives and sends when epoll reports the stream as ready.
TLS streams (`jdag.processes.net.tls`) have the same interface. This layer has no frames
and does not resend data.

Invariants: `recv_into` and `send` transfer at least one byte or raise an error. The
error is BlockingIOError, or ConnectionError with the peer's address and the reason.
After a ConnectionError the stream can only be closed. No call causes a SIGPIPE signal.
A descriptor received over a Unix socket is either taken by the caller or closed with
the stream.
"""

import array
import errno
import os
import socket
from collections import deque
from collections.abc import Sequence

from jdag.errors import reason
from jdag.processes.net.peer_identity import Names

# Sending 64 MiB over loopback TCP took 17 ms with this size, and 27 ms with the default
# of Linux (Unix sockets: 15 to 16 ms with both). Larger buffers gain little.
SOCKET_BUFFER_BYTES = 1 << 20

# Linux's limit for the number of buffers per call (IOV_MAX).
VIEWS_MAX = 1024

# Maximum number of received descriptors that are not yet taken. A node sends one
# descriptor for each new segment of shared memory.
DESCRIPTORS_MAX = 64
_DESCRIPTOR = array.array("i").itemsize
_NO_MORE_DESCRIPTORS = (errno.ETOOMANYREFS, errno.ENOMEM, errno.ENOBUFS)
_ANCILLARY_BYTES = socket.CMSG_SPACE(_DESCRIPTOR)
# These are plain ints because access to an enum member would take a microsecond.
_TRUNCATED = int(socket.MSG_CTRUNC)
_CLOSED_BY_EXEC = int(socket.MSG_CMSG_CLOEXEC)
_NO_SIGNAL = int(socket.MSG_NOSIGNAL)


class SocketStream:
    """One end of a plain TCP or Unix connection. The stream owns the socket.

    Attributes:
        local: whether both ends are on one host, so that descriptors can be passed.
        certificate: the names in the certificate of the other end; None without TLS,
            empty before the handshake is done.
        buffered: whether the stream buffers bytes, so that `pending` and `flush` must
            be called.
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
            # Send small messages at once, because callers wait for them.
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        return self._socket.fileno()

    def recv_into(self, view: memoryview) -> int:
        try:
            if not self.local:
                count = self._socket.recv_into(view)
            else:  # Reading the bytes alone would lose the descriptor.
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
        descriptors = array.array("i")
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(data[: len(data) - len(data) % _DESCRIPTOR])
        # Peers send one descriptor at a time. If it is missing, this process has
        # reached its limit of open files.
        self._descriptors.extend(descriptors or (None,))
        if len(self._descriptors) > DESCRIPTORS_MAX:
            raise ConnectionError(
                f"received over {DESCRIPTORS_MAX} descriptors that no frame announced"
            )

    def send(self, views: Sequence[memoryview]) -> int:
        """Send bytes from the start of `views`; return the number of sent bytes.

        At least one view must not be empty.
        """
        try:
            count = self._socket.sendmsg(views[:VIEWS_MAX], (), _NO_SIGNAL)
        except BlockingIOError:
            raise
        except OSError as error:
            raise broken(self.peer, error) from error
        return count or self.send(_filled(views))

    def pending(self) -> bool:
        """Whether bytes are available that epoll does not report."""
        return False

    def wants_write(self) -> bool:
        """Whether `flush` has buffered bytes to write."""
        return False

    def flush(self) -> None:
        """Write buffered bytes or raise BlockingIOError. Call this after `send`."""

    def send_segment(self, views: Sequence[memoryview], descriptor: int) -> int:
        """Send bytes together with a descriptor. Only for a `local` stream.

        The caller keeps its descriptor.

        Raises:
            OSError: the kernel cannot send more descriptors now. Nothing was sent, and
                the stream can still be used.
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
        """Return the first received descriptor that was not yet taken.

        The caller must close it.

        Raises:
            ConnectionError: no descriptor was received.
            OSError: this process had too many open files to receive it (EMFILE).
        """
        if not self._descriptors:
            raise ConnectionError(
                f"{self.peer} announced shared memory, but sent no descriptor for it"
            )
        descriptor = self._descriptors.popleft()
        if descriptor is None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return descriptor

    def close(self) -> None:
        self._socket.close()
        while self._descriptors:
            descriptor = self._descriptors.popleft()
            if descriptor is not None:
                os.close(descriptor)


Stream = SocketStream  # `TlsStream` is a subclass.


def peer_closed(peer: str) -> ConnectionError:
    return ConnectionError(f"{peer} closed the connection")


def broken(peer: str, error: OSError) -> ConnectionError:
    return ConnectionError(f"the connection to {peer} broke: {reason(error)}")


def _filled(views: Sequence[memoryview]) -> list[memoryview]:
    filled = [view for view in views if len(view)]
    assert filled, "expected a view that is not empty"
    return filled
