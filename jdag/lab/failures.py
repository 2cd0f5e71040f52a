"""Runs that broke a property: shrunk, saved, and repeated from a file.

Inputs:  a subject, the choices of a run, a property; or a file.
Outputs: a `RunFailure`; a file of JSON from which `replay` repeats the run.

Invariants: a failure's choices repeat it, in any process; a shrunk one breaks the
property too, and has no more choices that are not the first.
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

FORMAT = 3
_SHOWN_MAX = 4
OTHER_BITS = (
    "the steps are those that were saved, but the digest differs: values or messages "
    "in the trace are others now"
)
_KEYS = {
    **{"jdag": str, "program": str, "scenario": str, "workers": list, "values": str},
    **{"run": int, "why": str, "choices": list, "steps": list, "held": list},
    **{"faults": dict, "digest": str, "property": str},
}
_SAID = {str: "a text", list: "a list", int: "an integer", dict: "a table"}

Property = Callable[[Explored], object]


@dataclass(frozen=True, eq=False)
class RunFailure:
    """A run that broke the property; `choices` repeat it.

    Attributes:
        run: its number.
        why: what the property said.
        choices: for each step the index that was picked; after these, 0.
        steps: what was picked.
        firsts: the first one of those that each was picked of.
        held: steps that waited until nothing else could happen, where these are all
            that the order has beside first choices.
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
        """Of the trace of the run."""
        return str(self.explored.trace.digest)

    def __str__(self) -> str:
        off = [number for number, choice in enumerate(self.choices) if choice]
        where = "the first choice everywhere"
        if self.held:
            said = [f"{step} waits until nothing else can happen" for step in self.held]
            where += f", but {', '.join(said)}"
        elif off:
            said = [f"at step {n}: {self.picked(n)}" for n in off[:_SHOWN_MAX]]
            more = f" and {len(off) - _SHOWN_MAX} more" if len(off) > _SHOWN_MAX else ""
            where += f" but {', '.join(said)}{more}"
        return f"run {self.run}: {self.why} ({where})"

    def picked(self, number: int) -> str:
        """What was picked at a step, and before which other one, in words."""
        return said_of(self.steps[number], self.firsts[number])

    def shrink(self, runs: int = 1_000) -> "RunFailure":
        """A failure that is as simple as `runs` runs find.

        The simplest has one step that waits; else as few choices that are not the first
        as delta debugging leaves (Zeller, Hildebrandt, "Simplifying and Isolating
        Failure-Inducing Input", IEEE Transactions on Software Engineering 2002).
        """
        converted(COUNT, runs, "runs")
        alone = self.subject.play(_first)
        found = run_failure(self.subject, alone, self.property, self.run)
        if found is not None:
            return found
        for step in dict.fromkeys(self.steps):
            if runs <= 0:
                return self
            runs -= 1
            played = self.subject.play(partial(_but, step))
            found = run_failure(self.subject, played, self.property, self.run)
            if found is not None:
                return replace(found, held=(step,))
        best, width = self, len(self.choices)
        while width and runs > 0:
            before, at = best, 0
            while at < len(best.choices) and runs > 0:
                end = at + width
                if any(best.choices[at:end]):
                    zeros = [0] * len(best.choices[at:end])
                    tried = [*best.choices[:at], *zeros, *best.choices[end:]]
                    best = self._smaller(best, tried)
                    runs -= 1
                at = end
            if best is before:
                width //= 2
        return best

    def _smaller(self, best: "RunFailure", choices: Sequence[int]) -> "RunFailure":
        found = run_failure(
            self.subject, run_again(self.subject, choices), self.property, self.run
        )
        if found is None or _weight(found) >= _weight(best):
            return best
        return found

    def save(self, path: str | Path, scenario: str = "") -> None:
        """Write what `jdag.replay` repeats this run from, as JSON.

        Args:
            path: the file.
            scenario: the file of the scenario, if it is one; else the place of what was
                explored is kept: module:name, if a module or a script with a guard has
                it at top level.

        Raises:
            ScenarioError: the file cannot be written.
        """
        subject = self.subject
        held = {
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
        text = json.dumps(held, indent=1) + "\n"
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
        program: what was explored.

    Returns:
        The run, and the steps that were picked in it.

    Warns:
        UserWarning: the steps are the same, but the digest of the trace is not. It has
            the names of functions, and is not compared of a program of another name, as
            one of a script (`__main__`) has that is imported now.

    Raises:
        ScenarioError: the file is no such one, or the run is another than it was; names
            the first step that differs.
    """
    held = read_failure(path)
    subject = Subject(program, held["workers"], held["values"], held["faults"])
    played = replayed(held, path, subject)
    run = played.explored
    assert run is not None
    if has_other_bits(held, subject, run):
        warnings.warn(f"{path}: {OTHER_BITS}", stacklevel=2)
    return run, tuple(played.steps)


def has_other_bits(held: Mapping[str, Any], subject: Subject, run: Explored) -> bool:
    """Whether a program of the same name has another trace than was saved."""
    digest: str = held["digest"]
    return subject.name == held["program"] and run.trace.digest != digest


def replayed(held: Mapping[str, Any], path: str | Path, subject: Subject) -> RunResult:
    """As `replay`, of what was read from the file; the digest is not compared."""
    subject.first()  # What it raises, it raises in every order.
    played = run_again(subject, held["choices"])
    steps = map(str, played.steps)
    for number, (now, then) in enumerate(zip_longest(steps, held["steps"])):
        if now != then:
            raise ScenarioError(
                f"{path}: the run is another one than was saved: pick {number} is "
                f"{now or 'none'!r}, and was {then or 'none'!r}; {held['program']} has "
                f"changed since, or jdag, which was {held['jdag']}"
            )
    return played


def read_failure(path: str | Path) -> dict[str, Any]:
    """Read what `RunFailure.save` wrote.

    Raises:
        ScenarioError: the file is no such one, or cannot be read; names what is wrong.
    """
    file, wrong = (
        Path(converted(PATH, path, "path")),
        f"{path} is no run that jdag explore saved",
    )
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
        _check(held)
    except OSError as error:
        raise ScenarioError(f"{path}: {reason(error)}") from error
    except (ValueError, RecursionError, ScenarioError) as error:
        raise ScenarioError(f"{wrong}: {error}") from error
    return dict(held)


def _check(held: Any) -> None:
    found = held.get("format") if isinstance(held, dict) else held
    if found != FORMAT:
        raise ScenarioError(unusable("format", found, str(FORMAT)))
    for key, kind in _KEYS.items():
        if not isinstance(held.get(key), kind):
            raise ScenarioError(unusable(key, held.get(key), _SAID[kind]))
    for key in ("steps", "held"):
        if not all(isinstance(step, str) for step in held[key]):
            raise ScenarioError(unusable(key, held[key], "a list of texts"))
    Script(held["choices"])
    check_subject(held["workers"], held["values"], held["faults"])


def run_again(subject: Subject, choices: Sequence[int]) -> RunResult:
    """Run a subject with these choices."""
    return subject.play(Script(choices).pick)


def run_failure(
    subject: Subject, played: RunResult, property: Property, run: int
) -> RunFailure | None:
    """The failure that a run is; None if it keeps the property."""
    explored = played.explored
    assert explored is not None, run
    name, why = getattr(property, "__name__", "the property"), ""
    try:
        if not _kept(property(explored)):
            why = f"{name} is False"
    except AssertionError as error:
        why = str(error).partition("\n")[0] or f"{name} does not hold"
    if not why:
        return None
    last = max([n for n, choice in enumerate(played.choices) if choice], default=-1)
    return RunFailure(
        run=run,
        why=why,
        choices=tuple(played.choices[: last + 1]),
        steps=tuple(played.steps),
        firsts=tuple(played.firsts),
        explored=explored,
        subject=subject,
        property=property,
    )


def _kept(found: Any) -> bool:
    """Whether what a property returned says so; a bool may be of NumPy or JAX."""
    if found is None:
        return True
    is_one = getattr(found, "shape", None) == ()
    if isinstance(found, bool) or (is_one and found.dtype.kind == "b"):
        return bool(found)
    allowed = "None or a bool, or that it raises AssertionError"
    raise ScenarioError(unusable("what the property returns", found, allowed))


def said_of(step: PossibleStep, first: PossibleStep) -> str:
    """A step in words, and the first choice that it comes before."""
    return f"{_worded(step)} before {_worded(first)}"


def _worded(step: PossibleStep) -> str:
    name, _, where = step.of.partition(" ")
    path = where.partition(":")[2]
    if step.kind == "main":
        return "the main program goes on"
    if step.kind != "compute" or not path:
        return str(step)
    return f"{step.worker}'s {name.lower()} of call {path}"


def _first(steps: Sequence[PossibleStep]) -> int:
    return 0


def _but(held: PossibleStep, steps: Sequence[PossibleStep]) -> int:
    """The first step that is not held, if there is one."""
    return next((n for n, step in enumerate(steps) if step != held), 0)


def _weight(failure: RunFailure) -> tuple[int, int]:
    return sum(map(bool, failure.choices)), len(failure.choices)
