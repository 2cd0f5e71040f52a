"""One worker under either driver: its engine, its values, and its programs' waiters.

Inputs: events, of programs (`Port.tell`) and of the driver (`Host.handle`).
Outputs: the effects of each event, in their order. Values are dropped and waiters are
    resumed here; the driver sends messages, computes jobs, starts programs and sets
    alarms (`Driver`).
Invariants: all effects of an event are carried out before the next event, also if one
    of them raises; a waiter is resumed once, and only while its program waits.

A cause is the index of a record in the trace; -1 stands for none, and for no trace.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from jdag.compute.machine import Machine, failure_of
from jdag.engine.functions import name_of
from jdag.engine.vocabulary import (
    Alarm,
    Awaited,
    Compute,
    Differentiated,
    Drop,
    Event,
    Fetched,
    Job,
    Key,
    Launched,
    Left,
    Message,
    ReadingKey,
    Resume,
    Returned,
    Send,
    Spawn,
)
from jdag.errors import JdagError
from jdag.runtime.sizes import check_values
from jdag.runtime.waiters import Cancel, Waiters

RunProgram = Callable[["Port", Spawn], Returned]

NO_CAUSE = -1
_WAITING = (Launched, Awaited, Fetched, Differentiated, Left)


class Driver(Protocol):
    """What a driver does for its hosts and for programs."""

    def tell(
        self, port: "Port", event: Event, values: Sequence[tuple[Key, Any]]
    ) -> None:
        """Have the engine of a program's worker handle an event; see `Port.tell`."""

    def wait(self, port: "Port", waiter: int) -> tuple[Any, int]:
        """Block a program until its waiter is resumed; return the result and cause."""

    def transmit(
        self,
        host: "Host",
        send: Send,
        message: Message,
        values: tuple[tuple[Key, ...], tuple[Any, ...]],
        cause: int,
    ) -> None:
        """Send a message with values, of these keys, to another worker."""

    def compute(self, host: "Host", job: Job, cause: int) -> None:
        """Compute a job; report `Computed` when it is done."""

    def spawn(self, host: "Host", spawn: Spawn, cause: int) -> None:
        """Start a program."""

    def alarm(self, host: "Host", alarm: Alarm, cause: int) -> Cancel:
        """Report the event of an alarm when it is due, unless it is cancelled."""

    def resumed(self, host: "Host", waiter: int, what: str, cause: int) -> int:
        """Record that a waiter is resumed; return the record's index."""

    def wake(self, host: "Host", waiter: int) -> None:
        """Let the program of a waiter go on, if it is blocked."""


