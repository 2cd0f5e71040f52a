"""Data connections: a listener that admits the workers of its session, and `dial`.

A peer that proves its identity (`jdag.processes.net.greeting`) is admitted. Every other
connection is closed, with one line in the log.

Invariants: when a stream is passed to `take`, both ends have exchanged greetings and no
frame was read. A greeting takes at most HELLO_S. At most VISITORS_MAX connections
exchange greetings at a time. Beyond that, a new connection replaces an older one: the
oldest connection without a certificate, from the host with the most such connections. A
flood of connections can therefore delay only peers on its own host, and only for the
time of one greeting.
"""

import asyncio
import logging
import select
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from jdag.engine.protocol import Worker
from jdag.errors import JdagError, JoinError, reason
from jdag.processes.net.addresses import (
    Address,
    hold_to_loopback,
    hold_to_own_user,
    listen,
    open_socket,
    parse,
)
from jdag.processes.net.background import loop, wait_for
from jdag.processes.net.greeting import (
    ANSWER_BYTES,
    GIVEN_UP,
    HELLO_BYTES,
    OPENING,
    UNKNOWN,
    WELCOME,
    ConnectionPair,
    answered,
    hello_answer,
    is_by,
    opened,
    opening,
)
from jdag.processes.net.peer_identity import Names
from jdag.processes.net.streams import SocketStream, Stream
from jdag.processes.net.tls import Tls, TlsStream

HELLO_S = 5.0
VISITORS_MAX = 64
# Pause of a listener after the system refused to accept a connection (EMFILE).
_REST_S = 0.2

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

Pairs = Callable[[], Iterable[ConnectionPair]]
Admit = Callable[[Worker, Names], int]
Take = Callable[[Worker, Stream, int], None]


class Listener:
    """Admits peers at one address until it is closed.

    The attribute `address` is the address that is actually used. Without `tls` it must
    be a loopback address.

    Args:
        pairs: returns the pairs of which this worker is the listener; does not block.
        admit: called with an authenticated worker and the names in its certificate;
            returns how many of its frames were received, or raises JoinError to refuse.
        take: called with each admitted worker, its stream, and how many frames it has
            received. Both `admit` and `take` are called on threads.
    """

    def __init__(
        self,
        address: str,
        *,
        tls: Tls | None = None,
        pairs: Pairs,
        admit: Admit,
        take: Take,
    ) -> None:
        self._tls = tls
        self._pairs = pairs
        self._admit = admit
        self._take = take
        self._visitors: dict[asyncio.Task[None], Stream] = {}
        self._entered: dict[asyncio.Task[None], Stream] = {}
        self._closing = False
        where = parse(address)
        if tls is None:
            hold_to_loopback(where, "cannot listen at")
        self._listener, where = listen(where)
        self.address = str(where)
        loop().call_soon_threadsafe(self._watch)

    def close(self) -> None:
        """Stop listening, and close connections that are not admitted yet."""
        wait_for(self._close())

    async def _close(self) -> None:
        if not self._closing:
            loop().remove_reader(self._listener)
            self._listener.close()
        self._closing = True
        for visitor in self._visitors:
            visitor.cancel()
        await asyncio.gather(*self._visitors, *self._entered, return_exceptions=True)

    def _watch(self) -> None:
        if not self._closing:
            loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            connected, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # Pause, because the socket stays readable while no accept succeeds.
            _log.warning(
                "%s cannot accept connections now: %s", self.address, reason(error)
            )
            loop().remove_reader(self._listener)
            loop().call_later(_REST_S, self._watch)
            return
        try:
            hold_to_own_user(connected)
            stream = SocketStream(connected, _name_of(connected))
            if self._tls is not None and not stream.local:
                stream = self._tls.serve(stream)
        except OSError as error:
            _log.warning("%s refused a connection: %s", self.address, error)
            connected.close()
        else:
            self._welcome(stream)

    def _welcome(self, stream: Stream) -> None:
        if self._closing or not self._has_room():
            text = "%s refused %s: too many connections with certificates are pending"
            _log.warning(text, self.address, stream.peer)
            stream.close()
            return
        visitor = loop().create_task(self._visit(stream))
        self._visitors[visitor] = stream
        visitor.add_done_callback(partial(self._leave, stream))

    def _leave(self, stream: Stream, visitor: asyncio.Task[None]) -> None:
        self._visitors.pop(visitor, None)
        if self._entered.pop(visitor, None) is None:
            stream.close()

    def _has_room(self) -> bool:
        """Whether a connection may be added. May close another one to make room."""
        if len(self._visitors) < VISITORS_MAX:
            return True
        anonymous = [
            (visitor, stream.peer.rpartition(":")[0])
            for visitor, stream in self._visitors.items()
            if not stream.certificate
        ]
        crowd = Counter([host for _, host in anonymous]).most_common(1)
        for visitor, host in anonymous:
            if host == crowd[0][0]:
                why = "it has not completed its greeting, and other connections wait"
                self._refused(self._visitors.pop(visitor), why)
                visitor.cancel()
                return True
        return False

    async def _visit(self, stream: Stream) -> None:
        try:
            async with asyncio.timeout(HELLO_S):
                worker, received = await self._admission(stream)
        except TimeoutError:
            self._refused(stream, f"it sent no complete greeting within {HELLO_S:g} s")
        except (OSError, JoinError) as error:
            self._refused(stream, str(error))
        except Exception as error:  # A bug of jdag must not end the listener.
            _log.exception("%s: internal error", self.address)
            self._refused(stream, str(error))
        else:
            visitor = asyncio.current_task()
            assert visitor is not None
            self._entered[visitor] = self._visitors.pop(visitor)  # Keep it open.
            try:
                await asyncio.to_thread(self._take, worker, stream, received)
            except Exception:
                _log.exception("%s: cannot use an admitted stream", self.address)
                stream.close()

    async def _admission(self, stream: Stream) -> tuple[Worker, int]:
        if isinstance(stream, TlsStream):
            await _when(stream, stream.shake_hands, select.POLLIN)
        ours = opening()
        await _write(stream, ours)
        hello = await _read(stream, HELLO_BYTES)
        peer_received = opened(hello, "it", "this worker")
        pairs = self._pairs()
        pair = next((pair for pair in pairs if is_by(pair, ours, hello)), None)
        try:
            if pair is None:
                raise JoinError("it did not prove that it is a worker of this session")
            admit, names = self._admit, stream.certificate
            received = await asyncio.to_thread(admit, pair.dialler, names)
        except JoinError as error:
            verdict = GIVEN_UP if error.given_up else UNKNOWN
            with suppress(BlockingIOError):  # Do not wait until the answer is sent.
                stream.send([memoryview(hello_answer(pair, ours, hello, verdict))])
            raise
        await _write(stream, hello_answer(pair, ours, hello, WELCOME, received))
        return pair.dialler, peer_received

    def _refused(self, stream: Stream, why: str) -> None:
        _log.warning("%s refused %s: %s", self.address, stream.peer, why)


