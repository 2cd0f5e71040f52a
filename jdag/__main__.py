"""Entry point of `jdag` and `python -m jdag`: handles signals, then imports JAX."""

import gc

from jdag.processes.launch import signals


def main() -> None:
    signals.handle()
    gc.disable()  # Modules make no garbage, and a collection visits all of them.
    from jdag.cli.commands import main as command  # noqa: PLC0415 - It takes 50 ms.

    signals.run_command(command)


if __name__ == "__main__":
    main()