class Host:
    """The state of one worker.

    Args:
        worker: its name, with its incarnation.
        engine: its engine.
        machine: its values, and what computes on them.
        driver: carries out what needs time, devices or other workers.
        waiters: those of its driver.
        lost: why each peer that it was told is gone is gone; the driver fills it.
        value_bytes_max: the largest value that leaves the worker; None: any does.
    """

    __slots__ = (
        "_value_bytes_max",
        "alive",
        "driver",
        "engine",
        "lost",
        "machine",
        "made",
        "waiters",
        "worker",
    )

    def __init__(
        self,
        worker: str,
        engine: Any,
        machine: Machine,
        *,
        driver: Driver,
        waiters: Waiters,
        lost: Mapping[str, str],
        value_bytes_max: int | None = None,
    ) -> None:
        self.worker = worker
        self.engine = engine
        self.machine = machine
        self.lost = lost
        self.alive = True
        self.made: dict[Key, int] = {}  # The record that made each value, if traced.
        self.driver = driver
        self.waiters = waiters
        self._value_bytes_max = value_bytes_max

    def tell(
        self, port: "Port", event: Event, values: Sequence[tuple[Key, Any]], cause: int
    ) -> None:
        """Handle an event of a program; hold its values, unless that raises."""
        if isinstance(event, _WAITING):
            port.asked.append(event.waiter)
            self.waiters.ask(event.waiter, self.worker, type(event).__name__)
        try:
            if values:
                self.hold(values, cause)
            most = self._value_bytes_max
            if most is not None and self.machine.values.bytes_peak > most:
                check_values(event, self.worker, most)
            self.handle(event, cause)
        except JdagError:
            self.drop([key for key, _ in values])
            raise

    def handle(self, event: Event, cause: int = NO_CAUSE) -> None:
        """Handle an event and carry out all its effects; then raise what one raised."""
        failed: Exception | None = None
        for effect in self.engine.handle(event):
            if not self.alive:
                return  # The worker crashed between two effects.
            try:
                self._carry_out(effect, cause)
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _carry_out(self, effect: Any, cause: int) -> None:
        kind = effect.__class__
        driver = self.driver
        if kind is Send:
            message, keys, values = effect.message, effect.values, ()
            if keys:
                message, keys, values = self.machine.load(message, keys, self.worker)
            driver.transmit(self, effect, message, (keys, values), cause)
        elif kind is Compute:
            driver.compute(self, effect.job, cause)
        elif kind is Drop:
            self.drop(effect.keys)
        elif kind is Resume:
            self._resume(effect, cause)
        elif kind is Alarm:
            self.waiters.alarm(effect.waiter, driver.alarm(self, effect, cause))
        else:
            assert kind is Spawn, effect
            driver.spawn(self, effect, cause)

    def _resume(self, resume: Resume, cause: int) -> None:
        waiter, result, waiters = resume.waiter, resume.result, self.waiters
        waiters.silence(waiter)
        asked = waiters.asked(waiter)
        if asked is None:
            return  # The program was interrupted, and no longer waits.
        record = self.driver.resumed(self, waiter, asked, cause)
        if asked == Fetched.__name__:  # Before another event can replace a leaf.
            found = result
            result = self.machine.fetched(found, self.worker)
            self.drop([key for key in found if isinstance(key, ReadingKey)])
        waiters.give(waiter, result, record)
        self.driver.wake(self, waiter)

    def hold(self, values: Sequence[tuple[Key, Any]], cause: int) -> None:
        """Hold values that a program put here, or that came with a message."""
        put, made = self.machine.values.put, self.made
        for key, value in values:
            put(key, value)
            if cause >= 0:
                made[key] = cause

    def drop(self, keys: Sequence[Key]) -> None:
        """Let go of values; a key that is not held is no error."""
        values, made = self.machine.values, self.made
        for key in keys:
            if key in values:
                values.drop(key)
                made.pop(key, None)

    def clear(self) -> None:
        """Let go of everything but what was counted."""
        self.alive = False
        self.machine.clear()
        self.made.clear()
        self.engine = None


class Port:
    """A program's access to its driver.

    `cause` is the record of what the program last waited for: it causes what the
    program does next. `asked` are its waiters, in the order of asking.
    """

    __slots__ = ("asked", "cause", "host", "worker")

    def __init__(self, host: Host, cause: int = NO_CAUSE) -> None:
        self.host = host
        self.worker = host.worker
        self.cause = cause
        self.asked: deque[int] = deque()

    def tell(self, event: Event, values: Sequence[tuple[Key, Any]] = ()) -> None:
        """Have the engine handle an event, and carry out its effects.

        Blocks only while more bytes wait to be sent than may.

        Args:
            event: what the program asks or reports.
            values: held on this worker from then on, unless this raises.

        Raises:
            JdagError: the engine refuses the event, the cluster is closed, or a
                function cannot travel to where it is to run.
        """
        self.host.driver.tell(self, event, values)

    def waiter(self) -> int:
        """Return a new number to wait for."""
        return self.host.waiters.number()

    def wait(self, waiter: int) -> Any:
        """Block until the engine resumes a waiter; return the result.

        A program waits for what it asks for in the order of asking: what it asked for
        before was interrupted between asking and waiting, and is forgotten as well.

        Raises:
            JdagError: the waiter can never be resumed, or the cluster is closed.
        """
        try:
            result, self.cause = self.host.driver.wait(self, waiter)
            return result
        finally:
            asked = self.asked
            while asked and asked[0] <= waiter:
                self.host.waiters.forget(asked.popleft())

    def lost(self, worker: str) -> str | None:
        """Why that incarnation is gone; None unless this worker was told that it is."""
        return self.host.lost.get(worker)


def run_program(
    run: RunProgram, port: Port, spawn: Spawn, over: type[BaseException]
) -> BaseException | None:
    """Run a program, and report how it ended to the engine.

    Args:
        run: runs the program; returns how it ended.
        port: of the program.
        spawn: what the engine asked for.
        over: raised in a program whose worker or cluster is gone; not reported.

    Returns:
        What `run` let pass, such as a KeyboardInterrupt: the caller of the program gets
        it as a failure, and the driver may raise it.
    """
    passed: BaseException | None = None
    try:
        returned = run(port, spawn)
    except over:
        raise
    except BaseException as error:
        passed = error
        name = name_of(spawn.function)
        failure = failure_of(error, port.worker, spawn.path, name)
        returned = Returned(spawn.context, spawn.path, None, failure)
    port.tell(returned)
    return passed
