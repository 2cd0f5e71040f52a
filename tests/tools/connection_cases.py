"""Two ends of a connection on one loop, and the events that they gave."""

import random
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jdag.compute.buffers import Buffers
from jdag.engine.protocol import ContextId, Message, Primal, Ship, landing
from jdag.processes.net import connection, loop, receiving
from jdag.processes.net import large_values as bulk
from jdag.processes.net.connection import Connection
from jdag.processes.net.large_values import Delivery
from jdag.processes.net.loop import Loop, clock_ns
from jdag.processes.net.receiving import (
    Broken,
    Control,
    Exhausted,
    Failed,
    PeerEvent,
    ReceivedAcknowledgement,
    ReceivedDefinition,
)
from jdag.processes.net.streams import SocketStream
from jdag.processes.net.tls import Tls, TlsStream, load_tls
from jdag.wire.messages import Codec
from tests.tools.certificates import Issuer

PATIENCE_NS = 60_000_000_000
ONE, TWO = ContextId(0, 1, 0), ContextId(0, 2, 0)


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_ns = 0
        for module in (bulk, connection, loop, receiving):
            monkeypatch.setattr(module, "clock_ns", lambda: clock_ns() + self.ahead_ns)


class Side:
    def __init__(self, loop: Loop, name: str, other: str, deadline_s: float) -> None:
        self.loop = loop
        self.messages: list[tuple[Message, list[Any]]] = []
        # Messages as they are handled, and between them what was acknowledged.
        self.log: list[Message | int] = []
        self.acknowledged = 0
        self.react: Callable[[Message], None] = lambda message: None
        self.asides: list[Any] = []
        self.functions: list[tuple[bytes, bytes]] = []
        self.breaks: list[str] = []
        self.ends: list[str] = []
        self.socket: socket.socket | None = None
        self.connection = Connection(
            other,
            0,
            loop=loop,
            codec=Codec(("a", "b")),
            buffers=Buffers(),
            deadline_ns=round(deadline_s * 1e9),
            value_bytes_max=1 << 30,
            handle=self.handle,
        )
        self.name = name

    def stop(self) -> None:
        assert self.socket is not None
        self.loop.unregister(self.socket.fileno())
        self.loop.register(self.socket.fileno(), lambda mask: None)
        self.connection._timer.cancel()

    def handle(self, connection: Connection, events: Sequence[PeerEvent]) -> None:
        assert connection is self.connection
        for event in events:
            if connection.lost:
                return
            match event:
                case Delivery():
                    assert len(event.values) == len(landing(event.message))
                    connection.order.handing(event)
                    self.messages.append((event.message, list(event.values)))
                    self.log.append(event.message)
                    self.react(event.message)
                case ReceivedAcknowledgement(message, _):
                    self.acknowledged += message.count
                    self.log.append(message.count)
                case ReceivedDefinition(digest, data):
                    self.functions.append((digest, data))
                case Control({"joined": str(name), "incarnation": int(number)}):
                    connection._codec.joined(name, number)
                case Control(what):
                    self.asides.append(what)
                case Broken(why):
                    self.breaks.append(why)
                case Failed(why) | Exhausted(why):
                    self.ends.append(why)
                    connection.lose({"bye": "it is over"})


