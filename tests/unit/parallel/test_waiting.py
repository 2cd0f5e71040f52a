"""Waiting for processes that do not come, with a store of this process's own."""

import threading
from typing import Any, cast

import jax
import pytest

from jdag.errors import JdagError, WorkerLost
from jdag.parallel import waiting
from jdag.parallel.waiting import Waiting, check_deadline
from tests.tools.error_texts import fails_with


class Store:
    def __init__(self) -> None:
        self.held: dict[str, str] = {}

    def key_value_set(self, key: str, value: str) -> None:
        if key in self.held:
            raise jax.errors.JaxRuntimeError("ALREADY_EXISTS")
        self.held[key] = value

    def key_value_try_get(self, key: str) -> str:
        return self.held[key]

    def key_value_dir_get(self, under: str) -> list[tuple[str, str]]:
        return [item for item in self.held.items() if item[0].startswith(under)]

    def key_value_delete(self, key: str) -> None:
        del self.held[key]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    made = Store()
    monkeypatch.setattr(waiting, "_store", lambda: made)
    monkeypatch.setattr(jax, "process_count", lambda: 5)
    monkeypatch.setattr(waiting, "REGISTER_AFTER_S", 0.05)
    return made


def test_all_who_did_not_come_are_named(store: Store):
    for number in (2, 4):
        store.held[f"jdag/room/1/waits/{number}"] = ""
    said = r"^a sum: processes 1, 3 did not make .* within 0.2 seconds \(deadline_s\)"
    with pytest.raises(WorkerLost, match=said):
        Waiting("room").met(threading.Event().wait, "a sum", 0.2)
    assert store.held["jdag/room/1/verdict"] == "given up"


def test_who_gives_up_when_all_have_come_goes_on(store: Store):
    """One of them was first to ask, and goes on as well."""
    store.held["jdag/room/1/verdict"] = "met"
    slow = threading.Event()
    threading.Timer(0.4, slow.set).start()
    assert Waiting("room").met(slow.wait, "a sum", 0.2) is True
    assert list(store.held) == ["jdag/room/1/verdict"]


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def passes(self, seconds: float) -> int:
        self.now_s += seconds
        return 5


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(waiting, "time", made)
    return made


def test_who_comes_when_another_has_given_up_is_told(store: Store, clock: Clock):
    store.held["jdag/room/2/verdict"] = "given up"
    met = Waiting("room").met
    assert met(lambda: 5, "a sum", 60.0) == 5  # Nobody knows it before: it asks.
    assert store.held["jdag/room/1/verdict"] == "met"
    clock.passes(31.0)
    with fails_with(WorkerLost, "parallel.a_sum_process_0_came"):
        met(lambda: 5, "a sum", 60.0)


def test_who_heard_late_that_all_had_come_is_late_itself(store: Store, clock: Clock):
    """The others have gone on, and have waited for it since then."""
    store.held["jdag/room/2/verdict"] = "given up"
    met = Waiting("room").met
    assert met(lambda: clock.passes(31.0), "a sum", 60.0) == 5
    with fails_with(WorkerLost, "parallel.a_sum_process_0_came"):
        met(lambda: 5, "a sum", 60.0)


def test_who_comes_in_time_does_not_ask(store: Store):
    met = Waiting("room").met
    assert [met(lambda: 5, "a sum", 60.0) for _ in range(3)] == [5, 5, 5]
    assert list(store.held) == ["jdag/room/1/verdict"]


def test_a_collective_is_entered_under_the_context_managers_of_its_caller(store: Store):
    met, config = Waiting("room").met, cast(Any, jax.config)
    found = []
    for wide in (False, True, False):
        with jax.enable_x64(wide):
            found.append(met(lambda: config.jax_enable_x64, "a sum", 60.0))
    assert found == [False, True, False]


def test_what_a_collective_raises_is_raised(store: Store):
    def breaks() -> Any:
        raise ValueError("gloo: connection closed")

    with fails_with(ValueError, "parallel.connection_closed"):
        Waiting("room").met(breaks, "a sum", 60.0)


@pytest.mark.parametrize("deadline_s", [0, -1.0, float("inf"), float("nan"), "9", True])
def test_a_deadline_is_a_number_of_seconds(deadline_s: Any):
    with fails_with(JdagError, "parallel.deadline_s_allowed_is_a_number"):
        check_deadline(deadline_s)
    check_deadline(3)
