"""How programs wait in virtual time: each on a worker is a greenlet, home is the hub.

The main program runs in its caller's greenlet. When it blocks, that greenlet becomes
the hub: it carries out what happens next, and switches to a program's greenlet when
what that waits for is there; a program that blocks, or ends, switches back. One thing
runs at a time, in the order of the timeline.

Inputs:  `enter` and `leave` around the hub's loop; `start`, `wake`, `kill` from within
         it; `park` from a program.
"""

from collections.abc import Callable
from contextlib import suppress
from threading import current_thread, get_ident

from greenlet import GreenletExit, getcurrent, greenlet

from jdag.errors import JdagError, other_thread
from jdag.runtime.host import Port


class Programs:
    """The greenlets of one run, with the port of each."""

    __slots__ = ("_alive", "_hub", "_parked", "_thread")

    def __init__(self) -> None:
        self._hub: greenlet | None = None
        self._alive: dict[greenlet, Port] = {}
        self._parked: dict[int, greenlet] = {}
        self._thread = get_ident()  # Greenlets do not switch to another thread.

    @property
    def looping(self) -> bool:
        """Whether a hub carries out events: a program that blocks switches to it."""
        return self._hub is not None

    @property
    def alive(self) -> int:
        """How many programs have begun and not ended."""
        return len(self._alive)

    @property
    def current(self) -> Port | None:
        """The port of the program that runs right now; None if it is main."""
        self._check_thread()
        return self._alive.get(getcurrent())

    def _check_thread(self) -> None:
        """Raise JdagError unless this is the thread that made the run."""
        if get_ident() != self._thread:
            raise other_thread(current_thread().name)

    def enter(self) -> None:
        """The current greenlet is the hub from now on."""
        self._check_thread()
        assert self._hub is None, self._hub
        self._hub = getcurrent()

    def leave(self) -> None:
        """There is no hub from now on."""
        self._hub = None

    def check_outside(self) -> None:
        """Raise JdagError if a program on a worker asks this."""
        if self._hub is not None:
            raise JdagError("what runs on it cannot end the cluster; main can")

    def check_not_hub(self) -> None:
        """Raise JdagError if the hub itself asks this: it never uses the cluster.

        Then a function that it computes does.
        """
        self._check_thread()
        if self._hub is not None and getcurrent() is self._hub:
            raise JdagError(
                "what a worker computes, such as a hook, cannot use the cluster or "
                "fetch from it; only programs can"
            )

    def start(self, port: Port, body: Callable[[], None]) -> None:
        """Run `body` as the program of `port` until it blocks or ends."""
        program = greenlet(body)
        self._alive[program] = port
        self._run(program)

    def park(self, waiter: int) -> None:
        """Block the program that calls this until `wake(waiter)`.

        Raises:
            GreenletExit: its worker has crashed, or the cluster is closed.
        """
        assert self._hub is not None, waiter
        self._parked[waiter] = getcurrent()
        try:
            self._hub.switch()
        finally:
            self._parked.pop(waiter, None)

    def is_parked(self, waiter: int) -> bool:
        """Whether a program is blocked on that waiter."""
        return waiter in self._parked

    def wake(self, waiter: int) -> None:
        """Let the program that is blocked on `waiter` go on until it blocks or ends."""
        program = self._parked.get(waiter)
        if program is not None:
            self._run(program)

    def kill(self, worker: str | None) -> None:
        """End the programs of a worker, or of all (None), without an error in them."""
        dying = [p for p, port in self._alive.items() if worker in (None, port.worker)]
        assert getcurrent() not in dying, worker
        for program in dying:
            program.parent = getcurrent()
            # Whatever it raises as it dies has no listener: its worker is gone.
            with suppress(Exception):
                program.throw(GreenletExit)
            self._alive.pop(program, None)

    def _run(self, program: greenlet) -> None:
        program.parent = getcurrent()
        try:
            program.switch()
        finally:
            if program.dead:
                self._alive.pop(program, None)
