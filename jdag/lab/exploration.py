"""Exploration: one program in many orders of its events, each held to a property.

Inputs:  a program and its workers, a property, a strategy, a budget of faults.
Outputs: a `Report`: how many runs and orders there were, and the first run that breaks
         the property, as the choices that repeat it.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal

from jdag.api.cluster import Cluster
from jdag.engine.phases import TRIPLES, Triple
from jdag.errors import ScenarioError, WorkerLost, named_text, unusable
from jdag.lab.failures import Property, RunFailure, run_failure
from jdag.lab.strategies import EVERYWHERE, Pick, RandomWalk, Strategy
from jdag.lab.subject import Explored, Subject
from jdag.scenario.case import Case, difference, worst
from jdag.settings.validation import COUNT, converted
from jdag.sim.simulation import COLLECTOR
from jdag.sim.untimed import PossibleStep
from jdag.wire.encoding import encoded

RELATIVE_MAX = 1e-5  # Of float32; what the oracle fuses may differ in the last bits.


@dataclass(slots=True)
class Report:
    """What an exploration found.

    Attributes:
        runs: how many there were.
        redundant: how many more were given up, as their orders had been seen.
        picks: how often a step was picked among several, over all runs.
        lost: how many runs a worker's crash ended.
        failure: the first run that broke the property; None if none did.
        bound: what the strategy promises; "" for nothing.
        reached: in how many runs an event came in a phase: by role, phase and event
            (`jdag.engine.phases`).
    """

    runs: int = 0
    redundant: int = 0
    picks: int = 0
    lost: int = 0
    failure: RunFailure | None = None
    bound: str = ""
    seen: dict[bytes, None] = field(default_factory=dict, repr=False)
    reached: Counter[Triple] = field(default_factory=Counter, repr=False)

    @property
    def unreached(self) -> tuple[Triple, ...]:
        """What may come to an engine, and has not in any run.

        Much of it cannot come in one program: it has no such call, pass or fault.
        """
        return tuple([triple for triple in TRIPLES if triple not in self.reached])

    def coverage(self) -> list[str]:
        """Lines that say how much was reached, and what was not, by role and phase."""
        left = self.unreached
        lines = [
            f"{len(TRIPLES) - len(left)} of {len(TRIPLES)} triples of role, phase and"
            f" event reached{', but not:' if left else ''}"
        ]
        for (role, phase), of in groupby(left, itemgetter(0, 1)):
            lines.append(f"  {role}, {phase}: {', '.join([event for *_, event in of])}")
        return lines

    def add(self, other: "Report") -> None:
        """Add what further runs found; they count as long as there is no failure."""
        if self.failure is None:
            self.runs += other.runs
            self.redundant += other.redundant
            self.picks += other.picks
            self.lost += other.lost
            self.failure, self.bound = other.failure, other.bound
            self.seen |= other.seen
            self.reached += other.reached

    @property
    def orders(self) -> int:
        """How many runs differed in the order of steps on some worker."""
        return len(self.seen)

    @property
    def counts(self) -> str:
        """How many runs and orders there were, and how many a crash ended."""
        ended = f", {self.lost:,} of them ended by a crash" if self.lost else ""
        more = f" ({self.redundant:,} more seen before)" if self.redundant else ""
        runs, orders = _counted(self.runs, "run"), _counted(self.orders, "order")
        return f"{runs}{more}{ended}, {orders}, {_counted(self.picks, 'choice point')}"

    def __str__(self) -> str:
        found = (
            "no violation" if self.failure is None else f"violated by {self.failure}"
        )
        covered = f"{len(self.reached)} of {len(TRIPLES)} triples"
        return "; ".join(filter(None, [self.counts, covered, self.bound, found]))


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def explore(
    program: Case | Callable[[Cluster], Any],
    workers: Sequence[str],
    property: Property | None = None,
    *,
    runs: int = 1_000,
    strategy: Strategy | None = None,
    values: Literal["real", "abstract"] = "real",
    faults: Mapping[str, int] | None = None,
) -> Report:
    """Run a program in many orders of its events, until one breaks a property.

    No time passes: each message at the head of a link, ready job, program to be woken
    or started, and fault of the budget may be the next thing to happen.

    Args:
        program: a `jdag.scenario.Case`, which has an oracle; or a function that takes a
            cluster, and returns a pytree of arrays and refs, if anything.
        workers: their names; the program runs on the first.
        property: takes an `Explored` run; returns False or raises AssertionError if the
            run breaks it, and True or None if not. None: `sound`.
        runs: how many at most.
        strategy: one of `jdag.strategies`; None: `RandomWalk()`.
        values: "real", where JAX computes, or "abstract", where shapes alone are known.
        faults: how many there may be in a run, by kind: "crash", "rejoin", "drop",
            "duplicate". Delays are no fault: each frame may be late in any order.

    Raises:
        ScenarioError: a setting that is unusable: names it, its value, what is allowed.
    """
    converted(COUNT, runs, "runs")
    strategy = RandomWalk() if strategy is None else strategy
    if not isinstance(strategy, Strategy):
        allowed = "one of jdag.strategies, such as jdag.strategies.PCT(depth=3)"
        raise ScenarioError(unusable("strategy", strategy, allowed))
    if property is not None and not callable(property):
        raise ScenarioError(unusable("property", property, "a function of a run"))
    subject = Subject(program, workers, values, faults or {})
    return exploration(subject, property or sound, range(runs), strategy)


def exploration(
    subject: Subject, property: Property, runs: Iterable[int], strategy: Strategy
) -> Report:
    """Explore a subject by the runs of these numbers."""
    report = Report()
    strategy.planned(len(subject.first().choices))
    what = f"strategy: pick of {type(strategy).__qualname__}"
    with ExitStack() as leaving:
        leaving.callback(COLLECTOR.opened(subject))  # Once, not for each run.
        for run in runs:
            pick = _begun(strategy, run)
            if pick is None:
                break
            played = subject.play(pick, what)
            strategy.ended(len(played.choices))
            if played.explored is None:
                report.redundant += 1
                continue
            report.runs += 1
            report.picks += played.picks
            explored = played.explored
            report.lost += explored.crashed and explored.error is not None
            report.seen[order_of(played.steps)] = None
            report.reached.update(played.reached)
            report.failure = run_failure(subject, played, property, run)
            if report.failure is not None:
                break
    report.bound = strategy.bound()
    return report


def _begun(strategy: Strategy, run: int) -> Pick | None:
    """What picks in a run, None if there are no more."""
    pick = strategy.begin(run)
    if not (pick is None or callable(pick)):
        called = f"strategy: {type(strategy).__qualname__}.begin({run})"
        allowed = "a function that takes steps and returns the index of one, or None"
        raise ScenarioError(unusable(called, pick, allowed))
    return pick


def sound(run: Explored) -> None:
    """The default property: what the oracle says, always the same bits, nothing left.

    A run in which a worker crashed may end by that.
    """
    if run.error is not None:
        said = " ".join(named_text(run.error).split())  # In one line.
        assert run.crashed and (isinstance(run.error, WorkerLost) or "lost" in said), (
            said
        )
    living = [one for one in run.info.values() if not one["lost"]]
    for name in ("live_contexts", "live_passes"):
        held = sum(int(one[name]) for one in living)
        assert not held, f"{name}: {held} are left"
    assert run.crashed or not run.left, f"{run.left} values are left"
    assert run.same_bits, "the result has other bits than in the order of first choices"
    if run.result is not None and run.expected is not None:
        near(run.result, run.expected)


def near(result: Sequence[Any], expected: Sequence[Any], where: str = "") -> None:
    """Raise AssertionError if a gradient is not what the oracle says."""
    apart = worst(list(map(difference, result, expected)))
    said = f"{where}a gradient is off the oracle's by {apart:.1e}"
    assert apart <= RELATIVE_MAX, said


def order_of(steps: Iterable[PossibleStep]) -> bytes:
    """A hash of the order of steps on each worker, which is all that workers see."""
    spans: list[dict[str, list[PossibleStep]]] = [defaultdict(list)]
    for step in steps:
        spans[-1][step.worker].append(step)
        if step.kind in EVERYWHERE:
            spans.append(defaultdict(list))
    said = [sorted(by_worker.items()) for by_worker in spans]
    return hashlib.sha256(encoded(said)).digest()
