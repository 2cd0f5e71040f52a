"""Engines wired together without arithmetic, clock or wire: any order of events is allowed.

Values are pairs of an exact integer and the expression that made it, so that a test sees both
whether a gradient is right and in which order it was added up.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jdag.engine import Engine
from jdag.engine.vocabulary import (
    Argument,
    Arrived,
    Assigned,
    Compute,
    Computed,
    ContextId,
    Differentiated,
    Drop,
    Effect,
    Event,
    Failure,
    Fetched,
    Fill,
    Forward,
    Issued,
    Job,
    Key,
    Launched,
    LeafId,
    Left,
    Lost,
    Opened,
    PassResult,
    Resume,
    Root,
    Send,
    Spawn,
    Sum,
    Vjp,
    landing,
)

Number = tuple[int, str]


@dataclass(frozen=True)
class Linear:
    """A function of integers: output j is the sum over i of weights[j][i] * input i."""

    name: str
    weights: tuple[tuple[int, ...], ...]
    raises: str = ""  # "forward" or "vjp".

    def forward(self, inputs: Sequence[Number]) -> list[Number]:
        if self.raises == "forward":
            raise ValueError(f"{self.name} raised in forward")
        return [
            (
                sum(w * x for w, (x, _) in zip(row, inputs, strict=True)),
                f"{self.name}.{j}",
            )
            for j, row in enumerate(self.weights)
        ]

    def vjp(self, outputs: Sequence[Number], tracked: Sequence[int]) -> list[Number]:
        if self.raises == "vjp":
            raise ValueError(f"{self.name} raised in vjp")
        made = ",".join(expression for _, expression in outputs)
        return [
            (
                sum(
                    row[i] * cotangent
                    for row, (cotangent, _) in zip(self.weights, outputs, strict=True)
                ),
                f"{self.name}/{i}({made})",
            )
            for i in tracked
        ]


def left_fold(addends: Sequence[Number]) -> Number:
    """Sum left to right, and say so."""
    total, expression = addends[0]
    for value, added in addends[1:]:
        total, expression = total + value, f"({expression}+{added})"
    return total, expression


@dataclass
class Place:
    """One worker: its engine, its values, its ready jobs."""

    engine: Engine
    values: dict[Key, Any] = field(default_factory=dict)
    jobs: list[Job] = field(default_factory=list)
    resumed: dict[int, Any] = field(default_factory=dict)
    spawned: deque[Spawn] = field(default_factory=deque)


class Net:
    """Engines, and queues between each two of them; `rng` picks what happens next."""

    def __init__(self, workers: Sequence[str], rng: random.Random) -> None:
        self.places = {name: Place(Engine(name, workers)) for name in workers}
        self.workers = tuple(workers)
        self.rng = rng
        self.queues: dict[tuple[str, str], deque[tuple[Any, list[Any]]]] = {}
        self.sent: list[tuple[str, str, Any]] = []
        self.dead: dict[str, None] = {}
        self._waiter = 0
        self._leaf = 0
        self._context = 0

    # -------------------------------------------------------------------- running

    def tell(self, worker: str, event: Event) -> None:
        """Have an engine handle an event and carry out what it asks for."""
        place = self.places[worker]
        for effect in place.engine.handle(event):
            self._carry_out(worker, place, effect)

    def _carry_out(self, worker: str, place: Place, effect: Effect) -> None:
        match effect:
            case Send(to=to, message=message, values=values):
                self.sent.append((worker, to, message))
                carried = [place.values[key] for key in values]
                self.queues.setdefault((worker, to), deque()).append((message, carried))
            case Compute(job=job):
                place.jobs.append(job)
            case Drop(keys=keys):
                for key in keys:
                    place.values.pop(key, None)
            case Spawn():
                place.spawned.append(effect)
            case Resume(waiter=waiter, result=result):
                place.resumed[waiter] = result

    def step(self) -> bool:
        """Let one thing happen: a message arrive or a job run. False if nothing can."""
        choices: list[tuple[str, Any]] = [
            ("message", pair)
            for pair, queue in self.queues.items()
            if queue and pair[1] not in self.dead
        ]
        for name, place in self.places.items():
            if name not in self.dead:
                choices.extend(
                    ("job", (name, index)) for index in range(len(place.jobs))
                )
        if not choices:
            return False
        kind, what = self.rng.choice(choices)
        if kind == "message":
            sender, receiver = what
            message, carried = self.queues[what].popleft()
            store = self.places[receiver].values
            store.update(zip(landing(message), carried, strict=True))
            self.tell(receiver, Arrived(sender, message))
        else:
            name, index = what
            self._run(name, self.places[name].jobs.pop(index))
        return True

    def _run(self, name: str, job: Job) -> None:
        store = self.places[name].values
        failure = None
        try:
            compute(store, job)
        except ValueError as error:
            failure = Failure("RemoteError", str(error), name, job.path)
        self.tell(name, Computed(job.id, failure))

    def until(self, worker: str, waiter: int) -> Any:
        """Run until a waiter is resumed."""
        resumed = self.places[worker].resumed
        while waiter not in resumed:
            assert self.step(), f"nothing can happen and {waiter} still waits"
        return resumed.pop(waiter)

    def drain(self) -> None:
        """Run until nothing can happen."""
        while self.step():
            pass

    def crash(self, worker: str) -> None:
        """A worker stops; the others notice, each in its own time."""
        self.dead[worker] = None
        for pair in list(self.queues):
            if worker in pair:
                self.queues[pair].clear()
        for other in self.workers:
            if other not in self.dead:
                self.tell(other, Lost(worker))

    # ------------------------------------------------------------------ what users do

    def waiter(self) -> int:
        self._waiter += 1
        return self._waiter

    def put(self, worker: str, value: int, home: str) -> Argument:
        self._leaf += 1
        leaf = LeafId(worker, self._leaf)
        key = Key("leaf", None, leaf, 0)
        self.places[home].values[key] = (value, f"leaf{self._leaf}")
        event = Assigned((self._leaf,), worker, None, (), (key,), ("aval",), "here")
        self.tell(home, event)
        return Argument(key, worker, True)

    def open(self, owner: str) -> "Scope":
        self._context += 1
        context = ContextId(self.workers.index(owner), self._context, 0)
        self.tell(owner, Opened(context))
        return Scope(self, owner, context, ())

    def fetch(self, worker: str, *arguments: Argument) -> Any:
        waiter = self.waiter()
        keys = tuple((argument.key, argument.owner) for argument in arguments)
        self.tell(worker, Fetched(waiter, keys))
        answers = self.until(worker, waiter)
        store = self.places[worker].values
        got = [a if isinstance(a, Failure) else store[a] for a in answers]
        for answer in answers:
            if not isinstance(answer, Failure) and answer.kind == "reading":
                del store[answer]
        return got


class Scope:
    """One activation: what a context offers a program."""

    def __init__(
        self, net: Net, worker: str, context: ContextId, path: tuple[int, ...]
    ):
        self.net, self.worker, self.context, self.path = net, worker, context, path
        self.count = 0
        self.passes = 0

    def call(
        self, worker: str, function: Linear, *arguments: Argument
    ) -> list[Argument]:
        self.count += 1
        path = (*self.path, self.count)
        tracked = any(argument.tracked for argument in arguments)
        outputs = tuple(tracked for _ in function.weights)
        event = Issued(
            self.context,
            path,
            worker,
            function,
            function.name,
            arguments,
            outputs,
            "here",
        )
        self.net.tell(self.worker, event)
        return [
            Argument(Key("output", self.context, path, i), worker, tracked)
            for i in range(len(outputs))
        ]

    def launch(self, worker: str, function: Any, *arguments: Argument) -> int:
        self.count += 1
        waiter = self.net.waiter()
        path = (*self.path, self.count)
        event = Launched(
            waiter, self.context, path, worker, function, arguments, "here"
        )
        self.net.tell(self.worker, event)
        return waiter

    def backward(self, *roots: Argument, retain: bool = False) -> PassResult:
        waiter = self.net.waiter()
        self.passes += 1
        placed = tuple(
            (root.owner, Root(root.key, "aval", False, number))
            for number, root in enumerate(roots)
        )
        event = Differentiated(waiter, self.context, placed, retain)
        self.net.tell(self.worker, event)
        result = self.net.until(self.worker, waiter)
        assert isinstance(result, PassResult)
        return result

    def gradient(self, leaf: Argument, number: int) -> Argument:
        key = Key("gradient", self.context, leaf.key.name, number)
        return Argument(key, leaf.owner, False)

    def leave(self) -> tuple[Failure, ...]:
        waiter = self.net.waiter()
        self.net.tell(self.worker, Left(waiter, self.context))
        failures = self.net.until(self.worker, waiter)
        assert isinstance(failures, tuple)
        return failures


def compute(store: dict[Key, Any], job: Job) -> None:
    """Carry out a job on pairs of integer and expression."""
    match job:
        case Forward(function=function, inputs=inputs, outputs=outputs, residuals=kept):
            results = function.forward([store[key] for key in inputs])
            store.update(zip(outputs, results, strict=True))
            if kept is not None:
                store[kept] = "residuals"
        case Vjp(function=function, cotangents=cotangents, outputs=outputs):
            assert store[job.residuals] == "residuals"
            if job.last:
                del store[job.residuals]
            summed = [
                left_fold([store.pop(key) for key in addends]) if addends else (0, "0")
                for addends in cotangents
            ]
            made = function.vjp(summed, range(len(outputs)))
            store.update(zip(outputs, made, strict=True))
        case Sum(addends=addends, base=base, output=output):
            values = [] if base is None else [store[base]]
            store[output] = left_fold([*values, *(store.pop(key) for key in addends)])
        case Fill(value=value, output=output):
            store[output] = (value, str(value))
