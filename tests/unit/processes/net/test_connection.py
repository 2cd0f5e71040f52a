"""A connection: what is sent arrives once and in order, though streams break."""

import random
import re
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

from jdag.compute.buffers import parts
from jdag.compute.machine import Machine
from jdag.engine.protocol import (
    ContextId,
    Message,
    Primal,
    Read,
    Reading,
    Ship,
    StepFrame,
    landing,
)
from jdag.engine.tables import Hop
from jdag.processes.net import connection
from jdag.processes.net import large_values as bulk
from jdag.processes.net.connection import OUT_BYTES
from jdag.processes.net.loop import clock_ns
from jdag.processes.net.receiving import PING
from jdag.processes.net.streams import SocketStream
from jdag.processes.step_runner import StepRunner
from jdag.wire.arrays import type_of
from jdag.wire.frames import CHUNK_MAX_BYTES, FrameKind
from tests.tools.connection_cases import (
    ONE,
    TWO,
    Clock,
    Hoarder,
    Sides,
    Sink,
    assert_same,
    primal,
    random_values,
    ship,
)
from tests.tools.tiers import sized


def test_of_a_message_of_many_values_most_follow_it_in_chunks(
    sides: Sides,
) -> None:
    lengths: list[int] = []
    decoders = sides.b.connection.reader._decoders
    decode = decoders[FrameKind.MESSAGE]

    def watched(payload: bytes) -> Any:
        lengths.append(len(payload))
        return decode(payload)

    decoders[FrameKind.MESSAGE] = watched
    # The first five are just as many bytes as stay.
    sizes = (50_000, 50_000, 50_000, 50_000, 62_144, 0, 3, 0, 60_000, 60_000)
    values = [jnp.arange(size, dtype=jnp.float32) for size in sizes]
    sides.a.connection.send(primal(1, slots=len(values)), values)
    sides.run(lambda: len(sides.b.messages) == 1)
    assert_same(sides.b.messages[0][1], values)
    assert lengths[0] <= bulk.INLINE_BYTES + 1024 < sum(v.nbytes for v in values)


