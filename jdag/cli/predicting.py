"""The commands `jdag calibrate` and `jdag predict`: measured costs, and their use."""

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

_Out = Annotated[Path, typer.Option("--out", "-o", help="The file of costs to write.")]
Costs = Annotated[
    Path | None,
    typer.Option(
        help="What `jdag calibrate` wrote, in place of [network] and [devices]."
    ),
]
_Device = Annotated[
    str | None, typer.Option(help="Where workers compute: cpu, gpu or gpu:1.")
]
Measure = Annotated[int, typer.Option(min=0, help="How many real steps to run, too.")]
_Steps = Annotated[int, typer.Option(min=1, help="How many real steps.")]


def calibrate(
    file: File,
    *,
    out: _Out = Path("costs.toml"),
    device: _Device = None,
    steps: _Steps = calibration.STEPS,
) -> None:
    """Measure functions and links of a scenario on processes of this host.

    Exit codes: 0; 2 bad input.
    """
    with errors_in_one_line():
        found = calibration.calibrate(file, out, device=device, steps=steps)
    table = Table(title="measured", title_justify="left")
    for column in ("", "F", "B, or I", "W"):
        table.add_column(column, justify="left" if not column else "right")
    devices = {**found["devices"]}
    for name, costs in devices.pop("functions").items():
        table.add_row(name, *[formatted("_ns", ns) for ns in costs])
    console = Console()
    console.print(table)
    for key, value in {**found["network"], **devices}.items():
        say(console, f"{key}: {formatted(key, value)}")
    least, middle, most = [formatted("_ns", ns) for ns in found["measured"]["step_ns"]]
    say(console, f"steps took {middle} ({least} to {most})")
    say(console, f"costs: {spelled(out)}")


def predict(
    file: File,
    *,
    costs: Costs = None,
    measure: Measure = 0,
    device: _Device = None,
) -> None:
    """Simulate a step of a scenario with measured costs; compare it with real ones.

    Exit codes: 0; 2 bad input.
    """
    with errors_in_one_line():
        found = prediction.predict(file, costs, measure=measure, device=device)
    table = Table(title=f"a step of {file.stem}", title_justify="left")
    for column in ("worker", "busy", "peak activations"):
        table.add_column(column, justify="left" if column == "worker" else "right")
    for worker, share in found.busy.items():
        held = formatted("peak_bytes", found.peak_activations[worker])
        table.add_row(worker, formatted("bubble", share), held)
    console = Console()
    console.print(table)
    lines = [f"predicted: {formatted('_ns', found.step_ns)}"]
    lines.append(f"bubble: {formatted('bubble', found.bubble)}")
    if found.ratio is not None:
        real = found.measured_ns
        middle, least, most = (
            formatted("_ns", round(of(real))) for of in (statistics.median, min, max)
        )
        lines.append(f"measured: {middle} ({least} to {most}, {len(real)} steps)")
        lines.append(f"predicted / measured: {found.ratio:.3f}")
    for line in lines:
        say(console, line)
