"""Compares predicted times of pipeline steps with measured times.

    python -m paper.prediction

For each number of workers and shape, functions are measured in steps of 1F1B and of
ZB-H1 with `CALIBRATED` micro-batches; links are measured once. From these costs the
simulator predicts steps of these schedules and of GPipe with other numbers of
micro-batches, which then run on processes. Each process computes on one thread
(`NPROC=1`). Results with a core for each worker and results with fewer cores are listed
separately. If there are too few cores, workers wait for a core. The simulator does not
model these waits, although the measured durations of functions include them, and it
does not model other load of the machine. So everything is measured in bursts of steps,
and only the bursts count during which other processes used the least CPU time. A row is
quiet if they used at most `QUIET` of the machine's CPU time.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from jdag.lab.calibration import WARM, CaseSteps, measured, probe
from jdag.lab.prediction import predict
from jdag.scenario import load
from jdag.scenario.costs import written
from jdag.scenario.driving import driver_of
from paper.figures import RESULTS, machine

SCENARIOS = Path(__file__).parent.parent / "scenarios"
KINDS = ("gpipe", "1f1b", "zb_h1")
CALIBRATED, MICRO_BATCHES = 4, (6, 8)
BURST, BURSTS, COUNTED = 5, 6, 3
QUIET = 0.05
WAIT_S = 240  # The maximum total time to wait until other processes pause.
# Numbers of workers, widths of layers, and numbers of rows.
GROUPS = (
    (2, 512, 128),
    (2, 512, 512),
    (2, 768, 512),
    (3, 512, 256),
    (4, 512, 256),
)
SUBSETS = {True: "a worker per core", False: "more workers than cores"}
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """The sizes and the schedule of a pipeline."""

    workers: int
    width: int
    rows: int
    kind: str
    micro_batches: int

    @property
    def choice(self) -> tuple[Any, ...]:
        """A key to group settings: all fields except the schedule."""
        return (self.workers, self.width, self.rows, self.micro_batches)

    def file(self, folder: Path) -> Path:
        """Write this setting as a scenario. Returns the path of its file."""
        path = folder / f"{'-'.join(map(str, asdict(self).values()))}.toml"
        path.write_text(
            f"""name = "pipeline"
program = "shapes:pipeline"
workers = {[f"stage{number}" for number in range(self.workers)]}
expect = {{ outcome = "finished" }}

[schedule]
kind = "{self.kind}"
stages = {self.workers}
micro_batches = {self.micro_batches}

