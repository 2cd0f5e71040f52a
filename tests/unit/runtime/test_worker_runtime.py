"""One worker under any driver: effects, values, waiters."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jdag.compute.avals import aval_of
from jdag.compute.machine import Machine
from jdag.engine.protocol import (
    Arrived,
    ConstantKey,
    ContextId,
    Drop,
    Fetched,
    Primal,
    ReadingKey,
    ReceivedKey,
    Resume,
    Spawn,
)
from jdag.errors import JdagError
from jdag.runtime.waiters import Waiters
from jdag.runtime.worker_runtime import ProgramPort, WorkerRuntime, run_and_report
from tests.tools.error_texts import fails_with

CONTEXT = ContextId(0, 0, 0)
EVENT: Any = None
X = aval_of(np.ones(3))


class Driver:
    """Carries out nothing; a spawn raises what it is told to."""

    transmit: Any
    compute: Any
    skip: Any
    alarm: Any

    def __init__(self, *effects: Any) -> None:
        self.did: list[Any] = []
        self.raises: list[Exception] = []
        self.dies = False
        self.waiters = Waiters()
        machine = Machine("abstract")
        engine = SimpleNamespace(handle=lambda event: effects)
        self.host = WorkerRuntime(
            "a", engine, machine, driver=self, waiters=self.waiters, lost={}
        )

    def tell(self, port: ProgramPort, event: Any, values: Any) -> None:
        self.host.tell(port, event, values)

    def wait(self, port: ProgramPort, waiter: int) -> tuple[Any, int]:
        return self.waiters.results[waiter]

    def spawn(self, host: WorkerRuntime, spawn: Any, cause: int) -> None:
        self.did.append(spawn)
        self.host.alive = not self.dies
        if self.raises:
            raise self.raises.pop(0)

    def wake(self, host: WorkerRuntime, waiter: int) -> None:
        self.did.append(waiter)


def spawns(count: int) -> list[Spawn]:
    return [Spawn(CONTEXT, (number,), print, (), "") for number in range(count)]


def test_effects_after_one_that_raises_are_carried_out_and_the_first_error_raised():
    three = spawns(3)
    driver = Driver(*three)
    driver.raises = [ValueError("one"), ValueError("two")]
    with fails_with(ValueError, "runtime.one"):
        driver.host.handle(EVENT)
    assert driver.did == three


def test_a_worker_that_dies_between_two_effects_carries_out_no_more():
    driver = Driver(*spawns(3))
    driver.dies = True
    driver.host.handle(EVENT)
    assert len(driver.did) == 1


def test_what_was_asked_before_an_interrupt_is_forgotten_with_what_is_waited_for():
    driver = Driver()
    port, other = (ProgramPort(driver.host) for _ in range(2))
    for number in (1, 2, 3, 4):
        port.tell(Fetched(number, ()))
        driver.waiters.results[number] = "something", 7
    other.tell(Fetched(5, ()))
    assert port.wait(3) == "something"  # 1 and 2 were interrupted before waiting.
    assert driver.waiters.events == {4: ("a", "Fetched"), 5: ("a", "Fetched")}
    assert list(driver.waiters.results) == [4]
    assert port.cause == 7


class Noting:
    """A recorder that keeps what it is told; each input is record 5."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def input(self, *told: Any) -> int:
        self.told.append(told)
        return 5

    def effect(self, *told: Any) -> int:
        self.told.append(told)
        return 6


def recorded(*effects: Any) -> tuple[Driver, Any]:
    driver = Driver(*effects)
    recorder: Any = Noting()
    driver.host.recorder = recorder
    return driver, recorder.told


