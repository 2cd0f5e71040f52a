"""Runs a scenario and compares its figures with its expectations."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from jdag.api.cluster import Cluster
from jdag.engine.functions import outermost
from jdag.errors import JdagError, RootError, ScenarioError, unusable
from jdag.scenario import Scenario, configured
from jdag.scenario.costs import refuse_unmeasured
from jdag.scenario.driving import CaseDriver, Virtual
from jdag.scenario.expectations import Judged, judge
from jdag.scenario.player import VIRTUAL, Figures, Run, ended
from jdag.scenario.program import raising_nothing
from jdag.scenario.scenario_schema import has_jitter
from jdag.settings.toml_files import wrong

Progress = Callable[[int, int, Mapping[str, float]], None]


@dataclass(slots=True)
class ScenarioResult:
    figures: Figures
    judged: list[Judged]
    cluster: Cluster
    not_asked: tuple[str, ...]  # Figures not compared: they need virtual time.
    window: tuple[int, int]
    drawings: Any = None

    @property
    def met(self) -> bool:
        return all(expectation.met for expectation in self.judged)


def _run_of(scenario: Scenario, show: Progress, driver: CaseDriver) -> Run:
    settings = scenario.settings
    return Run(
        workers=settings.names,
        seeds=tuple(range(settings.seed, settings.seed + settings.seeds)),
        abstract=settings.values == "abstract",
        troubled=bool(settings.faults) or has_jitter(settings.network),
        virtual=driver.virtual,
        driver=driver,
        show=show,
        compile=settings.compile,
    )


@outermost  # So that call sites, and thus the digest, do not depend on the caller.
def run_scenario(
    scenario: Scenario, show: Progress, driver: CaseDriver | None = None
) -> ScenarioResult:
    """Run a scenario and compare its figures with its expectations.

    If the program raises a JdagError, this is the outcome of the run. If `driver` is
    None, the run is in virtual time; otherwise the caller closes the driver. Raises
    ScenarioError if the program returns invalid roots or figures, does not call
    `run.keep`, or raises an error that is not a JdagError.
    """
    driver = Virtual(scenario.settings) if driver is None else driver
    run = _run_of(scenario, show, driver)
    refused = scenario.settings.refused
    with (
        wrong(scenario.path),
        configured(scenario.settings, exact=True),
        raising_nothing(scenario.settings.program),
    ):
        try:
            figures = _plain(scenario.player.play(run))
        except ScenarioError:
            raise
        except RootError as error:
            raise refused(f"a program that returns roots of a pass; {error}") from error
        except JdagError as error:
            figures = ended(error)
            if run.last is not None and run.kept is None:
                run.keep(run.last, (0, run.last.now_ns))
        if run.kept is None:
            raise refused(
                "a program that selects a cluster to report on, by "
                "run.keep(cluster, (from_ns, until_ns))"
            )
        if driver.virtual:
            refuse_unmeasured(scenario.settings, run.kept.trace)
        named = [name for name in scenario.player.figures if name in figures]
        figures = {name: figures[name] for name in dict.fromkeys((*named, *figures))}
        figures |= driver.figures()
        expect = dict(scenario.settings.expect)
        unasked = () if driver.virtual else tuple(n for n in expect if n in VIRTUAL)
        judged = judge({n: e for n, e in expect.items() if n not in unasked}, figures)
    return ScenarioResult(figures, judged, run.kept, unasked, run.window, run.drawings)


def _plain(figures: Any) -> Figures:
    if not isinstance(figures, Mapping):
        allowed = "a mapping from the name of a figure to its value"
        raise ScenarioError(unusable("result of play(run)", figures, allowed))
    for name in figures:
        if not isinstance(name, str):
            raise ScenarioError(unusable("name of a figure", name, "a string"))
    return {name: _figure(name, value) for name, value in figures.items()}


def _figure(name: str, value: Any) -> Any:
    match value:
        case None | bool() | int() | float() | str() | Fraction():
            return value
        case Mapping():
            return {str(key): _figure(name, item) for key, item in value.items()}
        case list() | tuple():
            return [_figure(name, item) for item in value]
        case _ if hasattr(value, "tolist"):  # An array of NumPy or JAX.
            return _figure(name, value.tolist())
        case _:
            allowed = "a number, a string, None, or a list or mapping of these"
            raise ScenarioError(unusable(f"figure {name}", value, allowed))
