"""Random programs that something happens to, and a good one after each.

Whatever happened: no worker that lives has more than its leaves, and the next program,
on the same cluster, gives what it gives on a fresh one.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from random import Random
from typing import Any

from jdag import Cluster, sim, simulate
from jdag.errors import RemoteError, WorkerLost
from tests.random_features import all_steps
from tests.random_functions import FUSE, Broken, Hook
from tests.random_hooks import numbered
from tests.random_programs import Branch, Call, Invoke, Pass, Plan, Raise, Step
from tests.random_runs import Result, clean, passes, put, run, settings
from tests.random_source import source_of

FAILURES = ("forward", "vjp", "hook", "program", "abandon")
FOR_EVER = 1_000_000

Workers = tuple[str, ...]


@lru_cache(maxsize=16)
def expected(number: int, workers: Workers = ()) -> Any:
    """What the program of this number gives on a fresh cluster where nothing happens.

    That this is right is for test_random.py.
    """
    plan = numbered(number, workers)
    return run(plan, source_of(plan), seed=0).bits


def good(cluster: Cluster, number: int, leaves: list[Any], workers: Workers) -> None:
    """Hold that a program gives what it should; `leaves` are there, its own come to."""
    plan = numbered(number, workers)
    mine = put(cluster, plan)
    leaves.extend(mine)
    result = passes(cluster, source_of(plan), mine)
    clean(cluster, leaves)
    assert result.bits == expected(number, workers), source_of(plan).text


# --------------------------------------------------------------------------- failures


def happen(what: str, number: int) -> str:
    """Run a program while this happens to it, then a good one; say how that ended."""
    plan = spoilt(what, number)
    with simulate(
        plan.workers, home=plan.home, **settings(number, plan.workers)
    ) as cluster:
        leaves = put(cluster, plan)
        ended = spoil(cluster, what, plan, leaves)
        clean(cluster, leaves)
        good(cluster, number, leaves, ())
    return ended


def beside(what: str, number: int) -> str:
    """Run a good program, and before its first pass, in another context, a bad one."""
    plan = numbered(number)
    bad = spoilt(what, number)
    ended: list[str] = []
    with simulate(
        plan.workers, home=plan.home, **settings(number, plan.workers)
    ) as cluster:
        leaves, others = put(cluster, plan), put(cluster, bad)

        def before_pass() -> None:
            if not ended:
                ended.append(spoil(cluster, what, bad, others))

        result = passes(cluster, source_of(plan), leaves, before_pass=before_pass)
        clean(cluster, [*leaves, *others])
        assert result.bits == expected(number), source_of(plan).text
    return ended[0]


def spoil(cluster: Cluster, what: str, plan: Plan, leaves: Sequence[Any]) -> str:
    """Run a program that something happens to; hold that whoever wrote it is told."""
    if what in FUSE.left:
        FUSE.light(what, FOR_EVER)
    ended = "untouched"
    result = Result()
    try:
        passes(cluster, source_of(plan), leaves, result=result)
    except (RemoteError, Broken) as error:
        ended = type(error).__name__
    finally:
        for when in FUSE.left:
            FUSE.left[when] = 0
    steps = [step for _, step in all_steps(plan.steps)]
    if what in FUSE.left:
        # What fails in a pass may come second to the pass using what is spent.
        raised = ended == "RemoteError"
        outcomes = [each.outcome for each in result.passes]
        second = what != "forward" and "spent" in outcomes
        assert raised == (FUSE.burnt[what] > 0) or second, (ended, outcomes)
    elif what == "program":
        raises = any(isinstance(step, Raise) for step in steps)
        assert ended == ("RemoteError" if raises else "untouched")
    else:
        assert ended == "Broken"
    return ended


def spoilt(what: str, number: int) -> Plan:
    """The program of this number, made to fail."""
    plan = numbered(number)
    rng = Random(f"{what} {number}")
    if what == "abandon":  # Main raises, whatever is in flight.
        kept = rng.randrange(len(plan.steps))
        return replace(plan, steps=(*plan.steps[:kept], Raise()))
    return replace(plan, steps=_spoilt(plan.steps, what, rng))


def _spoilt(steps: Sequence[Step], what: str, rng: Random) -> tuple[Step, ...]:
    return tuple(_step(step, what, rng) for step in steps)


def _step(step: Step, what: str, rng: Random) -> Step:
    match step:
        case Hook() if what == "hook" and rng.random() < 0.3:
            return replace(step, fuse=True)
        case Call() if what in ("forward", "vjp") and rng.random() < 0.15:
            return replace(step, fuse=what)
        case Branch():
            above = _spoilt(step.above, what, rng)
            return replace(step, above=above, below=_spoilt(step.below, what, rng))
        case Invoke():
            inner = _spoilt(step.body.steps, what, rng)
            if what == "program" and rng.random() < 0.5:
                inner = (*inner[: rng.randint(0, len(inner))], Raise())
            name = f"{step.body.name}_{step.id}"  # Called twice, spoilt in two ways.
            return replace(step, body=replace(step.body, name=name, steps=inner))
        case _:
            return step


def again(number: int) -> int:
    """Have vjps fail in retained passes that are then tried again; return how many do.

    In the end the gradients are those of good passes: failed ones leave nothing.
    """
    plan = spoilt("vjp", number)
    steps = [
        replace(step, retain=True) if isinstance(step, Pass) else step
        for step in plan.steps
    ]
    plan = replace(plan, steps=tuple(steps))
    source = source_of(plan)
    calm = run(plan, source, seed=0)
    fuses = 1 + number % 3
    with simulate(
        plan.workers, home=plan.home, **settings(number, plan.workers)
    ) as cluster:
        leaves = put(cluster, plan)
        FUSE.light("vjp", fuses)
        result = passes(cluster, source, leaves, tries=fuses + 1)
        FUSE.left["vjp"] = 0
        clean(cluster, leaves)
    # What hooks are given in a pass that is tried again is theirs to tell apart.
    assert result.bits[:-1] == calm.bits[:-1], source.text
    return FUSE.burnt["vjp"]


# ---------------------------------------------------------------------------- crashes


def crash_somewhere(number: int) -> str:
    """Crash a worker somewhere in a program, on a network with faults.

    It may join again, at once or so late that the program is over.
    """
    plan = numbered(number)
    others = [worker for worker in plan.workers if worker != plan.home]
    if not others:
        return "alone"
    calm = run(plan, source_of(plan), **settings(number, plan.workers))
    rng = Random(f"crash {number}")
    victim, index = rng.choice(others), rng.randrange(calm.records)
    detect_ns = rng.choice((0, 2_000, 500_000))
    restart_ns = rng.choice((None, 0, 3_000, 2_000_000))
    crash = sim.Crash(victim, detect_ns, at_index=index, restart_ns=restart_ns)
    return crashed(plan, crash, calm, settings(number, plan.workers), number + 1)


def crashed(
    plan: Plan, crash: sim.Crash, calm: Result, options: dict[str, Any], after: int
) -> str:
    """Crash a worker in a program, then run the program `after` on those who live.

    Those are all, where it joins again.
    """
    faults = (*options["faults"], crash)
    options = {**options, "faults": faults}
    leaves: list[Any] = []
    ended = "untouched"
    with simulate(plan.workers, home=plan.home, **options) as cluster:
        try:
            for leaf in plan.leaves:
                leaves.append(cluster.put(leaf.worker, leaf.array))
            result = passes(cluster, source_of(plan), leaves)
            assert result.bits == calm.bits, crash
        except WorkerLost as error:
            ended = "WorkerLost"
            assert repr(crash.worker) in str(error)
        clean(cluster, leaves)
        lost = [name for name, held in cluster.info().items() if held["lost"]]
        assert lost == ([crash.worker] if crash.restart_ns is None else [])
        alive = tuple(name for name in plan.workers if name not in lost)
        good(cluster, after, leaves, alive)
    return ended