def test_a_recorder_is_told_of_each_event_and_then_of_each_effect_before_it():
    effects = spawns(2)
    driver, told = recorded(*effects)
    seen: list[Any] = []

    def handle(event: Any) -> Any:
        seen.append(("handled", len(told)))
        return effects

    def spawn(host: WorkerRuntime, spawn: Any, cause: int) -> None:
        seen.append(("carried out", len(told), cause))

    driver.host.engine.handle = handle
    driver.spawn = spawn  # type: ignore[method-assign]
    key = ReceivedKey(CONTEXT, ((0,), "b"), 0)
    message = Primal(CONTEXT, (0,), "b", (None,))
    driver.host.arrived("b", message, [X], (3,), ("said of it",))
    first, second = effects
    assert told == [
        ("a", Arrived("b", message), (3,), (key,), ("said of it",)),
        ("a", first, 5),
        ("a", second, 5),
    ]
    assert seen == [("handled", 1), ("carried out", 2, 6), ("carried out", 3, 6)]
    assert driver.host.machine.values.get(key) == X


def test_a_recorder_is_told_what_caused_what_a_program_tells():
    driver, told = recorded()
    key = ConstantKey(CONTEXT, (0,), 0)
    event = Fetched(1, ())
    ProgramPort(driver.host, 4).tell(event, [(key, X)])
    ProgramPort(driver.host).tell(event)
    assert told == [("a", event, (4,), (key,), ()), ("a", event, (), (), ())]


def test_a_worker_that_dies_as_an_event_is_recorded_handles_it_no_more():
    driver, told = recorded(*spawns(1))

    def dies(*_: Any) -> int:
        driver.host.alive = False
        return 5

    driver.host.recorder.input = dies  # type: ignore[union-attr, method-assign]
    assert driver.host.handle(EVENT) == 5
    assert (driver.did, told) == ([], [])


def test_a_resume_is_given_with_its_record_only_while_its_program_waits():
    driver, _ = recorded(Resume(1, ()), Resume(2, ()))
    port = ProgramPort(driver.host)
    driver.waiters.events[2] = "a", "Left"
    assert driver.host.handle(EVENT) == 5
    assert driver.did == [2]
    assert driver.waiters.results == {2: ((), 6)}
    assert port.wait(2) == ()
    assert port.cause == 6


def test_what_comes_for_a_fetch_goes_with_it_also_if_it_was_interrupted():
    keys = ReadingKey(None, 1, 0), ReadingKey(None, 2, 0)
    driver = Driver(Resume(1, keys[:1]), Resume(2, keys[1:]))
    driver.waiters.events[2] = "a", "Fetched"
    driver.host._fetching.update(dict.fromkeys(keys, X))
    driver.host.handle(EVENT)
    assert driver.waiters.results == {2: ((X,), -1)}
    assert driver.host._fetching == {} and not driver.host.machine.values.held


def test_values_of_an_event_that_is_refused_are_dropped():
    driver = Driver()
    key, kept = (ConstantKey(CONTEXT, (0,), n) for n in (0, 1))

    def refuses(event: Any) -> None:
        assert key in driver.host.machine.values
        raise JdagError("no")

    driver.host.machine.values.put(kept, X)
    driver.host.engine.handle = refuses
    port = ProgramPort(driver.host, 4)
    with fails_with(JdagError, "runtime.no"):
        port.tell(EVENT, [(key, X)])
    assert key not in driver.host.machine.values
    assert kept in driver.host.machine.values
    driver.host.engine.handle = lambda event: [Drop((kept,))]
    driver.host.handle(EVENT)
    assert kept not in driver.host.machine.values


def test_what_a_program_lets_pass_is_reported_as_a_failure_and_returned():
    told: list[Any] = []
    port: Any = SimpleNamespace(worker="a", tell=told.append)
    interrupt = KeyboardInterrupt()

    def run(port: Any, spawn: Any) -> Any:
        raise interrupt

    assert run_and_report(run, port, spawns(1)[0], GeneratorExit) is interrupt
    assert told[0].failure.error == "KeyboardInterrupt"
    with pytest.raises(KeyboardInterrupt):
        run_and_report(run, port, spawns(1)[0], KeyboardInterrupt)
    assert len(told) == 1
