"""The commands `jdag worker` and `jdag up`, which start worker processes.

Both read a cluster file (`jdag.processes.session.cluster_file`). If the cluster needs a
token, they create its file in the same folder. `jdag.connect` attaches the workers.
Under Slurm, `jdag up --slurm` also writes the cluster file
(`jdag.processes.launch.slurm`).
"""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jdag.cli.cli_errors import Exit, errors_in_one_line
from jdag.errors import ScenarioError, unusable
from jdag.processes.launch.launch import Launch, is_here
from jdag.processes.launch.slurm import write_cluster_file
from jdag.processes.launch.worker import become
from jdag.processes.session.cluster_file import (
    DEVICES,
    ClusterSettings,
    WorkerOptions,
    is_device,
    load_cluster_file,
)

# Import path of the node factory that worker processes use.
NODE = "jdag.api.drivers:member"

_File = Annotated[Path, typer.Argument(help="The cluster file, such as cluster.toml.")]
_Name = Annotated[str, typer.Option(help="Name of the worker in the file.")]
_Device = Annotated[
    str | None,
    typer.Option(help="cpu, gpu or gpu:N.  [default: from the file, or JAX's default]"),
]
Only = Annotated[
    list[str] | None, typer.Option("--only", help="Start only this worker; repeatable.")
]
Except = Annotated[
    list[str] | None,
    typer.Option(
        "--except", help="Do not start this worker (for example main); repeatable."
    ),
]
Logs = Annotated[
    Path | None,
    typer.Option(help="Folder for the workers' output.  [default: a temporary one]"),
]
Slurm = Annotated[
    bool, typer.Option("--slurm", help="Write FILE from Slurm's variables first.")
]
_Workers = Annotated[
    str | None,
    typer.Option(
        metavar="MAIN,NAME,...",
        help="With --slurm: names of main and of each task, separated by commas."
        "  [default: main,w0,w1,...]",
    ),
]


def worker(file: _File, *, name: _Name, device: _Device = None) -> None:
    """Run one worker of a cluster until Ctrl-C or SIGTERM stops it.

    Exit codes: 0 the worker was stopped; 2 invalid input, or the worker cannot start.
    """
    with errors_in_one_line():
        settings = load_cluster_file(file)
        settings.make_token()
        options = options_of(settings, name, device)
    sys.stdout.flush()
    become(options)


def up(
    file: _File = Path("cluster.toml"),
    *,
    only: Only = None,
    leaving: Except = None,
    logs: Logs = None,
    slurm: Slurm = False,
    workers: _Workers = None,
) -> None:
    """Run the workers of a cluster that are on this host.

    With --slurm, run the worker of this srun task. The command ends on Ctrl-C or
    SIGTERM, or when no worker is alive.

    Exit codes: 0 the workers were stopped; 1 a worker has died; 2 invalid input, or a
    worker cannot start.
    """
    console = Console()
    deaths: list[str] = []

    with errors_in_one_line():
        if slurm:
            if only or leaving:
                key, names = ("--only", only) if only else ("--except", leaving)
                allowed = "no such option with --slurm, since srun starts each worker"
                raise ScenarioError(unusable(key, ",".join(names or ()), allowed))
            only = [
                write_cluster_file(file, os.environ, workers and workers.split(","))
            ]
        elif workers is not None:
            allowed = "no such option without --slurm, since the file has the names"
            raise ScenarioError(unusable("--workers", workers, allowed))
        settings = load_cluster_file(file)
        settings.make_token()
        options = [
            options_of(settings, name, None)
            for name in chosen(settings, only or [], leaving or [])
        ]
        launch = Launch(options, logs=logs, ready_s=settings.ready_s)

    def died(name: str, why: str) -> None:
        deaths.append(name)
        typer.echo(f"jdag: {why}", err=True)

    with launch:
        _print(console, settings, launch)
        launch.on_death(died)
        launch.wait()
        console.print("stopping")
    raise typer.Exit(Exit.WRONG if deaths else Exit.MET)


def chosen(settings: ClusterSettings, only: list[str], leaving: list[str]) -> list[str]:
    for name in (*only, *leaving):
        settings.worker(name)
    names = [
        name
        for name, each in settings.workers.items()
        if (name in only if only else is_here(each.control.host))
        and name not in leaving
    ]
    if not names:
        allowed = "a file with a worker on this host that --except does not exclude"
        raise ScenarioError(unusable("file", str(settings.path), allowed))
    return names


def options_of(
    settings: ClusterSettings, name: str, device: str | None
) -> WorkerOptions:
    """Return the options of a worker process. `device` overrides the file's device."""
    if device is not None and not is_device(device):
        raise ScenarioError(unusable("--device", device, DEVICES))
    entry = settings.worker(name)
    return WorkerOptions(
        worker=name,
        node=NODE,
        control=str(entry.control),
        data=settings.listener(name),
        token=settings.token,
        allow=tuple(entry.allow),
        device=device or entry.device,
        # Allowed modules may be in the folder of the cluster file.
        path=(str(settings.path.resolve().parent), *sys.path),
        pythonpath=os.environ.get("PYTHONPATH"),
        tls=settings.tls_files,
        hosts={key: each.control.host for key, each in settings.workers.items()},
    )


def _print(console: Console, settings: ClusterSettings, launch: Launch) -> None:
    table = Table(title="workers", title_justify="left", title_style="bold")
    for column in ("worker", "address", "device", "process"):
        table.add_column(column, no_wrap=True)
    table.add_column("output", overflow="fold")
    for name, address in launch.addresses.items():
        device = settings.worker(name).device or "JAX's default"
        row = (name, str(address), device, str(launch.pids[name]))
        table.add_row(*map(Text, row), Text(str(launch.log_of(name))))
    console.print(table)
    console.print("press Ctrl-C to stop the workers", highlight=False)
