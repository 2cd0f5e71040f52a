"""Runs that violated a property: shrunk, saved, and repeated from a file.

Inputs:  a subject, the choices of a run, a property; or a file.
Outputs: a `RunFailure`; a JSON file from which `replay` repeats the run.

Invariants: running the subject with a failure's choices reproduces the failure, in any
process. A shrunk failure violates the property too; it either delays a single step or
has fewer choices other than the default than the original, or it is the original.
"""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from jdag.api.cluster import Cluster
from jdag.errors import ScenarioError, reason, unusable
from jdag.lab.places import place_of
from jdag.lab.strategies import Script
from jdag.lab.subject import Explored, RunResult, Subject, check_subject
from jdag.runtime.versions import version_of
from jdag.scenario.case import Case
from jdag.settings.validation import COUNT, PATH, converted
from jdag.sim.untimed import PossibleStep

FORMAT = 5
_SHOWN_MAX = 4
OTHER_BITS = (
    "the steps equal the saved ones, but the digest differs: values or messages in the "
    "trace have changed"
)
_KEYS = {
    **{"jdag": str, "program": str, "scenario": str, "workers": list, "values": str},
    **{"run": int, "why": str, "choices": list, "steps": list, "held": list},
    **{"faults": dict, "digest": str, "property": str},
}
_NOUNS = {str: "a string", list: "a list", int: "an integer", dict: "a table"}

Property = Callable[[Explored], object]


@dataclass(frozen=True, eq=False)
class RunFailure:
    """A run that violated the property; `choices` repeat it.

    Attributes:
        run: the number of the run.
        why: the property's message.
        choices: the index of the picked step at each pick. After these picks, the index
            is always 0.
        steps: the step that was picked at each pick.
        firsts: the first of the possible steps at each pick.
        explored: the run.
        subject: the program, workers and faults.
        property: the violated property.
        held: steps that waited until nothing else could happen, if the order differs
            from the default order only in these steps.
    """

    run: int
    why: str
    choices: tuple[int, ...]
    steps: tuple[PossibleStep, ...]
    firsts: tuple[PossibleStep, ...]
    explored: Explored
    subject: Subject
    property: Property
    held: tuple[PossibleStep, ...] = ()

    @cached_property
    def digest(self) -> str:
        return str(self.explored.trace.digest)

    def __str__(self) -> str:
        changed = [number for number, choice in enumerate(self.choices) if choice]
        where = "the first choice everywhere"
        if self.held:
            texts = [f"{s} waits until nothing else can happen" for s in self.held]
            where += f", but {', '.join(texts)}"
        elif changed:
            texts = [f"at step {n}: {self.picked(n)}" for n in changed[:_SHOWN_MAX]]
            if len(changed) > _SHOWN_MAX:
                texts[-1] += f" and {len(changed) - _SHOWN_MAX} more"
            where += f" but {', '.join(texts)}"
        return f"run {self.run}: {self.why} ({where})"

    def picked(self, number: int) -> str:
        return pick_text(self.steps[number], self.firsts[number])

    def shrink(self, runs: int = 1_000) -> "RunFailure":
        """Return a simpler failure, found within `runs` more runs.

        This first tries to delay a single step. If that does not violate the property,
        delta debugging minimizes the number of choices other than 0 (Zeller,
        Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", IEEE
        Transactions on Software Engineering 2002).
        """
        converted(COUNT, runs, "runs")
        result = self.subject.play(lambda steps: 0)
        failure = run_failure(self.subject, result, self.property, self.run)
        if failure is not None:
            return failure
        for step in dict.fromkeys(self.steps):
            if runs <= 0:
                return self
            runs -= 1
            result = self.subject.play(partial(_delayed, step))
            failure = run_failure(self.subject, result, self.property, self.run)
            if failure is not None:
                return replace(failure, held=(step,))
        best, width = self, len(self.choices)
        while width and runs > 0:
            previous, start = best, 0
            while start < len(best.choices) and runs > 0:
                end = start + width
                if any(best.choices[start:end]):
                    zeros = [0] * len(best.choices[start:end])
                    tried = [*best.choices[:start], *zeros, *best.choices[end:]]
                    best = self._smaller(best, tried)
                    runs -= 1
                start = end
            if best is previous:
                width //= 2
        return best

    def _smaller(self, best: "RunFailure", choices: Sequence[int]) -> "RunFailure":
        result = run_again(self.subject, choices)
        failure = run_failure(self.subject, result, self.property, self.run)
        if failure is None or _weight(failure) >= _weight(best):
            return best
        return failure

    def save(self, path: str | Path, scenario: str = "") -> None:
        """Write a JSON file from which `jdag.replay` repeats this run.

        Args:
            path: the file.
            scenario: path of the scenario's file, if the program comes from a scenario.
                Otherwise the saved file names the program as module:name, if it is
                defined at the top level of a module or of a script with a main guard.

        Raises:
            ScenarioError: the file cannot be written.
        """
        subject = self.subject
        data = {
            "format": FORMAT,
            "jdag": version_of("jdag"),
            "program": subject.name,
            "scenario": scenario or place_of(subject.program),
            "property": place_of(self.property),
            "workers": [*subject.workers],
            "values": subject.values,
            "faults": subject.faults,
            "run": self.run,
            "why": self.why,
            "choices": self.choices,
            "steps": [str(step) for step in self.steps],
            "held": [str(step) for step in self.held],
            "digest": self.digest,
        }
        text = json.dumps(data, indent=1) + "\n"
        try:
            Path(converted(PATH, path, "path")).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ScenarioError(f"{path}: {reason(error)}") from error


