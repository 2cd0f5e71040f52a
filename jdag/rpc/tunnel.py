"""The carrier `grpc`: a stream whose bytes go through a bidirectional gRPC stream.

Each end is one half of a pair of sockets, which the node treats like any stream; what
comes out of the other half goes into messages of up to 1 MiB, and back, on two threads
of which gRPC lends one. Nobody frames anything: bytes are joined and cut on the way.

Invariants: what is under way is what both pairs of sockets, one message in each pump
and HTTP/2's window hold, a few MiB, since each pump moves one message at a time. A
stream that either node closes, or a call that ends, brings bytes that came before it
and then ends both halves, both pumps and the channel. What gRPC says of a call that
broke is said by the stream.
"""

import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

import grpc

from jdag.rpc.addresses import Address
from jdag.rpc.certified import Shown, names_shown
from jdag.rpc.streams import SOCKET_BUFFER_BYTES, SocketStream, Stream
from jdag.rpc.tls import Tls

METHOD = "/jdag.Control/Carry"
MESSAGE_BYTES_MAX = 1 << 20
_KEEPALIVE_MS = 10_000

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 2 * MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", 2 * MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", _KEEPALIVE_MS),
    # Bulk must not stand in the way of what control says to the same server.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    # A proxy that the environment names is for the web.
    ("grpc.enable_http_proxy", 0),
)
# What a server has to allow, or it hangs up on those who ask whether it is there.
SERVER_OPTIONS = (
    ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
)


class _Half:
    """The half of a pair of sockets that pumps use; iterating takes from it.

    `why` is what the node is told in place of a plain end.
    """

    def __init__(self, outside: socket.socket) -> None:
        self.why = ""
        self._outside = outside
        self._reading = threading.Lock()
        self._room = memoryview(bytearray(MESSAGE_BYTES_MAX))
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            outside.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        with self._reading, suppress(OSError):
            if count := self._outside.recv_into(self._room):
                return bytes(self._room[:count])
        raise StopIteration

    def fill(self, messages: Iterable[bytes]) -> bool:
        """Hand all messages to the node; return whether it took them."""
        for message in messages:
            try:
                self._outside.sendall(message)
            except OSError:
                return False
        return True

    def cut(self) -> None:
        """End both directions; what was handed over can still be read."""
        with suppress(OSError):
            self._outside.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Cut, and close once nobody reads."""
        self.cut()
        with self._reading:
            self._outside.close()


class TunnelStream:
    """The node's end of a tunnel."""

    def __init__(self, inside: SocketStream, half: _Half, shown: Shown) -> None:
        self.peer = inside.peer
        self.local = False
        self.shown = shown
        self._inside = inside
        self._half = half

    def fileno(self) -> int:
        """See Stream."""
        return self._inside.fileno()

    def recv_into(self, view: memoryview) -> int:
        """See Stream."""
        try:
            return self._inside.recv_into(view)
        except ConnectionError as error:
            raise self._said(error) from error

    def send(self, views: Sequence[memoryview]) -> int:
        """See Stream."""
        try:
            return self._inside.send(views)
        except ConnectionError as error:
            raise self._said(error) from error

    def _said(self, error: ConnectionError) -> ConnectionError:
        if not self._half.why:
            return error
        return ConnectionError(f"the tunnel to {self.peer} broke: {self._half.why}")

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
        raise AssertionError(f"{self.peer} is not on this host; {descriptor} stays")

    def take_segment(self) -> int:
        """See Stream."""
        return self._inside.take_segment()

    def close(self) -> None:
        """See Stream."""
        self._inside.close()


def _pair(peer: str, shown: Shown = None) -> tuple[TunnelStream, _Half]:
    inside, outside = socket.socketpair()
    half = _Half(outside)
    return TunnelStream(SocketStream(inside, peer), half, shown), half


def open_tunnel(address: Address, tls: Tls | None, name: str) -> TunnelStream:
    """Open a stream through the control server at an address; does not wait for it.

    `name` is whom its certificate is to be for, if there is `tls`. That it cannot be
    reached is what the stream says once it is used.
    """
    target = str(address).partition(":")[2]
    if tls is None:
        channel = grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
    else:
        options = (*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", name))
        channel = grpc.secure_channel(
            target, tls.channel_credentials(), options=options
        )
    stream, half = _pair(str(address))
    call = channel.stream_stream(METHOD)(half)
    arguments = (channel, call, half)
    threading.Thread(
        target=_follow, args=arguments, name=f"tunnel {address}", daemon=True
    ).start()
    return stream


def _follow(channel: grpc.Channel, call: grpc.Call, half: _Half) -> None:
    """Hand to the node what a call brings, until it ends."""
    try:
        if not half.fill(call):
            call.cancel()
    except grpc.RpcError:
        half.why = " ".join(f"{call.code().name}: {call.details()}".split())
    finally:
        half.close()
        channel.close()


Carry = Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[bytes]]


def carrying(enter: Callable[[Stream], None]) -> Carry:
    """Return what handles the calls of METHOD; each becomes a stream that enters.

    `enter` is a gate's; it is called on a thread of the server, which the call keeps
    until it ends.
    """

    def carry(
        messages: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        stream, half = _pair(f"grpc:{context.peer()}", names_shown(context))
        if not context.add_callback(half.cut):
            half.cut()  # It ended before it began.
        threading.Thread(
            target=_feed, args=(messages, half), name="tunnel", daemon=True
        ).start()
        enter(stream)
        try:
            yield from half
        finally:
            half.close()

    return carry


def _feed(messages: Iterator[bytes], half: _Half) -> None:
    """Hand to the node what a client sends, until the call ends."""
    try:
        half.fill(messages)
    except grpc.RpcError:
        half.why = "the call was given up"
    except Exception as error:
        # gRPC's servers raise a bare Exception at a call that the client cut off.
        half.why = str(error) or "the call was cut off"
    finally:
        half.cut()
