"""Where other nodes come in, and how one goes to them: a hello before the first frame.

The dialer sends a hello: magic, version, one-time token, and up to which number its
link has received. The gate answers with a verdict and its own such number. Then frames
begin.

A gate does this on a thread of its own for all who come, so that neither a stranger nor
a slow peer takes a turn of the loop. A hello has a fixed size and 5 s; at most 64 are
under way, of one other host half of that. A newcomer beyond takes the place of one who
has shown no certificate: the oldest, of its own host, or of that which has most. Where
all have, it is refused. Each refusal is one line of the log.

Invariant: a stream handed to `take` has had its hello and its answer, and nothing else
was read from it; every other connection is closed.
"""

import logging
import select
import selectors
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from jdag.errors import JdagError, JoinError, reason
from jdag.rpc.addresses import (
    Address,
    connect,
    hold_to_loopback,
    hold_to_own_user,
    listen,
    parse,
)
from jdag.rpc.certified import Shown
from jdag.rpc.streams import SocketStream, Stream
from jdag.rpc.tls import Tls
from jdag.rpc.tokens import TOKEN_BYTES
from jdag.rpc.tunnel import open_tunnel

VERSION = 1
HELLO_S = 5.0
VISITORS_MAX, EACH_MAX = 64, 32
# How long a gate rests that the system gives no more connections (EMFILE).
_REST_S = 0.2

_MAGIC = b"jdag"
_HELLO = struct.Struct(f"<4sB3x{TOKEN_BYTES}sQ")
_ANSWER = struct.Struct("<4sBB2xQ")
_WELCOME, _UNKNOWN, _OTHER_VERSION, _GIVEN_UP, _REFUSED = range(5)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Admission:
    """Whom a token lets in, and up to which number this side's link has received."""

    worker: str
    incarnation: int
    received: int


Admit = Callable[[bytes, Shown], Admission | None]
Take = Callable[[Admission, Stream, int], None]


@dataclass
class _Visitor:
    """A connection whose hello, then whose answer, is under way."""

    stream: Stream
    due_ns: int
    hello: bytearray = field(default_factory=lambda: bytearray(_HELLO.size))
    came: int = 0
    answer: bytes = b""
    admission: Admission | None = None

    @property
    def host(self) -> str:
        """Where it comes from; nothing if that is this host, by a Unix socket."""
        return self.stream.peer.rpartition(":")[0]

    @property
    def events(self) -> int:
        writes = self.answer or self.stream.wants_write()
        return selectors.EVENT_WRITE if writes else selectors.EVENT_READ


class _Hello(NamedTuple):
    magic: bytes
    version: int
    token: bytes
    received: int


