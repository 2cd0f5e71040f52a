"""One worker under either driver: its engine, its values, and its programs' waiters.

Inputs: events, of programs (`ProgramPort.tell`) and of the driver
(`WorkerRuntime.handle`).
Outputs: the effects of each event, in their order. Values are dropped and waiters are
    resumed here; the driver sends messages, computes jobs, starts programs and sets
    alarms (`Driver`).
Invariants: all effects of an event are carried out before the next event, also if one
    of them raises; a waiter is resumed once, and only while its program waits. The
    recorder, if there is one, is told of every event before the engine handles it and
    of the effects that it records before they are carried out.

A cause is the index of a record in the trace; -1 stands for none, and for no trace.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Protocol

from jdag.compute.machine import Machine
from jdag.engine.functions import name_of
from jdag.engine.protocol import (
    Alarm,
    Arrived,
    Asked,
    Awaited,
    Collected,
    Compiled,
    Compute,
    Differentiated,
    Drop,
    Event,
    Fetched,
    Job,
    Key,
    Left,
    Listed,
    Message,
    ObjectId,
    ReadingKey,
    Resume,
    Returned,
    Send,
    Skip,
    Spawn,
    Stepping,
    Worker,
    landing,
)
from jdag.errors import JdagError
from jdag.runtime.failures import failure_of
from jdag.runtime.journal import Journal
from jdag.runtime.recorder import NO_CAUSE, RECORDED, NoRecorder, Recorder
from jdag.runtime.sizes import check_values
from jdag.runtime.waiters import Cancel, Waiters

RunProgram = Callable[["ProgramPort", Spawn], Returned]

_WAITING = frozenset(
    (Collected, Asked, Awaited, Fetched, Differentiated, Left, Compiled, Stepping)
)
# The program gets values in place of keys.
_VALUED = (Fetched.__name__, Stepping.__name__)


class Driver(Protocol):
    """What a driver does for its hosts and for programs."""

    def tell(
        self, port: "ProgramPort", event: Event, values: Sequence[tuple[Key, Any]]
    ) -> None:
        """Have the engine of a program's worker handle an event: `ProgramPort.tell`."""

    def wait(self, port: "ProgramPort", waiter: int) -> tuple[Any, int]:
        """Block a program until its waiter is resumed; return the result and cause."""

    def transmit(
        self,
        host: "WorkerRuntime",
        send: Send,
        message: Message,
        values: tuple[tuple[Key, ...], tuple[Any, ...]],
        cause: int,
    ) -> None:
        """Send a message with values, of these keys, to another worker."""

    def compute(self, host: "WorkerRuntime", job: Job, cause: int) -> None:
        """Compute a job; report `Computed` when it is done."""

    def skip(self, host: "WorkerRuntime", skip: Skip | Listed) -> None:
        """Wait no more for jobs that a schedule lists, and that will not come."""

    def spawn(self, host: "WorkerRuntime", spawn: Spawn, cause: int) -> None:
        """Start a program."""

    def alarm(self, host: "WorkerRuntime", alarm: Alarm, cause: int) -> Cancel:
        """Report the event of an alarm when it is due, unless it is cancelled."""

    def wake(self, host: "WorkerRuntime", waiter: int) -> None:
        """Let the program of a waiter go on, if it is blocked."""


