"""The commands `jdag calibrate`, which measures costs, and `jdag predict`."""

import statistics
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from jdag.cli.cli_errors import File, errors_in_one_line, say
from jdag.errors import spelled
from jdag.lab import calibration, prediction
from jdag.report.formatting import formatted

_Out = Annotated[Path, typer.Option("--out", "-o", help="File for the measured costs.")]
Costs = Annotated[
    Path | None,
    typer.Option(
        help="File from `jdag calibrate`. It replaces [network] and [devices]."
    ),
]
_Device = Annotated[
    str | None, typer.Option(help="Device of the workers: cpu, gpu or gpu:1.")
]
Measure = Annotated[
    int, typer.Option(min=0, help="Number of real steps to run for comparison.")
]
_Steps = Annotated[int, typer.Option(min=1, help="Number of real steps.")]


def calibrate(
    file: File,
    *,
    out: _Out = Path("costs.toml"),
    device: _Device = None,
    steps: _Steps = calibration.STEPS,
) -> None:
    """Measure the functions and links of a scenario on processes on this host.

    Exit codes: 0 success; 2 invalid input.
    """
    with errors_in_one_line():
        tables = calibration.calibrate(file, out, device=device, steps=steps)
    table = Table(title="measured", title_justify="left")
    for column in ("", "F", "B, or I", "W"):
        table.add_column(column, justify="left" if not column else "right")
    devices = {**tables["devices"]}
    for name, costs in devices.pop("functions").items():
        table.add_row(name, *[formatted("_ns", ns) for ns in costs])
    console = Console()
    console.print(table)
    for key, value in {**tables["network"], **devices}.items():
        say(console, f"{key}: {formatted(key, value)}")
    least, middle, most = [formatted("_ns", ns) for ns in tables["measured"]["step_ns"]]
    say(console, f"steps took {middle} ({least} to {most})")
    say(console, f"costs: {spelled(out)}")


def predict(
    file: File,
    *,
    costs: Costs = None,
    measure: Measure = 0,
    device: _Device = None,
) -> None:
    """Predict the time of a step of a scenario from measured costs.

    Exit codes: 0 success; 2 invalid input.
    """
    with errors_in_one_line():
        predicted = prediction.predict(file, costs, measure=measure, device=device)
    table = Table(title=f"a step of {file.stem}", title_justify="left")
    for column in ("worker", "busy", "peak activations"):
        table.add_column(column, justify="left" if column == "worker" else "right")
    for worker, share in predicted.busy.items():
        peak = formatted("peak_bytes", predicted.peak_activations[worker])
        table.add_row(worker, formatted("bubble", share), peak)
    console = Console()
    console.print(table)
    say(console, f"predicted: {formatted('_ns', predicted.step_ns)}")
    say(console, f"bubble: {formatted('bubble', predicted.bubble)}")
    if predicted.ratio is not None:
        real = predicted.measured_ns
        middle, least, most = (
            formatted("_ns", round(f(real))) for f in (statistics.median, min, max)
        )
        say(console, f"measured: {middle} ({least} to {most}, {len(real)} steps)")
        say(console, f"predicted / measured: {predicted.ratio:.3f}")
