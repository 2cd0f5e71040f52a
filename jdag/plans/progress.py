"""A progress bar on the terminal for what takes longer than a second."""

import sys
from typing import Any

from rich.console import Console
from rich.progress import Progress

SHOWN_S = 1.0


class Bar:
    """Progress towards a total; a context manager. Shown on a terminal, once slow."""

    def __init__(self, what: str, total: int) -> None:
        self._bar: Any = None
        if sys.stderr.isatty():
            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.add_task(what, total=total)

    def __enter__(self) -> "Bar":
        return self

    def show(self, done: int) -> None:
        """So much is done."""
        if self._bar is not None:
            (task,) = self._bar.tasks
            self._bar.update(task.id, completed=done)
            if task.elapsed > SHOWN_S:
                self._bar.start()

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()