def _name_of(connected: socket.socket) -> str:
    if connected.family == socket.AF_UNIX:
        return "a process of this host"
    host, port, *_ = connected.getpeername()
    return str(Address(host, port, "tcp"))


def dial(
    address: str,
    pair: ConnectionPair,
    received: int,
    *,
    tls: Tls | None = None,
    name: str | None = None,
    timeout_s: float,
) -> tuple[Stream, int]:
    """Connect to the listener of another node; block for at most `timeout_s`.

    This worker is the dialler of `pair`. `received` is the number of frames received
    from the peer. `name` is the expected name in the peer's certificate; None means the
    host of the address.

    Returns:
        The stream, and the number of frames that the peer has received.

    Raises:
        JdagError: the address cannot be reached; the message contains the reason.
        JoinError: nothing listens at the address; or the peer has another version of
            the protocol, does not know this worker, or considers it lost.
    """
    where = parse(address)
    if tls is None:
        hold_to_loopback(where, "cannot dial")
    due_ns = time.monotonic_ns() + int(timeout_s * 1e9)
    peer = f"worker {pair.listener!r} at {address}"
    try:
        stream = _connected(where, tls, name or where.host, timeout_s)
        return wait_for(_greet(stream, pair, received, due_ns))
    except TimeoutError as error:
        text = f"cannot reach {peer}: no answer within {timeout_s:g} s"
        raise JdagError(text) from error
    except ConnectionRefusedError as error:
        text = f"cannot reach {peer}: {reason(error)}"
        raise JoinError(text, reached=False, absent=True) from error
    except OSError as error:
        raise JdagError(f"cannot reach {peer}: {reason(error)}") from error


def _connected(where: Address, tls: Tls | None, name: str, timeout_s: float) -> Stream:
    connected = open_socket(where, max(0.001, timeout_s))
    try:
        hold_to_own_user(connected)
        plain = SocketStream(connected, str(where))
        return plain if tls is None or plain.local else tls.dial(plain, name)
    except BaseException:
        connected.close()
        raise


async def _greet(
    stream: Stream, pair: ConnectionPair, received: int, due_ns: int
) -> tuple[Stream, int]:
    try:
        async with asyncio.timeout((due_ns - time.monotonic_ns()) / 1e9):
            if isinstance(stream, TlsStream):
                await _when(stream, stream.shake_hands, select.POLLIN)
            record = opening(received)
            await _write(stream, record)
            peer_record = await _read(stream, OPENING.size)
            opened(peer_record, f"worker {pair.listener!r}", "this process")
            proof = pair.proof("dialler", peer_record, record)
            await _write(stream, proof)
            reply = await _read(stream, ANSWER_BYTES)
        return stream, answered(pair, peer_record, record + proof, reply)
    except BaseException:
        stream.close()
        raise


async def _read(stream: Stream, count: int) -> bytes:
    data, received = bytearray(count), 0
    while received < count:
        rest = memoryview(data)[received:]
        received += await _when(stream, partial(stream.recv_into, rest), select.POLLIN)
    return bytes(data)


async def _write(stream: Stream, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        send = partial(stream.send, [rest])
        rest = rest[await _when(stream, send, select.POLLOUT) :]
    await _when(stream, stream.flush, select.POLLOUT)


async def _when(stream: Stream, do: Callable[[], _Result], event: int) -> _Result:
    while True:
        try:
            return do()
        except BlockingIOError:
            writes = event == select.POLLOUT or stream.wants_write()
            await _ready(stream.fileno(), writes)


async def _ready(descriptor: int, writes: bool) -> None:
    ready, events = asyncio.Event(), loop()
    watch, forget = events.add_reader, events.remove_reader
    if writes:
        watch, forget = events.add_writer, events.remove_writer
    watch(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        forget(descriptor)