class WorkerRuntime:
    """The state of one worker.

    `journal` notes each event before that is recorded or handled, if there is one.

    Args:
        worker: its name, with its incarnation.
        lost: the reason for each lost peer; filled by the driver.
        value_bytes_max: the size limit for values that leave the worker; None: none.
        recorder: records all events and effects; None: not recorded.
    """

    __slots__ = (
        "_read",
        "_value_bytes_max",
        "alive",
        "driver",
        "engine",
        "journal",
        "lost",
        "machine",
        "objects",
        "recorder",
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
        recorder: Recorder | NoRecorder | None = None,
    ) -> None:
        self.worker = worker
        self.engine = engine
        self.machine = machine
        self.lost = lost
        self.alive = True
        self.objects: dict[ObjectId, Any] = {}  # That programs made here.
        self.driver = driver
        self.waiters = waiters
        self.recorder = recorder
        self.journal: Journal | None = None
        self._read: dict[Key, Any] = {}  # Values of incomplete fetches.
        self._value_bytes_max = value_bytes_max

    def tell(
        self, port: "ProgramPort", event: Event, values: Sequence[tuple[Key, Any]]
    ) -> None:
        """Handle an event of a program; hold its values, unless that raises."""
        if event.__class__ in _WAITING:
            port.asked.append(event.waiter)
            self.waiters.asked[event.waiter] = self.worker, type(event).__name__
        causes = () if port.cause < 0 else (port.cause,)
        keys = tuple(map(itemgetter(0), values))
        try:
            for key, value in values:
                self.machine.values.put(key, value)
            most = self._value_bytes_max
            if most is not None and self.machine.values.bytes_peak > most:
                check_values(event, self.worker, most)
            self.handle(event, causes, keys)
        except JdagError:
            self.drop(keys)
            raise

    def arrived(
        self,
        sender: Worker,
        message: Message,
        values: Sequence[Any],
        causes: tuple[int, ...] = (),
        said: tuple[Any, ...] = (),
    ) -> None:
        """Handle a message, whose values are held from now on.

        `said` is what traces tell of it, if it is known.
        """
        keys: tuple[Key, ...] = ()
        if values:
            keys = landing(message)
            for key, value in zip(keys, values, strict=True):
                if key.__class__ is ReadingKey:
                    self._read[key] = value
                else:
                    self.machine.values.put(key, value)
        self.handle(Arrived(sender, message), causes, keys, said)

    def handle(
        self,
        event: Event,
        causes: tuple[int, ...] = (),
        keys: Sequence[Key] = (),
        said: tuple[Any, ...] = (),
    ) -> int:
        """Handle an event and carry out all its effects; then raise what one raised.

        `causes` are the trace records that led to the event, `keys` those of the values
        that came with it, which are stored already. Returns the event's record.
        """
        journal, recorder = self.journal, self.recorder
        if journal is not None:
            journal.note((event, causes))
        record = NO_CAUSE
        if recorder is not None:
            record = recorder.input(self.worker, event, causes, keys, said)
            if not self.alive:
                return record  # It crashes when there are so many records.
        failed: Exception | None = None
        driver = self.driver
        effect: Any
        for effect in self.engine.handle(event):
            if not self.alive:
                break  # The worker crashed between two effects.
            cause, kind = record, effect.__class__
            if recorder is not None and kind in RECORDED:
                cause = recorder.effect(self.worker, effect, record)
            try:
                if kind is Send:
                    message, sent, values = effect.message, effect.values, ()
                    if sent:
                        message, sent, values = self.machine.load(
                            message, sent, self.worker
                        )
                    driver.transmit(self, effect, message, (sent, values), cause)
                elif kind is Compute:
                    driver.compute(self, effect.job, cause)
                elif kind is Drop:
                    self.drop(effect.keys)
                elif kind is Resume:
                    self._resume(effect, cause)
                else:
                    self._rarer(effect, cause)
            except Exception as error:
                failed = failed or error
        if failed is not None and self.alive:
            raise failed
        return record

    def _rarer(self, effect: Alarm | Skip | Listed | Spawn, cause: int) -> None:
        if isinstance(effect, Alarm):
            alarm = self.driver.alarm(self, effect, cause)
            self.waiters.alarms[effect.waiter] = alarm
        elif isinstance(effect, Skip | Listed):
            self.driver.skip(self, effect)
        else:
            assert isinstance(effect, Spawn), effect
            self.driver.spawn(self, effect, cause)

    def _resume(self, resume: Resume, cause: int) -> None:
        waiter, result, waiters = resume.waiter, resume.result, self.waiters
        if waiters.alarms:
            waiters.silence(waiter)
        asked = waiters.asked.get(waiter)
        if asked is None:  # The program was interrupted, and no longer waits.
            came = result if isinstance(result, tuple) else ()
            self.drop([one for one in came if one.__class__ is ReadingKey])
            return
        if asked[1] in _VALUED and isinstance(result, tuple):
            result = self._fetched(result)  # Before another event can replace a leaf.
        waiters.given[waiter] = result, cause
        self.driver.wake(self, waiter)

    def _fetched(self, found: Sequence[Any]) -> tuple[Any, ...]:
        """Return values for keys; discard those received for this fetch only."""
        read = self._read
        if len(found) == 1 and found[0].__class__ is ReadingKey:
            return (read.pop(found[0]),)
        if not read:
            return self.machine.fetched(found, self.worker)
        held = [one for one in found if one.__class__ is not ReadingKey]
        rest = iter(self.machine.fetched(held, self.worker))
        return tuple(
            [read.pop(k) if k.__class__ is ReadingKey else next(rest) for k in found]
        )

    def drop(self, keys: Sequence[Key]) -> None:
        """Drop values; a key that is not held is no error."""
        self.machine.values.drop(keys)
        if self._read:
            for key in keys:
                self._read.pop(key, None)

    def clear(self) -> None:
        """Drop everything but counts."""
        self.alive = False
        self.machine.clear()
        self.objects.clear()
        self._read.clear()
        if self.engine is not None:
            self.engine.clear()
        self.engine = None


class ProgramPort:
    """A program's access to its driver.

    Attributes:
        cause: the record of the last result, which causes the program's next events.
        asked: its pending waiters, in order of creation.
        waiter: returns a new waiter.
    """

    __slots__ = ("asked", "cause", "host", "waiter", "worker")

    def __init__(self, host: WorkerRuntime, cause: int = NO_CAUSE) -> None:
        self.host = host
        self.worker = host.worker
        self.waiter = host.waiters.number
        self.cause = cause
        self.asked: deque[int] = deque()

    def tell(self, event: Event, values: Sequence[tuple[Key, Any]] = ()) -> None:
        """Have the engine handle an event, and carry out its effects.

        Blocks only while more bytes wait to be sent than may. The values are held on
        this worker from then on, unless this raises.

        Raises:
            JdagError: the engine refuses the event, the cluster is closed, or a
                function cannot travel to where it is to run.
        """
        self.host.driver.tell(self, event, values)

    def wait(self, waiter: int) -> Any:
        """Block until the engine resumes a waiter; return the result.

        Waiters are awaited in the order of asking. An earlier one that is still pending
        was interrupted between asking and waiting, and is forgotten too.

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
        """The reason why this incarnation is lost; None if it is not known to be."""
        return self.host.lost.get(worker)


def run_and_report(
    run: RunProgram, port: ProgramPort, spawn: Spawn, over: type[BaseException]
) -> BaseException | None:
    """Run a program, and report its outcome to the engine.

    `over` is raised in a program whose worker or cluster is gone, and is not reported.

    Returns:
        The exception that `run` raised, such as a KeyboardInterrupt. The program's
        caller gets it as a failure; the driver may raise it.
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