class Gate:
    """The listener of a node; see the module for what it does with whom.

    `address` is where to listen (`unix:@`, `tcp:127.0.0.1:0`), or `grpc:...`, which is
    not listened at: streams come from the control server by `enter`. `admit(token,
    shown)` says whom a token lets in, or None; it compares in constant time, honours a
    token once, and raises JoinError where its owner may not come in with a certificate
    of those names, or at all. `take(admission, stream, received)` gets the stream and
    the peer's number. Both are called on the gate's thread and do not block. `tls` is
    for TCP; without it only loopback is listened at.

    Raises JdagError if it cannot listen there.
    """

    def __init__(
        self, address: str, *, tls: Tls | None = None, admit: Admit, take: Take
    ) -> None:
        where = parse(address)
        self._listener: socket.socket | None = None
        self._tls = tls
        if where.kind != "grpc":
            if tls is None:
                hold_to_loopback(where, "is listened at")
            self._listener, where = listen(where)
        self.address = str(where)
        self._admit = admit
        self._take = take
        self._entering: deque[Stream] = deque()
        self._closing = False
        self._waker, self._alarm = socket.socketpair()
        for end in (self._waker, self._alarm):
            end.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._alarm, selectors.EVENT_READ)
        self._rests_until_ns = 0
        self._visitors: dict[int, _Visitor] = {}
        self._thread = threading.Thread(
            target=self._run, name=f"gate {self.address}", daemon=True
        )
        self._thread.start()

    def enter(self, stream: Stream) -> None:
        """Let a stream come in that another listener accepted; from any thread."""
        if self._closing or len(self._entering) >= VISITORS_MAX:
            _log.warning("%s has no room for %s", self.address, stream.peer)
            stream.close()
            return
        self._entering.append(stream)
        self._wake()

    def close(self) -> None:
        """Stop listening, close whoever has not come in; streams handed over stay."""
        if not self._closing:
            self._closing = True
            self._wake()
            self._thread.join()
            self._waker.close()  # Its thread may end before it is woken.

    def _wake(self) -> None:
        try:
            self._waker.send(b"\0")
        except BlockingIOError:
            return  # Wakes that nobody has read yet are as good.
        except OSError:
            if not self._closing:  # Else nobody has to be woken any more.
                raise

    def _run(self) -> None:
        if self._listener is not None:
            self._selector.register(self._listener, selectors.EVENT_READ)
        while not self._closing:
            for key, _ in self._selector.select(self._wait_s()):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._alarm:
                    self._alarm.recv(1 << 12)
                elif (visitor := self._visitors.get(key.fd)) is not None:
                    self._attend(visitor)
            while self._entering:
                self._welcome(self._entering.popleft())
            self._watch_the_clock()
        self._end()

    def _wait_s(self) -> float | None:
        dues = [visitor.due_ns for visitor in self._visitors.values()]
        if self._rests_until_ns:
            dues.append(self._rests_until_ns)
        return max(0, min(dues) - time.monotonic_ns()) / 1e9 if dues else None

    def _watch_the_clock(self) -> None:
        now_ns = time.monotonic_ns()
        for visitor in list(self._visitors.values()):
            if visitor.due_ns <= now_ns:
                self._refuse(visitor, f"no whole hello came within {HELLO_S:g} s")
        if self._rests_until_ns and self._rests_until_ns <= now_ns:
            assert self._listener is not None
            self._rests_until_ns = 0
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connected, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # It is readable for as long as nobody can be accepted: look away meanwhile.
            _log.warning("%s accepts nobody now: %s", self.address, reason(error))
            self._selector.unregister(self._listener)
            self._rests_until_ns = time.monotonic_ns() + int(_REST_S * 1e9)
            return
        try:
            hold_to_own_user(connected)
            stream = self._stream_of(connected)
        except OSError as error:
            _log.warning("%s refused a connection: %s", self.address, error)
            connected.close()
            return
        self._welcome(stream)

    def _stream_of(self, connected: socket.socket) -> Stream:
        plain = SocketStream(connected, _name_of(connected))
        if self._tls is None or plain.local:
            return plain
        return self._tls.serve(plain)

    def _welcome(self, stream: Stream) -> None:
        visitor = _Visitor(stream, time.monotonic_ns() + int(HELLO_S * 1e9))
        if not self._has_room(visitor.host):
            said = "%s has no room for %s: others have shown a certificate"
            _log.warning(said, self.address, stream.peer)
            stream.close()
            return
        self._visitors[stream.fileno()] = visitor
        self._selector.register(stream.fileno(), visitor.events)
        self._attend(visitor)

    def _has_room(self, host: str) -> bool:
        """Have room for one more of a host, if need be in place of another one."""
        visitors = list(self._visitors.values())
        shy = [one for one in visitors if not one.stream.shown]
        if host and sum([one.host == host for one in visitors]) >= EACH_MAX:
            shy = [one for one in shy if one.host == host]
        elif len(visitors) < VISITORS_MAX:
            return True
        else:
            most = Counter([one.host for one in shy]).most_common(1)
            shy = [one for one in shy if one.host == most[0][0]]
        for oldest in shy[:1]:
            self._refuse(oldest, "it has said nothing yet, and others come")
        return bool(shy)

    def _attend(self, visitor: _Visitor) -> None:
        try:
            while visitor.came < _HELLO.size:
                room = memoryview(visitor.hello)[visitor.came :]
                visitor.came += visitor.stream.recv_into(room)
            if visitor.admission is None:
                self._decide(visitor)
            while visitor.answer:
                count = visitor.stream.send([memoryview(visitor.answer)])
                visitor.answer = visitor.answer[count:]
        except BlockingIOError:
            self._selector.modify(visitor.stream.fileno(), visitor.events)
        except ConnectionError as error:
            self._refuse(visitor, str(error))
        except Exception as error:
            # A mistake of ours must not close the gate to everybody.
            _log.exception("%s met a mistake of its own", self.address)
            self._refuse(visitor, str(error))
        else:
            self._hand_over(visitor)

    def _decide(self, visitor: _Visitor) -> None:
        """Read a whole hello; ConnectionError says why it does not let anybody in."""
        hello = _Hello(*_HELLO.unpack(visitor.hello))
        if hello.magic != _MAGIC:
            raise ConnectionError("it does not speak jdag's protocol")
        if hello.version != VERSION:
            self._turn_away(visitor, _OTHER_VERSION)
            raise ConnectionError(f"it speaks version {hello.version}, not {VERSION}")
        try:
            visitor.admission = self._admit(hello.token, visitor.stream.shown)
        except JoinError as error:
            self._turn_away(visitor, _GIVEN_UP if error.given_up else _REFUSED)
            raise ConnectionError(str(error)) from None
        if visitor.admission is None:
            self._turn_away(visitor, _UNKNOWN)
            raise ConnectionError("its token is unknown, used or too old")
        received = visitor.admission.received
        visitor.answer = _ANSWER.pack(_MAGIC, VERSION, _WELCOME, received)

    def _turn_away(self, visitor: _Visitor, verdict: int) -> None:
        """Tell a dialer why, if its socket takes it at once: nobody waits for that."""
        said = _ANSWER.pack(_MAGIC, VERSION, verdict, 0)
        try:
            visitor.stream.send([memoryview(said)])
        except BlockingIOError:
            return

    def _hand_over(self, visitor: _Visitor) -> None:
        self._leave(visitor)
        assert visitor.admission is not None
        received = _Hello(*_HELLO.unpack(visitor.hello)).received
        try:
            self._take(visitor.admission, visitor.stream, received)
        except Exception:
            _log.exception("%s could not hand over a stream", self.address)
            visitor.stream.close()

    def _refuse(self, visitor: _Visitor, why: str) -> None:
        _log.warning("%s refused %s: %s", self.address, visitor.stream.peer, why)
        self._leave(visitor)
        visitor.stream.close()

    def _leave(self, visitor: _Visitor) -> None:
        descriptor = visitor.stream.fileno()
        self._selector.unregister(descriptor)
        del self._visitors[descriptor]

    def _end(self) -> None:
        for visitor in list(self._visitors.values()):
            self._leave(visitor)
            visitor.stream.close()
        while self._entering:
            self._entering.popleft().close()
        self._selector.close()
        self._alarm.close()
        if self._listener is not None:
            self._listener.close()


