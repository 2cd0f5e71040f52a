"""Exploration: runs a program in many orders of its events; a property checks each run.

Inputs:  a program and its workers, a property, a strategy, a budget of faults.
Outputs: a `Report` with the counts of runs and orders, and with the choices that repeat
         the first run that violates the property.
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
from jdag.scenario.case import Case
from jdag.scenario.player import difference, worst
from jdag.settings.validation import COUNT, converted
from jdag.sim.simulation import COLLECTOR
from jdag.sim.untimed import PossibleStep
from jdag.wire.encoding import encoded

RELATIVE_MAX = 1e-5  # For float32; fused code of the oracle differs in the last bits.


@dataclass(slots=True)
class Report:
    """Result of an exploration.

    Attributes:
        runs: number of runs.
        redundant: number of further runs, which were stopped because an earlier run had
            the same order.
        picks: number of picks among several possible steps, summed over all runs.
        lost: number of runs that a worker's crash ended.
        failure: the first run that violated the property; None if no run did.
        bound: the strategy's guarantee; "" if it gives no guarantee.
        seen: hashes of the orders that occurred.
        reached: for each (role, phase, event) of `jdag.engine.phases`, the number of
            runs in which the event reached an engine in this role and phase.
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
        """Triples of role, phase and event that did not occur in any run.

        A single program cannot reach all triples, since it lacks some kinds of calls,
        passes or faults.
        """
        return tuple([triple for triple in TRIPLES if triple not in self.reached])

    def coverage(self) -> list[str]:
        unreached = self.unreached
        lines = [
            f"{len(self.reached)} of {len(TRIPLES)} triples of role, phase and event"
            f" reached{', but not:' if unreached else ''}"
        ]
        for (role, phase), triples in groupby(unreached, itemgetter(0, 1)):
            events = ", ".join([event for *_, event in triples])
            lines.append(f"  {role}, {phase}: {events}")
        return lines

    def add(self, later: "Report") -> None:
        if self.failure is None:
            self.runs += later.runs
            self.redundant += later.redundant
            self.picks += later.picks
            self.lost += later.lost
            self.failure, self.bound = later.failure, later.bound
            self.seen |= later.seen
            self.reached += later.reached

    @property
    def orders(self) -> int:
        """Number of runs that differ in the order of steps on some worker."""
        return len(self.seen)

    @property
    def counts(self) -> str:
        ended = f", {self.lost:,} of them ended by a crash" if self.lost else ""
        more = f" ({self.redundant:,} more seen before)" if self.redundant else ""
        runs, orders = _counted(self.runs, "run"), _counted(self.orders, "order")
        return f"{runs}{more}{ended}, {orders}, {_counted(self.picks, 'choice point')}"

    def __str__(self) -> str:
        failure = self.failure
        outcome = "no violation" if failure is None else f"violated by {failure}"
        coverage = f"{len(self.reached)} of {len(TRIPLES)} triples"
        return "; ".join(filter(None, [self.counts, coverage, self.bound, outcome]))


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


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
    """Run a program in many orders of its events, until a run violates a property.

    No time passes. The next event may be any of these: a message at the head of a link,
    a ready job, a program that is to be started or resumed, a fault within the budget.

    Args:
        program: a `jdag.scenario.Case`, which has an oracle; or a function of a cluster
            that returns a pytree of arrays and refs, or None.
        workers: names of the workers; the program runs on the first.
        property: function of an `Explored` run that returns False or raises
            AssertionError if the run violates the property, and otherwise returns True
            or None. None: `sound`.
        runs: maximum number of runs.
        strategy: one of `jdag.strategies`; None: `RandomWalk()`.
        values: "real", or "abstract": only shapes and dtypes are computed.
        faults: limit of each kind of fault in a run: "crash", "rejoin", "drop",
            "duplicate". Frames may be late even without a fault.

    Returns:
        A `Report`.

    Raises:
        ScenarioError: an argument is unusable.
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
    report = Report()
    strategy.planned(len(subject.first().choices))
    index_name = f"strategy: pick of {type(strategy).__qualname__}"
    with ExitStack() as stack:
        stack.callback(COLLECTOR.opened(subject))  # Once, not for each run.
        for run in runs:
            pick = _begun(strategy, run)
            if pick is None:
                break
            result = subject.play(pick, index_name)
            strategy.ended(len(result.choices))
            if result.explored is None:
                report.redundant += 1
                continue
            report.runs += 1
            report.picks += result.picks
            explored = result.explored
            report.lost += explored.crashed and explored.error is not None
            report.seen[order_of(result.steps)] = None
            report.reached.update(result.reached)
            report.failure = run_failure(subject, result, property, run)
            if report.failure is not None:
                break
    report.bound = strategy.bound()
    return report


def _begun(strategy: Strategy, run: int) -> Pick | None:
    pick = strategy.begin(run)
    if not (pick is None or callable(pick)):
        called = f"strategy: {type(strategy).__qualname__}.begin({run})"
        allowed = "a function that takes steps and returns the index of one, or None"
        raise ScenarioError(unusable(called, pick, allowed))
    return pick


def sound(run: Explored) -> None:
    """The default property of a run.

    Gradients agree with the oracle, their bits equal those of the default run, and no
    worker still holds values, contexts or passes. A run in which a worker crashed may
    end with an error that reports the loss.
    """
    if run.error is not None:
        message = " ".join(named_text(run.error).split())  # Joined to one line.
        is_loss = isinstance(run.error, WorkerLost) or "lost" in message
        assert run.crashed and is_loss, message
    live_infos = [info for info in run.info.values() if not info["lost"]]
    for name in ("live_contexts", "live_passes"):
        count = sum(int(info[name]) for info in live_infos)
        assert not count, f"{name} is {count} after the run; expected 0"
    assert run.crashed or not run.left, f"workers still hold {run.left} values"
    assert run.same_bits, "the result's bits differ from those of the default order"
    if run.result is not None and run.expected is not None:
        near(run.result, run.expected)


def near(result: Sequence[Any], expected: Sequence[Any], where: str = "") -> None:
    difference_max = worst(list(map(difference, result, expected)))
    message = f"{where}a gradient differs from the oracle's by {difference_max:.1e}"
    assert difference_max <= RELATIVE_MAX, message


def order_of(steps: Iterable[PossibleStep]) -> bytes:
    """Return a hash of the orders of steps, as far as workers can distinguish them."""
    spans: list[dict[str, list[PossibleStep]]] = [defaultdict(list)]
    for step in steps:
        spans[-1][step.worker].append(step)
        if step.kind in EVERYWHERE:
            spans.append(defaultdict(list))
    ordered = [sorted(by_worker.items()) for by_worker in spans]
    return hashlib.sha256(encoded(ordered)).digest()
