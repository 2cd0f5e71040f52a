"""What failures and crashes leave behind, which is nothing, at the level of users."""

from collections import Counter
from typing import Any

import pytest

from jdag import sim
from tests import random_failures
from tests.random_failures import FAILURES, again, beside, crash_somewhere, happen
from tests.random_programs import (
    Body,
    Branch,
    Call,
    Fetch,
    Invoke,
    Leaf,
    Move,
    Pass,
    Plan,
    Use,
)
from tests.random_runs import check, run
from tests.random_source import source_of
from tests.tiers import sized

PROGRAMS = sized(12, 60)
FEW = sized(1, 15)  # So many of them meet what is to happen.
STEP = sized(17, 1)  # Between indexes of a trace at which a worker crashes.


@pytest.mark.parametrize("what", FAILURES)
def test_a_failure_is_told_leaves_nothing_and_the_next_program_is_right(what: str):
    ended = Counter(happen(what, number) for number in range(PROGRAMS))
    assert ended.total() - ended["untouched"] >= FEW, ended


@pytest.mark.parametrize("what", FAILURES)
def test_a_failure_does_not_touch_a_context_that_is_open_beside_it(what: str):
    ended = Counter(beside(what, number) for number in range(PROGRAMS))
    assert ended.total() - ended["untouched"] >= FEW, ended


def test_a_retained_pass_that_fails_and_is_tried_again_is_one_good_pass():
    failed = Counter(again(number) for number in range(PROGRAMS))
    few = PROGRAMS // 12
    assert min(failed[1], failed[2], failed[3]) >= few, failed


def test_after_a_crash_anywhere_in_a_program_those_who_live_go_on():
    ended = Counter(crash_somewhere(number) for number in range(PROGRAMS))
    assert ended["WorkerLost"] >= PROGRAMS // 2, ended
    assert ended["untouched"] >= PROGRAMS // 12, ended


# Two leaves, programs to depth 2 and back to the caller, a branch, two roots on two
# workers, two passes.
INNERMOST = Body(
    "innermost", (20, 21), (Call(1, "c", "product", (Use(20), Use(21)), (22,)),), (22,)
)
INNER = Body(
    "inner",
    (10, 11),
    (
        Invoke(2, "a", INNERMOST, (Use(10), Use(11)), (12,)),
        Branch(
            *(12, 0, 0.1),
            above=(Call(3, "c", "mix", (Use(12), Use(11)), (13,)),),
            below=(Call(4, "b", "mix", (Use(12), Use(11)), (13,)),),
        ),
    ),
    (12, 13),
)
SMALL = Plan(
    workers=("a", "b", "c"),
    home="a",
    leaves=(Leaf(0, "b", (0.3, -0.2, 0.9)), Leaf(1, "c", (0.7, 0.5, -0.4))),
    steps=(
        Call(9, "b", "mix", (Use(0),), (7,)),
        Call(10, "c", "mix", (Use(7),), (8,)),
        Fetch((8,)),  # From c, who waits for b.
        Invoke(5, "b", INNER, (Use(0), Use(1)), (2, 3)),
        Move(6, "c", (Use(2),), (4,)),
        Call(7, "a", "total", (Use(3), Use(2), Use(0)), (5,)),
        Call(8, "c", "total", (Use(4), Use(8)), (6,)),
        Pass((5, 6), (None, 0.5), retain=True),
        Pass((6, 5), (None, 2.0), retain=False),
    ),
)
CALM: dict[str, Any] = {
    "seed": 0,
    "network": sim.LinkModel(latency_ns=500),
    "devices": sim.DeviceModel(forward_ns=1_000, backward_ns=2_000),
    "faults": (),
}


@pytest.mark.parametrize("victim", ["b", "c"])
def test_after_a_crash_at_any_index_of_a_trace_those_who_are_there_go_on(victim: str):
    calm = run(SMALL, source_of(SMALL), **CALM)
    check(SMALL, calm)
    ended: Counter[str] = Counter()
    for index in range(0, calm.records, STEP):
        detect_ns, restart_ns = 2_000 * (index % 2), (None, 0, 1_000)[index % 3]
        crash = sim.Crash(victim, detect_ns, at_index=index, restart_ns=restart_ns)
        ended[random_failures.crashed(SMALL, crash, calm, CALM, after=index % 8)] += 1
    assert ended["WorkerLost"] > calm.records // 2 // STEP and ended["untouched"] > 0, (
        ended
    )
