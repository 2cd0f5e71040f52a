"""The command `jdag what-if`: the time of a recorded run with changed hardware."""

from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from jdag.cli.cli_errors import errors_in_one_line, no_run, say
from jdag.cli.run_folder import reading
from jdag.cli.sweeping import value_of
from jdag.errors import JdagError, ScenarioError, unusable
from jdag.lab.retiming import Retimed, retime
from jdag.report.formatting import formatted
from jdag.report.result import RESULT, TRACE, read_result
from jdag.runtime.trace import read_trace
from jdag.sim.network import LinkModel, Network

Folder = Annotated[Path, typer.Argument(help="Folder written by `jdag run`.")]
_Change = Annotated[
    str | None, typer.Option(metavar="xF|N", help="A factor such as x2, or a value.")
]


def what_if(
    folder: Folder,
    *,
    bandwidth: _Change = None,
    latency: _Change = None,
    compute: _Change = None,
) -> None:
    """Compute the time of a recorded run with other links or devices.

    `--bandwidth` (bytes/s) and `--latency` (ns) apply to all links. `--compute` scales
    the times of all jobs. The run must follow a schedule, with control_lane = true. The
    result is for the time window of the run's report.

    Exit codes: 0 success; 2 invalid input, or the order of the run depends on time.
    """
    with errors_in_one_line():
        try:
            with reading(folder):
                trace, window = read_trace(folder / TRACE), None
                result = folder / RESULT
                if result.exists():  # The folder may contain only a trace.
                    first_ns, last_ns = read_result(folder)["window_ns"]
                    window = first_ns, last_ns
                run = retime(trace, window)
        except (OSError, ValueError) as error:
            raise no_run(folder, error) from error
        except JdagError as error:
            raise ScenarioError(f"{folder}: {error}") from error
        network = _changed(run.network, bandwidth, latency)
        scale = _factor("--compute", compute) if compute else 1.0
        paths = [run.critical_path(), run.critical_path(network, scale=scale)]
    _print(run, paths)


def _changed(network: Network, bandwidth: str | None, latency: str | None) -> Network:
    def changed(model: LinkModel) -> LinkModel:
        rate = model.bandwidth_bytes_per_s
        if bandwidth is not None:
            if rate is None and bandwidth.startswith("x"):
                allowed = "a number of bytes/s, since this run has unlimited bandwidth"
                raise ScenarioError(unusable("--bandwidth", bandwidth, allowed))
            rate = _value("--bandwidth", bandwidth, rate or 0, 1)
            model = replace(model, bandwidth_bytes_per_s=rate)
        if latency is not None:
            ns = _value("--latency", latency, model.latency_ns, 0)
            model = replace(model, latency_ns=ns)
        return model

    links = {pair: changed(model) for pair, model in network.links.items()}
    return replace(network, default=changed(network.default), links=links)


def _value(key: str, text: str, recorded: int, least: int) -> int:
    if text.startswith("x"):
        return max(round(_factor(key, text) * recorded), least)
    value = value_of(text)
    if type(value) is not int or value < least:
        allowed = f"a factor such as x2, or an integer >= {least}"
        raise ScenarioError(unusable(key, text, allowed))
    return value


def _factor(key: str, text: str) -> float:
    try:
        factor = float(text.removeprefix("x"))
    except ValueError:
        factor = -1.0
    if not (text.startswith("x") and 0 < factor < 1e9):
        raise ScenarioError(unusable(key, text, "a factor above 0, such as x2"))
    return factor


def _print(run: Retimed, paths: list[Any]) -> None:
    console = Console()
    before, after = (path.makespan_ns for path in paths)
    ratio = f"{after / before:.3f}" if before else "-"
    table = Table(title="critical path")
    for column in ("", "recorded", "what if"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("makespan", *(formatted("makespan_ns", n) for n in (before, after)))
    for name in ("by_kind", "by_worker", "by_link"):
        shares = [getattr(path, name) for path in paths]
        for key in sorted({*shares[0], *shares[1]}):
            cells = [
                f"{formatted('share_ns', share.get(key, 0))} "
                f"({100 * share.get(key, 0) / max(path.makespan_ns, 1):.1f} %)"
                for share, path in zip(shares, paths, strict=True)
            ]
            table.add_row(key, *cells)
    console.print(table)
    say(console, f"what if / recorded: {ratio}")
