"""A progress bar on the terminal, for operations that take longer than a second."""

import sys
from typing import Any

from rich.console import Console
from rich.progress import Progress

SHOWN_S = 1.0


class Bar:
    """A context manager that shows a progress bar on a terminal after `SHOWN_S`."""

    def __init__(self, title: str, total: int) -> None:
        self._bar: Any = None
        if sys.stderr.isatty():
            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.add_task(title, total=total)

    def __enter__(self) -> "Bar":
        return self

    def show(self, done: int) -> None:
        if self._bar is not None:
            (task,) = self._bar.tasks
            self._bar.update(task.id, completed=done)
            if task.elapsed > SHOWN_S:
                self._bar.start()

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()
