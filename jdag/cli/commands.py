"""The command line: its entry point, and commands, which are imported when called."""

import gc
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from jdag.cli.cli_errors import Exit
from jdag.gone import GONE_SETTINGS
from jdag.processes.launch import signals

_INTERRUPTED = 130  # Exit code of a shell after Ctrl-C.

# The function of each command, with the first line of its docstring.
COMMANDS = {
    "running.run": "Run a scenario, check its expectations, and write a report.",
    "running.check": "Run a scenario in two new processes and compare their digests.",
    "running.report": "Write the page of a run again, and print its metrics.",
    "predicting.calibrate": "Measure the functions and links of a scenario on "
    "processes on this host.",
    "predicting.predict": "Predict the time of a step of a scenario from measured "
    "costs.",
    "exploring.explore": "Run a scenario in many orders of its events, until a run is "
    "wrong.",
    "retiming.what_if": "Compute the time of a recorded run with other links or "
    "devices.",
    "exploring.replay": "Repeat a wrong run of `jdag explore` step by step, or a run "
    "from its journals.",
    "sweeping.sweep": "Run a scenario with all combinations of values, and write a "
    "table of the runs.",
    "hosting.worker": "Run one worker of a cluster until Ctrl-C or SIGTERM stops it.",
    "hosting.up": "Run the workers of a cluster that are on this host.",
}


class _Commands(TyperGroup):
    """Its commands are placeholders, whose callbacks import the real functions."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, placeholder, args = super().resolve_command(ctx, args)
        assert placeholder is not None and placeholder.callback is not None
        command = typer.Typer(add_completion=False, rich_markup_mode=None)
        command.command(name)(placeholder.callback())
        if not gc.isenabled():  # Disabled by `jdag.__main__` during imports.
            gc.freeze()
            gc.enable()
        return name, typer.main.get_command(command), args


def _placeholder(module: str, name: str) -> Callable[[], Any]:
    return lambda: getattr(signals.import_command(f"jdag.cli.{module}"), name)


app = typer.Typer(cls=_Commands, add_completion=False, rich_markup_mode=None)
for _path, _line in COMMANDS.items():
    _module, _name = _path.split(".")
    app.command(_name.replace("_", "-"), help=_line)(_placeholder(_module, _name))


def _version(is_asked: bool) -> None:
    if is_asked:
        from jdag.runtime.versions import version_of  # noqa: PLC0415 - 20 ms.

        typer.echo(f"jdag {version_of('jdag')}, JAX {version_of('jax')}")
        raise typer.Exit


_Version = Annotated[
    bool,
    typer.Option(
        "--version", callback=_version, is_eager=True, help="Print the version."
    ),
]


@app.callback(invoke_without_command=True)
def _main(context: typer.Context, is_asked: _Version = False) -> None:
    """Distributed autograd for JAX: run scenarios in virtual time, or start workers."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(Exit.BAD_INPUT)


def main() -> None:
    """Run the command in `sys.argv`. Raises SystemExit or KeyboardInterrupt."""
    command = typer.main.get_command(app)
    try:
        code = command.main(prog_name="jdag", standalone_mode=False)
    except Exception as error:
        # Errors in the command line arguments are also printed as one line.
        format_message = getattr(error, "format_message", None)
        if format_message is None:
            raise
        context = getattr(error, "ctx", None)
        command_path = context.command_path if context is not None else "jdag"
        line = " ".join(format_message().split()).rstrip(".")
        option = getattr(error, "option_name", "").removeprefix("--")
        if option in GONE_SETTINGS:
            line = f"{line}: {GONE_SETTINGS[option]}"
        typer.echo(f"jdag: {line}; see {command_path} --help", err=True)
        code = Exit.BAD_INPUT
    if code == _INTERRUPTED:
        raise KeyboardInterrupt  # Typer has converted it to an exit code.
    sys.exit(code)
