"""Programs as greenlets: who runs when, what they wait for, and how they end."""

from types import SimpleNamespace
from typing import Any

import pytest
from greenlet import GreenletExit, getcurrent

from jdag.engine.protocol import Arrived, Fetched, Left, Resume, Returned, Spawn
from jdag.errors import JdagError
from jdag.sim.faults import Crash
from jdag.sim.network import LinkModel
from tests.tools.error_texts import fails_with
from tests.tools.sim_cases import CONTEXT, play, send, tag_of

NETWORK = LinkModel(latency_ns=100)


class Cast:
    """Engines where b and c run programs when a number arrives, by (worker, number).

    A program's `Fetched(waiter, ((to, number),))` sends the number to a worker and is
    resumed by a number from 900; `Returned` sends what the program returns: to whom,
    and which number. Nobody answers to 0.
    """

    def __init__(self, programs: Any) -> None:
        self.programs = programs
        self.log: list[Any] = []
        self.waiting: dict[str, list[int]] = {"a": [], "b": [], "c": []}

    def react(self, engine: Any, event: Any) -> Any:
        match event:
            case Left() | Fetched():
                self.waiting[engine.worker].append(event.waiter)
                to = ("b", 1) if isinstance(event, Left) else event.keys[0]
                return [send(*to)]
            case Returned():
                self.log.append((engine.worker, "returned", event.result))
                return [send(*(event.result or ("a", 999)))]
            case Arrived():
                number = tag_of(event.message)
                if not number:
                    return None
                if number < 900:
                    fn = self.programs[engine.worker, number]
                    return [Spawn(CONTEXT, (number,), fn, None, "here")]
                waiter = self.waiting[engine.worker].pop()
                return [Resume(waiter, number if engine.worker == "a" else (number,))]

    def run(self, port: Any, spawn: Spawn) -> Returned:
        result = spawn.function(SimpleNamespace(port=port, log=self.log))
        return Returned(spawn.context, spawn.path, result, None)


def ask(stage: Any, to: str, number: int) -> Any:
    waiter = stage.port.waiter()
    asked: Any = ((to, number),)
    stage.port.tell(Fetched(waiter, asked))
    (number,) = stage.port.wait(waiter)
    return number


def outer(stage: Any) -> Any:
    stage.log.append("outer begins")
    stage.log.append(("outer has", ask(stage, "c", 2)))
    stage.log.append(("outer has", ask(stage, "c", 2)))
    return ("a", 901)


def inner(stage: Any) -> Any:
    stage.log.append("inner runs")
    return ("b", 902)


def played_by(monkeypatch: Any, programs: Any, **settings: Any) -> tuple[Cast, Any]:
    cast = Cast(programs)
    settings = {"network": NETWORK, "run_program": cast.run, **settings}
    return cast, play(monkeypatch, cast.react, **settings)


def test_programs_nest_and_each_goes_on_where_it_was(monkeypatch):
    cast, played = played_by(monkeypatch, {("b", 1): outer, ("c", 2): inner})
    assert played.run() == 901
    assert cast.log == [
        "outer begins",
        "inner runs",
        ("c", "returned", ("b", 902)),
        ("outer has", 902),
        "inner runs",
        ("c", "returned", ("b", 902)),
        ("outer has", 902),
        ("b", "returned", ("a", 901)),
    ]
    assert played.simulation.now_ns == 600
    kinds = [(kind, worker) for _, kind, worker in played.kinds("spawn", "resume")]
    assert kinds == [
        *[("spawn", "b"), ("spawn", "c"), ("resume", "b"), ("spawn", "c")],
        *[("resume", "b"), ("resume", "a")],
    ]
    assert len(played.simulation._programs.alive) == 0


def test_each_record_of_a_program_is_caused_by_what_it_last_waited_for(monkeypatch):
    _, played = played_by(monkeypatch, {("b", 1): outer, ("c", 2): inner})
    played.run()
    began, resumed = (
        [r.index for r in played.records(kind) if r.worker == "b"]
        for kind in ("spawn", "resume")
    )
    issued = [r.causes for r in played.records("issue") if r.worker == "b"]
    assert issued == [(began[0],), (resumed[0],), (resumed[1],)]