[settings]
micro_batches = {self.micro_batches}
width = {self.width}
rows = {self.rows}
""",
            encoding="utf-8",
        )
        return path


class Load:
    """Measures the CPU time that other processes use, and waits until they pause."""

    def __init__(self) -> None:
        self._left_s = float(WAIT_S)

    @staticmethod
    def _ticks() -> tuple[float, int]:
        """Return the clock in seconds, and the CPU time of other processes in ticks.

        proc(5) documents the fields. After the process name, of[1] is the parent, and
        of[11] and of[12] are user and system time.
        """
        *busy, idle, waits = map(int, Path("/proc/stat").read_text().split()[1:6])
        del idle, waits
        ours, me = 0, os.getpid()
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                text = Path(f"/proc/{pid}/stat").read_text()
            except OSError:
                continue  # The process has ended.
            of = text.rpartition(")")[2].split()
            if me in (int(pid), int(of[1])):
                ours += int(of[11]) + int(of[12])
        return time.monotonic(), sum(busy) - ours

    def during(self, work: Callable[[], Any]) -> tuple[float, Any]:
        """Call `work`. Returns the CPU share of other processes, and the result."""
        began_s, before = self._ticks()
        found = work()
        ended_s, after = self._ticks()
        ticks = (ended_s - began_s) * os.sysconf("SC_CLK_TCK") * (os.cpu_count() or 1)
        return max(after - before, 0) / max(ticks, 1), found

    def calm(self, works: Sequence[Callable[[], Any]]) -> list[tuple[float, Any]]:
        """Call all `works`, if possible when the machine is quiet; sort by its load."""
        found = []
        for work in works:
            while self._left_s > 0:
                if self.during(lambda: time.sleep(0.25))[0] <= QUIET:
                    break
                self._left_s -= 0.25
            found.append(self.during(work))
        return sorted(found, key=lambda one: one[0])


def costs_of(setting: Setting, folder: Path, links: list[Any], load_of: Load) -> Path:
    """Measure the functions of a setting, and the links once. Returns the cost file."""
    file = setting.file(folder)
    scenario = load(file)
    driver = driver_of(scenario.settings, "rpc", device=None)
    with closing(driver):
        cluster = driver.cluster(0, clean=True)
        steps = CaseSteps(scenario.case, cluster)
        burst = partial(measured, steps, cluster, BURST)
        devices = load_of.calm([burst] * BURSTS)[0][1]
        if not links:
            names = scenario.settings.names
            probes = [partial(probe, cluster, names, BURST)] * COUNTED
            links += load_of.calm(probes)[0][1]
    network, job_ns = links
    devices = {"job_ns": job_ns, **devices}
    costs = file.with_suffix(".costs")
    tables = {"measured": {}, "network": network, "devices": devices}
    costs.write_text(written(tables), encoding="utf-8")
    return costs


def row_of(setting: Setting, file: Path, costs: Path, load_of: Load) -> Row:
    """Predict the step time of a setting, measure it, and compare."""
    scenario = load(file)
    driver = driver_of(scenario.settings, "rpc", device=None)
    with closing(driver):
        steps = CaseSteps(scenario.case, driver.cluster(0, clean=True))
        for _ in range(WARM):
            steps.step()
        bursts = [lambda: [steps.step().ns for _ in range(BURST)]] * BURSTS
        calm = load_of.calm(bursts)[:COUNTED]
    real = [ns for _, burst in calm for ns in burst]
    quartiles = statistics.quantiles(real, n=4)
    predicted_ns = predict(file, costs).step_ns
    return {
        **asdict(setting),
        "predicted_ns": predicted_ns,
        "measured_ns": round(quartiles[1]),
        "measured_quartiles_ns": [round(quartiles[0]), round(quartiles[2])],
        "measured_min_ns": min(real),
        "predicted_by_measured": predicted_ns / quartiles[1],
        "others": statistics.mean([share for share, _ in calm]),
    }


def summary(rows: Sequence[Row]) -> Row:
    """Summarize prediction errors and the choice of the best schedule over rows."""
    errors = [abs(row["predicted_by_measured"] - 1) for row in rows]
    spread = [
        (row["measured_quartiles_ns"][1] - row["measured_quartiles_ns"][0])
        / row["measured_ns"]
        for row in rows
    ]
    choices: dict[Any, list[Row]] = {}
    for row in rows:
        setting = Setting(**{name: row[name] for name in Setting.__slots__})
        choices.setdefault(setting.choice, []).append(row)
    whole = [each for each in choices.values() if len(each) == len(KINDS)]
    chosen = [min(each, key=lambda row: row["predicted_ns"]) for each in whole]
    best_ns = [min([row["measured_ns"] for row in each]) for each in whole]
    behind = [c["measured_ns"] / b - 1 for c, b in zip(chosen, best_ns, strict=True)]
    return {
        "settings": len(rows),
        "mean_error": statistics.mean(errors),
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "rank_correlation": rank_correlation(
            [row["predicted_ns"] for row in rows], [row["measured_ns"] for row in rows]
        ),
        "choices": len(whole),
        "right_choices": sum([one == 0 for one in behind]),
        "mean_loss_by_choice": statistics.mean(behind) if behind else None,
        "mean_quartile_range": statistics.mean(spread),
    }


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Spearman's rank correlation. The values must have no ties."""
    if len(a) < 2:
        return 1.0
    ranks = [np.argsort(np.argsort(values)) for values in (a, b)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def written_results(rows: Sequence[Row], where: dict[str, Any]) -> None:
    """Write `prediction.json`, `.md` and `.png` to `paper/results/`."""
    by = {
        SUBSETS[own]: [r for r in rows if (r["workers"] <= where["cores"]) is own]
        for own in (True, False)
    }
    quiet = {
        f"{name}, quiet": [row for row in of if row["others"] <= QUIET]
        for name, of in by.items()
    }
    sums = {name: summary(of) for name, of in (by | quiet).items() if of}
    found = {
        "figure": "prediction",
        "machine": where,
        "target": "a mean error of 8 % with a worker per core",
        "summary": sums,
        "rows": list(rows),
    }
    path = RESULTS / "prediction.json"
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(markdown(by, sums, where), encoding="utf-8")
    draw(by, path.with_suffix(".png"))


def markdown(
    by: dict[str, list[Row]], sums: dict[str, Row], where: dict[str, Any]
) -> str:
    """Return the results as a page in Markdown."""
    doc = " ".join((__doc__ or "").split("\n\n")[2].split())
    doc = doc.replace("`CALIBRATED`", str(CALIBRATED))
    doc = doc.replace("`QUIET`", f"{QUIET:.0%}")
    lines = ["# Predicted and real steps of pipelines", "", doc, ""]
    lines.append(f"{', '.join([f'{key} {value}' for key, value in where.items()])}.")
    lines.append(f"Of {COUNTED * BURST} real steps: the median, and the quartiles.")
    lines.append(
        "The error is predicted / measured - 1; others: their share of CPU time"
    )
    lines.append("during these steps.")
    for name, rows in by.items():
        if not rows:
            continue
        lines += ["", f"## {name.capitalize()}", ""]
        for part in (name, f"{name}, quiet"):
            said = told(sums[part]) if part in sums else "none."
            lines += [f"{part.capitalize()}: {said}", ""]
        lines += [
            "| workers | width x rows | micro-batches | schedule "
            "| predicted | measured | quartiles | error | others |",
            "| ---: | --- | ---: | --- | ---: | ---: | --- | ---: | ---: |",
        ]
        for row in rows:
            low, high = row["measured_quartiles_ns"]
            lines.append(
                f"| {row['workers']} | {row['width']} x {row['rows']} | "
                f"{row['micro_batches']} | {row['kind']} | "
                f"{row['predicted_ns'] / 1e6:.1f} ms | {row['measured_ns'] / 1e6:.1f} "
                f"ms | {low / 1e6:.1f} to {high / 1e6:.1f} | "
                f"{row['predicted_by_measured'] - 1:+.1%} | {row['others']:.0%} |"
            )
    return "\n".join([*lines, ""])


def told(of: Row) -> str:
    """Describe a result of `summary` in sentences."""
    return (
        f"{of['settings']} settings: mean error {of['mean_error']:.1%}, median "
        f"{of['median_error']:.1%}, worst {of['worst_error']:.1%}; rank correlation "
        f"{of['rank_correlation']:.3f}; the predicted best of {len(KINDS)} schedules "
        f"is the best in {of['right_choices']} of {of['choices']} cases (loss "
        f"{of['mean_loss_by_choice'] or 0:.1%} on average). The quartiles of real "
        f"steps are {of['mean_quartile_range']:.1%} apart on average."
    )


def draw(by: dict[str, list[Row]], path: Path) -> None:
    """Plot predicted against measured times, with quartiles of the measured times."""
    figure = Figure(figsize=(6, 5.4), layout="constrained")
    axes = figure.subplots()
    ends = [r[key] / 1e6 for of in by.values() for r in of for key in _ENDS]
    line = np.array([0.8 * min(ends), 1.25 * max(ends)])
    axes.plot(line, line, color="0.3", linewidth=1, label="equal")
    axes.fill_between(line, 0.92 * line, 1.08 * line, color="0.88", label="within 8 %")
    for (name, rows), colour in zip(by.items(), ("C0", "C1"), strict=True):
        for kind, marker in zip(KINDS, "os^", strict=True):
            some = [row for row in rows if row["kind"] == kind]
            if some:
                x = np.array([row["measured_ns"] for row in some]) / 1e6
                quartiles = np.array([r["measured_quartiles_ns"] for r in some]) / 1e6
                axes.errorbar(
                    x,
                    [row["predicted_ns"] / 1e6 for row in some],
                    xerr=np.abs(quartiles.T - x),
                    fmt=marker,
                    color=colour,
                    markersize=5,
                    elinewidth=0.8,
                    label=f"{kind}, {name}",
                )
    axes.set(xscale="log", yscale="log", xlim=line, ylim=line)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("measured: median and quartiles of real steps, ms")
    axes.set_ylabel("predicted by simulation, ms")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)


_ENDS = ("predicted_ns", "measured_ns")


def main() -> None:
    """Calibrate, predict and measure all settings; save results even on an error."""
    os.environ["NPROC"] = "1"  # Must be set before JAX computes.
    sys.path.insert(0, str(SCENARIOS))
    rows: list[Row] = []
    links: list[Any] = []
    load_of = Load()
    try:
        with tempfile.TemporaryDirectory() as folder:
            for group in GROUPS:
                costs = {
                    kind: costs_of(
                        Setting(*group, kind, CALIBRATED), Path(folder), links, load_of
                    )
                    for kind in KINDS[1:]
                }
                costs[KINDS[0]] = costs[KINDS[1]]
                for count in MICRO_BATCHES:
                    for kind in KINDS:
                        setting = Setting(*group, kind, count)
                        file = setting.file(Path(folder))
                        rows.append(row_of(setting, file, costs[kind], load_of))
                        print(rows[-1], flush=True)
    finally:
        if rows:
            written_results(rows, machine())


if __name__ == "__main__":
    main()
