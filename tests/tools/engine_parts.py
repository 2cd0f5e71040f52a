"""The workers of a net, and what is on its way between them, large values last."""

import random
from collections import deque
from collections.abc import Callable, Container, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args, get_type_hints

from jdag.engine import Engine
from jdag.engine.protocol import (
    Acknowledged,
    AnyKey,
    Event,
    Job,
    Key,
    LeafId,
    Message,
    Return,
    Spawn,
)
from jdag.wire.order import Order

Body = Generator[int, Any, Any]
Pair = tuple[str, str]


class PlaceValues:
    """A `StepDriver`: each value has the size 1, and a row that keeps one 1 more."""

    has_keys = True

    def __init__(self, values: dict[Key, Any]) -> None:
        self.get, self.put = values.__getitem__, values.__setitem__
        self.held = [0, 0]

    def nbytes(self, value: Any) -> int:
        return 1

    def sizes(self, function: Any, is_leaf: Sequence[bool]) -> list[tuple[int, int]]:
        outputs = get_args(get_type_hints(function)["return"])
        return [(1, place) for place, _ in enumerate(outputs)]

    def refusal(self, step: Any) -> None:
        return None

    def account(self, nbytes: int, activation: int) -> None:
        self.held = [self.held[0] + nbytes, self.held[1] + activation]

    def run(self, *_: Any) -> bool:
        return False

    send = finish = flush = run


@dataclass
class Place:
    engine: Engine
    values: dict[Key, Any] = field(default_factory=dict)
    steps: PlaceValues = field(init=False)
    jobs: list[Job] = field(default_factory=list)
    resumed: dict[int, Any] = field(default_factory=dict)
    alarms: dict[int, Event] = field(default_factory=dict)  # By waiter.
    spawned: list[Spawn] = field(default_factory=list)
    running: dict[int, tuple[Any, Body]] = field(default_factory=dict)
    joined: dict[str, int] = field(default_factory=dict)  # Incarnations that joined.

    def __post_init__(self) -> None:
        self.steps = PlaceValues(self.values)
        self.engine.drive(self.steps)


@dataclass(eq=False)
class Parcel:
    message: Message | Acknowledged
    carried: list[Any]


class Links:
    """Queues by (from, to); of what came out of one values may still be to come.

    `large` is how probable that is, of a message that has any. An `Acknowledged` among
    the messages stands for the count in a frame's header.
    """

    def __init__(self, rng: random.Random, large: float) -> None:
        self.queues: dict[Pair, deque[tuple[Any, list[Any]]]] = {}
        self.partial: dict[Pair, list[Parcel]] = {}
        self.stalls = False  # What is to come of values does not.
        self._orders: dict[Pair, Order] = {}
        self._rng = rng
        self.large = large

    def send(
        self, pair: Pair, message: Message | Acknowledged, carried: list[Any]
    ) -> None:
        self.queues.setdefault(pair, deque()).append((message, carried))

    def join(self, pair: Pair, joins: Callable[[Any], bool]) -> None:
        """Join an `Acknowledged` at the head of a queue with those behind it."""
        queue = self.queues[pair]
        head = queue[0][0]
        while isinstance(head, Acknowledged) and len(queue) > 1:
            following = queue[1][0]
            if not (isinstance(following, Acknowledged) and joins(following)):
                break
            queue.popleft()
            head = Acknowledged(head.sender, head.count + following.count)
            queue[0] = (head, [])

    def take(self, pair: Pair) -> list[Parcel]:
        parcel = Parcel(*self.queues[pair].popleft())
        if isinstance(parcel.message, Acknowledged):
            return [parcel]  # It waits for no values.
        large = bool(parcel.carried) and self._rng.random() < self.large
        if large:
            self.partial.setdefault(pair, []).append(parcel)
        order = self._orders.setdefault(pair, Order())
        return list(order.arrived(parcel, whole=not large))

    def handing(self, pair: Pair, parcel: Parcel) -> int:
        """How many more messages of the sender are known to be handled with this."""
        order = self._orders.setdefault(pair, Order())
        before = order.handled
        order.handing(parcel)
        return order.handled - before

    def rests(self) -> list[tuple[str, str, Any]]:
        if self.stalls:
            return []
        return [
            ("rest", pair[1], (pair, parcel))
            for pair, parcels in self.partial.items()
            for parcel in parcels
        ]

    def complete(self, pair: Pair, parcel: Parcel) -> list[Parcel]:
        self.partial[pair].remove(parcel)
        return list(self._orders[pair].completed(parcel))

    def forget(self, pair: Pair) -> None:
        self.partial.pop(pair, None)
        self._orders.pop(pair, None)


def leftovers(places: Mapping[str, Any], dropped: Container[LeafId]) -> list[str]:
    found: list[str] = []
    for name, place in places.items():
        engine: Any = place.engine
        state = engine._state
        kept = {
            "contexts": state.contexts,
            "passes": engine.live_passes,
            "jobs": state.jobs,
            "soon": state.callbacks,
            "effects": state.out,
            "requests": engine._reads._requests,
            "after": state.after,
            "held": engine._frames._waits,
            "unhandled": [to for to, sent in state.unhandled.items() if sent],
            "unhandled of frames": [
                frame.path
                for part in state.contexts.values()
                for frame in part.frames.values()
                if frame.unhandled
            ],
            "assignments": state.assignments,
            "programs": place.running,
            "values": [
                key for key in place.values if key.kind != "leaf" or key.name in dropped
            ],
        }
        found.extend(f"{name}: {what} {it}" for what, it in kept.items() if it)
    return found


def taken(store: dict[Key, Any], result: Any) -> Any:
    match result:
        case (Return(result=made, failure=failure),):  # News of a program.
            return made, failure
        case tuple():
            pass
        case _:
            return result
    taken = tuple(store[what] if isinstance(what, AnyKey) else what for what in result)
    for what in result:
        if isinstance(what, AnyKey) and what.kind == "reading":
            del store[what]
    return taken
