"""Plans of plain Python functions on the engines of a net, in any order of events.

Values are ints. Leaves are put and read through the engines too.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from random import Random
from typing import Any

from msgspec.structs import replace

from jdag.engine.protocol import (
    Assigned,
    Assignment,
    Compiled,
    CompileSegment,
    Computed,
    ContextId,
    Failure,
    Fetched,
    Forward,
    Job,
    LeafId,
    LeafKey,
    NewestKey,
    Outgoing,
    Planned,
    Prepare,
    Resume,
    RunSegment,
    Segment,
    Send,
    SlotKey,
    Slotted,
    Stepping,
)
from jdag.engine.tables import Hop, StepState, TableRow
from tests.tools.engine_net import Net
from tests.tools.engine_parts import PlaceValues

Fails = Callable[[str, Any], bool]


UNSENDABLE = -77  # A value that a `DirectValues` cannot send.


@dataclass(eq=False)
class DirectRow:
    """A row that its worker runs without a job of the engine."""

    step: StepState
    row: TableRow
    inputs: list[Any]

    @property
    def path(self) -> tuple[int, ...]:
        return (self.row.index,)


class DirectValues(PlaceValues):
    """A `StepDriver` that runs rows and sends frames without effects."""

    has_keys = False

    def __init__(self, net: "SegmentNet", name: str) -> None:
        place = net.places[name]
        super().__init__(place.values)
        self.place, self.name, self.net = place, name, net

    def run(self, step: StepState, row: TableRow, inputs: list[Any]) -> Any:
        if row.index % 2 or len(inputs) > 2:
            return False  # Some rows are jobs.
        return self.net.outputs(self.name, DirectRow(step, row, inputs))

    def send(self, hop: Hop, number: int, base: int, values: Sequence[Any]) -> bool:
        if UNSENDABLE in values:
            raise ValueError("it cannot be sent")
        frame = replace(hop.frame, number=number, base=base)
        effect = Send(hop.to, frame, given=tuple(values))
        self.net._carry_out(self.name, self.place, effect)
        return True

    def finish(self, waiter: int, results: tuple[Any, ...]) -> bool:
        self.net._carry_out(self.name, self.place, Resume(waiter, results))
        return True


class SegmentNet(Net):
    """A net whose workers run segments; `fails` says which of them fail."""

    fails: Fails

    def run_directly(self) -> None:
        for name, place in self.places.items():
            place.steps = DirectValues(self, name)
            place.engine.drive(place.steps)

    def outputs(self, name: str, job: DirectRow) -> Any:
        segment = job.row.segment
        if segment is None or self.fails(name, job):
            return Failure("RemoteError", "it failed", name)
        return segment.function(*job.inputs)

    def _run(self, name: str, job: Job) -> None:
        values, failure = self.places[name].values, None
        if isinstance(job, RunSegment | Forward):
            if isinstance(job, Forward):
                made = job.function(*[values[key] for key in job.inputs])
                values.update(zip(job.outputs, made, strict=True))
            else:
                self.places[name].steps.account(*[-size for size in job.freed])
                if self.fails(name, job):
                    failure = Failure("RemoteError", "it failed", name, job.path)
                else:
                    job.results.extend(job.function(*job.inputs))
        else:
            assert isinstance(job, CompileSegment), job
        self.tell(name, Computed(job.id, failure))


class PlanNet:
    def __init__(self, seed: int, workers: str = "abc") -> None:
        self.net = net = SegmentNet(tuple(workers), Random(seed))
        if seed % 2:
            net.run_directly()
        net.fails = lambda *job: self.fails(*job)  # noqa: PLW0108 - Tests set it.
        self.fails: Fails = lambda *_: False
        self.engines = {name: place.engine for name, place in net.places.items()}
        self.values = {name: place.values for name, place in net.places.items()}
        self.jobs = {name: place.jobs for name, place in net.places.items()}
        self.steps: dict[ContextId, int] = defaultdict(int)
        self.number = count(1).__next__
        self.turn = net.step

    def __getattr__(self, name: str) -> Any:
        return getattr(self.net, name)

    def crash_at(self, victim: str, step: int) -> None:
        def crash(net: Net) -> None:
            if net.steps >= before + step - 1:
                net.before_step = None
                net.crash(victim)

        before = self.net.steps
        self.net.before_step = crash

    def wait(self, worker: str, event: Callable[[int], Any]) -> Any:
        waiter = self.net.waiter()
        self.net.tell(worker, event(waiter))
        result = self.net.until(worker, waiter)
        return [*result] if isinstance(result, tuple) else result

    def put(self, worker: str, value: int, home: str = "a") -> LeafId:
        leaf = LeafId(worker, self.number())
        key = LeafKey(None, leaf, 0)
        self.values[home][key] = value
        self._assign(home, Assignment((self.number(), 0), None, (), (key,), (1,), ""))
        return leaf

    def update(self, leaf: LeafId, by: Callable[[int], Any], home: str = "a") -> None:
        key = NewestKey(None, leaf, 0)
        path = (self.number(), 0)
        self._assign(home, Assignment(path, by, (key,), (key,), (1,), ""))

    def _assign(self, home: str, part: Assignment) -> None:
        self.net.tell(home, Assigned(part.path[:1], (part,)))

    def fetch(self, leaf: LeafId, home: str = "a") -> Any:
        located = ((NewestKey(None, leaf, 0), leaf.worker),)
        (found,) = self.wait(home, lambda waiter: Fetched(waiter, located))
        return found

    def plan(
        self,
        parts: Sequence[tuple[str, Prepare]],
        results: Sequence[int],
        constants: dict[int, int],
        to: str = "b",
    ) -> None:
        """Prepare a plan whose only input, slot 0, goes to the workers `to`.

        Its owner is that of its context.
        """
        context = parts[0][1].context
        home = "abc"[context.number]
        for slot, value in constants.items():
            self.values[home][SlotKey(context, 0, slot)] = value
        inputs = tuple((worker, (0,)) for worker in to)
        planned = Planned(context, tuple(parts), tuple(results), (0,), inputs)
        self.net.tell(home, planned)
        segments = sum(len(part.segments) for _, part in parts)
        seen = 0
        while seen < segments:
            seen = self.wait(home, partial(Compiled, context=context, seen=seen))
            assert not isinstance(seen, Failure), seen

    def step(self, context: ContextId, x: int) -> Any:
        self.steps[context] += 1
        number, home = self.steps[context], "abc"[context.number]
        return self.wait(home, lambda waiter: Stepping(waiter, context, number, (x,)))


def chain(
    context: ContextId, w: LeafId, v: LeafId, home: str = "a"
) -> list[tuple[str, Prepare]]:
    """The parts of a plan: y = w x on b, z = v y + 5 on c; w + y and v + z are staged.

    Slots: 0 x, 1 w, 2 y, 3 v, 4 the constant 5, 5 z, 6 new w, 7 new v, 8 what b keeps.
    """
    del home
    hop = (Outgoing("c", (2,)),)
    back = (Outgoing("abc"[context.number], (5,)),) if context.number != 2 else ()

    def times(x: int, w: int) -> tuple[int, int]:
        return w * x, 10 * x

    def plus(y: int, v: int, five: int) -> tuple[int]:
        return (v * y + five,)

    def add_rest(w: int, y: int, rest: int) -> tuple[int]:
        assert rest % 10 == 0
        return (w + y + rest // 10,)

    def add(v: int, z: int) -> tuple[int]:
        return (v + z,)

    b = Prepare(
        context,
        0,
        (
            Segment(times, (0, 1), (2, 8), hop),
            Segment(add_rest, (1, 2, 8), (6,)),
        ),
        (),
        (Slotted(w, 1),),
        (Slotted(w, 6),),
        (1,),
        True,
    )
    c = Prepare(
        context,
        0,
        (Segment(plus, (2, 3, 4), (5,), back), Segment(add, (3, 5), (7,))),
        (4,),
        (Slotted(v, 3),),
        (Slotted(v, 7),),
        (1,),
        True,
    )
    return [("b", b), ("c", c)]


def held(net: PlanNet) -> list[Any]:
    """What steps hold, by worker: values, steps, and bytes."""
    actual: list[Any] = []
    for name, values in net.values.items():
        stored = {
            version.stored
            for leaf in net.engines[name]._state.leaves.values()
            for version in leaf.versions.values()
        }
        actual += [
            (name, key)
            for key in values
            if key not in stored and not (key.kind == "slot" and key.name == 0)
        ]
        if name not in net.dead:
            steps = net.engines[name]._steps
            actual += [
                (name, each.steps) for each in steps.tables.values() if each.steps
            ]
            actual += [(name, size) for size in net.places[name].steps.held if size]
            state = net.engines[name]._state
            actual += [(name, to) for to, sent in state.unhandled.items() if sent]
            actual += [(name, count) for count in (state.assignments,) if count]
    return actual
