"""Random programs over engines alone: the oracle's integers, in the oracle's order."""

import os
import random
from collections import Counter

import pytest

from jdag.engine.protocol import Mode, Outcome
from tests.tools.engine_beside import now_and_then
from tests.tools.engine_faults import FAULTS, happen
from tests.tools.engine_net import Net
from tests.tools.engine_programs import Run, drawn
from tests.tools.tiers import sized

PROGRAMS = sized(30, 300)
ORDERS = sized(6, 20)  # Interleavings of each program.
ALONE = sized(6, 17)  # So many of them with nothing beside it.
LARGE = (0.0, 0.5, 1.0)  # How probable it is that values come after their message.
FAULTY = sized(20, 150)  # Programs for each kind of fault.
CHUNKS = 10  # For tests to run side by side.
MODES = (None, Mode.SMART, Mode.FAST)  # None: each pass has its own.


def run_program(seed: int) -> list[Outcome]:
    plan = drawn(seed)
    outcomes: list[Outcome] = []
    for order in range(ORDERS):
        rng = random.Random(f"{seed} {order}")
        net = Net(plan.workers, rng, large=LARGE[order // len(MODES) % len(LARGE)])
        if order >= ALONE:
            now_and_then(net, random.Random(f"beside {seed} {order}"), 0.02)
        mode = MODES[order % len(MODES)]
        run = Run(plan, net, mode)
        run.all()
        run.scope.tell_discarded()
        net.before_step = None
        net.drain()
        assert (kept := run.kept()) == [], (seed, kept)
        assert run.scope.leave() == (), seed
        net.drain()
        assert (left := net.leftovers()) == [], (seed, left)
        if mode is None:
            outcomes = [result.outcome for result in run.passes]
        if mode is Mode.SMART:
            assert all(result.outcome is not Outcome.STUCK for result in run.passes)
    return outcomes


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_pass_is_the_oracles_in_any_order_of_events(chunk: int):
    for seed in range(chunk, PROGRAMS, CHUNKS):
        run_program(seed)


@pytest.mark.parametrize("fault", FAULTS)
def test_nothing_is_left_and_the_next_program_is_right_after_a(fault: str):
    for seed in range(FAULTY):
        happen(fault, seed)


def test_programs_end_in_every_way_and_use_what_they_are_meant_to():
    outcomes: Counter[Outcome] = Counter()
    workers: Counter[int] = Counter()
    passes: Counter[int] = Counter()
    for seed in range(PROGRAMS):
        plan = drawn(seed)
        run = Run(plan, Net(plan.workers, random.Random(seed)), Mode.FAST)
        run.all()
        outcomes.update(result.outcome for result in run.passes)
        workers[len(plan.workers)] += 1
        passes[len(run.passes)] += 1
    assert outcomes[Outcome.FINISHED] > PROGRAMS
    assert outcomes[Outcome.STUCK] > PROGRAMS // 8
    assert outcomes[Outcome.FAILED] > PROGRAMS // 8
    assert sorted(workers) == [1, 2, 3, 4, 5, 6]
    assert passes[1] and passes[2] and passes[3]


@pytest.mark.long
def test_as_many_programs_as_asked_for():
    count = int(os.environ.get("JDAG_PROGRAMS", "3000"))
    for seed in range(PROGRAMS, PROGRAMS + count):
        run_program(seed)
        for fault in FAULTS:
            happen(fault, seed)
