"""Predicts a step's time by simulation with measured costs. May also measure it."""

import os
import statistics
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jdag.errors import ScenarioError, unusable
from jdag.lab.calibration import WARM, CaseSteps, in_one_line
from jdag.report.spans import bubble, spans_of
from jdag.scenario import Scenario, configured, load
from jdag.scenario.costs import refuse_unmeasured
from jdag.scenario.driving import CaseDriver, Virtual, driver_of
from jdag.settings.validation import NATURAL, converted


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted costs of a step.

    Attributes:
        step_ns: simulated time of a step.
        busy: fraction of the step in which each worker computes.
        peak_activations: maximum bytes that each worker holds for the backward pass.
        measured_ns: times of real steps, or () if no steps were measured.
    """

    step_ns: int
    busy: Mapping[str, float]
    peak_activations: Mapping[str, int]
    measured_ns: tuple[int, ...] = ()

    @property
    def bubble(self) -> float:
        """Fraction of the step in which workers are idle, on average."""
        return 1 - statistics.mean(self.busy.values())

    @property
    def ratio(self) -> float | None:
        if not self.measured_ns:
            return None
        return self.step_ns / statistics.median(self.measured_ns)


def predict(
    file: str | os.PathLike[str],
    costs: str | os.PathLike[str] | None = None,
    *,
    measure: int = 0,
    device: str | None = None,
) -> Prediction:
    """Predict the time of a step of a scenario's program, by simulation.

    Values are abstract (shapes and dtypes) unless the program depends on them. Links
    have no jitter.

    Args:
        file: the scenario; its program returns a `Case`.
        costs: a cost file of `jdag calibrate`, which replaces the scenario's network
            and devices; None: use the scenario's.
        measure: number of real steps to run as well, on processes of this host.
        device: the device of these processes, as for `jdag.launch`.

    Returns:
        A `Prediction`.

    Raises:
        ScenarioError: an argument or file is unusable, the scenario has faults, the
            costs lack a function, or a step fails or takes no time.
    """
    converted(NATURAL, measure, "measure")
    if device is not None and not measure:
        raise ScenarioError(unusable("--device", device, "only with --measure"))
    path, changes = Path(file), dict[str, Any]()
    if costs is not None:
        changes = {"costs": str(Path(costs).resolve()), "network": {}, "devices": {}}
    scenario = load(path, changes=changes)
    settings, real = scenario.settings, None
    if measure:
        real = driver_of(settings, "rpc", device=device)
    with in_one_line(scenario):
        if settings.faults:
            kind = settings.faults[0].kind
            allowed = "no faults in a scenario whose steps are predicted"
            raise ScenarioError(unusable("faults[0].kind", kind, allowed))
        try:
            figures = _simulated(load(path, changes={**changes, "values": "abstract"}))
        except ScenarioError:
            raise
        except Exception:  # The program depends on values, which abstract runs lack.
            figures = _simulated(scenario)
        if not figures[0]:
            allowed = "a file of costs, or None if links or devices take time"
            raise ScenarioError(unusable("costs", settings.costs, allowed))
        measured = () if real is None else _real(scenario, measure, real)
        return Prediction(*figures, measured)


def _simulated(scenario: Scenario) -> tuple[int, dict[str, float], dict[str, int]]:
    """Simulate two steps; return time, busy fractions and peak bytes of the second."""
    case, settings = scenario.case, scenario.settings
    with configured(settings), closing(Virtual(settings)) as driver:
        cluster = driver.cluster(settings.seed, clean=True)
        steps = CaseSteps(case, cluster, planned=settings.compile)
        _, last = steps.step(), steps.step()
        refuse_unmeasured(settings, cluster.trace)
        window = last.began_ns, last.ended_ns
        idle = bubble(spans_of(cluster.trace).jobs, settings.names, window)
        info: Mapping[str, Any] = cluster.info()
    busy = {worker: 1 - float(share) for worker, share in idle.items()}
    peak_bytes = {w: int(each["activation_bytes_peak"]) for w, each in info.items()}
    return last.ns, busy, peak_bytes


def _real(scenario: Scenario, count: int, driver: CaseDriver) -> tuple[int, ...]:
    settings = scenario.settings
    with configured(settings), closing(driver):
        cluster = driver.cluster(settings.seed, clean=True)
        steps = CaseSteps(scenario.case, cluster, planned=settings.compile)
        return tuple([steps.step().ns for _ in range(WARM + count)][WARM:])
