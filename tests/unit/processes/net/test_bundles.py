"""Messages of one turn in one frame, in order with what was handled."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jdag.engine.protocol import ContextId, Message, StepFrame, landing
from jdag.wire.arrays import type_of
from jdag.wire.frames import FRAME_BYTES, MESSAGE_BYTES
from jdag.wire.messages import Codec
from tests.tools.connection_cases import Sides, Sink, assert_same, primal, ship

CODEC = Codec(("a", "b"))


def test_the_messages_of_a_turn_leave_in_one_frame(make: Callable[..., Sides]) -> None:
    sides = make(deadline_s=600.0)
    connection = sides.a.connection
    sides.run(lambda: connection.idle)
    bytes_sent = connection.sent.bytes
    sent: list[Message] = [ship(1), primal(2), ship(3)]
    for message in sent:
        connection.send(message, [jnp.ones(3)] * len(landing(message)))
        assert not connection.idle
    assert connection.numbers.sent == 0
    sides.run(lambda: len(sides.b.messages) == 3)
    assert sides.b.log == sent
    assert_same(sides.b.messages[1][1], [jnp.ones(3)])
    assert connection.numbers.sent == 1 and connection.sent.messages == 3
    bodies = [CODEC.encode(ship(1)), CODEC.encode(primal(2), [type_of(jnp.ones(3))])]
    length = 2 * len(bodies[0]) + len(bodies[1]) + jnp.ones(3).nbytes
    length += FRAME_BYTES + 3 * MESSAGE_BYTES
    assert connection.sent.bytes - bytes_sent == length
    # Those that b has handled are two; nothing else goes to a.
    sides.run(lambda: sides.a.acknowledged == 2)
    assert sides.a.log == [2] and sides.b.connection.numbers.sent == 1
    sides.run(lambda: sides.b.connection.idle)


def test_a_number_of_handled_messages_that_was_not_told_keeps_an_end_busy(
    make: Callable[..., Sides],
) -> None:
    sides = make(connects=False)
    connection = sides.b.connection
    assert connection.idle
    connection.order.handled += 1
    assert not connection.idle
    connection.flush()
    connection.drop_stream()
    assert connection.bundles.told == 1 and not connection.idle
    sides.connect()
    sides.run(lambda: sides.a.log == [1])
    sides.run(lambda: connection.idle)


def test_messages_and_what_was_handled_arrive_in_the_order_in_which_they_happened(
    sides: Sides,
) -> None:
    """The header of a bundle has the number of when its first message was sent."""
    answers = iter(range(1, 9))

    def react(message: Message) -> None:
        if message != ship(4):
            for _ in range(2):
                sides.b.connection.send(primal(next(answers), slots=0), [])

    sides.b.react = react
    for number in (1, 2, 3, 4):
        sides.a.connection.send(ship(number), [])
    sides.run(lambda: sides.a.acknowledged == 4)
    answered = [primal(number, slots=0) for number in range(1, 7)]
    assert sides.a.log == [1, *answered[:2], 1, *answered[2:4], 1, *answered[4:], 1]
    assert sides.b.connection.numbers.sent == 4


def test_a_frame_that_is_sent_again_tells_what_was_handled_before_it(
    make: Callable[..., Sides],
) -> None:
    sides = make(connects=False)
    end = sides.b.connection
    sink: Any = Sink()
    end.adopt(sink, 0)
    for number in (1, 2, 3):
        end.order.handled += 1
        end.send(primal(number, slots=0), [])
        end.flush()
    assert end.numbers.sent == 3
    sides.connect()
    sides.run(lambda: len(sides.a.messages) == 3)
    sent = [primal(number, slots=0) for number in (1, 2, 3)]
    assert sides.a.log == [1, sent[0], 1, sent[1], 1, sent[2]]


def test_what_goes_in_order_stays_between_the_messages_of_a_turn(sides: Sides) -> None:
    connection, seen = sides.a.connection, []
    sides.b.react = lambda message: seen.append((message, len(sides.b.functions)))
    connection.send(primal(1, slots=0), [])
    connection.define(bytes(32), b"x")
    connection.send(primal(2, slots=0), [])
    step = StepFrame(ContextId(0, 1, 0), 1, (), 0, True)
    connection.send(step, [])
    connection.send(primal(3, slots=0), [])
    sides.run(lambda: len(seen) == 4)
    found = [primal(1, slots=0), primal(2, slots=0), step, primal(3, slots=0)]
    assert seen == [*zip(found, [0, 1, 1, 1], strict=True)]


def test_a_frame_of_a_step_tells_what_was_handled_before_it(sides: Sides) -> None:
    step = StepFrame(ContextId(0, 1, 0), 1, (), 0, True)
    sides.b.react = lambda message: sides.b.connection.send(step, [])
    sides.a.connection.send(ship(1), [])
    sides.run(lambda: bool(sides.a.messages))
    assert sides.a.log == [1, step]


def test_a_bundle_has_a_size_beyond_which_another_begins(sides: Sides) -> None:
    values = [np.ones(28_000, "i1")]
    for number in range(1, 7):
        sides.a.connection.send(primal(number), values)
    sides.run(lambda: len(sides.b.messages) == 6)
    assert sides.a.connection.numbers.sent == 3
    assert [message for message, _ in sides.b.messages] == [*map(primal, range(1, 7))]


def test_the_number_of_handled_messages_outlives_the_stream_on_which_it_was_told(
    sides: Sides,
) -> None:
    """Also if nothing else is sent, and if the handling broke the stream."""
    sides.b.react = lambda message: sides.b.connection.drop_stream()
    sides.a.connection.send(ship(1), [])
    sides.run(lambda: bool(sides.b.messages))
    sides.turn()
    assert sides.b.connection.bundles.told == 1 and sides.a.log == []
    sides.connect()
    sides.run(lambda: sides.a.log == [1])
    sides.connect()
    sides.a.connection.send(ship(2), [])
    sides.run(lambda: len(sides.b.messages) == 2)
    sides.connect()
    sides.run(lambda: sides.a.log == [1, 1])
    assert not sides.a.ends
