"""The carrier `grpc`: a data connection over a bidirectional gRPC stream.

Each end has a socket pair. The node uses one half as a stream; bytes from the other
half are sent in gRPC messages of up to MESSAGE_BYTES_MAX, and vice versa. Message
boundaries carry no meaning.

Invariants: the bytes in flight are bounded by both socket pairs, one message per pump
and the HTTP/2 window, which gRPC lets grow to 16 MiB. When a node closes its stream or
the call ends, earlier bytes are delivered and then both ends are closed. The gRPC error
of a broken call appears in the error of the stream.
"""

import asyncio
import socket
from collections.abc import AsyncIterable, Awaitable, Callable, Sequence
from typing import Any

import grpc.aio

from jdag.rpc.addresses import Address
from jdag.rpc.background import loop
from jdag.rpc.peer_identity import Names, names_of
from jdag.rpc.streams import SOCKET_BUFFER_BYTES, SocketStream, Stream
from jdag.rpc.tls import Tls

METHOD = "/jdag.Control/Carry"
MESSAGE_BYTES_MAX = 1 << 20
_TAKEN = ("jdag-carried", "1")  # Initial metadata of a call that becomes a stream.
_KEEPALIVE_MS = 10_000

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 2 * MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", 2 * MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", _KEEPALIVE_MS),
    # Bulk must not delay control requests to the same server.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    # Ignore a web proxy set in the environment.
    ("grpc.enable_http_proxy", 0),
)
# By default a server disconnects clients that send frequent keepalives.
SERVER_OPTIONS = (
    ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
)


class CarriedStream(SocketStream):
    """The node's end of a carried connection.

    `outside` is the other half of the socket pair. `broken_by` is the reason if the
    call failed.
    """

    def __init__(self, peer: str, certificate: Names) -> None:
        inside, self.outside = socket.socketpair()
        super().__init__(inside, peer)
        self.local = False
        self.broken_by = ""
        self.certificate = certificate
        self.outside.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self.outside.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)

    def recv_into(self, view: memoryview) -> int:
        """See SocketStream."""
        try:
            return super().recv_into(view)
        except ConnectionError as error:
            raise self._explained(error) from error

    def send(self, views: Sequence[memoryview]) -> int:
        """See SocketStream."""
        try:
            return super().send(views)
        except ConnectionError as error:
            raise self._explained(error) from error

    def _explained(self, error: ConnectionError) -> ConnectionError:
        if not self.broken_by:
            return error
        return ConnectionError(f"the stream to {self.peer} broke: {self.broken_by}")

    async def pump(
        self,
        messages: AsyncIterable[bytes],
        write: Callable[[bytes], Awaitable[Any]],
        done: Callable[[], Awaitable[Any]],
    ) -> None:
        """Move bytes in both directions until the messages end.

        Args:
            messages: received by the call.
            write: sends one message.
            done: called when the node has closed its end and everything is sent.
        """
        sending = asyncio.create_task(self._send(write, done))
        try:
            async for message in messages:
                await loop().sock_sendall(self.outside, message)
        except OSError as error:
            _forget(error)  # The node has closed its end, so the call ends.
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _send(
        self,
        write: Callable[[bytes], Awaitable[Any]],
        done: Callable[[], Awaitable[Any]],
    ) -> None:
        try:
            while came := await loop().sock_recv(self.outside, MESSAGE_BYTES_MAX):
                await write(came)
        except OSError as error:
            _forget(error)
        await done()


def _forget(error: OSError) -> None:
    """Let go of the frames that an error of asyncio's went through.

    It is in a cycle with its future, and gRPC keeps the connection of a closed channel
    while there is a call: a worker without work may not collect cycles for hours.
    """
    error.__traceback__ = None


def open_carried(
    address: Address, tls: Tls | None, name: str, timeout_s: float
) -> Stream:
    """Open a stream through a control server, without waiting for the connection.

    Args:
        address: of the control server.
        tls: for mutual TLS.
        name: the name expected in the server's certificate, with `tls`.
        timeout_s: how long a connection may take; then the stream breaks.
    """
    stream = CarriedStream(str(address), None)
    calling = _call(stream, address, tls, name, timeout_s)
    asyncio.run_coroutine_threadsafe(calling, loop())
    return stream


async def _call(
    stream: CarriedStream,
    address: Address,
    tls: Tls | None,
    name: str,
    timeout_s: float,
) -> None:
    target = str(address._replace(kind=""))
    # How long gRPC waits for a server that accepts a connection and says nothing, even
    # if the channel is closed: by default 20 s.
    connecting = ("grpc.min_reconnect_backoff_ms", round(timeout_s * 1000))
    options: tuple[Any, ...] = (*CHANNEL_OPTIONS, connecting)
    if tls is None:
        channel = grpc.aio.insecure_channel(target, options=options)
    else:
        options = (*options, ("grpc.ssl_target_name_override", name))
        credentials = tls.channel_credentials()
        channel = grpc.aio.secure_channel(target, credentials, options=options)
    async with channel:
        call = channel.stream_stream(METHOD)()
        messages = _heard(call, stream)
        try:
            # Writing to a refused call would replace the error with a less useful one.
            if _TAKEN in tuple(await call.initial_metadata()):
                await stream.pump(messages, call.write, call.done_writing)
            else:
                async for _ in messages:
                    break
        finally:
            call.cancel()
            # After a failed write gRPC takes the call for done and does not cancel it,
            # though it goes on in its core, and with it the connection.
            call._cython_call.cancel("the stream is closed")
            stream.outside.close()


async def _heard(call: Any, stream: CarriedStream) -> Any:
    """Yield the messages of a call; record why it failed.

    Iterating over the call would make a cycle of it and its iterator; see `_forget`.
    """
    try:
        while (message := await call.read()) is not grpc.aio.EOF:
            yield message
    except grpc.RpcError as error:
        text = f"{error.code().name}: {error.details()}"
        stream.broken_by = " ".join(text.split())


async def serve_carried(
    messages: AsyncIterable[bytes],
    context: grpc.aio.ServicerContext[Any, Any],
    enter: Callable[[Stream], None],
) -> None:
    """Serve a call of METHOD: pass it to a listener as a stream."""
    await context.send_initial_metadata((_TAKEN,))
    stream = CarriedStream(f"grpc:{context.peer()}", names_of(context.auth_context()))
    enter(stream)
    over = asyncio.Event()

    async def done() -> None:
        over.set()

    pumping = asyncio.create_task(stream.pump(messages, context.write, done))
    # Once it has ended, also if gRPC cancels this call meanwhile.
    pumping.add_done_callback(lambda _: stream.outside.close())
    waiting = asyncio.create_task(over.wait())
    try:
        await asyncio.wait((pumping, waiting), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        pumping.cancel()
        await asyncio.gather(pumping, return_exceptions=True)
