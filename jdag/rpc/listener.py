"""Data connections: a listener that lets peers in by tickets, and dialling one.

The dialling end sends a hello: magic, protocol version, single-use ticket, and the
highest number that its link has received. The listener answers with its version, a
verdict and its own such number; then frames begin.

Inputs: connections at one address (TCP, TLS or a Unix socket).
Outputs: `take(admission, stream, received)` for each one whose ticket is valid. Each
    refusal is one line of the log.
Invariants: a stream that `take` gets has exchanged hello and answer, and nothing else
    was read from it; every other connection is closed. A hello takes at most HELLO_S.
    At most VISITORS_MAX are under way. A newcomer beyond takes the place of the oldest
    without a certificate, of the host that has most; so a flood keeps a peer out only
    if it comes from that peer's own host, and no longer than one hello takes to arrive.
"""

import asyncio
import logging
import select
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from jdag.errors import JdagError, JoinError, reason
from jdag.rpc.addresses import (
    Address,
    connect,
    hold_to_loopback,
    hold_to_own_user,
    listen,
    parse,
)
from jdag.rpc.background import loop, wait_for
from jdag.rpc.handshake import PROTOCOL, protocols_differ
from jdag.rpc.peer_identity import Names
from jdag.rpc.streams import SocketStream, Stream
from jdag.rpc.tickets import TICKET_BYTES
from jdag.rpc.tls import Tls, TlsStream

HELLO_S = 5.0
VISITORS_MAX = 64
# How long a listener waits when the system gives no more connections (EMFILE).
_REST_S = 0.2

_MAGIC = b"jdag"
_HELLO = struct.Struct(f"<4sB3x{TICKET_BYTES}sQ")
_ANSWER = struct.Struct("<4sBB2xQ")
_WELCOME, _UNKNOWN, _OTHER_PROTOCOL, _GIVEN_UP, _REFUSED = range(5)

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Admission:
    """The holder of a ticket, and the highest number that the link to it received."""

    worker: str
    incarnation: int
    received: int


Admit = Callable[[bytes, Names], Admission | None]
Take = Callable[[Admission, Stream, int], None]


class Listener:
    """Lets peers in at one address until it is closed; see the module.

    Args:
        address: `unix:@`, `tcp:127.0.0.1:0` or the like; `self.address` is the one that
            is listened at.
        tls: for TCP; without it only loopback may be listened at.
        admit: called with the ticket and the names in the peer's certificate. Redeems
            the ticket; returns None for an invalid one. A JoinError is a refusal.
        take: called with the stream of each peer that was let in, and the highest
            number that the peer has received. Both are called on threads.

    Raises:
        JdagError: it cannot listen there.
    """

    def __init__(
        self, address: str, *, tls: Tls | None = None, admit: Admit, take: Take
    ) -> None:
        self._tls = tls
        self._admit = admit
        self._take = take
        self._visitors: dict[asyncio.Task[None], Stream] = {}
        self._entered: dict[asyncio.Task[None], Stream] = {}
        self._closing = False
        where = parse(address)
        if tls is None:
            hold_to_loopback(where, "is listened at")
        self._listener, where = listen(where)
        self.address = str(where)
        loop().call_soon_threadsafe(self._watch)

    def close(self) -> None:
        """Stop listening and close visitors; streams that were taken stay open."""
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
            # It stays readable while nothing can be accepted: look away meanwhile.
            _log.warning("%s accepts nobody now: %s", self.address, reason(error))
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
            said = "%s has no room for %s: others have shown a certificate"
            _log.warning(said, self.address, stream.peer)
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
        """Whether there is room for one more, if need be in place of another one."""
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
                self._refused(
                    self._visitors.pop(visitor),
                    "it has said nothing yet, and others come",
                )
                visitor.cancel()
                return True
        return False

    async def _visit(self, stream: Stream) -> None:
        try:
            async with asyncio.timeout(HELLO_S):
                hello = await _read(stream, _HELLO.size)
                admission = await self._admission(hello, stream)
                answer = _ANSWER.pack(_MAGIC, PROTOCOL, _WELCOME, admission.received)
                await _write(stream, answer)
        except TimeoutError:
            self._refused(stream, f"no whole hello came within {HELLO_S:g} s")
        except OSError as error:
            self._refused(stream, str(error))
        except Exception as error:  # A mistake of ours must not end the listener.
            _log.exception("%s met an error of its own", self.address)
            self._refused(stream, str(error))
        else:
            visitor = asyncio.current_task()
            assert visitor is not None
            self._entered[visitor] = self._visitors.pop(visitor)  # It stays open.
            received = _HELLO.unpack(hello)[-1]
            try:
                await asyncio.to_thread(self._take, admission, stream, received)
            except Exception:
                _log.exception("%s could not hand over a stream", self.address)
                stream.close()

    async def _admission(self, hello: bytearray, stream: Stream) -> Admission:
        """Return the admission of a hello; ConnectionError says why there is none."""
        magic, protocol, ticket, _ = _HELLO.unpack(hello)
        if magic != _MAGIC:
            raise ConnectionError("it does not speak jdag's protocol")
        if protocol != PROTOCOL:
            _answer(stream, _OTHER_PROTOCOL)
            raise ConnectionError(protocols_differ(protocol, "it", "this worker"))
        try:
            admit, names = self._admit, stream.certificate
            admission = await asyncio.to_thread(admit, ticket, names)
        except JoinError as error:
            _answer(stream, _GIVEN_UP if error.given_up else _REFUSED)
            raise ConnectionError(str(error)) from None
        if admission is None:
            _answer(stream, _UNKNOWN)
            raise ConnectionError("its ticket is unknown, used or too old")
        return admission

    def _refused(self, stream: Stream, why: str) -> None:
        _log.warning("%s refused %s: %s", self.address, stream.peer, why)