def _name_of(connected: socket.socket) -> str:
    if connected.family == socket.AF_UNIX:
        return "a process of this host"
    host, port, *_ = connected.getpeername()
    return str(Address("tcp", host, port))


def dial(
    address: str,
    token: bytes,
    received: int,
    *,
    tls: Tls | None = None,
    name: str | None = None,
    timeout_s: float,
) -> tuple[Stream, int]:
    """Connect to another node's gate; return the stream and up to what it received.

    `token` is what that node's control server gave for this (32 bytes, good once);
    `received` the highest number that this side's link has in order, 0 for a new link.
    With `tls`, what listens there shows a certificate for `name`, else for the
    address's host. Blocks for `timeout_s` at most. Raises JdagError, which names the
    address and why; JoinError if that node has given this one up.
    """
    assert len(token) == TOKEN_BYTES, len(token)
    due_ns = time.monotonic_ns() + int(timeout_s * 1e9)
    where = parse(address)
    if tls is None:
        hold_to_loopback(where, "is dialled")
    try:
        stream = _connected(where, tls, name or where.host, due_ns)
        try:
            hello = _HELLO.pack(_MAGIC, VERSION, token, received)
            return stream, _greet(stream, hello, due_ns)
        except BaseException:
            stream.close()
            raise
    except TimeoutError as error:
        said = f"cannot reach {address}: no answer within {timeout_s:g} s"
        raise JdagError(said) from error
    except OSError as error:
        raise JdagError(f"cannot reach {address}: {reason(error)}") from error


def _connected(where: Address, tls: Tls | None, name: str, due_ns: int) -> Stream:
    if where.kind == "grpc":
        return open_tunnel(where, tls, name)
    connected = connect(where, max(0.001, (due_ns - time.monotonic_ns()) / 1e9))
    try:
        hold_to_own_user(connected)
        plain = SocketStream(connected, str(where))
        if tls is None or plain.local:
            return plain
        return _trusted(plain, tls, name, due_ns)
    except BaseException:
        connected.close()
        raise


def _trusted(plain: SocketStream, tls: Tls, name: str, due_ns: int) -> Stream:
    """Put TLS on a connection, once both ends have seen each other's certificates."""
    stream = tls.dial(plain, name)
    while True:
        try:
            stream.shake_hands()
        except BlockingIOError:
            _await(stream, select.POLLIN, due_ns)
        else:
            return stream


def _greet(stream: Stream, hello: bytes, due_ns: int) -> int:
    """Send the hello, read the answer; TimeoutError once it is due."""
    left = memoryview(hello)
    while left:
        try:
            left = left[stream.send([left]) :]
        except BlockingIOError:
            _await(stream, select.POLLOUT, due_ns)
    answer = memoryview(bytearray(_ANSWER.size))
    came = 0
    while came < len(answer):
        try:
            came += stream.recv_into(answer[came:])
        except BlockingIOError:
            _await(stream, select.POLLIN, due_ns)
    magic, version, verdict, received = _ANSWER.unpack(answer)
    if magic != _MAGIC:
        raise ConnectionError("what listens there does not speak jdag's protocol")
    if verdict == _OTHER_VERSION or version != VERSION:
        raise ConnectionError(
            f"it speaks version {version} of the protocol, not {VERSION}"
        )
    if verdict == _GIVEN_UP:
        raise JoinError("it has given this worker up", given_up=True)
    if verdict == _REFUSED:
        raise ConnectionError("it refused this worker, or its certificate")
    if verdict != _WELCOME:
        raise ConnectionError("it refused the token: unknown, used or too old")
    return int(received)


def _await(stream: Stream, event: int, due_ns: int) -> None:
    left_ms = (due_ns - time.monotonic_ns()) / 1e6
    poller = select.poll()
    poller.register(stream.fileno(), select.POLLOUT if stream.wants_write() else event)
    if left_ms <= 0 or not poller.poll(left_ms):
        raise TimeoutError
