"""Two ends of a pair: what is said arrives once and in order, though streams break."""

import random
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jdag.compute.buffers import Buffers
from jdag.engine.vocabulary import (
    Acknowledge,
    ContextId,
    Message,
    Primal,
    Read,
    Reading,
    landing,
)
from jdag.rpc import outbox
from jdag.rpc.inbox import Inbox
from jdag.rpc.loop import Loop, clock_ns
from jdag.rpc.peer import Peer
from jdag.rpc.streams import SocketStream
from jdag.rpc.tls import Tls, TlsStream, load
from jdag.wire.messages import Codec
from tests.certificates import Issuer

PATIENCE_NS = 20_000_000_000
ONE, TWO = ContextId(0, 1, 0), ContextId(0, 2, 0)


class Side:
    """One end, and what its owner was told."""

    def __init__(self, loop: Loop, name: str, other: str, deadline_s: float) -> None:
        self.loop = loop
        self.messages: list[tuple[Message, list[Any]]] = []
        self.asides: list[Any] = []
        self.functions: list[tuple[bytes, bytes]] = []
        self.breaks: list[str] = []
        self.ends: list[str] = []
        self.socket: socket.socket | None = None
        self.peer = Peer(
            other,
            0,
            loop=loop,
            codec=Codec(("a", "b")),
            owner=self,
            buffers=Buffers(),
            deadline_ns=round(deadline_s * 1e9),
            value_bytes_max=1 << 30,
        )
        self.name = name

    def arrived(self, peer: Peer, message: Message, values: Sequence[Any]) -> None:
        assert peer is self.peer
        assert len(values) == len(landing(message))
        self.messages.append((message, list(values)))

    def defined(self, peer: Peer, digest: bytes, data: bytes) -> None:
        self.functions.append((digest, data))

    def told(self, peer: Peer, what: dict[str, Any]) -> None:
        self.asides.append(what)

    def speaks(self, peer: Peer) -> None:
        assert peer.flushing

    def broken(self, peer: Peer, why: str) -> None:
        self.breaks.append(why)

    def silent(self, peer: Peer, why: str) -> None:
        self.ends.append(why)
        peer.lose()


class Sides:
    """Both ends, on one loop."""

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
        self.a.peer.flush()
        self.b.peer.flush()

    def connect(self) -> None:
        for side in (self.a, self.b):
            side.peer.drop_stream()
        received = self.a.peer.link.received, self.b.peer.link.received
        ends = socket.socketpair()
        plain = [SocketStream(end, "the other end") for end in ends]
        streams = [self.stream(end) for end in plain]
        if self.tls is not None:
            streams = secured(self.tls, *plain)
        for side, end, stream, got in zip(
            (self.a, self.b), ends, streams, reversed(received), strict=True
        ):
            side.socket = end
            side.peer.adopt(stream, got)

    def run(self, done: Any) -> None:
        """Drive until `done()`, for so long at most."""
        due_ns = clock_ns() + PATIENCE_NS
        self.loop.drive(lambda: done() or clock_ns() > due_ns)
        assert done(), (self.a.ends, self.b.ends, len(self.b.messages))

    def turn(self) -> None:
        """Let whatever is ready happen."""
        left = [True]
        self.loop.post(left.clear)
        self.loop.drive(lambda: not left)

    def close(self) -> None:
        self.loop.acquire()
        self.a.peer.lose()
        self.b.peer.lose()
        self.loop.close()
        self.loop.release()


def secured(tls: Tls, near: SocketStream, far: SocketStream) -> list[TlsStream]:
    """Put TLS on both ends of a connection, after they have shaken hands."""
    ends = [tls.dial(near, "a"), tls.serve(far)]
    for end in ends * 3:
        with suppress(BlockingIOError):
            end.shake_hands()
    return ends


class Hoarder:
    """A stream that keeps bytes to itself both ways, as one through TLS may."""

    local = False

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

    def make_one(**options: Any) -> Sides:
        made.append(Sides(**options))
        return made[-1]

    yield make_one
    for one in made:
        one.close()