def replay(
    path: str | Path, program: Case | Callable[[Cluster], Any]
) -> tuple[Explored, tuple[PossibleStep, ...]]:
    """Repeat the run that `RunFailure.save` wrote.

    Args:
        path: the file.
        program: the explored program.

    Returns:
        The `Explored` run, and the steps picked in it.

    Warns:
        UserWarning: the steps are the same, but the digest of the trace differs. Traces
            contain function names, so digests are compared only if the program has the
            same name (a script's `__main__` differs when it is imported).

    Raises:
        ScenarioError: the file was not written by `save`, or the run differs; the error
            names the first step that differs.
    """
    data = read_failure(path)
    subject = Subject(program, data["workers"], data["values"], data["faults"])
    result = replayed(data, path, subject)
    run = result.explored
    assert run is not None
    if has_other_bits(data, subject, run):
        warnings.warn(f"{path}: {OTHER_BITS}", stacklevel=2)
    return run, tuple(result.steps)


def has_other_bits(data: Mapping[str, Any], subject: Subject, run: Explored) -> bool:
    """Whether the program has the saved name, but the trace a different digest."""
    digest: str = data["digest"]
    return subject.name == data["program"] and run.trace.digest != digest


def replayed(data: Mapping[str, Any], path: str | Path, subject: Subject) -> RunResult:
    """Repeat the run that a file's data describes. Does not compare the digest."""
    subject.first()  # Raises errors that are not due to the order.
    result = run_again(subject, data["choices"])
    steps = map(str, result.steps)
    for number, (actual, expected) in enumerate(zip_longest(steps, data["steps"])):
        if actual != expected:
            raise ScenarioError(
                f"{path}: the run differs from the saved one: pick {number} is "
                f"{actual or 'none'!r}, not {expected or 'none'!r}; {data['program']} "
                f"has changed, or jdag, whose version was {data['jdag']}"
            )
    return result


def read_failure(path: str | Path) -> dict[str, Any]:
    """Read a file of `RunFailure.save`. Raises ScenarioError if it is unusable."""
    file = Path(converted(PATH, path, "path"))
    prefix = f"{path} is not a run that jdag explore saved"
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        _check(data)
    except OSError as error:
        raise ScenarioError(f"{path}: {reason(error)}") from error
    except (ValueError, RecursionError, ScenarioError) as error:
        raise ScenarioError(f"{prefix}: {error}") from error
    return dict(data)


def _check(data: Any) -> None:
    version = data.get("format") if isinstance(data, dict) else data
    if version != FORMAT:
        raise ScenarioError(unusable("format", version, str(FORMAT)))
    for key, kind in _KEYS.items():
        if not isinstance(data.get(key), kind):
            raise ScenarioError(unusable(key, data.get(key), _NOUNS[kind]))
    for key in ("steps", "held"):
        if not all(isinstance(step, str) for step in data[key]):
            raise ScenarioError(unusable(key, data[key], "a list of strings"))
    Script(data["choices"])
    check_subject(data["workers"], data["values"], data["faults"])


def run_again(subject: Subject, choices: Sequence[int]) -> RunResult:
    return subject.play(Script(choices).pick)


def run_failure(
    subject: Subject, result: RunResult, property: Property, run: int
) -> RunFailure | None:
    explored = result.explored
    assert explored is not None, run
    name, why = getattr(property, "__name__", "the property"), ""
    try:
        if not _is_satisfied(property(explored)):
            why = f"{name} is False"
    except AssertionError as error:
        why = str(error).partition("\n")[0] or f"{name} does not hold"
    if not why:
        return None
    last = max([n for n, choice in enumerate(result.choices) if choice], default=-1)
    return RunFailure(
        run=run,
        why=why,
        choices=tuple(result.choices[: last + 1]),
        steps=tuple(result.steps),
        firsts=tuple(result.firsts),
        explored=explored,
        subject=subject,
        property=property,
    )


def _is_satisfied(result: Any) -> bool:
    if result is None:
        return True
    is_scalar = getattr(result, "shape", None) == ()
    if isinstance(result, bool) or (is_scalar and result.dtype.kind == "b"):
        return bool(result)
    allowed = "None or a bool, or an AssertionError"
    raise ScenarioError(unusable("result of the property", result, allowed))


def pick_text(step: PossibleStep, first: PossibleStep) -> str:
    """Return "PICKED before FIRST", where FIRST is the first possible step."""
    return f"{_step_text(step)} before {_step_text(first)}"


def _step_text(step: PossibleStep) -> str:
    name, _, where = step.detail.partition(" ")
    path = where.partition(":")[2]
    if step.kind == "main":
        return "the main program continues"
    if step.kind != "compute" or not path:
        return str(step)
    return f"{step.worker}'s {name.lower()} of call {path}"


def _delayed(held: PossibleStep, steps: Sequence[PossibleStep]) -> int:
    return next((n for n, step in enumerate(steps) if step != held), 0)


def _weight(failure: RunFailure) -> tuple[int, int]:
    return sum(map(bool, failure.choices)), len(failure.choices)
