"""One worker under any driver: effects, values, waiters."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jdag.compute.avals import aval_of
from jdag.compute.machine import Machine
from jdag.engine.vocabulary import ConstantKey, ContextId, Drop, Fetched, Resume, Spawn
from jdag.errors import JdagError
from jdag.runtime.host import Host, Port, run_program
from jdag.runtime.waiters import Waiters

CONTEXT = ContextId(0, 0, 0)
EVENT: Any = None
X = aval_of(np.ones(3))


class Driver:
    """Carries out nothing; a spawn raises what it is told to."""

    transmit: Any
    compute: Any
    alarm: Any

    def __init__(self, *effects: Any) -> None:
        self.did: list[Any] = []
        self.raises: list[Exception] = []
        self.dies = False
        self.waiters = Waiters()
        machine = Machine("abstract")
        engine = SimpleNamespace(handle=lambda event: effects)
        self.host = Host(
            "a", engine, machine, driver=self, waiters=self.waiters, lost={}
        )

    def tell(self, port: Port, event: Any, values: Any) -> None:
        self.host.tell(port, event, values, port.cause)

    def wait(self, port: Port, waiter: int) -> tuple[Any, int]:
        return self.waiters.given[waiter]

    def spawn(self, host: Host, spawn: Any, cause: int) -> None:
        self.did.append(spawn)
        self.host.alive = not self.dies
        if self.raises:
            raise self.raises.pop(0)

    def resumed(self, host: Host, waiter: int, what: str, cause: int) -> int:
        self.did.append((waiter, what, cause))
        return cause + 1

    def wake(self, host: Host, waiter: int) -> None:
        self.did.append(waiter)


def spawns(count: int) -> list[Spawn]:
    return [Spawn(CONTEXT, (number,), print, (), "") for number in range(count)]


def test_effects_after_one_that_raises_are_carried_out_and_the_first_error_raised():
    three = spawns(3)
    driver = Driver(*three)
    driver.raises = [ValueError("one"), ValueError("two")]
    with pytest.raises(ValueError, match="one"):
        driver.host.handle(EVENT)
    assert driver.did == three


def test_a_worker_that_dies_between_two_effects_carries_out_no_more():
    driver = Driver(*spawns(3))
    driver.dies = True
    driver.host.handle(EVENT)
    assert len(driver.did) == 1


def test_what_was_asked_before_an_interrupt_is_forgotten_with_what_is_waited_for():
    driver = Driver()
    port, other = (Port(driver.host) for _ in range(2))
    for number in (1, 2, 3, 4):
        port.tell(Fetched(number, ()))
        driver.waiters.give(number, "something", 7)
    other.tell(Fetched(5, ()))
    assert port.wait(3) == "something"  # 1 and 2 were interrupted before waiting.
    asked = {number: driver.waiters.asked(number) for number in range(1, 6)}
    assert asked == {1: None, 2: None, 3: None, 4: "Fetched", 5: "Fetched"}
    assert list(driver.waiters.given) == [4]
    assert port.cause == 7


def test_a_resume_is_recorded_and_given_only_while_its_program_waits():
    driver = Driver(Resume(1, ()), Resume(2, ()))
    port = Port(driver.host)
    driver.waiters.ask(2, "a", "Left")
    driver.host.handle(EVENT, 5)
    assert driver.did == [(2, "Left", 5), 2]
    assert driver.waiters.given == {2: ((), 6)}
    assert port.wait(2) == ()


def test_values_of_an_event_that_is_refused_are_dropped():
    driver = Driver()
    key, kept = (ConstantKey(CONTEXT, (0,), n) for n in (0, 1))

    def refuses(event: Any) -> None:
        assert key in driver.host.machine.values
        raise JdagError("no")

    driver.host.hold([(kept, X)], 3)
    driver.host.engine.handle = refuses
    port = Port(driver.host, 4)
    with pytest.raises(JdagError, match="no"):
        port.tell(EVENT, [(key, X)])
    assert key not in driver.host.machine.values
    assert driver.host.made == {kept: 3}
    driver.host.engine.handle = lambda event: [Drop((kept,))]
    driver.host.handle(EVENT)
    assert driver.host.made == {} and kept not in driver.host.machine.values


def test_what_a_program_lets_pass_is_reported_as_a_failure_and_returned():
    told: list[Any] = []
    port: Any = SimpleNamespace(worker="a", tell=told.append)
    interrupt = KeyboardInterrupt()

    def run(port: Any, spawn: Any) -> Any:
        raise interrupt

    assert run_program(run, port, spawns(1)[0], GeneratorExit) is interrupt
    assert told[0].failure.error == "KeyboardInterrupt"
    with pytest.raises(KeyboardInterrupt):
        run_program(run, port, spawns(1)[0], KeyboardInterrupt)
    assert len(told) == 1