@pytest.mark.parametrize(
    ("either", "seed"),
    [("tls", 0), *(("plain", seed) for seed in range(1, sized(4, 15)))],
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
                message: tuple[Message, list[Any]] = (ship(number), [])
                if rng.random() < 0.7:
                    message = (primal(number, slots=slots), random_values(rng, slots))
                sent[side.name].append(message)
                side.connection.send(*message)
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
    for side, counts in ((sides.a, sent["a"]), (sides.b, sent["b"])):
        asked = sum([isinstance(message, Ship) for message, _ in counts])
        sides.run(lambda side=side, asked=asked: side.acknowledged == asked)
    assert not sides.a.ends and not sides.b.ends
    # What is acknowledged is let go of.
    numbers = sides.a.connection.numbers
    sides.run(lambda: sides.b.connection.numbers.received == numbers.sent)
    sides.b.connection._look()
    sides.run(lambda: not sides.a.connection.numbers.unacknowledged)


def test_a_small_message_of_another_context_overtakes_a_large_one(
    sides: Sides,
) -> None:
    large = jnp.arange(8_000_000.0)
    sides.a.connection.send(primal(1, ONE), [large])
    sides.a.connection.send(primal(2, ONE), [jnp.ones(3)])
    sides.a.connection.send(primal(3, TWO), [jnp.ones(3)])
    sides.a.connection.send(Reading(7, (None,)), [jnp.ones(3)])
    read = Read(1, landing(primal(1, ONE)))  # It stays behind what it may read.
    sides.a.connection.send(read, [])
    sides.run(lambda: len(sides.b.messages) == 5)
    order = [message for message, _ in sides.b.messages]
    assert order == [primal(3, TWO), Reading(7, (None,)), primal(1), primal(2), read]
    assert_same(sides.b.messages[2][1], [large])


def test_what_a_stream_keeps_to_itself_is_asked_of_it(
    make: Callable[..., Sides],
) -> None:
    sides = make(deadline_s=600.0, stream=Hoarder)
    values = [jnp.arange(9_000.0), jnp.arange(20_000.0), jnp.arange(3.0)]
    sides.a.connection.send(primal(1, slots=3), values)
    sides.run(lambda: len(sides.b.messages) == 1)
    assert_same(sides.b.messages[0][1], values)


def test_functions_and_asides_arrive_between_messages(sides: Sides) -> None:
    digest, data = bytes(range(32)), b"x" * 300_000
    sides.a.connection.define(digest, data)
    sides.a.connection.define(digest, data)
    sides.a.connection.send(ship(1), [])
    sides.a.connection.control({"ask": 1, "what": "info"})
    sides.run(lambda: bool(sides.b.asides))
    assert sides.b.functions == [(digest, data)]
    assert sides.b.messages == [(ship(1), [])]
    assert sides.b.asides == [{"ask": 1, "what": "info"}]


def test_an_end_to_which_a_part_of_a_message_is_to_come_is_not_idle(
    sides: Sides,
) -> None:
    sides.a.connection.send(primal(1), [jnp.ones(1 << 23)])
    while not sides.b.connection.reader.assembler.messages:
        sides.turn()
    sides.b.connection.drop_stream()  # As where it is cut.
    assert not sides.b.messages and not sides.b.connection.idle
    sides.connect()
    sides.run(lambda: bool(sides.b.messages))
    sides.run(lambda: sides.b.connection.idle)


def test_a_message_may_name_a_worker_of_which_a_control_frame_before_it_tells(
    make: Callable[..., Sides],
) -> None:
    """However many frames one read gets."""
    sides = make(connects=False)
    again = Primal(ONE, (1,), "a#1", ())
    sides.a.connection._codec.joined("a", 1)
    sides.a.connection.control({"joined": "a", "incarnation": 1})
    sides.a.connection.send(again, [])
    sides.connect()
    sides.run(lambda: bool(sides.b.messages or sides.b.ends))
    assert sides.b.messages == [(again, [])]


def test_what_is_heard_while_nothing_is_acknowledged_puts_off_no_acknowledgement(
    make: Callable[..., Sides],
) -> None:
    sides = make(deadline_s=600.0)
    sides.a.connection.send(primal(1), [jnp.ones(3)])
    sides.b.connection._pure(PING)  # On its way before b has read anything.
    sides.run(lambda: len(sides.b.messages) == 1)
    for number in (1, 2, 3):
        sides.b.connection.send(primal(number), [jnp.ones(30_000)])
        sides.run(lambda number=number: len(sides.a.messages) == number)
        sides.run(lambda: not sides.b.connection.numbers.unacknowledged)


@pytest.mark.parametrize("seed", range(sized(5, 20)))
def test_bytes_that_are_no_frames_lose_the_peer_and_raise_nothing(
    seed: int, make: Callable[..., Sides]
) -> None:
    rng = random.Random(seed)
    sides = make(connects=False)
    ours, theirs = socket.socketpair()
    sides.a.connection.adopt(SocketStream(ours, "b"), 0)
    garbage = rng.randbytes(rng.randrange(24, 4_000))
    theirs.sendall(garbage)
    theirs.close()
    sides.run(lambda: bool(sides.a.ends or sides.a.breaks))
    assert not sides.a.messages


def test_what_a_peer_says_that_cannot_be_read_loses_it_alone(sides: Sides) -> None:
    nested = b"[" * 200_000
    sides.a.connection._add(FrameKind.ASIDE, (nested,), len(nested))
    sides.a.connection.send(primal(1), [jnp.ones(3)])
    sides.run(lambda: bool(sides.b.ends))
    assert "broke the protocol" in sides.b.ends[0]


def test_more_frames_than_may_be_unacknowledged_all_arrive(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "FRAMES_MAX", 8)
    monkeypatch.setattr(connection, "ACK_FRAMES", 5)
    for number in range(1, 60):
        sides.a.connection.send(primal(number, slots=0), [])
        sides.a.connection.control({"number": number})
    sides.run(lambda: len(sides.b.messages) == 59)


def leave(sides: Sides) -> int:
    """Have a stream take all there is; how many bytes that were."""
    stream: Any = sides.a.connection.stream
    before = stream.taken
    sides.a.connection.flush()
    return int(stream.taken - before)


def test_frames_without_a_number_still_wait_when_their_stream_breaks(
    make: Callable[..., Sides],
) -> None:
    sides = make(connects=False)
    end = sides.a.connection
    for number in (1, 2, 3):
        end.send(primal(number), [jnp.arange(1_000.0)])
        end.flush()
    waiting = end.waiting_bytes
    assert waiting > 3 * 8_000
    end.drop_stream()
    assert end.waiting_bytes == waiting
    sink: Any = Sink()
    end.adopt(sink, 0)
    ping = end.waiting_bytes - waiting
    assert leave(sides) == waiting + ping and end.waiting_bytes == 0
    assert end.sent.resends == 0


def test_after_a_break_bulk_waits_for_what_waits_for_the_stream_as_before(
    make: Callable[..., Sides],
) -> None:
    sides = make(connects=False)
    end = sides.a.connection
    for number in (1, 2, 3, 4, 5):
        end.send(primal(number), [jnp.arange(25_000.0)])
    end.send(primal(6), [jnp.arange(500_000.0)])
    end.flush()
    end.drop_stream()
    end._fill()
    assert end.waiting_bytes > OUT_BYTES
    assert end.numbers.sent == 6  # The messages, and no chunk yet.
    sink: Any = Sink()
    end.adopt(sink, 0)
    leave(sides)
    assert end.numbers.sent > 6 and end.waiting_bytes == 0
    assert end.sent.resends == 6


def test_bulk_waits_while_a_window_of_it_is_unacknowledged(
    make: Callable[..., Sides],
) -> None:
    sides = make(connects=False)
    end = sides.a.connection
    sink: Any = Sink()
    end.adopt(sink, 0)
    end.send(primal(1), [jnp.zeros(3 * bulk.WINDOW_BYTES, jnp.uint8)])
    for left in (True, True, False):
        sent = leave(sides)
        assert bool(end.bulk.nbytes) == left
        assert sent <= bulk.WINDOW_BYTES + CHUNK_MAX_BYTES + 1_000  # With headers.
        end.numbers.acknowledge(end.numbers.sent)
        end.bulk.acknowledged(end.numbers.sent)
    assert end.idle


def test_a_frame_leaves_at_once_and_never_ahead_of_one_that_waits(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = sides.a.connection
    end.send(primal(1, slots=0), [])
    end.flush()
    assert end.numbers.sent == 1 and not end._queue
    monkeypatch.setattr(connection, "FRAMES_MAX", 1)
    end.define(bytes(32), b"x")
    monkeypatch.undo()
    end.send(primal(2, slots=0), [])
    end.control({"ask": 1})
    assert end.numbers.sent == 1 and len(end._queue) == 3
    sides.run(lambda: len(sides.b.messages) == 2)
    assert len(sides.b.functions) == 1


def test_a_peer_that_is_asked_gives_a_sign_of_life_and_one_that_does_not_is_lost(
    monkeypatch: pytest.MonkeyPatch, make: Callable[..., Sides]
) -> None:
    clock = Clock(monkeypatch)
    sides = make(deadline_s=1_000.0)
    for _ in range(2_000):  # Who is asked gives signs of life.
        clock.ahead_ns += 1_000_000_000
        sides.turn()
    assert not sides.a.ends and not sides.b.ends
    sides.b.stop()
    heard_ns = sides.a.connection.heard_ns
    while clock_ns() + clock.ahead_ns < heard_ns + 899_000_000_000:
        sides.turn()
        assert not sides.a.ends
        clock.ahead_ns += 1_000_000_000
    clock.ahead_ns += 2_000_000_000
    sides.turn()
    assert re.match(r"it gave no sign of life for 9\d\d\.\d s$", sides.a.ends[0])


def test_who_was_away_itself_hears_first_what_has_come_meanwhile(
    monkeypatch: pytest.MonkeyPatch, make: Callable[..., Sides]
) -> None:
    """As when the process was stopped, or its interpreter held for long."""
    clock = Clock(monkeypatch)
    sides = make(deadline_s=10.0)
    for _ in range(5):
        clock.ahead_ns += 60_000_000_000
        for side in (sides.a, sides.b):
            side.connection._look()  # It is due before what came is read.
        sides.turn()
        sides.turn()
    assert not sides.a.ends and not sides.b.ends


def test_a_flush_handles_no_events_even_if_the_stream_is_broken(sides: Sides) -> None:
    sides.turn()
    sides.b.connection.send(primal(1), [1.5])
    sides.b.connection.flush()
    sides.b.connection.drop_stream()
    for _ in range(3):
        sides.a.connection.send(primal(2), [1.5])
        sides.a.connection.flush()
        assert sides.a.connection._send_error is not None
        assert not sides.a.messages and not sides.a.breaks
    sides.turn()
    sides.turn()
    assert len(sides.a.messages) == len(sides.a.breaks) == 1


def test_a_step_frame_has_the_types_of_its_own_values(sides: Sides) -> None:
    host: Any = SimpleNamespace(machine=Machine("real"), resume=None)
    jobs: Any = SimpleNamespace(run_row=None, rows_are_jobs=False, send_out=None)
    link = sides.a.connection
    peers: Any = SimpleNamespace(codec=link._codec, connections={"b": link})
    runner = StepRunner(host, jobs, peers)
    hop = Hop("b", (0,), StepFrame(ContextId(0, 1, 0), 0, (0,), 0, True))
    values = [np.arange(3.0), jnp.arange(3, dtype="f4"), np.arange(3), 2.5, 3, 2.5]
    values += [np.arange(6.0)[::2], jnp.ones(2, "bfloat16"), np.ones((0, 3))]
    values += [jnp.asarray(2.5), jnp.asarray(2.5) * 1, jax.lax.full((), 2.5) * 2.5]
    columns = Format(
        Layout((1, 0)), jax.sharding.SingleDeviceSharding(jax.devices()[0])
    )
    values += [jax.device_put(jnp.arange(6.0).reshape(2, 3), columns)]
    values += [np.ones((2, 3)).T, np.ones(1 << 10), jnp.ones(1 << 10, "f4")]
    for number, value in enumerate(values, 1):
        assert runner.send(hop, number, number - 1, [value])
    sides.run(lambda: len(sides.b.messages) == len(values))
    for value, (message, received) in zip(values, sides.b.messages, strict=True):
        assert isinstance(message, StepFrame) and message.base == message.number - 1
        assert type_of(received[0]) == type_of(value)
        assert [*map(bytes, parts(received[0]))] == [*map(bytes, parts(value))]
