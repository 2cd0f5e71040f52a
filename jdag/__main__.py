"""The process of `jdag` and `python -m jdag`: signals are handled before imports."""

from jdag.processes.launch import signals


def main() -> None:
    """The console script."""
    signals.handle()
    from jdag.cli.commands import main as command  # noqa: PLC0415 - It imports JAX.

    signals.run_command(command)


if __name__ == "__main__":
    main()
