"""Playing a scenario: its program runs, its figures meet what it expects of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from jdag.api.cluster import Cluster
from jdag.errors import (
    JdagError,
    RootError,
    ScenarioError,
    UnusedSendError,
    text_of,
    unusable,
)
from jdag.scenario import Driver, Scenario, configured, raised, wrong
from jdag.scenario.case import VIRTUAL, Figures
from jdag.scenario.driving import Virtual
from jdag.scenario.expectations import Judged, judge

Progress = Callable[[int, int, Mapping[str, float]], None]


@dataclass(slots=True)
class Answer:
    """What came of a scenario."""

    figures: Figures
    judged: list[Judged]
    cluster: Cluster
    not_asked: tuple[str, ...]  # What is expected that only virtual time can answer.
    window: tuple[int, int]
    drawings: Any = None

    @property
    def met(self) -> bool:
        """Whether all that was expected is so."""
        return all(one.met for one in self.judged)


@dataclass(slots=True)
class Playing:
    """One play of a scenario, as its program sees it (`jdag.scenario.case.Run`)."""

    scenario: Scenario
    show: Progress
    driver: Driver
    kept: Cluster | None = None
    window: tuple[int, int] = (0, 0)
    drawings: Any = None
    last: Cluster | None = None

    @property
    def workers(self) -> tuple[str, ...]:
        """The names of the workers."""
        return self.scenario.workers

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds to play with."""
        first = self.scenario.settings.seed
        return tuple(range(first, first + self.scenario.settings.seeds))

    @property
    def abstract(self) -> bool:
        """Whether values are shapes alone."""
        return self.scenario.settings.values == "abstract"

    @property
    def troubled(self) -> bool:
        """Whether there are faults or jitter."""
        network = self.scenario.settings.network
        jitters = [network.jitter_ns, *(link.jitter_ns for link in network.links)]
        return bool(self.scenario.settings.faults) or any(jitters)

    @property
    def virtual(self) -> bool:
        """Whether time is virtual."""
        return self.driver.virtual

    def cluster(self, seed: int, *, clean: bool = False) -> Cluster:
        """Return the scenario's cluster."""
        self.driver.let_go(self.kept)
        self.last = self.driver.cluster(seed, clean=clean)
        return self.last

    def progress(self, done: int, total: int, **numbers: float) -> None:
        """Show how far the play is."""
        self.show(done, total, numbers)

    def keep(self, cluster: Cluster, window: tuple[int, int]) -> None:
        """Report on this cluster, and draw this window."""
        if not isinstance(cluster, Cluster):
            raise ScenarioError(unusable("run.keep: cluster", cluster, "a cluster"))
        if not _is_window(window):
            allowed = "two integers of nanoseconds, 0 <= from_ns <= until_ns"
            raise ScenarioError(unusable("run.keep: window", window, allowed))
        self.kept, self.window = cluster, window

    def keep_last(self) -> None:
        """Report on the last cluster that was made, the whole of its run."""
        if self.last is not None and self.kept is None:
            self.keep(self.last, (0, self.last.now_ns))

    def draw(self, drawings: Any) -> None:
        """Report this graph."""
        if not isinstance(drawings, Mapping):
            allowed = "what ctx.graph() gives"
            raise ScenarioError(unusable("run.draw: drawings", drawings, allowed))
        self.drawings = drawings


def play(scenario: Scenario, show: Progress, driver: Driver | None = None) -> Answer:
    """Run a scenario and hold what came of it against what it expects.

    What its program lets pass of jdag's errors is the outcome, as if it had said so.
    Without a driver it is in virtual time. A driver stays open, whatever happens.

    Raises:
        ScenarioError: its program returns no roots that a pass can start from, or no
            figures; kept no cluster; or raised what is no error of jdag.
    """
    driver = Virtual(scenario.settings) if driver is None else driver
    playing = Playing(scenario, show, driver)
    program = scenario.settings.program
    with wrong(scenario.path), configured(scenario.settings):
        try:
            figures = _plain(scenario.player.play(playing))
        except ScenarioError:
            raise
        except RootError as error:
            allowed = f"one whose roots a pass can start from; {error}"
            raise ScenarioError(unusable("program", program, allowed)) from error
        except JdagError as error:
            figures = _ended(error)
            playing.keep_last()
        except (Exception, SystemExit) as error:
            allowed = f"one that does not raise; it raised {raised(error)}"
            raise ScenarioError(unusable("program", program, allowed)) from error
        if playing.kept is None:
            allowed = (
                "one that keeps a cluster to report on, by "
                "run.keep(cluster, (from_ns, until_ns))"
            )
            raise ScenarioError(unusable("program", program, allowed))
        named = [name for name in scenario.player.figures if name in figures]
        figures = {name: figures[name] for name in dict.fromkeys((*named, *figures))}
        figures |= driver.figures()
        expect = dict(scenario.settings.expect)
        unasked = () if driver.virtual else tuple(n for n in expect if n in VIRTUAL)
        judged = judge({n: e for n, e in expect.items() if n not in unasked}, figures)
    return Answer(
        figures, judged, playing.kept, unasked, playing.window, playing.drawings
    )


def _is_window(window: Any) -> bool:
    if not isinstance(window, tuple | list) or len(window) != 2:
        return False
    return all(type(ns) is int for ns in window) and 0 <= window[0] <= window[1]


def _plain(figures: Any) -> Figures:
    """What a program returned, its arrays as lists and numbers.

    Raises:
        ScenarioError: it is no table of figures, or one is what no result can hold.
    """
    if not isinstance(figures, Mapping):
        allowed = "a mapping of figures by their names"
        raise ScenarioError(unusable("what play(run) returned", figures, allowed))
    for name in figures:
        if not isinstance(name, str):
            raise ScenarioError(unusable("name of a figure", name, "a text"))
    return {name: _figure(name, value) for name, value in figures.items()}


def _figure(name: str, value: Any) -> Any:
    match value:
        case None | bool() | int() | float() | str() | Fraction():
            return value
        case Mapping():
            return {str(key): _figure(name, one) for key, one in value.items()}
        case list() | tuple():
            return [_figure(name, one) for one in value]
        case _ if hasattr(value, "tolist"):  # An array, of numpy's or of JAX's.
            return _figure(name, value.tolist())
        case _:
            allowed = "a number, a text, None, or a list or mapping of these"
            raise ScenarioError(unusable(f"figure {name}", value, allowed))


def _ended(error: JdagError) -> Figures:
    """The figures of a play that an error ended."""
    is_stuck = isinstance(error, UnusedSendError)
    return {
        "outcome": "stuck" if is_stuck else "failed",
        "error": type(error).__name__,
        "error_message": text_of(error),
    }
