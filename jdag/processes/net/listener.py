"""Data connections: a listener that lets in workers of its session, and dialling one.

A peer that proves its identity (`jdag.processes.net.greeting`) is accepted; each
refusal is one line of the log.
Invariants: a stream that `take` gets has exchanged greetings, and nothing else was read
    from it; every other connection is closed. A hello takes at most HELLO_S. At most
    VISITORS_MAX are under way. A newcomer beyond takes the place of the oldest without
    a certificate, of the host that has most; so a flood keeps a peer out only if it
    comes from that peer's own host, and no longer than one hello takes to arrive.
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
# How long a listener waits when the system gives no more connections (EMFILE).
_REST_S = 0.2

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


Pairs = Callable[[], Iterable[ConnectionPair]]
Admit = Callable[[Worker, Names], int]
Take = Callable[[Worker, Stream, int], None]


class Listener:
    """Lets peers in at one address until it is closed; see the module.

    Args:
        address: `unix:@`, `tcp:127.0.0.1:0` or the like; `self.address` is the one that
            is listened at.
        tls: for TCP; without it only loopback may be listened at.
        pairs: returns the pairs of which this worker is the listener; does not block.
        admit: called with a worker that has proved itself, and the names in its
            certificate; returns how many of its frames have come. A JoinError is a
            refusal.
        take: called with each worker that was let in, its stream, and how many frames
            it has received. Both are called on threads.

    Raises:
        JdagError: it cannot listen there.
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
                worker, received = await self._admission(stream)
        except TimeoutError:
            self._refused(stream, f"no whole hello came within {HELLO_S:g} s")
        except (OSError, JoinError) as error:
            self._refused(stream, str(error))
        except Exception as error:  # A mistake of ours must not end the listener.
            _log.exception("%s met an error of its own", self.address)
            self._refused(stream, str(error))
        else:
            visitor = asyncio.current_task()
            assert visitor is not None
            self._entered[visitor] = self._visitors.pop(visitor)  # It stays open.
            try:
                await asyncio.to_thread(self._take, worker, stream, received)
            except Exception:
                _log.exception("%s could not hand over a stream", self.address)
                stream.close()

    async def _admission(self, stream: Stream) -> tuple[Worker, int]:
        """Exchange greetings; an error says why the peer is not let in."""
        if isinstance(stream, TlsStream):
            await _when(stream, stream.shake_hands, select.POLLIN)
        ours = opening()
        await _write(stream, ours)
        hello = await _read(stream, HELLO_BYTES)
        theirs = opened(hello, "it", "this worker")
        pair = next((one for one in self._pairs() if is_by(one, ours, hello)), None)
        try:
            if pair is None:
                raise JoinError("it does not prove that it is a worker of this session")
            admit, names = self._admit, stream.certificate
            received = await asyncio.to_thread(admit, pair.dialler, names)
        except JoinError as error:
            verdict = GIVEN_UP if error.given_up else UNKNOWN
            with suppress(BlockingIOError):  # Said if its socket takes it at once.
                stream.send([memoryview(hello_answer(pair, ours, hello, verdict))])
            raise
        await _write(stream, hello_answer(pair, ours, hello, WELCOME, received))
        return pair.dialler, theirs

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
    """Connect to the listener of another node; from any thread that may block.

    Args:
        address: of the listener.
        pair: this worker as the dialler, and the peer as the listener.
        received: how many frames of the other side have come.
        tls: without it only loopback may be dialled.
        name: whom the certificate there is to be for; the address's host if None.
        timeout_s: how long this may take.

    Returns:
        The stream, and the number of frames that the other side has received.

    Raises:
        JdagError: names the address and why it cannot be reached.
        JoinError: nothing listens there; or the peer has another version of the
            protocol, does not know this worker, or has given it up.
    """
    where = parse(address)
    if tls is None:
        hold_to_loopback(where, "is dialled")
    due_ns = time.monotonic_ns() + int(timeout_s * 1e9)
    there = f"worker {pair.listener!r} at {address}"
    try:
        stream = _connected(where, tls, name or where.host, timeout_s)
        return wait_for(_greet(stream, pair, received, due_ns))
    except TimeoutError as error:
        said = f"cannot reach {there}: no answer within {timeout_s:g} s"
        raise JdagError(said) from error
    except ConnectionRefusedError as error:
        said = f"cannot reach {there}: {reason(error)}"
        raise JoinError(said, reached=False, absent=True) from error
    except OSError as error:
        raise JdagError(f"cannot reach {there}: {reason(error)}") from error


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
            said = opening(received)
            await _write(stream, said)
            theirs = await _read(stream, OPENING.size)
            opened(theirs, f"worker {pair.listener!r}", "this process")
            proof = pair.proof("dialler", theirs, said)
            await _write(stream, proof)
            reply = await _read(stream, ANSWER_BYTES)
        return stream, answered(pair, theirs, said + proof, reply)
    except BaseException:
        stream.close()
        raise


async def _read(stream: Stream, count: int) -> bytes:
    data, came = bytearray(count), 0
    while came < count:
        rest = memoryview(data)[came:]
        came += await _when(stream, partial(stream.recv_into, rest), select.POLLIN)
    return bytes(data)


async def _write(stream: Stream, data: bytes) -> None:
    left = memoryview(data)
    while left:
        send = partial(stream.send, [left])
        left = left[await _when(stream, send, select.POLLOUT) :]
    await _when(stream, stream.flush, select.POLLOUT)


async def _when(stream: Stream, do: Callable[[], _Result], event: int) -> _Result:
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
