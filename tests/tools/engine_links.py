"""What is on its way between the workers of a net: in order, but for what is large."""

import random
from collections import deque
from dataclasses import dataclass
from typing import Any

from jdag.engine.protocol import Message
from jdag.wire.order import Order

Pair = tuple[str, str]


@dataclass(eq=False)
class Parcel:
    """A message and its values."""

    message: Message
    carried: list[Any]


class Links:
    """Queues by (from, to); of what came out of one values may still be to come.

    `large` is how probable that is, of a message that has any.
    """

    def __init__(self, rng: random.Random, large: float) -> None:
        self.queues: dict[Pair, deque[tuple[Any, list[Any]]]] = {}
        self.partial: dict[Pair, list[Parcel]] = {}
        self.stalls = False  # What is to come of values does not.
        self._orders: dict[Pair, Order] = {}
        self._rng = rng
        self.large = large

    def send(self, pair: Pair, message: Message, carried: list[Any]) -> None:
        """A message leaves."""
        self.queues.setdefault(pair, deque()).append((message, carried))

    def take(self, pair: Pair) -> list[Parcel]:
        """The next message of a queue comes out; what its receiver is told of now."""
        parcel = Parcel(*self.queues[pair].popleft())
        large = bool(parcel.carried) and self._rng.random() < self.large
        if large:
            self.partial.setdefault(pair, []).append(parcel)
        order = self._orders.setdefault(pair, Order())
        return list(order.arrived(parcel, whole=not large))

    def rests(self) -> list[tuple[str, str, Any]]:
        """Of which messages the last value can come: as choices of the net."""
        if self.stalls:
            return []
        return [
            ("rest", pair[1], (pair, parcel))
            for pair, parcels in self.partial.items()
            for parcel in parcels
        ]

    def complete(self, pair: Pair, parcel: Parcel) -> list[Parcel]:
        """The last value of a message is here; what its receiver is told of now."""
        self.partial[pair].remove(parcel)
        return list(self._orders[pair].completed(parcel))

    def forget(self, pair: Pair) -> None:
        """What came out of a queue and was not told never is."""
        self.partial.pop(pair, None)
        self._orders.pop(pair, None)
