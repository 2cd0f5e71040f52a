"""What one program has of the driver: its worker's engine and values, and waiting."""

from collections.abc import Callable, Sequence
from typing import Any

from jdag.engine.vocabulary import Event, Key
from jdag.sim.host import Host

Tell = Callable[["Port", Event, Sequence[tuple[Key, Any]]], None]
Wait = Callable[[Host, int], tuple[Any, int]]


class Port:
    """A program's way to its driver.

    `record` is what the program last waited for, as an index of the trace, -1 for
    nothing: it causes what the program does next.
    """

    __slots__ = ("_number", "_tell", "_wait", "host", "record", "worker")

    def __init__(
        self,
        host: Host,
        record: int,
        *,
        tell: Tell,
        wait: Wait,
        number: Callable[[], int],
    ) -> None:
        self.host = host
        self.worker = host.worker
        self.record = record
        self._tell = tell
        self._wait = wait
        self._number = number

    def tell(self, event: Event, values: Sequence[tuple[Key, Any]] = ()) -> None:
        """Have the engine handle an event, and its effects carried out; never blocks.

        Args:
            event: what the program tells.
            values: what is held on this worker from then on, unless this raises.

        Raises:
            JdagError: the engine refuses the event, or the cluster is closed.
        """
        self._tell(self, event, values)

    def waiter(self) -> int:
        """A number that no other waiter of the run has."""
        return self._number()

    def wait(self, waiter: int) -> Any:
        """Block this program until its engine resumes `waiter`; return the result.

        Raises:
            JdagError: nothing is left to happen that could, or the cluster is closed.
        """
        result, self.record = self._wait(self.host, waiter)
        return result

    def lost(self, worker: str) -> str | None:
        """Why that worker is gone; None unless this one was told that it is."""
        return self.host.lost.get(worker)
