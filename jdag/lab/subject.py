"""The subject of an exploration: a program that is run many times, in many orders.

Inputs:  a `jdag.scenario.Case` or a function of a cluster; workers; a budget of faults;
         a function for each run, which picks its steps.
Outputs: the picks, and the outcome of the run (`Explored`).

Invariants: a run is a function of the program, workers, budget and choices. Runs share
nothing but compiled functions.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Annotated, Any

import jax
import numpy as np
from msgspec import Meta

from jdag.api.cluster import Cluster
from jdag.api.drivers import simulated
from jdag.compute.avals import frozen, is_deleted
from jdag.compute.duals import is_array
from jdag.context.leaves import stored
from jdag.context.refs import Ref
from jdag.engine.functions import name_of, outermost
from jdag.engine.phases import Triple, triple
from jdag.errors import JdagError, ScenarioError, unusable
from jdag.lab.strategies import FAULTS, Pick, Redundant, Script
from jdag.runtime.trace import Trace
from jdag.scenario.case import Case
from jdag.scenario.player import bits
from jdag.settings.validation import NATURAL, converted, where
from jdag.sim.settings import SimSettings
from jdag.sim.untimed import PossibleStep, StepChooser


@dataclass(frozen=True)
class Explored:
    """One run, as a property receives it.

    Attributes:
        error: the error that the program or a pass raised; None if it finished. Errors
            other than `JdagError` are included only if the default run has no error.
        result: for a `Case`, the gradients of its parameters, in the order of
            `jax.tree.leaves`, with None for parameters that no root depends on; for a
            function, the fetched leaves of its result. None if the run failed.
        expected: the oracle's gradients for a `Case` with real values, otherwise None.
        same_bits: whether the result has the same bits as the result of the default
            run, in which every pick is the first step. True if one of the two runs has
            no result.
        trace: the trace of the run. The first use runs the program again to record it.
        info: `cluster.info()` after the run.
        crashed: whether a worker crashed.
        left: number of values other than leaves that workers still hold.
    """

    error: Exception | None
    result: tuple[Any, ...] | None
    expected: tuple[Any, ...] | None
    same_bits: bool
    info: Mapping[str, Mapping[str, Any]]
    crashed: bool
    left: int
    again: Callable[[], Trace] = field(repr=False, compare=False)

    @cached_property
    def trace(self) -> Trace:
        return self.again()


@dataclass(slots=True)
class RunResult:
    """The picks and the outcome of a run.

    `picks` counts the picks among several possible steps. `firsts` has the first
    possible step at each pick. `explored` is None if the run was stopped because its
    order had been seen. `reached` has (role, phase, event) of each input of an engine.
    """

    choices: list[int] = field(default_factory=list)
    steps: list[PossibleStep] = field(default_factory=list)
    picks: int = 0
    firsts: list[PossibleStep] = field(default_factory=list)
    reached: list[Triple] = field(default_factory=list)
    explored: Explored | None = None


class Subject:
    """A program with its workers, the kind of its values, and its budget of faults."""

    def __init__(
        self,
        program: Case | Callable[[Cluster], Any],
        workers: Sequence[str],
        values: str,
        faults: Mapping[str, int],
    ) -> None:
        if not (isinstance(program, Case) or _takes_one_argument(program)):
            allowed = (
                "a jdag.scenario.Case, or a function with one argument, a cluster; "
                "wrap a program of (ctx, params) in "
                "jdag.scenario.Case(program, params, placement)"
            )
            raise ScenarioError(unusable("program", program, allowed))
        check_subject(workers, values, faults)
        if isinstance(program, Case):
            _check_case(program)
        self.program = program
        self.workers = workers
        self.values = values
        self.faults = dict(faults)
        self._case = program
        if isinstance(program, Case) and values == "real":
            params = {k: jax.tree.map(_array, v) for k, v in program.params.items()}
            self._case = replace(program, params=params)
        self._expected: tuple[Any, ...] | None = None
        self._bits: str | None = None  # Result of the default run.
        self._first: RunResult | None = None

    @property
    def name(self) -> str:
        program = self.program
        return name_of(program.program if isinstance(program, Case) else program)

    def play(self, pick: Pick, index_name: str = "pick") -> RunResult:
        chooser = StepChooser(pick, self.faults.items(), index_name)
        explored, _ = self._run_with(chooser, trace=False)
        steps, choices = chooser.steps, chooser.choices
        chooser.steps = []  # Frees memory early: the run has reference cycles.
        return RunResult(
            choices,
            [possible[index] for possible, index in zip(steps, choices, strict=True)],
            sum([len(possible) > 1 for possible in steps]),
            [possible[0] for possible in steps],
            [triple(*situation) for situation in chooser.reached],
            explored,
        )

    @outermost  # The trace must not depend on the caller.
    def _run_with(
        self, chooser: StepChooser, *, trace: bool
    ) -> tuple[Explored | None, Trace]:
        """Run once. Return the outcome (None if redundant) and the trace."""
        cluster = simulated(_settings(self.workers, self.values, chooser, trace))
        explored: Explored | None = None
        try:
            explored = self._explored(cluster, chooser.choices)
        except BaseException as error:
            _pass_on_interrupt(error)
            if not isinstance(error, Redundant):
                raise
        finally:
            cluster.close()
            cluster.state.clusters.clear()  # Breaks the reference cycle.
        if explored is not None:
            _pass_on_interrupt(explored.error)
        if chooser.failed is not None:
            raise chooser.failed
        return explored, cluster.trace

    def _again(self, choices: Sequence[int]) -> Trace:
        chooser = StepChooser(Script(choices).pick, self.faults.items())
        return self._run_with(chooser, trace=True)[1]

    def _explored(self, cluster: Cluster, choices: Sequence[int]) -> Explored:
        error: Exception | None = None
        result: tuple[Any, ...] | None = None
        try:
            try:
                result = self.run(cluster)
            except JdagError as raised:
                error = raised
            cluster.driver.settle()
        except Exception as raised:
            if self._first is None or not self._first.steps:
                raise  # The default run fails too, so the order is not the cause.
            error, result = raised, None
        expected, same = None, True
        if result is not None and self.values == "real":
            result_bits = bits(result)
            self.first()
            same = result_bits == (self._bits or result_bits)
            expected = self.truth()
        info = cluster.info()
        held_count = sum(
            int(counts["values_held"]) for counts in info.values() if not counts["lost"]
        )
        leaves = len(cluster.state.living(info))
        crashed = cluster.driver.crashed
        return Explored(
            *(error, result, expected, same, info, crashed, held_count - leaves),
            again=partial(self._again, choices),
        )

    def first(self) -> RunResult:
        """Return the default run, in which every pick is the first step."""
        if self._first is None:
            self._first = RunResult()  # The default run is compared with no other run.
            self._first = self.play(lambda steps: 0)
            explored = self._first.explored
            if explored is not None and explored.result is not None:
                self._bits = bits(explored.result)
        return self._first

    def run(self, cluster: Cluster) -> tuple[Any, ...]:
        case = self._case
        if not isinstance(case, Case):
            leaves = jax.tree.leaves(case(cluster))
            return tuple(leaf.fetch() if type(leaf) is Ref else leaf for leaf in leaves)
        refs = case.put(cluster)
        with cluster.context() as ctx:
            case.backward(ctx, case.roots(ctx, refs))
            return () if self.values == "abstract" else case.gradients(ctx, refs)

    def truth(self) -> tuple[Any, ...] | None:
        if self._expected is None and isinstance(self._case, Case):
            truth = self._case.truth()
            self._expected = tuple(np.asarray(gradient) for gradient in truth)
        return self._expected


_KINDS = f"one of {', '.join(FAULTS)}; frames may be late even without a fault"
_KIND = Annotated[str, where(lambda kind: kind in FAULTS, _KINDS)]
_FAULTS = Annotated[
    Mapping[_KIND, NATURAL],
    Meta(description='numbers by kind, such as {"crash": 1}'),
]


def check_subject(workers: Any, values: Any, faults: Any) -> None:
    _settings(workers, values)
    converted(_FAULTS, faults, "faults")


def _check_case(case: Case) -> None:
    if not callable(case.program):
        allowed = "a function of a context and the parameters"
        raise ScenarioError(unusable("program", case.program, allowed))
    if not isinstance(case.params, Mapping):
        raise ScenarioError(unusable("params", case.params, "arrays by name"))
    is_by_name = isinstance(case.placement, Mapping)
    if not (is_by_name and case.params.keys() <= case.placement.keys()):
        allowed = f"the worker of each of {', '.join(map(repr, case.params))}"
        raise ScenarioError(unusable("placement", case.placement, allowed))


def _settings(
    workers: Any, values: Any, chooser: StepChooser | None = None, trace: bool = False
) -> SimSettings:
    return SimSettings(
        workers=workers,
        seed=0,
        detect_ns=0,
        values=values,
        chooser=chooser,
        trace=trace,
    )


def _takes_one_argument(function: Any) -> bool:
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # Some functions in C have no signature.
        return True
    return True


def _array(leaf: Any) -> Any:
    """Convert a leaf as `Cluster.put` does, so that it is converted only once."""
    is_numbers = isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc"
    if is_numbers or (is_array(leaf) and not is_deleted(leaf)):
        return stored(frozen(leaf))
    return leaf


def _pass_on_interrupt(error: BaseException | None) -> None:
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            raise error
        error = error.__context__