class Sides:
    def __init__(
        self,
        deadline_s: float = 60.0,
        tls: Tls | None = None,
        stream: Callable[[SocketStream], Any] = lambda plain: plain,
    ) -> None:
        self.tls = tls
        self.stream = stream
        self.loop = Loop(self.flush)
        self.a = Side(self.loop, "a", "b", deadline_s)
        self.b = Side(self.loop, "b", "a", deadline_s)

    def flush(self) -> None:
        unflushed = self.loop.unflushed
        for _ in range(len(unflushed)):
            unflushed.popleft().flush()

    def connect(self) -> None:
        for side in (self.a, self.b):
            side.connection.drop_stream()
        received = (
            self.a.connection.numbers.received,
            self.b.connection.numbers.received,
        )
        ends = socket.socketpair()
        plain = [SocketStream(end, "the other end") for end in ends]
        streams = [self.stream(end) for end in plain]
        if self.tls is not None:
            streams = secured(self.tls, *plain)
        for at, side in enumerate((self.a, self.b)):
            side.socket = ends[at]
            side.connection.adopt(streams[at], received[1 - at])

    def run(self, done: Any) -> None:
        due_ns = clock_ns() + PATIENCE_NS
        self.loop.drive(lambda: done() or clock_ns() > due_ns)
        assert done(), (self.a.ends, self.b.ends, len(self.b.messages))

    def turn(self) -> None:
        left = [True]
        self.loop.post(left.clear)
        self.loop.drive(lambda: not left)

    def close(self) -> None:
        with self.loop:
            self.a.connection.lose({"bye": "it is over"})
            self.b.connection.lose({"bye": "it is over"})
            self.loop.close()


def secured(tls: Tls, near: SocketStream, far: SocketStream) -> list[TlsStream]:
    ends = [tls.dial(near, "a"), tls.serve(far)]
    for end in ends * 3:
        with suppress(BlockingIOError):
            end.shake_hands()
    return ends


class Hoarder:
    """A stream that keeps bytes to itself both ways, as one through TLS may."""

    local, buffered = False, True

    def __init__(self, plain: SocketStream) -> None:
        self.plain = plain
        self.peer = plain.peer
        self.fileno, self.close = plain.fileno, plain.close
        self.came = bytearray()
        self.taken = b""

    def recv_into(self, view: memoryview) -> int:
        room = memoryview(bytearray(1 << 16))
        with suppress(BlockingIOError):
            while True:
                self.came += room[: self.plain.recv_into(room)]
        if not self.came:
            raise BlockingIOError
        count = min(len(view), len(self.came), 9)
        view[:count] = self.came[:count]
        del self.came[:count]
        return count

    def pending(self) -> bool:
        return bool(self.came)

    def send(self, views: Sequence[memoryview]) -> int:
        self.flush()
        self.taken = b"".join(views)
        return len(self.taken)

    def wants_write(self) -> bool:
        return bool(self.taken)

    def flush(self) -> None:
        if self.taken:
            front = memoryview(self.taken)[:1000]
            self.taken = self.taken[self.plain.send([front]) :]
        if self.taken:
            raise BlockingIOError

    send_segment = take_segment = None


@pytest.fixture
def make() -> Iterator[Callable[..., Sides]]:
    made: list[Sides] = []

    def make_one(*, connects: bool = True, **options: Any) -> Sides:
        made.append(Sides(**options))
        if connects:
            made[-1].connect()
        return made[-1]

    yield make_one
    for one in made:
        one.close()


@pytest.fixture
def sides(make: Callable[..., Sides]) -> Sides:
    return make()


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return load_tls(*Issuer(tmp_path_factory.mktemp("certificates"), "ca").issue("a"))


@pytest.fixture(params=["plain", "tls"])
def either(request: Any, make: Callable[..., Sides], tls: Tls) -> Sides:
    return make(tls=tls if request.param == "tls" else None)


def primal(number: int, context: ContextId = ONE, slots: int = 1) -> Primal:
    return Primal(context, (number,), "a", (None,) * slots)


def ship(number: int, context: ContextId = ONE) -> Ship:
    return Ship(context, (number,), "b", (), (), "f", "")


def random_values(rng: random.Random, slots: int) -> list[Any]:
    sizes = [rng.choice((0, 1, 7, 1_000, 60_000, 200_000)) for _ in range(slots)]
    seeds = np.random.default_rng(rng.getrandbits(32))
    return [jnp.asarray(seeds.standard_normal(size, np.float32)) for size in sizes]


def assert_same(came: Sequence[Any], sent: Sequence[Any]) -> None:
    assert len(came) == len(sent)
    for one, other in zip(came, sent, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
