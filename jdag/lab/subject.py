"""What is explored: a program that is run again and again, each time in another order.

Inputs:  a `jdag.scenario.Case` or a function of a cluster; workers; a budget of faults;
         for each run what picks its steps.
Outputs: what was picked, and what came of the run (`Explored`).

Invariants: a run is a function of the program, the workers, the budget and its choices.
Nothing of one run is left for the next, but compiled functions.
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
from jdag.scenario.case import Case, bits
from jdag.settings.validation import NATURAL, converted, where
from jdag.sim.settings import SimSettings
from jdag.sim.untimed import PossibleStep, StepChooser


@dataclass(frozen=True)
class Explored:
    """One run, as a property sees it.

    Attributes:
        error: what the program or a pass raised; None if it finished. One that is not
            jdag's is there only if the run of first choices has none like that.
        result: of a `Case`, the gradients of its parameters, in the order of
            `jax.tree.leaves`, None for one that no root depends on; of a function, the
            leaves of what it returned, fetched. None if it failed.
        expected: the same by the oracle, of a `Case` with real values; else None.
        same_bits: whether the result has the bits of the run in which each step is the
            first of those there were; so too if one of the two has none.
        trace: the record of the run, which is run again for it.
        info: `cluster.info()` after it.
        crashed: whether a worker crashed in it.
        left: how many values are held afterwards that are no leaves.
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
        """See above."""
        return self.again()


@dataclass(slots=True)
class RunResult:
    """What was picked in a run, how often among several steps, and what came of it.

    `firsts` has the first of the steps at each pick.
    `explored` is None if it was given up, as its order had been seen; `reached` has
    role, phase and event of what came to engines.
    """

    choices: list[int] = field(default_factory=list)
    steps: list[PossibleStep] = field(default_factory=list)
    picks: int = 0
    firsts: list[PossibleStep] = field(default_factory=list)
    reached: list[Triple] = field(default_factory=list)
    explored: Explored | None = None


class Subject:
    """A program, its workers, the kind of its values, and the faults there may be.

    Raises:
        ScenarioError: one of these is unusable: names it, its value, what is allowed.
    """

    def __init__(
        self,
        program: Case | Callable[[Cluster], Any],
        workers: Sequence[str],
        values: str,
        faults: Mapping[str, int],
    ) -> None:
        if not (isinstance(program, Case) or _takes_one(program)):
            allowed = (
                "a jdag.scenario.Case, or a function of a cluster, which takes one "
                "argument; a program of (ctx, params) is wrapped in "
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
        self._bits: str | None = None  # Of the run of first choices.
        self._first: RunResult | None = None

    @property
    def name(self) -> str:
        """The name of the program."""
        program = self.program
        return name_of(program.program if isinstance(program, Case) else program)

    def play(self, pick: Pick, what: str = "pick") -> RunResult:
        """Run once, with the steps that are picked; `what` as in `StepChooser`."""
        chooser = StepChooser(pick, self.faults.items(), what)
        explored, _ = self._played(chooser, trace=False)
        steps, choices = chooser.steps, chooser.choices
        chooser.steps = []  # They are many, and the run itself is full of cycles.
        return RunResult(
            choices,
            [of[index] for of, index in zip(steps, choices, strict=True)],
            sum([len(of) > 1 for of in steps]),
            [of[0] for of in steps],
            [triple(*one) for one in chooser.reached],
            explored,
        )

    @outermost  # So that the trace does not depend on who runs it.
    def _played(
        self, chooser: StepChooser, *, trace: bool
    ) -> tuple[Explored | None, Trace]:
        """Run once; None if that was given up."""
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
            cluster.state.clusters.clear()  # So that no cycle is left.
        if explored is not None:
            _pass_on_interrupt(explored.error)
        if chooser.failed is not None:
            raise chooser.failed
        return explored, cluster.trace

    def _again(self, choices: Sequence[int]) -> Trace:
        chooser = StepChooser(Script(choices).pick, self.faults.items())
        return self._played(chooser, trace=True)[1]

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
                raise  # In every order.
            error, result = raised, None
        expected, same = None, True
        if result is not None and self.values == "real":
            said = bits(result)
            self.first()
            same = said == (self._bits or said)
            expected = self.truth()
        info = cluster.info()
        held = sum(int(one["values_held"]) for one in info.values() if not one["lost"])
        leaves = len(cluster.state.living(info))
        crashed = cluster.driver.crashed
        return Explored(
            *(error, result, expected, same, info, crashed, held - leaves),
            again=partial(self._again, choices),
        )

    def first(self) -> RunResult:
        """The run of first choices."""
        if self._first is None:
            self._first = RunResult()  # It is compared with nothing itself.
            self._first = self.play(lambda steps: 0)
            explored = self._first.explored
            if explored is not None and explored.result is not None:
                self._bits = bits(explored.result)
        return self._first

    def run(self, cluster: Cluster) -> tuple[Any, ...]:
        """Run the program on a cluster; return the result, as `Explored` has it."""
        case = self._case
        if not isinstance(case, Case):
            leaves = jax.tree.leaves(case(cluster))
            return tuple(one.fetch() if type(one) is Ref else one for one in leaves)
        refs = case.put(cluster)
        with cluster.context() as ctx:
            case.backward(ctx, case.roots(ctx, refs))
            return () if self.values == "abstract" else case.gradients(ctx, refs)

    def truth(self) -> tuple[Any, ...] | None:
        """The result by the oracle; None if the program has none."""
        if self._expected is None and isinstance(self._case, Case):
            truth = self._case.truth()
            self._expected = tuple(np.asarray(one) for one in truth)
        return self._expected


_KINDS = f"one of {', '.join(FAULTS)}; a frame may be late without a fault"
_KIND = Annotated[str, where(lambda kind: kind in FAULTS, _KINDS)]
_FAULTS = Annotated[
    Mapping[_KIND, NATURAL],
    Meta(description='numbers by kind, such as {"crash": 1}'),
]


def check_subject(workers: Any, values: Any, faults: Any) -> None:
    """Raise ScenarioError if workers, the kind of values or faults are unusable."""
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


def _takes_one(function: Any) -> bool:
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # Some of C have no signature.
        return True
    return True


def _array(leaf: Any) -> Any:
    """What `Cluster.put` makes of an array, once for all runs; the rest stays."""
    is_numbers = isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc"
    if is_numbers or (is_array(leaf) and not is_deleted(leaf)):
        return stored(frozen(leaf))
    return leaf


def _pass_on_interrupt(error: BaseException | None) -> None:
    """Raise the interrupt that leaving a context has turned into an error."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            raise error
        error = error.__context__
