"""Engines that run plans of plain Python functions, in any order of events.

Values are ints. A message waits on its link, a job on its worker, until chance picks
it; links keep their order. Leaves are put and read through the engines too.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from random import Random
from typing import Any

from jdag.engine import Engine
from jdag.engine.protocol import (
    AnyKey,
    Arrived,
    Assigned,
    Assignment,
    Compiled,
    CompileSegment,
    Compute,
    Computed,
    ContextId,
    Drop,
    Failure,
    Fetched,
    Forward,
    Key,
    LeafId,
    LeafKey,
    Lost,
    NewestKey,
    Outgoing,
    Planned,
    Prepare,
    ReadingKey,
    Resume,
    RunSegment,
    Segment,
    Send,
    SlotKey,
    Slotted,
    Stepping,
    landing,
)
from jdag.errors import JdagError


class PlanNet:
    """Workers a, b and c with a leaf on b, and plans that step it."""

    def __init__(self, seed: int, workers: str = "abc") -> None:
        self.rng = Random(seed)
        self.engines = {name: Engine(name, tuple(workers)) for name in workers}
        self.values: dict[str, dict[Key, Any]] = {name: {} for name in workers}
        self.links: dict[tuple[str, str], deque[Any]] = defaultdict(deque)
        self.jobs: dict[str, list[Any]] = defaultdict(list)
        self.resumed: dict[int, Any] = {}
        self.sent: list[tuple[str, str, Any]] = []
        self.steps: dict[ContextId, int] = defaultdict(int)
        self.dead: dict[str, None] = {}
        self.waiter = count(1).__next__
        self.number = count(1).__next__
        self.fails: Callable[[str, RunSegment], bool] = lambda *_: False
        self.seen = 0
        self.crash: tuple[str, int] = ("", 0)  # Who dies, before which event.

    def tell(self, worker: str, event: Any) -> None:
        """Have an engine handle an event, and carry out the effects."""
        self.seen += 1
        if self.crash == (self.crash[0], self.seen):
            self.kill(self.crash[0])
        if worker in self.dead:
            return
        values = self.values[worker]
        for effect in self.engines[worker].handle(event):
            match effect:
                case Send():
                    carried = [values[key] for key in effect.values]
                    self.sent.append((worker, effect.to, effect.message))
                    self.links[worker, effect.to].append((effect.message, carried))
                case Compute():
                    self.jobs[worker].append(effect.job)
                case Drop():
                    for key in effect.keys:
                        values.pop(key, None)
                case Resume():
                    found = effect.result
                    if isinstance(found, tuple):
                        is_key = [isinstance(one, AnyKey) for one in found]
                        pairs = zip(found, is_key, strict=True)
                        found = [values[o] if key else o for o, key in pairs]
                        for key in effect.result:
                            if isinstance(key, ReadingKey):
                                del values[key]
                    self.resumed[effect.waiter] = found

    def kill(self, worker: str) -> None:
        """A worker is gone, and all others hear of it at some time."""
        self.dead[worker] = None
        for other in self.engines:
            if other != worker:
                self.links[worker, other].append((None, ()))
                self.links.pop((other, worker), None)

    def turn(self) -> bool:
        """Let one event happen; False if none is left."""
        links = [link for link, queue in self.links.items() if queue]
        busy = [name for name, jobs in self.jobs.items() if jobs]
        if not links and not busy:
            return False
        pick = self.rng.randrange(len(links) + len(busy))
        if pick >= len(links):
            self._job(busy[pick - len(links)])
            return True
        sender, to = links[pick]
        message, carried = self.links[sender, to].popleft()
        if to in self.dead:
            return True
        if message is None:
            self.tell(to, Lost(sender, "it was killed"))
            return True
        self.values[to].update(zip(landing(message), carried, strict=True))
        self.tell(to, Arrived(sender, message))
        return True

    def _job(self, worker: str) -> None:
        jobs, values = self.jobs[worker], self.values[worker]
        job = jobs.pop(self.rng.randrange(len(jobs)))
        if worker in self.dead:
            return
        if isinstance(job, CompileSegment):
            self.tell(worker, Computed(job.id))
            return
        assert isinstance(job, RunSegment | Forward)
        inputs = [values[key] for key in job.inputs]
        if isinstance(job, RunSegment):
            for key in job.last:
                values.pop(key)
            if self.fails(worker, job):
                failure = Failure("RemoteError", "it failed", worker, job.path)
                self.tell(worker, Computed(job.id, failure))
                return
        made = job.function(*inputs)
        values.update(zip(job.outputs, made, strict=True))
        self.tell(worker, Computed(job.id))

    def drain(self) -> None:
        """Until nothing happens any more."""
        while self.turn():
            pass

    def wait(self, worker: str, event: Callable[[int], Any]) -> Any:
        """Tell an event of a waiter, and let others go on until it is resumed."""
        waiter = self.waiter()
        self.tell(worker, event(waiter))
        while waiter not in self.resumed and worker not in self.dead:
            assert self.turn(), "nothing is left to happen"
        return self.resumed.pop(waiter, None)

    # ------------------------------------------------------------------ what users do

    def put(self, worker: str, value: int, home: str = "a") -> LeafId:
        """Make a leaf."""
        leaf = LeafId(worker, self.number())
        key = LeafKey(None, leaf, 0)
        self.values[home][key] = value
        self._assign(home, Assignment((self.number(), 0), None, (), (key,), (1,), ""))
        return leaf

    def update(self, leaf: LeafId, by: Callable[[int], Any], home: str = "a") -> None:
        """Make the next version of a leaf by a function of the newest."""
        key = NewestKey(None, leaf, 0)
        path = (self.number(), 0)
        self._assign(home, Assignment(path, by, (key,), (key,), (1,), ""))

    def _assign(self, home: str, part: Assignment) -> None:
        self.tell(home, Assigned(part.path[:1], (part,)))

    def fetch(self, leaf: LeafId, home: str = "a") -> Any:
        """The value of a leaf as a program here reads it."""
        located = ((NewestKey(None, leaf, 0), leaf.worker),)
        (found,) = self.wait(home, lambda waiter: Fetched(waiter, located))
        return found

    def plan(
        self,
        parts: Sequence[tuple[str, Prepare]],
        results: Sequence[int],
        constants: dict[int, int],
    ) -> None:
        """Prepare a plan; its owner is that of its context."""
        context = parts[0][1].context
        home = "abc"[context.number]
        for slot, value in constants.items():
            self.values[home][SlotKey(context, 0, slot)] = value
        self.tell(home, Planned(context, tuple(parts), tuple(results)))
        segments = sum(len(part.segments) for _, part in parts)
        seen = 0
        while seen < segments:
            seen = self.wait(home, partial(Compiled, context=context, seen=seen))
            assert not isinstance(seen, Failure), seen

    def step(self, context: ContextId, to: str, x: int) -> Any:
        """Run a step whose only input, slot 0, goes to this worker."""
        self.steps[context] += 1
        number, home = self.steps[context], "abc"[context.number]
        key, inputs = SlotKey(context, number, 0), ((to, (0,)),)
        self.values[home][key] = x
        try:
            return self.wait(
                home, lambda waiter: Stepping(waiter, context, number, inputs)
            )
        except JdagError:
            del self.values[home][key]
            raise


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
