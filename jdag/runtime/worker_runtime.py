"""One worker under either driver: its engine, its values, and its programs' waiters.

Inputs: events of programs (`ProgramPort.tell`) and of the driver
    (`WorkerRuntime.handle`).
Outputs: the effects of each event, in order. The runtime drops values and resumes
    waiters itself; the driver sends messages, computes jobs, starts programs and sets
    alarms (`Driver`).
Invariants: all effects of an event are carried out before the next event, even if one
    of them raises. A waiter is resumed once, and only while its program waits. The
    recorder, if any, gets every event before the engine handles it, and every effect
    that it records before it is carried out.

A cause is the index of a record in the trace; -1 means no cause, or no trace.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from jdag.compute.machine import Machine
from jdag.engine.functions import name_of
from jdag.engine.protocol import (
    LANDING,
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
    StepFrame,
    Stepping,
    Worker,
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


class Driver(Protocol):
    def tell(
        self, port: "ProgramPort", event: Event, values: Sequence[tuple[Key, Any]]
    ) -> None: ...

    def wait(self, port: "ProgramPort", waiter: int) -> tuple[Any, int]: ...

    def transmit(
        self,
        host: "WorkerRuntime",
        send: Send,
        message: Message,
        values: tuple[tuple[Key, ...], tuple[Any, ...]],
        cause: int,
    ) -> None:
        """Send a message to another worker. `values` are keys and their values."""

    def compute(self, host: "WorkerRuntime", job: Job, cause: int) -> None: ...

    def skip(self, host: "WorkerRuntime", skip: Skip | Listed) -> None:
        """Stop waiting for jobs of a schedule's list that will not come."""

    def spawn(self, host: "WorkerRuntime", spawn: Spawn, cause: int) -> None: ...

    def alarm(self, host: "WorkerRuntime", alarm: Alarm, cause: int) -> Cancel: ...

    def wake(self, host: "WorkerRuntime", waiter: int) -> None: ...


class WorkerRuntime:
    """The state of one worker. `worker` is its name with its incarnation.

    `journal` and `recorder`, if not None, get each event before it is handled. `lost`
    has the reason for each lost peer. `value_bytes_max` limits values that leave the
    worker.
    """

    __slots__ = (
        "_fetching",
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
        self.objects: dict[ObjectId, Any] = {}  # Made by programs on this worker.
        self.driver = driver
        self.waiters = waiters
        self.recorder = recorder
        self.journal: Journal | None = None
        self._fetching: dict[Key, Any] = {}  # Values of incomplete fetches.
        self._value_bytes_max = value_bytes_max

    def tell(
        self, port: "ProgramPort", event: Event, values: Sequence[tuple[Key, Any]]
    ) -> None:
        """Store a program's values and handle its event. An error drops the values."""
        if event.__class__ in _WAITING:
            port.pending.append(event.waiter)
            self.waiters.events[event.waiter] = self.worker, type(event).__name__
        causes = () if port.cause < 0 else (port.cause,)
        keys = tuple([key for key, _ in values]) if values else ()
        try:
            for key, value in values:
                self.machine.values.put(key, value)
            bytes_max = self._value_bytes_max
            if bytes_max is not None and self.machine.values.bytes_peak > bytes_max:
                check_values(event, self.worker, bytes_max)
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
        fields: tuple[Any, ...] = (),
    ) -> int:
        """Store a message's values and handle it. Return the event's record.

        `fields` are known trace fields.
        """
        keys: tuple[Key, ...] = ()
        if message.__class__ is StepFrame:
            if self.recorder is None and self.journal is None:
                effects = self.engine.arrived(sender, message, values)
                if effects and self.alive:
                    self._carry_out(effects, NO_CAUSE)
                return NO_CAUSE
            keys = tuple(LANDING[StepFrame](message))
            event = Arrived(sender, message, values)
            return self.handle(event, causes, keys, fields)
        if values:
            keys = tuple(LANDING[message.__class__](message))
            for key, value in zip(keys, values, strict=True):
                if key.__class__ is ReadingKey:
                    self._fetching[key] = value
                else:
                    self.machine.values.put(key, value)
        return self.handle(Arrived(sender, message), causes, keys, fields)

    def handle(
        self,
        event: Event,
        causes: tuple[int, ...] = (),
        keys: Sequence[Key] = (),
        fields: tuple[Any, ...] = (),
    ) -> int:
        """Handle an event and carry out all effects. Then raise their first error.

        `causes` are the trace records that led to the event. `keys` are the keys of its
        values, which are stored already. Returns the event's record.
        """
        journal, recorder = self.journal, self.recorder
        if journal is not None:
            journal.note((event, causes))
        record = NO_CAUSE
        if recorder is not None:
            record = recorder.input(self.worker, event, causes, keys, fields)
            if not self.alive:
                return record  # The worker crashed at this number of records.
        if effects := self.engine.handle(event):
            self._carry_out(effects, record)
        return record

    def _carry_out(self, effects: Sequence[Any], record: int) -> None:
        failed: Exception | None = None
        driver, recorder = self.driver, self.recorder
        for effect in effects:
            if not self.alive:
                break  # The worker crashed between two effects.
            cause, kind = record, effect.__class__
            try:
                if kind is Send:
                    message, sent = effect.message, effect.values
                    values = effect.given
                    if values:
                        if recorder is not None:
                            sent = tuple(LANDING[StepFrame](message))
                        values = self.machine.leave(values)
                    elif sent:
                        message, sent, values = self.machine.load(
                            message, sent, self.worker
                        )
                    driver.transmit(self, effect, message, (sent, values), cause)
                elif kind is Compute:
                    driver.compute(self, effect.job, cause)
                else:
                    if recorder is not None and kind in RECORDED:
                        cause = recorder.effect(self.worker, effect, record)
                    if kind is Drop:
                        self.drop(effect.keys)
                    else:
                        self._carry_out_rare(effect, cause)
            except Exception as error:
                failed = failed or error
        if failed is not None and self.alive:
            raise failed

    def _carry_out_rare(
        self, effect: Resume | Alarm | Skip | Listed | Spawn, cause: int
    ) -> None:
        if isinstance(effect, Resume):
            self.resume(effect.waiter, effect.result, cause)
        elif isinstance(effect, Alarm):
            alarm = self.driver.alarm(self, effect, cause)
            self.waiters.alarms[effect.waiter] = alarm
        elif isinstance(effect, Skip | Listed):
            self.driver.skip(self, effect)
        else:
            assert isinstance(effect, Spawn), effect
            self.driver.spawn(self, effect, cause)

    def resume(self, waiter: int, result: Any, cause: int = NO_CAUSE) -> None:
        waiters = self.waiters
        if waiters.alarms:
            waiters.silence(waiter)
        origin = waiters.events.get(waiter)
        if origin is None:  # The program was interrupted, and no longer waits.
            keys = result if isinstance(result, tuple) else ()
            self.drop([key for key in keys if key.__class__ is ReadingKey])
            return
        if isinstance(result, tuple):
            if origin[1] == "Fetched":
                result = self._fetched(result)  # Before an event can replace a leaf.
            elif origin[1] == "Stepping":
                result = self.machine.leave(result)
        waiters.results[waiter] = result, cause
        self.driver.wake(self, waiter)

    def _fetched(self, keys: Sequence[Any]) -> tuple[Any, ...]:
        received = self._fetching
        if len(keys) == 1 and keys[0].__class__ is ReadingKey:
            return (received.pop(keys[0]),)
        if not received:
            return self.machine.fetched(keys, self.worker)
        stored = [key for key in keys if key.__class__ is not ReadingKey]
        rest = iter(self.machine.fetched(stored, self.worker))
        return tuple(
            [received.pop(k) if k.__class__ is ReadingKey else next(rest) for k in keys]
        )

    def drop(self, keys: Sequence[Key]) -> None:
        self.machine.values.drop(keys)
        if self._fetching:
            for key in keys:
                self._fetching.pop(key, None)

    def clear(self) -> None:
        """Drop all state except counts."""
        self.alive = False
        self.machine.clear()
        self.objects.clear()
        self._fetching.clear()
        if self.engine is not None:
            self.engine.clear()
        self.engine = None


