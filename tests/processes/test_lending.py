"""Two ends of a pair on one host: large arrays come in shared memory."""

import struct
from collections.abc import Callable

import jax.numpy as jnp
import pytest

from jdag.wire.frames import FrameKind
from tests.tools.connection_cases import TWO, Side, Sides, assert_same, primal


def lent(side: Side) -> int:
    return len(side.connection._borrowed._out)


def send_one(sides: Sides, number: int) -> None:
    value = jnp.arange(500_000.0) * number
    sides.a.connection.send(primal(number), [value])
    sides.run(lambda: len(sides.b.messages) == number)
    assert_same(sides.b.messages[-1][1], [value])


def make_one(sides: Sides) -> None:
    for number in (1, 2):
        send_one(sides, number)
    sides.run(lambda: bool(sides.a.connection._pool._free))


def test_large_arrays_come_in_shared_memory_once_there_is_some_and_it_is_used_again(
    sides: Sides,
) -> None:
    make_one(sides)
    shared = 0
    for number in range(3, 12):
        send_one(sides, number)
        shared += lent(sides.b)
        sides.b.messages[-1] = (primal(number), [])  # The array goes.
        for _ in range(20):
            sides.turn()
    assert shared >= 4
    assert sides.a.connection._pool._counter <= 2


def test_memory_of_an_array_that_is_gone_is_free_without_another_message(
    make: Callable[..., Sides],
) -> None:
    sides = make(deadline_s=8.0)
    sides.connect()
    make_one(sides)
    send_one(sides, 3)
    assert lent(sides.b) == 1
    sides.b.messages.clear()
    sides.run(lambda: lent(sides.b) == 0)


def test_shared_memory_survives_a_connection_that_breaks(sides: Sides) -> None:
    kept = []
    for number in range(1, 12):
        value = jnp.arange(500_000.0) * number
        sides.a.connection.send(primal(number), [value])
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
    large = jnp.arange(8_000_000.0)
    for number in range(1, 3):  # What is missed twice is made.
        sides.a.connection.send(primal(number), [large])
        sides.run(lambda number=number: len(sides.b.messages) == number)
    sides.run(lambda: bool(sides.a.connection._pool._free))
    sides.a.connection.send(primal(3), [large])
    sides.turn()
    sides.a.connection.send(primal(4, TWO), [jnp.ones(3)])
    sides.run(lambda: len(sides.b.messages) == 4)
    assert lent(sides.b) == 1
    order = [message for message, _ in sides.b.messages[2:]]
    assert order == [primal(4, TWO), primal(3)]


LOANS = ((1, 7, 8_000_000), (9, 1, 8))


@pytest.mark.parametrize(
    ("what", "numbers"),
    [*[(b"l", loan) for loan in LOANS], (b"x", (1,)), (b"f", (1, 2)), (b"", ())],
)
def test_nonsense_about_shared_memory_loses_the_peer(
    what: bytes, numbers: tuple[int, ...], sides: Sides
) -> None:
    data = what + struct.pack(f"<{len(numbers)}Q", *numbers)
    sides.a.connection._add(FrameKind.SEGMENT, (data,), len(data))
    sides.a.connection.send(primal(1), [jnp.ones(3)])
    sides.run(lambda: bool(sides.b.ends))
    assert "broke the protocol" in sides.b.ends[0]
