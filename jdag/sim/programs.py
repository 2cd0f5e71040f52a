"""Programs in virtual time: one greenlet per program on a worker.

The main program runs in its caller's greenlet. When the main program blocks, that
greenlet becomes the hub: it runs the next events, and switches to a program's greenlet
once the result for which the program waits has arrived. A program that blocks or ends
switches back to the hub. One greenlet runs at a time, in the order of the timeline.

Inputs:  the attribute `hub`, set while the event loop runs; calls of `start`, `wake`
         and `kill` from within the loop, and of `park` from a program.
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
    """All programs of one simulated run.

    `hub` is the greenlet that runs the event loop; None while the main program runs.
    `alive` has the port of each program, `parked` the blocked program of each waiter.
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
        """The running program's port. JdagError on another thread and in the hub."""
        if get_ident() != self._thread:
            raise other_thread(current_thread().name)
        running = getcurrent()
        if running is self.hub:
            raise JdagError(
                "a function that a worker computes, such as a hook, cannot use the "
                "cluster or fetch from it; only programs can"
            )
        return self.alive.get(running, self._main)

    def start(self, port: ProgramPort, body: Callable[[], None]) -> None:
        program = greenlet(body)
        self.alive[program] = port
        self._run(program)

    def park(self, waiter: int) -> None:
        """Block the calling program until `wake`. A crash raises GreenletExit in it."""
        assert self.hub not in (None, getcurrent()), waiter
        self.parked[waiter] = getcurrent()
        try:
            self.hub.switch()
        finally:
            self.parked.pop(waiter, None)

    def wake(self, host: WorkerRuntime, waiter: int) -> None:
        program = self.parked.get(waiter)
        if program is not None:
            assert host.alive, waiter
            self._run(program)

    def frame(self, waiter: int) -> FrameType:
        program = self.parked.get(waiter)
        frame: FrameType | None = None if program is None else program.gr_frame
        return frame or sys._getframe()

    def kill(self, worker: str | None) -> None:
        """End the programs of a worker, or of all workers (None), by GreenletExit."""
        dying = [p for p, port in self.alive.items() if worker in (None, port.worker)]
        assert getcurrent() not in dying, worker
        for program in dying:
            program.parent = getcurrent()
            # Errors of the ended program are dropped, since its worker is lost.
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