class ProgramPort:
    """A program's access to its driver.

    Attributes:
        cause: the record of the last result, which causes the program's next events.
        pending: its pending waiters, in order of creation.
        waiter: returns a new waiter.
    """

    __slots__ = ("cause", "host", "pending", "waiter", "worker")

    def __init__(self, host: WorkerRuntime, cause: int = NO_CAUSE) -> None:
        self.host = host
        self.worker = host.worker
        self.waiter = host.waiters.number
        self.cause = cause
        self.pending: deque[int] = deque()

    def tell(self, event: Event, values: Sequence[tuple[Key, Any]] = ()) -> None:
        """Have the engine handle an event, and carry out its effects.

        Blocks only while the unsent bytes exceed their limit. The worker stores the
        values, unless this raises.

        Raises:
            JdagError: the engine refuses the event, the cluster is closed, or a
                function cannot be sent to its worker.
        """
        self.host.driver.tell(self, event, values)

    def wait(self, waiter: int) -> Any:
        """Block until the engine resumes a waiter. Return the result.

        Waiters are awaited in order of creation. An earlier waiter that is still
        pending was interrupted between creation and waiting, and is forgotten too.

        Raises:
            JdagError: the waiter can never be resumed, or the cluster is closed.
        """
        try:
            result, self.cause = self.host.driver.wait(self, waiter)
            return result
        finally:
            pending = self.pending
            while pending and pending[0] <= waiter:
                self.host.waiters.forget(pending.popleft())

    def lost(self, worker: str) -> str | None:
        return self.host.lost.get(worker)


def run_and_report(
    run: RunProgram, port: ProgramPort, spawn: Spawn, closed: type[BaseException]
) -> BaseException | None:
    """Run a program, and report its outcome to the engine. Return its exception.

    `closed` is raised in a program whose worker or cluster is gone, and is not
    reported. The program's caller gets the exception as a failure; the driver may raise
    it.
    """
    raised: BaseException | None = None
    try:
        returned = run(port, spawn)
    except closed:
        raise
    except BaseException as error:
        raised = error
        name = name_of(spawn.function)
        failure = failure_of(error, port.worker, spawn.path, name)
        returned = Returned(spawn.context, spawn.path, None, failure)
    port.tell(returned)
    return raised
