"""Programs in virtual time: a greenlet per program on a worker; main's is the hub.

The main program runs in its caller's greenlet. When it blocks, that greenlet becomes
the hub: it carries out the next events, and switches to a program's greenlet once its
result is there. A program that blocks or ends switches back. One greenlet runs at a
time, in the order of the timeline.

Inputs:  `hub`, set while its loop runs; `start`, `wake` and `kill` from within it;
         `park` from a program.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from threading import current_thread, get_ident
from types import FrameType

from greenlet import GreenletExit, getcurrent, greenlet

from jdag.errors import JdagError, other_thread
from jdag.runtime.worker_runtime import ProgramPort, WorkerRuntime


class Programs:
    """The greenlets of one run: `alive` maps them to ports, `parked` waiters to them.

    A blocked program is parked until the `hub` wakes it. `hub` is None while main runs.
    """

    __slots__ = ("_main", "_thread", "alive", "hub", "parked")

    def __init__(self, main: ProgramPort) -> None:
        self.hub: greenlet | None = None
        self.alive: dict[greenlet, ProgramPort] = {}
        self.parked: dict[int, greenlet] = {}
        self._main = main
        self._thread = get_ident()  # Greenlets do not switch to another thread.

    @property
    def current(self) -> ProgramPort:
        """The port of the program that runs right now.

        Raises:
            JdagError: asked on another thread than that which made the run, or by a
                function that the hub computes.
        """
        if get_ident() != self._thread:
            raise other_thread(current_thread().name)
        running = getcurrent()
        if running is self.hub:
            raise JdagError(
                "what a worker computes, such as a hook, cannot use the cluster or "
                "fetch from it; only programs can"
            )
        return self.alive.get(running, self._main)

    def start(self, port: ProgramPort, body: Callable[[], None]) -> None:
        """Run `body` as the program of `port` until it blocks or ends."""
        program = greenlet(body)
        self.alive[program] = port
        self._run(program)

    def park(self, waiter: int) -> None:
        """Block the program that calls this until `wake(..., waiter)`.

        Raises:
            GreenletExit: its worker has crashed, or the cluster is closed.
        """
        assert self.hub not in (None, getcurrent()), waiter
        self.parked[waiter] = getcurrent()
        try:
            self.hub.switch()
        finally:
            self.parked.pop(waiter, None)

    def wake(self, host: WorkerRuntime, waiter: int) -> None:
        """Let the program that is blocked on `waiter` go on until it blocks or ends."""
        program = self.parked.get(waiter)
        if program is not None:
            assert host.alive, waiter
            self._run(program)

    def frame(self, waiter: int) -> FrameType:
        """Return what the program of a waiter runs; else main, which calls this."""
        program = self.parked.get(waiter)
        frame: FrameType | None = None if program is None else program.gr_frame
        return frame or sys._getframe()

    def kill(self, worker: str | None) -> None:
        """End the programs of a worker, or of all (None), without an error in them."""
        dying = [p for p, port in self.alive.items() if worker in (None, port.worker)]
        assert getcurrent() not in dying, worker
        for program in dying:
            program.parent = getcurrent()
            # Errors of the dying program are ignored: its worker is gone.
            with suppress(Exception):
                program.throw(GreenletExit)
            self.alive.pop(program, None)

    def _run(self, program: greenlet) -> None:
        program.parent = getcurrent()
        try:
            program.switch()
        finally:
            if program.dead:
                self.alive.pop(program, None)
