"""Programs that run at the same time as the program that started them."""

from collections.abc import Iterable, Sequence
from typing import Any

from jdag.context.outcome import nanoseconds
from jdag.engine.protocol import Worker, named
from jdag.errors import CollectiveError, JdagError, TaskTimeout, kind_of


class Task:
    """A program that was started on a worker: `ctx.start` gives it.

    The program or context that started it waits for it at its own end, and raises its
    error there unless its result was requested.

    Attributes:
        worker: the name of the worker on which the program runs.
    """

    __slots__ = ("_site", "asked", "end", "frame", "given", "held", "name", "worker")

    def __init__(
        self, frame: Any, worker: Worker, name: str, site: str, held: Any = None
    ) -> None:
        self.frame = frame  # That started it: a `ProgramFrame`, or the oracle's.
        self.worker = named(worker)
        self.name = name
        self._site = site
        self.held = held  # Refs of its arguments live until it ends.
        self.asked = False  # Whether its program asked for its result.
        self.given: tuple[Any, ...] | None = None  # The result, once it was taken.
        self.end: Any = None  # How the program ended, as its frame knows it.

    def __repr__(self) -> str:
        state = "running" if self.end is None else "ended"
        return f"Task({self}, called at {self._site}, {state})"

    def __str__(self) -> str:
        return f"{self.name} on {self.worker!r}"

    def result(self, timeout_s: float | None = None) -> Any:
        """Return what the program returned, once it has; repeatable.

        Args:
            timeout_s: None, or how many seconds (of `cluster.now_ns`) to wait at most.

        Raises:
            TaskTimeout: it has not returned within that time; it goes on.
            RemoteError: the program raised; errors of jdag keep their class.
            WorkerLost: its worker is gone.
            ContextError: this program did not start it.
        """
        (found,) = wait([self], timeout_s=timeout_s)
        return found

    def called(self) -> Any:
        """Return what a call of the program returns, which nobody else waits for."""
        if self.end is None:  # In the oracle it has ended.
            self.frame.join([self])
        return self.collect()

    def collect(self) -> Any:
        """Return the result of a program that has ended, or raise its error."""
        self.asked = True
        if self.given is None:
            assert self.end is not None, self
            self.given = (self.frame.returned(self),)
        return self.given[0]


def wait(tasks: Sequence[Task], *, timeout_s: float | None = None) -> list[Any]:
    """Wait until all these tasks have ended; return their results in order.

    Args:
        tasks: of this program, as `ctx.start` gives them.
        timeout_s: None, or how many seconds (of `cluster.now_ns`) to wait at most.

    Raises:
        TaskTimeout: some have not returned within that time; they go on.
        RemoteError: a program raised; errors of jdag keep their class. Of several the
            first in the order of `tasks`; the others are its notes.
        WorkerLost: a worker is gone.
        ContextError: this program did not start one of them.
        JdagError: `tasks` is no sequence of tasks.
    """
    timeout_ns = nanoseconds(timeout_s)
    found = list(tasks) if isinstance(tasks, Sequence) else [tasks]
    for one in found:
        if not isinstance(one, Task):
            raise JdagError(
                "jdag.wait takes a list of tasks, as ctx.start gives, and got "
                f"{kind_of(one)}"
            )
    frames = list(dict.fromkeys(one.frame for one in found if one.given is None))
    due_ns = None
    if timeout_ns is not None and frames:
        due_ns = frames[0].now_ns + timeout_ns
    for frame in frames:
        frame.check("waiting for a task")
        waited = [one for one in found if one.frame is frame]
        try:
            ended = frame.join(waited, due_ns)
        except KeyboardInterrupt:
            for one in waited:  # A simulated program's is raised here, and here alone.
                one.asked = True
            raise
        if not ended:
            late = ", ".join(repr(one) for one in found if one.end is None)
            raise TaskTimeout(
                f"not within timeout_s={timeout_s!r}: {late}; what runs goes on, and "
                "its result may be asked for again"
            )
    return collected(found)


def collected(tasks: Iterable[Task]) -> list[Any]:
    """Return the results of tasks that have ended.

    Of several errors the first is raised, those of collectives after all else; the
    others are its notes.
    """
    results, errors = [], list[tuple[Task, JdagError]]()
    for one in tasks:
        try:
            results.append(one.collect())
        except JdagError as error:
            errors.append((one, error))
    if not errors:
        return results
    errors.sort(key=lambda one: isinstance(one[1], CollectiveError))
    (_, first), *others = errors
    for task, other in others:
        first.add_note(f"{task} failed too: {other}")
    raise first
