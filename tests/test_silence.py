"""Peers that say nothing: lost in time, and not because we were away ourselves."""

import re
from collections.abc import Callable

import pytest

from jdag.rpc import bulk, connection, loop, receiving
from jdag.rpc.loop import clock_ns
from tests.connection_cases import Sides


class Clock:
    """Time that leaps ahead when it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_ns = 0
        for module in (connection, loop, receiving, bulk):
            monkeypatch.setattr(module, "clock_ns", lambda: clock_ns() + self.ahead_ns)


def test_a_silent_peer_is_lost_before_its_deadline(
    monkeypatch: pytest.MonkeyPatch, make: Callable[..., Sides]
) -> None:
    clock = Clock(monkeypatch)
    sides = make(deadline_s=1_000.0)
    sides.connect()
    assert sides.b.socket is not None
    sides.loop.unregister(sides.b.socket.fileno())  # As one that is stopped.
    sides.loop.register(sides.b.socket.fileno(), lambda mask: None)
    sides.b.connection._timer.cancel()
    for seconds in range(800):
        sides.turn()
        assert not sides.a.ends, seconds
        clock.ahead_ns += 1_000_000_000
    clock.ahead_ns += 105_000_000_000
    sides.turn()
    assert re.match(r"it gave no sign of life for 9\d\d\.\d s$", sides.a.ends[0])


def test_who_was_away_itself_hears_first_what_has_come_meanwhile(
    monkeypatch: pytest.MonkeyPatch, make: Callable[..., Sides]
) -> None:
    """As when the process was stopped, or its interpreter held for long."""
    clock = Clock(monkeypatch)
    sides = make(deadline_s=10.0)
    sides.connect()
    for _ in range(5):
        clock.ahead_ns += 60_000_000_000
        for side in (sides.a, sides.b):
            side.connection._look()  # It is due before what came is read.
        sides.turn()
        sides.turn()
    assert not sides.a.ends and not sides.b.ends
