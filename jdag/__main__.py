"""Entry point of `jdag` and `python -m jdag`: handles signals, then imports JAX."""

from jdag.processes.launch import signals


def main() -> None:
    signals.handle()
    from jdag.cli.commands import main as command  # noqa: PLC0415 - It imports JAX.

    signals.run_command(command)


if __name__ == "__main__":
    main()
