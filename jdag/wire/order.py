"""Which of a peer's messages may be handed on before earlier ones are whole.

Large values follow their message in pieces, so that what comes after it on the link may
be whole before it is. That must not wait for it where it need not, and engines have to
be told no earlier than what they rely on.

Inputs:  `arrived(item, whole)` for each message, in the order of the link; then, for
         each that was not whole, `completed(item)` when it is.
Outputs: those that may be handed on now, in an order in which they may be.

An item is anything with a `message`; it is told from others by what it is, not by what
it equals. Invariants: each is handed on once, and when it is whole; of two that are in
order (`RULES`) the earlier one first; at most `held_max` are held at once.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, get_args

from jdag.engine.protocol import (
    Acknowledge,
    Assign,
    ContextId,
    Forget,
    Message,
    Read,
    Reading,
)
from jdag.errors import ProtocolError

HELD_MAX = 1 << 20


class Item(Protocol):
    """A message on its way, with whatever belongs to it."""

    @property
    def message(self) -> Message:
        """What arrives."""


class Lanes(NamedTuple):
    """Where a message is in order: with all, or in the lanes of some contexts."""

    all: bool
    contexts: tuple[ContextId, ...]


ALL = Lanes(all=True, contexts=())
NONE = Lanes(all=False, contexts=())


def _own(message: Any) -> Lanes:
    return Lanes(False, (message.context,))


def _all(_: Any) -> Lanes:
    return ALL


def _none(_: Any) -> Lanes:
    return NONE


def _read(message: Read) -> Lanes:
    contexts = [key.context for key in message.keys if key.context is not None]
    return Lanes(False, tuple(dict.fromkeys(contexts)))


RULES: Mapping[type, Callable[[Any], Lanes]] = {
    # Notices and the release of a context come after all that uses its values; a
    # cotangent after the call whose edge it goes back on; an end after what it ends.
    # Contexts share nothing but leaves.
    **dict.fromkeys(get_args(Message), _own),
    # The issuer of an assignment waits for nothing but that it has arrived.
    Acknowledge: lambda ack: NONE if ack.context is None else _own(ack),
    # Neither before what makes the values, nor after what lets them go.
    Read: _read,
    # It answers a question that only its asker knows of.
    Reading: _none,
    # Earlier messages read older versions of leaves, or leaves that are not dropped
    # yet, and later ones newer versions.
    Assign: _all,
    Forget: _all,
}

T = TypeVar("T", bound=Item)


class _Held(Generic[T]):
    """An item that waits; `ahead`: in how many of its lanes it is not the first."""

    __slots__ = ("ahead", "item", "lanes", "whole")

    def __init__(self, item: T, lanes: Lanes, whole: bool) -> None:
        self.item = item
        self.lanes = lanes
        self.whole = whole
        self.ahead = 0


class Order(Generic[T]):
    """The order of what comes from one peer."""

    __slots__ = ("_held", "_held_max", "_lanes", "_later", "_partial", "_queued")

    def __init__(self, held_max: int = HELD_MAX) -> None:
        self._held_max = held_max
        self._held = 0
        self._partial: dict[int, _Held[T]] = {}  # By the identity of their items.
        self._lanes: dict[ContextId, deque[_Held[T]]] = {}
        self._queued = 0  # How many are in lanes.
        self._later: deque[_Held[T]] = deque()  # The first is in order with all.

    def __len__(self) -> int:
        """How many are held."""
        return self._held

    def arrived(self, item: T, whole: bool) -> Sequence[T]:
        """A message came, whole or not; return what may be handed on now."""
        if whole and not self._held:
            return (item,)
        message = item.message
        lanes = RULES[message.__class__](message)
        if whole and lanes is NONE:
            return (item,)
        if self._held >= self._held_max:
            raise ProtocolError(
                f"{self._held} messages of one peer wait for each other: at most "
                f"{self._held_max} may"
            )
        self._held += 1
        held = _Held(item, lanes, whole)
        if not whole:
            self._partial[id(item)] = held
        if lanes is NONE:
            return ()
        self._later.append(held)
        return self._turn([]) if len(self._later) == 1 else ()

    def completed(self, item: T) -> Sequence[T]:
        """A message that was not whole is; return what may be handed on now."""
        held = self._partial.pop(id(item))
        held.whole = True
        ready: list[T] = []
        if held.lanes is NONE:
            self._hand_on(held, ready)
        elif not held.ahead and self._is_queued(held):
            self._free(held, ready)
        return self._turn(ready)

    def _hand_on(self, held: _Held[T], ready: list[T]) -> None:
        self._held -= 1
        ready.append(held.item)

    def _is_queued(self, held: _Held[T]) -> bool:
        lanes = [self._lanes.get(context) for context in held.lanes.contexts]
        return any(lane is not None and lane[0] is held for lane in lanes)

    def _turn(self, ready: list[T]) -> list[T]:
        """Admit items up to the first that has to wait for all before it."""
        later = self._later
        while later:
            held = later[0]
            if held.lanes is not ALL:
                self._enqueue(held, ready)
            elif held.whole and not self._queued:
                self._hand_on(held, ready)
            else:
                break
            later.popleft()
        return ready

    def _enqueue(self, held: _Held[T], ready: list[T]) -> None:
        """Put one into its lanes, unless it may go on at once."""
        contexts = held.lanes.contexts
        held.ahead = sum(context in self._lanes for context in contexts)
        if held.whole and not held.ahead:
            self._hand_on(held, ready)
            return
        self._queued += 1
        for context in contexts:
            self._lanes.setdefault(context, deque()).append(held)

    def _free(self, held: _Held[T], ready: list[T]) -> None:
        """Take one out of its lanes, and all items that waited for it alone."""
        free = deque((held,))
        while free:  # Bounded: each was placed, and is taken out.
            one = free.popleft()
            self._queued -= 1
            self._hand_on(one, ready)
            for context in one.lanes.contexts:
                lane = self._lanes[context]
                lane.popleft()
                if not lane:
                    del self._lanes[context]
                    continue
                lane[0].ahead -= 1
                if lane[0].whole and not lane[0].ahead:
                    free.append(lane[0])
