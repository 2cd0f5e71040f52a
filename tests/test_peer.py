"""Two ends of a pair: what is said arrives once and in order, though streams break."""

import random
import socket
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

from jdag.compute.buffers import Buffers
from jdag.engine.vocabulary import (
    Acknowledge,
    Read,
    Reading,
    landing,
)
from jdag.rpc import outbox
from jdag.rpc.inbox import PING, Inbox
from jdag.rpc.loop import clock_ns
from jdag.rpc.streams import SocketStream
from jdag.wire.frames import CHUNK_MAX_BYTES, FrameKind
from tests.peer_cases import (
    ONE,
    TWO,
    Hoarder,
    Sides,
    assert_same,
    primal,
    random_values,
)


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
    assert 0 < most <= outbox.WINDOW_BYTES + CHUNK_MAX_BYTES + 16
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


def test_what_is_heard_while_nothing_is_acknowledged_puts_off_no_acknowledgement(
    make: Callable[..., Sides],
) -> None:
    """A resend that is due in a hundred years is nothing to wait for."""
    sides = make(deadline_s=600.0)
    sides.connect()
    sides.a.peer.send(primal(1), [jnp.ones(3)])
    sides.b.peer._pure(PING)  # On its way before b has read anything.
    sides.run(lambda: len(sides.b.messages) == 1)
    for number in (1, 2, 3):
        sides.b.peer.send(primal(number), [jnp.ones(3)])
        sides.run(lambda number=number: len(sides.a.messages) == number)
        sides.run(lambda: sides.a.peer.link.quiet and sides.b.peer.link.quiet)


def test_a_peer_that_is_asked_gives_a_sign_of_life_and_one_that_does_not_is_lost(
    make: Callable[..., Sides],
) -> None:
    sides = make(deadline_s=2.0)
    sides.connect()
    due_ns = clock_ns() + 4_000_000_000
    sides.loop.drive(lambda: clock_ns() > due_ns)
    assert not sides.a.ends and not sides.b.ends
    assert sides.b.socket is not None
    sides.loop.unregister(sides.b.socket.fileno())  # As one that is stopped.
    sides.loop.register(sides.b.socket.fileno(), lambda mask: None)
    sides.b.peer._alive_timer.cancel()
    sides.run(lambda: bool(sides.a.ends))
    assert "it gave no sign of life for" in sides.a.ends[0]


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


def test_what_a_peer_says_that_cannot_be_read_loses_it_alone(sides: Sides) -> None:
    nested = b"[" * 200_000
    sides.a.peer.outbox._urgent.append(
        outbox.Parcel(FrameKind.ASIDE, (nested,), len(nested))
    )
    sides.a.peer.send(primal(1), [jnp.ones(3)])
    sides.run(lambda: bool(sides.b.ends))
    assert "broke the protocol" in sides.b.ends[0]


def test_a_value_for_which_there_is_no_memory_loses_the_peer_alone(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(self: Any, nbytes: int) -> Any:
        raise MemoryError(nbytes)

    monkeypatch.setattr(Buffers, "aligned", none_left)
    sides.a.peer.send(primal(1), [jnp.arange(1_000_000.0)])
    sides.run(lambda: bool(sides.b.ends))
    assert sides.b.ends[0].startswith("it has no memory for what was sent: ")


def test_more_frames_than_may_be_unacknowledged_all_arrive(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "FRAMES_MAX", 8)
    monkeypatch.setattr(Sides, "flush", Sides.flush_speaking)
    for number in range(1, 60):
        sides.a.peer.send(primal(number, slots=0), [])
    sides.run(lambda: len(sides.b.messages) == 59)
