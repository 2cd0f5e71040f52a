"""`assert_equals_oracle`: a program in several orders of events, in one assertion.

Inputs:  a program, and what `jdag.explore` takes; `replaying`, a file of a failure that
         the assertion of its program repeats in place of exploring.
Outputs: nothing, or a `Violation`, whose failure the pytest plugin shrinks and saves.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jdag.api.cluster import Cluster
from jdag.api.drivers import simulate
from jdag.errors import ScenarioError, unusable
from jdag.lab.exploration import explore, near, sound
from jdag.lab.failures import Property, RunFailure, read_failure, replayed, run_failure
from jdag.lab.strategies import Strategy
from jdag.lab.subject import Subject
from jdag.scenario.case import Case
from jdag.testing.drawn import Program, program_of

DRAWN = "drawn:"  # Begins a failure's `scenario` if the program was drawn.
replaying: list[Path] = []  # One file, or none.
repeated: list[Path] = []  # The same, once its run was repeated.


class Violation(AssertionError):
    """A program's run was wrong; `failure` is which, `drawn` the program if drawn."""

    def __init__(self, failure: RunFailure, drawn: Program | None) -> None:
        super().__init__(str(failure))
        self.failure = failure
        self.drawn = drawn

    def save(self, path: Path) -> None:
        """Write the failure, with the program if that was drawn."""
        drawn = "" if self.drawn is None else DRAWN + json.dumps(self.drawn.data())
        self.failure.save(path, drawn)


def assert_equals_oracle(
    program: Program | Case | Callable[[Cluster], Any],
    workers: Sequence[str] = (),
    *,
    runs: int = 20,
    strategy: Strategy | None = None,
    faults: Mapping[str, int] | None = None,
    property: Property | None = None,
    simulated: Mapping[str, Any] | None = None,
) -> None:
    """Hold a program against the oracle in several orders of its events.

    Args:
        program: one that `programs` drew, or what `jdag.explore` takes.
        workers: their names; of a drawn program those that it has.
        runs: how many orders are run at most.
        strategy: what picks them; None: `RandomWalk()`.
        faults: a budget for each run, as `jdag.explore` takes it.
        property: what each run has to keep; None: what `jdag.explore` asks for.
        simulated: settings of `jdag.simulate` for one more run, in virtual time:
            network, faults, devices, seed. Of a `Case` or a drawn program.

    Raises:
        Violation: an AssertionError that says in which order which run is wrong.
        ScenarioError: an argument is unusable.
    """
    drawn = program if isinstance(program, Program) else None
    if replaying and _replay(replaying[0], program, workers, drawn, property or sound):
        return
    what = program.case() if isinstance(program, Program) else program
    names = drawn.workers if drawn is not None else workers
    found = explore(what, names, property, runs=runs, strategy=strategy, faults=faults)
    if found.failure is not None:
        raise Violation(found.failure, drawn)
    if simulated is not None:
        _check_timed(Subject(what, names, "real", {}), simulated)


def _check_timed(subject: Subject, settings: Mapping[str, Any]) -> None:
    if not (isinstance(subject.program, Case) and isinstance(settings, Mapping)):
        allowed = "settings of jdag.simulate, by name; and only with a "
        allowed += "jdag.scenario.Case or a drawn program"
        raise ScenarioError(unusable("simulated", settings, allowed))
    with simulate(subject.workers, **{"seed": 0, **settings}) as cluster:
        result = subject.run(cluster)
    expected = subject.truth()
    assert expected is not None, subject.name
    near(result, expected, f"with {dict(settings)} ")


def _replay(
    path: Path,
    program: Any,
    workers: Sequence[str],
    drawn: Program | None,
    property: Property,
) -> bool:
    """Repeat the run of a file; False if that is of another assertion of the test."""
    held = read_failure(path)
    if held["scenario"].startswith(DRAWN):
        drawn = program_of(json.loads(held["scenario"].removeprefix(DRAWN)))
    what = program if drawn is None else drawn.case()
    subject = Subject(what, held["workers"], held["values"], held["faults"])
    own = held["workers"] if drawn is not None else [*workers]
    if (subject.name, own) != (held["program"], held["workers"]):
        return False
    repeated[:] = [path]
    played = replayed(held, path, subject)
    failure = run_failure(subject, played, property, held["run"])
    if failure is not None:
        raise Violation(failure, drawn)
    return True
