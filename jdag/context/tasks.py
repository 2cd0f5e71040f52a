"""Tasks: programs that run at the same time as the program that started them."""

from collections.abc import Iterable, Sequence
from typing import Any

from jdag.context.outcome import nanoseconds
from jdag.engine.protocol import Worker, named
from jdag.errors import CollectiveError, JdagError, TaskTimeout, kind_of


class Task:
    """A program that was started on a worker; `ctx.start` returns it.

    The end of the starting program or context waits for the task, and raises its error
    unless its result was requested before.

    Attributes:
        worker: the name of the worker on which the program runs.
    """

    __slots__ = (
        "_site", "end", "frame", "held", "name", "value", "was_requested", "worker",
    )  # fmt: skip

    def __init__(
        self, frame: Any, worker: Worker, name: str, site: str, held: Any = None
    ) -> None:
        self.frame = frame  # Of the program that started it; or an `OracleFrame`.
        self.worker = named(worker)
        self.name = name
        self._site = site
        self.held = held  # Refs among the arguments, kept until the program ends.
        self.was_requested = False  # Whether the result was requested.
        self.value: tuple[Any, ...] | None = None  # The collected result.
        self.end: Any = None  # The `Return` of the program, once it has arrived.

    def __repr__(self) -> str:
        state = "running" if self.end is None else "ended"
        return f"Task({self}, called at {self._site}, {state})"

    def __str__(self) -> str:
        return f"{self.name} on {self.worker!r}"

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for the program and return its result. May be called again.

        Args:
            timeout_s: the time limit in seconds of `cluster.now_ns`; None: no limit.

        Raises:
            TaskTimeout: the program has not returned within that time. It continues.
            RemoteError: the program raised an exception; errors of jdag keep their
                class.
            WorkerLost: its worker is lost.
            ContextError: this program did not start it.
        """
        return wait([self], timeout_s=timeout_s)[0]

    def called(self) -> Any:
        """Wait for a program that `ctx.call` started and return its result."""
        if self.end is None:  # In the oracle the program has already ended.
            self.frame.join([self])
        return self.collect()

    def collect(self) -> Any:
        """Return the result of a program that has ended, or raise its error."""
        self.was_requested = True
        if self.value is None:
            assert self.end is not None, self
            self.value = (self.frame.returned(self),)
        return self.value[0]


def wait(tasks: Sequence[Task], *, timeout_s: float | None = None) -> list[Any]:
    """Wait until all these tasks have ended; return their results in order.

    Args:
        tasks: tasks that this program has started.
        timeout_s: the time limit in seconds of `cluster.now_ns`; None: no limit.

    Raises:
        TaskTimeout: some programs have not returned within that time. They continue.
        RemoteError: a program raised an exception; errors of jdag keep their class. If
            several failed, the first error in the order of `tasks` is raised, with the
            others as its notes.
        WorkerLost: a worker is lost.
        ContextError: another program started one of the tasks.
        JdagError: `tasks` is not a sequence of tasks.
    """
    timeout_ns = nanoseconds(timeout_s)
    tasks = list(tasks) if isinstance(tasks, Sequence) else [tasks]
    for task in tasks:
        if not isinstance(task, Task):
            raise JdagError(
                "jdag.wait takes a list of tasks, as returned by ctx.start, not "
                f"{kind_of(task)}"
            )
    frames = list(dict.fromkeys(task.frame for task in tasks if task.value is None))
    due_ns = None
    if timeout_ns is not None and frames:
        due_ns = frames[0].state.driver.now_ns + timeout_ns
    for frame in frames:
        frame.check("waiting for a task")
        waited = [task for task in tasks if task.frame is frame]
        try:
            have_ended = frame.join(waited, due_ns)
        except KeyboardInterrupt:
            for task in waited:  # So that the end of the program does not raise again.
                task.was_requested = True
            raise
        if not have_ended:
            late = ", ".join(repr(task) for task in tasks if task.end is None)
            raise TaskTimeout(
                f"not finished within timeout_s={timeout_s!r}: {late}; these programs "
                "continue, and their results may be requested again"
            )
    return collected(tasks)


def collected(tasks: Iterable[Task]) -> list[Any]:
    """Return the results of tasks that have ended, or raise the first error.

    A CollectiveError is raised only if all errors are CollectiveErrors. The other
    errors become notes of the raised error.
    """
    results, errors = [], list[tuple[Task, JdagError]]()
    for task in tasks:
        try:
            results.append(task.collect())
        except JdagError as error:
            errors.append((task, error))
    if not errors:
        return results
    errors.sort(key=lambda item: isinstance(item[1], CollectiveError))
    (_, first), *rest = errors
    for task, also in rest:
        first.add_note(f"{task} also failed: {also}")
    raise first