def test_a_program_does_not_run_amid_the_effects_that_spawned_it(monkeypatch):
    log = []

    def react(engine, event):
        if isinstance(event, Left):
            effects = [Spawn(CONTEXT, (n,), quick, None, "here") for n in (1, 2)]
            return [*effects, send("b", 1)]
        log.append((engine.worker, type(event).__name__))
        if isinstance(event, Returned):
            return [Resume(1, None)] if event.path == (2,) else None

    def quick(stage):
        raise AssertionError

    def run(port, spawn):
        log.append(spawn.path)
        return Returned(spawn.context, spawn.path, None, None)

    played = play(monkeypatch, react, run_program=run, network=NETWORK)
    played.run()
    # Had it run at once, its Returned had come before the send had left.
    assert [r.kind for r in played.records()[:4]] == ["issue", "spawn", "spawn", "send"]
    assert log == [(1,), ("a", "Returned"), (2,), ("a", "Returned")]


def test_what_a_program_raises_in_the_driver_reaches_main(monkeypatch):
    def broken(stage):
        raise ZeroDivisionError("a program's runner lets nothing pass but this")

    _, played = played_by(monkeypatch, {("b", 1): broken})
    with pytest.raises(ZeroDivisionError):
        played.run()
    assert len(played.simulation._programs.alive) == 0


def test_an_interrupt_in_a_program_reaches_main_and_its_caller_hears_of_it(monkeypatch):
    def interrupted(stage):
        raise KeyboardInterrupt

    cast, played = played_by(monkeypatch, {("b", 1): interrupted, ("b", 3): inner})
    waiter = played.ask()
    with pytest.raises(KeyboardInterrupt):
        played.port.wait(waiter)
    assert cast.log == [("b", "returned", None)]
    failure = played.engines["b"].told[-1][1].failure
    assert failure.error == "KeyboardInterrupt"
    assert (
        failure.function
        == "tests.unit.context.test_program_runner:" + interrupted.__qualname__
    )
    played.simulation.settle()  # What main asked for comes, and nobody is there for it.
    assert played.simulation._env.waiters.results == {}


def dying(log: list[Any]) -> Any:
    """A program that waits for ever, and is stubborn when it is ended."""

    def program(stage):
        try:
            ask(stage, "a", 0)
        finally:
            log.append("ends")
            try:
                ask(stage, "b", 1)
            except GreenletExit:
                log.append("may not wait")
            raise ValueError("nobody listens")

    return program


def test_a_crash_ends_the_programs_of_its_worker_and_no_other(monkeypatch):
    log: list[Any] = []
    programs = {("b", 1): outer, ("c", 2): dying(log)}
    faults = [Crash("c", 50, at_ns=1_000)]
    _, played = played_by(monkeypatch, programs, faults=faults)
    played.ask()
    played.simulation.settle()
    assert log == ["ends", "may not wait"]
    assert len(played.simulation._programs.alive) == 1  # b's, which waits on.
    assert [r.time_ns for r in played.records("issue") if r.worker == "c"] == [200]


def test_closing_ends_all_programs(monkeypatch):
    log: list[Any] = []
    _, played = played_by(monkeypatch, {("b", 1): dying(log)})
    played.ask()
    played.simulation.settle()
    assert len(played.simulation._programs.alive) == 1
    played.simulation.close()
    assert log == ["ends", "may not wait"]
    assert len(played.simulation._programs.alive) == 0


def test_a_program_cannot_close_the_cluster_that_runs_it(monkeypatch):
    def closing(stage):
        played.simulation.close()

    _, played = played_by(monkeypatch, {("b", 1): closing})
    with fails_with(JdagError, "context.only_the_main_program_may"):
        played.run()
    assert played.engines["a"].told  # It is still there.
    played.simulation.info()


def test_main_runs_in_the_greenlet_that_called_and_programs_in_others(monkeypatch):
    mine, theirs = getcurrent(), []

    def here(stage):
        theirs.append(getcurrent())
        return ("a", 901)

    _, played = played_by(monkeypatch, {("b", 1): here})
    played.run()
    assert getcurrent() is mine
    assert theirs[0] is not mine and theirs[0].dead
