"""The commands `jdag worker` and `jdag up`: worker processes started by hand.

Both read a cluster's file (`jdag.processes.session.cluster_file`), and make the secret
beside it that is needed where nothing else keeps strangers out; `jdag.connect` joins
what they start. Under Slurm, `jdag up --slurm` makes the file too
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

# The import path of the node factory; worker processes look it up by name.
NODE = "jdag.api.drivers:member"

_File = Annotated[
    Path, typer.Argument(help="The cluster's file, such as cluster.toml.")
]
_Name = Annotated[str, typer.Option(help="Which worker of the file this is to be.")]
_Device = Annotated[
    str | None,
    typer.Option(help="cpu, gpu, or gpu:N.  [default: the file's, or JAX's choice]"),
]
Only = Annotated[
    list[str] | None, typer.Option("--only", help="Start this worker alone; repeat.")
]
Except = Annotated[
    list[str] | None,
    typer.Option("--except", help="Do not start this one (main's); repeat."),
]
Logs = Annotated[
    Path | None,
    typer.Option(help="Folder for what they print.  [default: a temporary one]"),
]
Slurm = Annotated[
    bool, typer.Option("--slurm", help="Write FILE from Slurm's variables first.")
]
_Workers = Annotated[
    str | None,
    typer.Option(
        metavar="MAIN,NAME,...",
        help="With --slurm, the program that connects, and a name for each task."
        "  [default: main,w0,w1,...]",
    ),
]


def worker(file: _File, *, name: _Name, device: _Device = None) -> None:
    """Be one worker of a cluster until stopped (Ctrl-C, SIGTERM).

    Exit codes: 0 it was stopped, and had finished; 2 bad input, or it cannot start.
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
    """Start the workers of a cluster that are on this host, and stop them in the end.

    With --slurm, start the worker of this task of srun. Ends by Ctrl-C or SIGTERM, or
    when no worker is left. Exit codes: 0 they were stopped; 1 a worker has died; 2 bad
    input, or one cannot start.
    """
    console = Console()
    deaths: list[str] = []

    with errors_in_one_line():
        if slurm:
            if only or leaving:
                key, names = ("--only", only) if only else ("--except", leaving)
                allowed = "without --slurm, where srun says how many tasks there are"
                raise ScenarioError(unusable(key, ",".join(names or ()), allowed))
            only = [
                write_cluster_file(file, os.environ, workers and workers.split(","))
            ]
        elif workers is not None:
            allowed = "only with --slurm; a file names its workers itself"
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
    """Return the workers of this host that are to be started.

    Raises:
        ScenarioError: one that is named is not in the file, or none is left.
    """
    for name in (*only, *leaving):
        settings.worker(name)
    names = [
        name
        for name, one in settings.workers.items()
        if (name in only if only else is_here(one.control.host)) and name not in leaving
    ]
    if not names:
        allowed = "a file with a worker whose address is this host's, and not excepted"
        raise ScenarioError(unusable("file", str(settings.path), allowed))
    return names


def options_of(
    settings: ClusterSettings, name: str, device: str | None
) -> WorkerOptions:
    """Return the options of a worker process of a cluster's file.

    Raises:
        ScenarioError: the file has no such worker, or what it names is not usable; or
            the device is none.
    """
    if device is not None and not is_device(device):
        raise ScenarioError(unusable("--device", device, DEVICES))
    own = settings.worker(name)
    return WorkerOptions(
        worker=name,
        node=NODE,
        control=str(own.control),
        data=settings.listener(name),
        token=settings.token,
        allow=tuple(own.allow),
        device=device or own.device,
        # Modules that it allows may lie beside the file.
        path=(str(settings.path.resolve().parent), *sys.path),
        pythonpath=os.environ.get("PYTHONPATH"),
        tls=settings.tls_files,
        hosts={key: one.control.host for key, one in settings.workers.items()},
    )


def _print(console: Console, settings: ClusterSettings, launch: Launch) -> None:
    table = Table(title="workers", title_justify="left", title_style="bold")
    for column in ("worker", "address", "device", "process"):
        table.add_column(column, no_wrap=True)
    table.add_column("output", overflow="fold")
    for name, address in launch.addresses.items():
        device = settings.worker(name).device or "JAX's choice"
        row = (name, str(address), device, str(launch.pids[name]))
        table.add_row(*map(Text, row), Text(str(launch.log_of(name))))
    console.print(table)
    console.print("Ctrl-C stops them", highlight=False)