@pytest.fixture
def sides(make: Callable[..., Sides]) -> Sides:
    made = make()
    made.connect()
    return made


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return load(*Issuer(tmp_path_factory.mktemp("certificates"), "ca").issue("a"))


@pytest.fixture(params=["plain", "tls"])
def either(request: Any, make: Callable[..., Sides], tls: Tls) -> Sides:
    """Ends that are connected, plainly and through TLS."""
    made = make(tls=tls if request.param == "tls" else None)
    made.connect()
    return made


def primal(number: int, context: ContextId = ONE, slots: int = 1) -> Primal:
    return Primal(context, (number,), "a", (None,) * slots)


def random_values(rng: random.Random, slots: int) -> list[Any]:
    sizes = [rng.choice((0, 1, 7, 1_000, 60_000, 200_000)) for _ in range(slots)]
    seeds = np.random.default_rng(rng.getrandbits(32))
    return [jnp.asarray(seeds.standard_normal(size, np.float32)) for size in sizes]


def assert_same(came: Sequence[Any], sent: Sequence[Any]) -> None:
    assert len(came) == len(sent)
    for one, other in zip(came, sent, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_messages_with_values_of_all_sizes_arrive_in_order_with_their_bits(
    either: Sides,
) -> None:
    sides = either
    rng = random.Random(3)
    sent = []
    for number in range(1, 40):
        slots = rng.randrange(4)
        sent.append((primal(number, slots=slots), random_values(rng, slots)))
        sides.a.peer.send(*sent[-1])
    sides.run(lambda: len(sides.b.messages) == len(sent))
    for (message, values), (came, landed) in zip(sent, sides.b.messages, strict=True):
        assert came == message
        assert_same(landed, values)


def test_of_a_message_of_many_values_most_follow_it_in_chunks(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    message = Inbox._message

    def watched(self: Any, payload: bytes) -> None:
        lengths.append(len(payload))
        message(self, payload)

    monkeypatch.setattr(Inbox, "_message", watched)
    # The first five are just as many bytes as stay.
    sizes = (50_000, 50_000, 50_000, 50_000, 62_144, 0, 3, 0, 60_000, 60_000)
    values = [jnp.arange(size, dtype=jnp.float32) for size in sizes]
    sides.a.peer.send(primal(1, slots=len(values)), values)
    sides.run(lambda: len(sides.b.messages) == 1)
    assert_same(sides.b.messages[0][1], values)
    assert lengths[0] <= outbox.INLINE_BYTES + 1024 < sum(v.nbytes for v in values)


@pytest.mark.parametrize(
    ("either", "seed"),
    [*(("plain", seed) for seed in range(12)), *(("tls", seed) for seed in range(3))],
    indirect=["either"],
)
def test_connections_that_break_anywhere_lose_nothing_and_repeat_nothing(
    seed: int, either: Sides
) -> None:
    sides = either
    rng = random.Random(seed)
    sent: dict[str, list[Any]] = {"a": [], "b": []}
    number = 0
    for _ in range(60):
        for side in (sides.a, sides.b):
            if rng.random() < 0.7:
                number += 1
                slots = rng.randrange(3)
                message = (primal(number, slots=slots), random_values(rng, slots))
                sent[side.name].append(message)
                side.peer.send(*message)
        if rng.random() < 0.3:
            side = rng.choice((sides.a, sides.b))
            assert side.socket is not None
            turns = rng.randrange(6)
            for _ in range(turns):
                sides.turn()
            side.socket.shutdown(socket.SHUT_RDWR)
            sides.run(lambda: bool(sides.a.breaks and sides.b.breaks))
            sides.a.breaks.clear()
            sides.b.breaks.clear()
            sides.connect()
    wanted = (len(sent["a"]), len(sent["b"]))
    sides.run(lambda: (len(sides.b.messages), len(sides.a.messages)) == wanted)
    for name, side in (("a", sides.b), ("b", sides.a)):
        assert [message for message, _ in side.messages] == [m for m, _ in sent[name]]
        for (_, values), (_, landed) in zip(sent[name], side.messages, strict=True):
            assert_same(landed, values)
    assert not sides.a.ends and not sides.b.ends


def test_a_small_message_of_another_context_overtakes_a_large_one(
    sides: Sides,
) -> None:
    large = jnp.arange(8_000_000.0)
    sides.a.peer.send(primal(1, ONE), [large])
    sides.a.peer.send(primal(2, ONE), [jnp.ones(3)])
    sides.a.peer.send(primal(3, TWO), [jnp.ones(3)])
    sides.a.peer.send(Reading(7, (None,)), [jnp.ones(3)])
    sides.run(lambda: len(sides.b.messages) == 4)
    order = [message for message, _ in sides.b.messages]
    assert order == [primal(3, TWO), Reading(7, (None,)), primal(1), primal(2)]
    assert_same(sides.b.messages[2][1], [large])


def test_no_more_bulk_is_unacknowledged_than_the_window_and_a_chunk(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 0
    fill = outbox.Outbox.fill

    def watched(self: Any) -> bool:
        nonlocal most
        found = fill(self)
        most = max(most, self._chunk_bytes)
        return found

    monkeypatch.setattr(outbox.Outbox, "fill", watched)
    values = [jnp.arange(4_000_000.0) + place for place in range(3)]
    sides.a.peer.send(primal(1, slots=3), values)
    sides.run(lambda: len(sides.b.messages) == 1)
    assert 0 < most <= outbox.WINDOW_BYTES + outbox.CHUNK_BYTES + 16
    assert_same(sides.b.messages[0][1], values)


def test_what_a_stream_keeps_to_itself_is_asked_of_it(
    make: Callable[..., Sides],
) -> None:
    sides = make(deadline_s=600.0, stream=Hoarder)
    sides.connect()
    values = [jnp.arange(9_000.0), jnp.arange(20_000.0), jnp.arange(3.0)]
    sides.a.peer.send(primal(1, slots=3), values)
    sides.run(lambda: len(sides.b.messages) == 1)
    assert_same(sides.b.messages[0][1], values)


def test_functions_and_asides_arrive_between_messages(sides: Sides) -> None:
    digest, data = bytes(range(32)), b"x" * 300_000
    sides.a.peer.define(digest, data)
    sides.a.peer.define(digest, data)
    sides.a.peer.send(Acknowledge(None, (1,)), [])
    sides.a.peer.aside({"ask": 1, "what": "info"})
    sides.run(lambda: bool(sides.b.asides))
    assert sides.b.functions == [(digest, data)]
    assert sides.b.messages == [(Acknowledge(None, (1,)), [])]
    assert sides.b.asides == [{"ask": 1, "what": "info"}]


def test_what_is_acknowledged_is_let_go_of(sides: Sides) -> None:
    for number in range(1, 20):
        sides.a.peer.send(primal(number), [jnp.arange(100_000.0)])
    sides.run(lambda: len(sides.b.messages) == 19)
    sides.run(lambda: sides.a.peer.link.quiet and sides.b.peer.link.quiet)
    assert sides.a.peer.outbox.empty


def test_a_peer_that_is_asked_gives_a_sign_of_life_and_one_that_does_not_is_lost(
    make: Callable[..., Sides],
) -> None:
    sides = make(deadline_s=0.4)
    sides.connect()
    due_ns = clock_ns() + 1_200_000_000
    sides.loop.drive(lambda: clock_ns() > due_ns)
    assert not sides.a.ends and not sides.b.ends
    assert sides.b.socket is not None
    sides.loop.unregister(sides.b.socket.fileno())  # As one that is stopped.
    sides.loop.register(sides.b.socket.fileno(), lambda mask: None)
    sides.run(lambda: bool(sides.a.ends))
    assert sides.a.ends == ["it gave no sign of life for 0.4 s"]


@pytest.mark.parametrize("seed", range(20))
def test_bytes_that_are_no_frames_lose_the_peer_and_raise_nothing(
    seed: int, make: Callable[..., Sides]
) -> None:
    rng = random.Random(seed)
    sides = make()
    ours, theirs = socket.socketpair()
    sides.a.peer.adopt(SocketStream(ours, "b"), 0)
    garbage = rng.randbytes(rng.randrange(24, 4_000))
    theirs.sendall(garbage)
    theirs.close()
    sides.run(lambda: bool(sides.a.ends or sides.a.breaks))
    assert not sides.a.messages


def test_a_read_does_not_overtake_what_it_may_read(sides: Sides) -> None:
    large = jnp.arange(8_000_000.0)
    sides.a.peer.send(primal(1, ONE), [large])
    key = landing(primal(1, ONE))[0]
    sides.a.peer.send(Read(1, (key,)), [])
    sides.run(lambda: len(sides.b.messages) == 2)
    assert [message for message, _ in sides.b.messages] == [
        primal(1, ONE),
        Read(1, (key,)),
    ]


def lent(side: Side) -> int:
    """How many arrays have come in shared memory, and live."""
    return len(side.peer.inbox._borrowed._out)


def test_large_arrays_come_in_shared_memory_once_there_is_some_and_it_is_used_again(
    sides: Sides,
) -> None:
    shared = 0
    for number in range(1, 12):
        value = jnp.arange(1_500_000.0) * number
        sides.a.peer.send(primal(number), [value])
        sides.run(lambda number=number: len(sides.b.messages) == number)
        shared += lent(sides.b)
        assert_same(sides.b.messages[-1][1], [value])
        sides.b.messages[-1] = (primal(number), [])  # The array goes.
        for _ in range(20):
            sides.turn()
    assert shared >= 4
    assert sides.a.peer._segments._counter <= 2


def test_shared_memory_survives_a_connection_that_breaks(sides: Sides) -> None:
    kept = []
    for number in range(1, 12):
        value = jnp.arange(1_500_000.0) * number
        sides.a.peer.send(primal(number), [value])
        if number % 3 == 0:
            sides.turn()
            sides.connect()
        sides.run(lambda number=number: len(sides.b.messages) == number)
        kept.append((value, sides.b.messages[-1][1]))
    for value, came in kept:
        assert_same(came, [value])


def test_a_small_message_overtakes_one_that_is_copied_to_shared_memory(
    sides: Sides,
) -> None:
    large = jnp.arange(16_000_000.0)
    for number in range(1, 5):  # Until there is a segment of this size.
        sides.a.peer.send(primal(number), [large])
        sides.run(lambda number=number: len(sides.b.messages) == number)
        sides.b.messages[-1] = (primal(number), [])
        for _ in range(20):
            sides.turn()
    sides.a.peer.send(primal(5), [large])
    sides.turn()
    sides.a.peer.send(primal(6, TWO), [jnp.ones(3)])
    sides.run(lambda: len(sides.b.messages) == 6)
    assert lent(sides.b) == 1
    assert [message for message, _ in sides.b.messages[4:]] == [
        primal(6, TWO),
        primal(5),
    ]


@pytest.mark.parametrize(
    "said",
    [
        (b"l", (1, 7, 8_000_000)),
        (b"l", (9, 1, 8)),
        (b"x", (1,)),
        (b"f", (1, 2)),
        (b"", ()),
    ],
)
def test_nonsense_about_shared_memory_loses_the_peer(
    said: tuple[bytes, tuple[int, ...]], sides: Sides
) -> None:
    what, numbers = said
    sides.a.peer.outbox.about_segment(what, *numbers)
    sides.a.peer.send(primal(1), [jnp.ones(3)])
    sides.run(lambda: bool(sides.b.ends))
    assert "broke the protocol" in sides.b.ends[0]
