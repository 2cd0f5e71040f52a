"""Engines wired together without arithmetic, clock or wire: any order of events.

Values are the numbers of engine_values. Programs that run on workers are generators:
they yield a waiter and are sent what it was resumed with.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jdag.engine.protocol import (
    Acknowledged,
    Alarm,
    Argument,
    Arrived,
    Assigned,
    Assignment,
    Attached,
    Collected,
    Compute,
    Computed,
    ConstantKey,
    ContextId,
    Differentiated,
    Discarded,
    Drop,
    Dropped,
    Effect,
    Event,
    Failure,
    Fetched,
    GradientKey,
    Hook,
    Issued,
    Job,
    Joined,
    Key,
    Launched,
    LeafId,
    LeafKey,
    Left,
    Lost,
    Mode,
    Opened,
    OutputKey,
    PassResult,
    Resume,
    Returned,
    Root,
    SeedKey,
    Send,
    Spawn,
    StepFrame,
    Worker,
    incarnation_of,
    landing,
    named,
)
from tests.tools import engine_outages as outages
from tests.tools.engine_parts import Body, Links, Pair, Parcel, Place, leftovers, taken
from tests.tools.engine_values import Linear, compute

STEPS_MAX = 200_000


class Net:
    """Engines, and links between each two of them; `rng` picks what happens next."""

    def __init__(
        self, workers: Sequence[str], rng: random.Random, large: float = 0.0
    ) -> None:
        self.places: dict[str, Place] = {}
        self.workers = tuple(workers)
        for name in workers:
            outages.start(self, name, 0)
        self.rng = rng
        self.links = Links(rng, large)
        self.queues = self.links.queues
        self.sent: list[tuple[str, str, Any]] = []
        self.ran: list[Job] = []
        self.dead: dict[str, None] = {}
        self.dropped: dict[LeafId, None] = {}
        self.parted: dict[tuple[str, str], None] = {}  # (from, to): nothing passes.
        self.unnoticed: list[tuple[str, Lost | Joined]] = []  # (who was not told, what)
        self.steps = 0
        self.before_step: Callable[[Net], None] | None = None
        self.let_go()  # `holds` a message at the head of its queue, `pauses` a job.
        # One kind of thing may be slow, so that much of it is under way at once.
        self.slow = rng.choice(("nothing", "message", "job", "resume"))
        self._waiter = 0
        self._leaf = 0
        self._assignment = 0
        self._contexts: dict[str, int] = {}

    def tell(self, worker: str, event: Event) -> None:
        place = self.places[worker]
        for effect in place.engine.handle(event):
            self._carry_out(worker, place, effect)

    def _carry_out(self, worker: str, place: Place, effect: Effect) -> None:
        match effect:
            case Send(to=to, message=message, values=values, given=given):
                carried = [*given, *[place.values[key] for key in values]]
                self._send(worker, to, message, carried)
            case Compute(job=job):
                place.jobs.append(job)
            case Drop(keys=keys):
                for key in keys:
                    place.values.pop(key, None)
            case Spawn():
                place.spawned.append(effect)
            case Alarm(waiter=waiter, event=event):
                place.alarms[waiter] = event
            case Resume(waiter=waiter, result=result):
                assert waiter not in place.resumed, waiter
                place.alarms.pop(waiter, None)
                place.resumed[waiter] = taken(place.values, result)

    def _send(self, worker: str, to: str, message: Any, carried: list[Any]) -> None:
        self.sent.append((worker, to, message))
        if to not in self.dead and (worker, to) not in self.parted:
            self.links.send((worker, to), message, carried)

    def choices(self) -> list[tuple[str, str, Any]]:
        """Everything that can happen next: what, on which worker, which."""
        found: list[tuple[str, str, Any]] = []
        for pair, queue in self.queues.items():
            if queue and not self.holds(*pair, queue[0][0]):
                found.append(("message", pair[1], pair))
        found.extend(self.links.rests())
        for name, place in self.places.items():
            if name in self.dead:
                continue
            for job in place.jobs:
                if not self.pauses(name, job):
                    found.append(("job", name, job))
            for spawn in place.spawned:
                found.append(("spawn", name, spawn))
            for waiter in place.running if place.resumed else ():
                if waiter in place.resumed:
                    found.append(("resume", name, waiter))
        found.extend(("notice", *pair) for pair in self.unnoticed)
        return found

    def ring(self, worker: str) -> None:
        alarms = self.places[worker].alarms
        if alarms:
            self.tell(worker, alarms.pop(min(alarms)))

    def step(self) -> bool:
        """Let one thing happen. False if nothing can."""
        if self.before_step is not None:
            self.before_step(self)
        choices = self.choices()
        if not choices:
            return False
        self.steps += 1
        assert self.steps < STEPS_MAX, "the net never falls silent"
        kind, worker, what = self.rng.choice(choices)
        for _ in range(4 if kind == self.slow else 0):
            if kind == self.slow:
                kind, worker, what = self.rng.choice(choices)
        place = self.places[worker]
        match kind:
            case "message" if isinstance(self.queues[what][0][0], Acknowledged):
                self.tell(worker, self.links.acknowledged(what, self._joins(*what)))
            case "message":
                self._hear(what, self.links.take(what))
            case "rest":
                self._hear(what[0], self.links.complete(*what))
            case "job":
                place.jobs.remove(what)
                self._run(worker, what)
            case "spawn":
                place.spawned.remove(what)
                scope = Scope(self, worker, what.context, what.path)
                self._resume(scope, what.function(scope, *what.arguments), None)
            case "resume":
                scope, body = place.running.pop(what)
                self._resume(scope, body, place.resumed.pop(what))
            case "notice":
                self.unnoticed.remove((worker, what))
                outages.hear(self, worker, what)
        return True

    def _joins(self, sender: str, worker: str) -> Callable[[Any], bool]:
        return lambda event: (
            not self.holds(sender, worker, event) and self.rng.random() < 0.5
        )

    def _hear(self, pair: Pair, parcels: Sequence[Parcel]) -> None:
        sender, worker = pair
        for parcel in parcels:
            message, values = parcel.message, parcel.carried
            if handled := self.links.handing(pair, parcel):
                self._send(worker, sender, Acknowledged(worker, handled), [])
            if not isinstance(message, StepFrame):
                landed = zip(landing(message), values, strict=True)
                self.places[worker].values.update(landed)
                values = []
            self.tell(worker, Arrived(sender, message, values))

    def _run(self, name: str, job: Job) -> None:
        failure = None
        self.ran.append(job)
        try:
            compute(self.places[name].values, job)
        except ValueError as error:
            function = getattr(job, "function", None)
            called = getattr(function, "name", "")
            failure = Failure("RemoteError", str(error), name, job.path, called)
        self.tell(name, Computed(job.id, failure))

    def _resume(self, scope: "Scope", body: Body, result: Any) -> None:
        name = scope.worker
        failure, returned = None, None
        try:
            self.places[name].running[body.send(result)] = (scope, body)
            return
        except StopIteration as stop:
            returned = stop.value
        except Exception as error:  # Whatever a program raises is what it returns.
            kind = type(error).__name__
            failure = Failure(kind, str(error), name, scope.path)
        left = scope.noted()
        self.tell(name, Returned(scope.context, scope.path, returned, failure, left))

    def until(self, worker: str, waiter: int) -> Any:
        resumed = self.places[worker].resumed
        while waiter not in resumed:
            if not self.step():  # Before which anything may have happened.
                assert waiter in resumed, f"nothing can happen and {waiter} still waits"
        return resumed.pop(waiter)

    def drain(self) -> None:
        while self.step():
            pass

    def some(self) -> None:
        while self.rng.random() < 0.7 and self.step():
            pass

    def crash(self, worker: str) -> None:
        outages.crash(self, worker)

    def rejoin(self, name: str) -> str:
        return outages.rejoin(self, name)

    def part(self, one: str, other: str) -> None:
        outages.part(self, one, other)

    @property
    def alive(self) -> tuple[str, ...]:
        return tuple(name for name in self.places if name not in self.dead)

    def messages(self, kind: type) -> list[tuple[str, str]]:
        return [(a, b) for a, b, message in self.sent if type(message) is kind]

    def let_go(self) -> None:
        self.holds: Callable[[str, str, Any], bool] = lambda *_: False
        self.pauses: Callable[[str, Job], bool] = lambda *_: False
        self.links.stalls = False

    def leftovers(self) -> list[str]:
        living = {name: self.places[name] for name in self.alive}
        return leftovers(living, self.dropped)

    def waiter(self) -> int:
        self._waiter += 1
        return self._waiter

    def put(self, worker: str, value: int, home: str) -> Argument:
        self._leaf += 1
        leaf = LeafId(outages.known(self, home, worker), self._leaf)
        key = LeafKey(None, leaf, 0)
        self.places[home].values[key] = (value, f"leaf{self._leaf}")
        self.assign(home, worker, None, (), key)
        return Argument(key, leaf.worker, True)

    def assign(
        self,
        home: str,
        worker: str,
        function: Linear | None,
        inputs: Sequence[Argument],
        output: Key,
    ) -> Argument:
        self._assignment += 1
        keys = tuple(argument.key for argument in inputs)
        path = (self._assignment,)
        part = Assignment((*path, 0), function, keys, (output,), ("aval",), "here")
        self.tell(home, Assigned(path, (part,)))
        return Argument(output, worker, True)

    def update(
        self, home: str, leaf: Argument, function: Linear, *inputs: Argument
    ) -> Argument:
        key = LeafKey(None, leaf.key.name, leaf.key.index + 1)
        return self.assign(home, leaf.owner, function, inputs, key)

    def drop(self, home: str, *leaves: Argument) -> None:
        names = tuple(leaf.key.name for leaf in leaves)
        self.dropped.update(dict.fromkeys(names))
        self.tell(home, Dropped(names))

    def open(self, owner: str) -> "Scope":
        counter = self._contexts[owner] = self._contexts.get(owner, 0) + 1
        number = self.workers.index(named(owner))
        context = ContextId(number, counter, incarnation_of(owner))
        self.tell(owner, Opened(context))
        return Scope(self, owner, context, ())

    def asked(self, worker: str, *arguments: Argument) -> int:
        """Ask for values; the waiter to wait for."""
        waiter = self.waiter()
        keys = tuple((argument.key, argument.owner) for argument in arguments)
        self.tell(worker, Fetched(waiter, keys))
        return waiter

    def fetch(self, worker: str, *arguments: Argument) -> list[Any]:
        """The numbers, or the failures in their place."""
        return list(self.until(worker, self.asked(worker, *arguments)))


class Scope:
    def __init__(
        self, net: Net, worker: str, context: ContextId, path: tuple[int, ...]
    ):
        self.net, self.worker, self.context, self.path = net, worker, context, path
        self.count = self.launched = 0
        self.passes = 0
        self._discarded: list[tuple[Key, Worker]] = []

    def discard(self, *values: Argument) -> None:
        self._discarded += [(value.key, value.owner) for value in values]

    def noted(self) -> tuple[tuple[Key, Worker], ...]:
        noted, self._discarded = tuple(self._discarded), []
        return noted

    def tell_discarded(self) -> None:
        event = Discarded(self.context, self.path, self.noted())
        self.net.tell(self.worker, event)

    def call(
        self,
        worker: str,
        function: Linear,
        *arguments: Argument | int,
        inexact: Sequence[bool] | None = None,
    ) -> list[Argument]:
        """Call; an int is a constant; `inexact`: which outputs can be tracked."""
        worker = outages.known(self.net, self.worker, worker)
        self.count += 1
        path = (*self.path, self.count)
        store = self.net.places[self.worker].values
        given: list[Argument] = []
        for position, argument in enumerate(arguments):
            if isinstance(argument, int):
                key = ConstantKey(self.context, path, position)
                store[key] = (argument, str(argument))
                given.append(Argument(key, self.worker, False))
            else:
                given.append(argument)
        inputs = tuple(i for i, argument in enumerate(given) if argument.tracked)
        flags = [True] * len(function.credits) if inexact is None else inexact
        outputs = tuple(bool(inputs) and flag for flag in flags)
        made = tuple(j for j, flag in enumerate(outputs) if flag)
        event = Issued(
            self.context,
            path,
            worker,
            replace(function, inputs=inputs, outputs=made),
            function.name,
            tuple(given),
            outputs,
            "here",
            self.noted(),
        )
        self._tell(event, [a.key for a in given if a.key.kind == "constant"])
        return [
            Argument(OutputKey(self.context, path, i), worker, tracked)
            for i, tracked in enumerate(outputs)
        ]

    def _tell(self, event: Event, carried: Sequence[Key]) -> None:
        try:
            self.net.tell(self.worker, event)
        except Exception:
            for key in carried:
                del self.net.places[self.worker].values[key]
            raise

    def attach(
        self, value: Argument, function: Any, replaces: bool = True
    ) -> tuple[int, ...]:
        self.count += 1
        path = (*self.path, self.count)
        hook = Hook(path, function, replaces, "aval", f"hooked at {path}")
        event = Attached(self.context, value.owner, value.key, hook)
        self.net.tell(self.worker, event)
        return path

    def launch(self, worker: str, body: Any, *arguments: Any) -> int:
        """Call a program; the waiter for (result, failure)."""
        worker = outages.known(self.net, self.worker, worker)
        self.count += 1
        waiter = self.net.waiter()
        path = (*self.path, self.count)
        self.tell_discarded()
        news = Collected(waiter, self.context, self.path, self.launched, None)
        for event in (Launched(self.context, path, worker, body, arguments, "h"), news):
            self.net.tell(self.worker, event)
        self.launched += 1
        return waiter

    def run(self, worker: str, body: Any, *arguments: Any) -> Any:
        return self.net.until(self.worker, self.launch(worker, body, *arguments))

    def start_backward(
        self,
        *roots: Argument,
        retain: bool = False,
        seeds: Sequence[int | None] | None = None,
        mode: Mode = Mode.FAST,
        timeout_ns: int | None = None,
    ) -> int:
        """Ask for a pass; the waiter for its result."""
        self.tell_discarded()
        waiter = self.net.waiter()
        self.passes += 1
        given = seeds or [None] * len(roots)
        carried: list[Key] = []
        for number, seed in enumerate(given):
            if seed is not None:
                carried.append(SeedKey(self.context, self.passes, number))
                self.net.places[self.worker].values[carried[-1]] = (seed, str(seed))
        placed = tuple(
            (root.owner, Root(root.key, "aval", given[number] is not None, number))
            for number, root in enumerate(roots)
        )
        event = Differentiated(waiter, self.context, placed, mode, retain, timeout_ns)
        self._tell(event, carried)
        return waiter

    def backward(self, *roots: Argument, **settings: Any) -> PassResult:
        waiter = self.start_backward(*roots, **settings)
        result = self.net.until(self.worker, waiter)
        assert isinstance(result, PassResult)
        return result

    def gradient(self, leaf: Argument, number: int | None = None) -> Argument:
        """The gradient that a pass, by default the last one, left of a leaf."""
        number = self.passes if number is None else number
        key = GradientKey(self.context, leaf.key.name, number)
        return Argument(key, leaf.owner, False)

    def gradients(self, *leaves: Argument) -> list[Any]:
        refs = [self.gradient(leaf) for leaf in leaves]
        return [number for number, _ in self.net.fetch(self.worker, *refs)]

    def start_leaving(self) -> int:
        waiter = self.net.waiter()
        self.net.tell(self.worker, Left(waiter, self.context))
        return waiter

    def leave(self) -> tuple[Failure, ...]:
        return tuple(self.net.until(self.worker, self.start_leaving()))


def stopped(value: Argument) -> Argument:
    return Argument(value.key, value.owner, False)


def names(count: int) -> tuple[Worker, ...]:
    return tuple("abcdef"[:count])
