"""Engines that follow a script, to see what the driver alone does."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from jdag.api.cluster import Cluster
from jdag.context.cluster_state import ClusterState
from jdag.context.program_runner import run_program
from jdag.engine.credit import WHOLE
from jdag.engine.protocol import (
    Answer,
    Arrived,
    ContextId,
    Cotangent,
    Effect,
    Event,
    Forward,
    Key,
    Left,
    Resume,
    ScratchKey,
    Send,
)
from jdag.runtime.chooser import Chooser
from jdag.runtime.trace import TraceRecord
from jdag.sim.settings import SimSettings
from jdag.sim.simulation import Simulation

CONTEXT = ContextId(0, 1, 0)
WORKERS = ("a", "b", "c")

# What an engine does: react(engine, event) -> effects, None for none.
React = Callable[[Any, Any], Sequence[Effect] | None]


class Unasked(Chooser):
    """A chooser that must not be used."""

    def chance(self, probability: float) -> bool:
        raise AssertionError(probability)

    def amount(self, least: int, most: int) -> int:
        raise AssertionError((least, most))


class Scripted:
    live_contexts = 2
    live_passes = 1

    def __init__(self, worker: str, react: React) -> None:
        self.worker = worker
        self.told: list[tuple[int, Event]] = []
        self.react = react
        self.simulation: Any = None

    def drive(self, driver: Any) -> None: ...

    def handle(self, event: Event) -> list[Effect]:
        self.told.append((self.simulation.now_ns, event))
        return list(self.react(self, event) or ())

    def clear(self) -> None:
        """What it heard stays."""

    @property
    def heard(self) -> list[tuple[int, str, int]]:
        """(time, sender, tag) of each answer and cotangent that arrived."""
        return [
            (now_ns, event.sender, tag_of(event.message))
            for now_ns, event in self.told
            if isinstance(event, Arrived)
        ]


class Played:
    def __init__(self, made: Simulation, engines: dict[str, Scripted]) -> None:
        self.simulation = made
        self.engines = engines
        self.port = made.port
        self.values: list[tuple[Key, Any]] = []  # That come with what is told next.

    def put(self, key: Key, value: Any) -> None:
        self.values.append((key, value))

    def ask(self) -> int:
        waiter = self.port.waiter()
        self.port.tell(Left(waiter, CONTEXT), self.values)
        self.values = []
        return waiter

    def run(self) -> Any:
        return self.port.wait(self.ask())

    def run_out(self) -> None:
        self.run()
        self.simulation.settle()

    def records(self, *kinds: str) -> list[TraceRecord]:
        assert self.simulation.trace is not None
        return [r for r in self.simulation.trace if not kinds or r.kind in kinds]

    def kinds(self, *kinds: str) -> list[tuple[int, str, str]]:
        return [(r.time_ns, r.kind, r.worker) for r in self.records(*kinds)]


def cluster_of(settings: SimSettings) -> Cluster:
    shared = ClusterState(settings, settings.values == "abstract")
    shared.driver = Simulation(settings, partial(run_program, shared))
    return Cluster(shared, shared.driver.port)


def no_program(port: Any, spawn: Any) -> Any:
    raise AssertionError(spawn)


def play(
    monkeypatch: pytest.MonkeyPatch,
    react: React,
    workers: Sequence[str] = WORKERS,
    run_program: Any = no_program,
    **settings: Any,
) -> Played:
    engines: dict[str, Scripted] = {}

    def engine(worker: str, *_: Any) -> Scripted:
        engines[worker] = Scripted(worker, react)
        return engines[worker]

    monkeypatch.setattr("jdag.sim.environment.Engine", engine)
    settings = {"seed": 0, "home": workers[0], **settings}
    made = Simulation(SimSettings(workers=workers, **settings), run_program)
    for each in engines.values():
        each.simulation = made
    return Played(made, engines)


def answer(tag: int) -> Answer:
    return Answer(CONTEXT, 1, WHOLE, tag)


def cotangent(tag: int, count: int = 1) -> Cotangent:
    return Cotangent(CONTEXT, 1, (tag,), (True,) * count, False, WHOLE, 0)


def effects_then_reply(effects: Sequence[Effect]) -> React:
    def react(engine: Any, event: Any) -> Sequence[Effect]:
        if isinstance(event, Left):
            return effects
        return [send("a", 2)] if engine.worker == "b" else [Resume(1, "done")]

    return react


def tag_of(message: Any) -> int:
    return int(message.owed if isinstance(message, Answer) else message.path[0])


def send(to: str, tag: int) -> Send:
    return Send(to, answer(tag))


def key(name: Any, index: int = 0) -> Key:
    return ScratchKey(CONTEXT, name, index)


def resume(event: Event, result: Any = None) -> Resume:
    assert isinstance(event, Left), event
    return Resume(event.waiter, result)


class Work:
    """Stands for a pair: a function with a name that is called when its job starts."""

    device = in_devices = out_devices = None

    def __init__(self, name: str, function: Callable[[], Any] = lambda: None) -> None:
        self.name = name
        self.function = function

    def forward(self, args: list[Any]) -> tuple[tuple[Any, ...], None]:
        self.function()
        return (sum(args, 0.0),), None


def job(number: int, work: Work, *inputs: Key, path: tuple[int, ...] = ()) -> Forward:
    """A forward whose output is key("made", number)."""
    path = path or (number,)
    outputs = (key("made", number),)
    return Forward(number, CONTEXT, path, work, inputs, outputs, None)
