"""How a pass ended, as users are told."""

import pytest

from jdag.engine.vocabulary import Failure, Outcome, Owed, PassResult
from jdag.errors import JdagError
from jdag.outcome import expired, nanoseconds, stuck
from jdag.sim.devices import MOVED

OWED = Owed((3, 1), "b", "c", "m:f", "x.py:7 in main")


@pytest.mark.parametrize(("seconds", "ns"), [(None, None), (1, 10**9), (1e-12, 1)])
def test_a_time_is_whole_nanoseconds_and_at_least_one(seconds, ns):
    assert nanoseconds(seconds) == ns


@pytest.mark.parametrize("seconds", [0, -1, "1", True, float("inf"), float("nan")])
def test_a_time_that_is_none_is_refused(seconds):
    with pytest.raises(JdagError, match="allowed is a number of seconds above 0"):
        nanoseconds(seconds)


def test_a_pass_whose_time_is_over_says_what_it_waits_for():
    failure = Failure("PassTimeout", "", "a")
    result = PassResult(2, Outcome.EXPIRED, failure, (OWED,), (), ())
    assert expired(result, 0.5).splitlines() == [
        "pass 2 took longer than timeout_s=0.5; no cotangent has come for what was "
        "sent by",
        "  call 3.1: b -> c, sent for m:f, called at x.py:7 in main",
    ]


def test_a_pass_that_had_not_begun_says_for_want_of_what():
    failure = Failure("PassTimeout", "acknowledgements of call (1,) on 'b'", "a")
    result = PassResult(1, Outcome.EXPIRED, failure, (), (), ())
    assert expired(result, 1) == (
        "pass 1 took longer than timeout_s=1; it had not begun, for want of "
        "acknowledgements of call (1,) on 'b'"
    )


def test_what_was_moved_is_said_to_be_moved():
    assert "sent for ctx.move, called" in stuck((OWED._replace(function=MOVED),))


def test_a_stuck_pass_says_what_helps():
    said = stuck((OWED,))
    assert "call 3.1: b -> c, sent for m:f, called at x.py:7 in main" in said
    assert "mode='smart'" in said
