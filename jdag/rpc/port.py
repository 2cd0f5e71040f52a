"""What one program has of its node: the engine's ear, values, and waiting."""

from collections.abc import Sequence
from typing import Any, Protocol

from jdag.engine.vocabulary import Event, Key


class Host(Protocol):
    """The node of a program."""

    @property
    def worker(self) -> str:
        """Its name."""

    def tell(self, event: Event, values: Sequence[tuple[Key, Any]]) -> None:
        """Have the engine handle an event; hold these values, unless it raises."""

    def number(self) -> int:
        """Return a number to wait for."""

    def wait(self, waiter: int) -> Any:
        """Block until that waiter is resumed; return what it was given."""

    def loss(self, worker: str) -> str | None:
        """Why that worker is gone; None if it is not."""


class Port:
    """A program's way to its driver; see `jdag.home.Port`."""

    __slots__ = ("_host", "worker")

    def __init__(self, host: Host) -> None:
        self._host = host
        self.worker = host.worker

    def tell(self, event: Event, values: Sequence[tuple[Key, Any]] = ()) -> None:
        """Have the engine handle an event, and its effects carried out.

        Blocks only while more waits to leave than may.

        Args:
            event: what the program tells.
            values: what is held on this worker from then on, unless this raises.

        Raises:
            JdagError: the engine refuses the event, or the cluster is closed, or a
                function cannot travel to where it is to run.
        """
        self._host.tell(event, values)

    def waiter(self) -> int:
        """A number that no other waiter of the node has."""
        return self._host.number()

    def wait(self, waiter: int) -> Any:
        """Block this program until its engine resumes `waiter`; return the result."""
        return self._host.wait(waiter)

    def lost(self, worker: str) -> str | None:
        """Why that worker is gone; None unless this one was told that it is."""
        return self._host.loss(worker)