def _answer(stream: Stream, verdict: int) -> None:
    """Tell a refused peer why, if its socket takes it at once."""
    try:
        stream.send([memoryview(_ANSWER.pack(_MAGIC, PROTOCOL, verdict, 0))])
    except BlockingIOError:
        return


def _name_of(connected: socket.socket) -> str:
    if connected.family == socket.AF_UNIX:
        return "a process of this host"
    host, port, *_ = connected.getpeername()
    return str(Address(host, port, "tcp"))


def dial(
    address: str,
    ticket: bytes,
    received: int,
    *,
    tls: Tls | None = None,
    name: str | None = None,
    timeout_s: float,
) -> tuple[Stream, int]:
    """Connect to the listener of another node; from any thread that may block.

    Args:
        address: of the listener.
        ticket: a ticket that the other node issued for this one.
        received: the highest number that this side's link has received; 0 for none.
        tls: for mutual TLS; without it only loopback may be dialled.
        name: whom the certificate there is to be for; the address's host if None.
        timeout_s: how long this may take.

    Returns:
        The stream, and the highest number that the other side has received.

    Raises:
        JdagError: names the address and why it cannot be reached.
        JoinError: it speaks another protocol, or has given this worker up.
    """
    assert len(ticket) == TICKET_BYTES, len(ticket)
    where = parse(address)
    if tls is None:
        hold_to_loopback(where, "is dialled")
    hello = _HELLO.pack(_MAGIC, PROTOCOL, ticket, received)
    due_ns = time.monotonic_ns() + int(timeout_s * 1e9)
    try:
        stream = _connected(where, tls, name or where.host, timeout_s)
        return wait_for(_greet(stream, hello, where, due_ns))
    except TimeoutError as error:
        said = f"cannot reach {address}: no answer within {timeout_s:g} s"
        raise JdagError(said) from error
    except OSError as error:
        raise JdagError(f"cannot reach {address}: {reason(error)}") from error


def _connected(where: Address, tls: Tls | None, name: str, timeout_s: float) -> Stream:
    connected = connect(where, max(0.001, timeout_s))
    try:
        hold_to_own_user(connected)
        plain = SocketStream(connected, str(where))
        return plain if tls is None or plain.local else tls.dial(plain, name)
    except BaseException:
        connected.close()
        raise


async def _greet(
    stream: Stream, hello: bytes, where: Address, due_ns: int
) -> tuple[Stream, int]:
    try:
        async with asyncio.timeout((due_ns - time.monotonic_ns()) / 1e9):
            if isinstance(stream, TlsStream):
                await _when(stream, stream.shake_hands, select.POLLIN)
            await _write(stream, hello)
            answer = await _read(stream, _ANSWER.size)
        return stream, _accepted(answer, where)
    except BaseException:
        stream.close()
        raise


def _accepted(answer: bytearray, where: Address) -> int:
    """Return what the other side has received; raise what its answer says instead."""
    magic, protocol, verdict, received = _ANSWER.unpack(answer)
    if magic != _MAGIC:
        raise ConnectionError("what listens there does not speak jdag's protocol")
    if protocol != PROTOCOL:
        there = f"the worker at {where}"
        raise JoinError(protocols_differ(protocol, there, "this process"))
    if verdict == _GIVEN_UP:
        raise JoinError("it has given this worker up", given_up=True)
    if verdict == _REFUSED:
        raise ConnectionError("it refused this worker, or its certificate")
    if verdict != _WELCOME:
        raise ConnectionError("it refused the ticket: unknown, used or too old")
    return int(received)


async def _read(stream: Stream, count: int) -> bytearray:
    data, came = bytearray(count), 0
    while came < count:
        rest = memoryview(data)[came:]
        came += await _when(stream, partial(stream.recv_into, rest), select.POLLIN)
    return data


async def _write(stream: Stream, data: bytes) -> None:
    left = memoryview(data)
    while left:
        send = partial(stream.send, [left])
        left = left[await _when(stream, send, select.POLLOUT) :]
    await _when(stream, stream.flush, select.POLLOUT)


async def _when(stream: Stream, do: Callable[[], Result], event: int) -> Result:
    """Do it as soon as it does not block: when the stream can be read, or written."""
    while True:
        try:
            return do()
        except BlockingIOError:
            writes = event == select.POLLOUT or stream.wants_write()
            await _ready(stream.fileno(), writes)


async def _ready(descriptor: int, writes: bool) -> None:
    ready, here = asyncio.Event(), loop()
    watch, forget = here.add_reader, here.remove_reader
    if writes:
        watch, forget = here.add_writer, here.remove_writer
    watch(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        forget(descriptor)
