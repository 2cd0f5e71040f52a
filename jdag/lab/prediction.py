"""Prediction of a step's time by simulation with measured costs, beside real ones."""

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
    """What a step takes.

    Attributes:
        step_ns: by simulation.
        busy: for each worker the share of the step in which it computes.
        peak_activations: for each worker the most bytes that it holds for backward.
        measured_ns: real steps, one after the other; empty if none were asked for.
    """

    step_ns: int
    busy: Mapping[str, float]
    peak_activations: Mapping[str, int]
    measured_ns: tuple[int, ...] = ()

    @property
    def bubble(self) -> float:
        """The share of the step in which workers are idle, on average."""
        return 1 - statistics.mean(self.busy.values())

    @property
    def ratio(self) -> float | None:
        """Predicted / the median of measured steps; None without these."""
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
    """Predict a step of a scenario's program, with values as shapes if that will do.

    Links have no jitter.

    Args:
        file: the scenario; its program returns a `Case`.
        costs: the file that `jdag calibrate` wrote, in place of the tables of network
            and devices; None: what the scenario says.
        measure: how many real steps to run as well, on processes of this host.
        device: where these compute, as of `jdag.launch`.

    Raises:
        ScenarioError: one line: an argument or file is unusable, the scenario has
            faults, the costs lack a function, or a step fails or takes no time.
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
            found = _simulated(load(path, changes={**changes, "values": "abstract"}))
        except ScenarioError:
            raise
        except Exception:  # It looks at values.
            found = _simulated(scenario)
        if not found[0]:
            allowed = "a file of costs, or None if links or devices take time"
            raise ScenarioError(unusable("costs", settings.costs, allowed))
        return Prediction(
            *found, () if real is None else _real(scenario, measure, real)
        )


def _simulated(scenario: Scenario) -> tuple[int, dict[str, float], dict[str, int]]:
    """Simulate the second step of a scenario: its time, busy shares, activations."""
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
    held = {worker: int(one["activation_bytes_peak"]) for worker, one in info.items()}
    return last.ns, busy, held


def _real(scenario: Scenario, count: int, driver: CaseDriver) -> tuple[int, ...]:
    settings = scenario.settings
    with configured(settings), closing(driver):
        cluster = driver.cluster(settings.seed, clean=True)
        steps = CaseSteps(scenario.case, cluster, planned=settings.compile)
        return tuple([steps.step().ns for _ in range(WARM + count)][WARM:])
