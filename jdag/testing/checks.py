"""`assert_equals_oracle`: one assertion over several orders of a program's events.

Inputs:  a program, and the arguments of `jdag.explore`; `replaying`, a failure file
         that the assertion repeats instead of exploring.
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

DRAWN = "drawn:"  # Prefix of a failure's `scenario` if the program was drawn.
replaying: list[Path] = []  # The failure file of `--jdag-replay`, if it was given.
repeated: list[Path] = []  # That file, once an assertion has repeated its run.


class Violation(AssertionError):
    """A run violated the property that `assert_equals_oracle` checks.

    Attributes:
        failure: the run, a `RunFailure`.
        drawn: the program, if the strategy `programs` drew it; otherwise None.
    """

    def __init__(self, failure: RunFailure, drawn: Program | None) -> None:
        super().__init__(str(failure))
        self.failure = failure
        self.drawn = drawn

    def save(self, path: Path) -> None:
        """Write the failure to a file. A drawn program is part of the file."""
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
    """Check a program against the oracle in several orders of its events.

    Args:
        program: a program drawn by `programs`, or a program as `jdag.explore` takes it.
        workers: names of the workers; a drawn program has its own.
        runs: maximum number of orders.
        strategy: picks the orders; None: `RandomWalk()`.
        faults: a budget for each run, as for `jdag.explore`.
        property: a function that checks each run, as for `jdag.explore`.
        simulated: settings of `jdag.simulate` for one more run, in virtual time:
            network, faults, devices, seed. Only for a `Case` or a drawn program.

    Raises:
        Violation: an AssertionError that names the run and its order.
        ScenarioError: an argument is unusable.
    """
    drawn = program if isinstance(program, Program) else None
    if replaying and _replay(replaying[0], program, workers, drawn, property or sound):
        return
    explored = program.case() if isinstance(program, Program) else program
    names = drawn.workers if drawn is not None else workers
    report = explore(
        explored, names, property, runs=runs, strategy=strategy, faults=faults
    )
    if report.failure is not None:
        raise Violation(report.failure, drawn)
    if simulated is not None:
        _check_timed(Subject(explored, names, "real", {}), simulated)


def _check_timed(subject: Subject, settings: Mapping[str, Any]) -> None:
    if not (isinstance(subject.program, Case) and isinstance(settings, Mapping)):
        allowed = "a mapping, together with a Case or a drawn program"
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
    """Repeat the run of a failure file. False if the file is of another assertion."""
    data = read_failure(path)
    if data["scenario"].startswith(DRAWN):
        drawn = program_of(json.loads(data["scenario"].removeprefix(DRAWN)))
    explored = program if drawn is None else drawn.case()
    subject = Subject(explored, data["workers"], data["values"], data["faults"])
    expected_workers = data["workers"] if drawn is not None else [*workers]
    if (subject.name, expected_workers) != (data["program"], data["workers"]):
        return False
    repeated[:] = [path]
    result = replayed(data, path, subject)
    failure = run_failure(subject, result, property, data["run"])
    if failure is not None:
        raise Violation(failure, drawn)
    return True
