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
from typing import Any, get_args

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


# Messages that share one of these are in order; so is one of ALL with any that has one.
Lanes = tuple[ContextId | str, ...]
ALL: Lanes = ("all",)


def _own(message: Any) -> Lanes:
    return (message.context,)


def _all(_: Any) -> Lanes:
    return ALL


def _none(_: Any) -> Lanes:
    return ()


def _read(message: Read) -> Lanes:
    contexts = [key.context for key in message.keys if key.context is not None]
    return tuple(dict.fromkeys(contexts)) or ("leaves",)


RULES: Mapping[type, Callable[[Any], Lanes]] = {
    # Notices and the release of a context come after all that uses its values; a
    # cotangent after the call whose edge it goes back on; an end after what it ends.
    # Contexts share nothing but leaves.
    **dict.fromkeys(get_args(Message), _own),
    # The issuer of an assignment waits for nothing but that it has arrived.
    Acknowledge: lambda ack: () if ack.context is None else (ack.context,),
    # Neither before what makes the values, nor after what lets them go.
    Read: _read,
    # It answers a question that only its asker knows of.
    Reading: _none,
    # Earlier messages read older versions of leaves, or leaves that are not dropped
    # yet, and later ones newer versions.
    Assign: _all,
    Forget: _all,
}


class _Held:
    """An item that waits for its values, or for `ahead` others."""

    __slots__ = ("ahead", "followers", "item", "lanes", "whole")

    def __init__(self, item: Any, lanes: Lanes, whole: bool) -> None:
        self.item = item
        self.lanes = lanes
        self.whole = whole
        self.ahead = 0
        self.followers: list[_Held] = []


class Order:
    """The order of what comes from one peer."""

    __slots__ = ("_held", "_held_max", "_last", "_partial")

    def __init__(self, held_max: int = HELD_MAX) -> None:
        self._held_max = held_max
        self._held = 0
        self._partial: dict[int, _Held] = {}  # By the identity of their items.
        # The last one held in each lane. One in order with all waits for these, and is
        # then the last in every lane.
        self._last: dict[ContextId | str, _Held] = {}

    def __len__(self) -> int:
        """How many are held."""
        return self._held

    def arrived(self, item: Any, whole: bool) -> Sequence[Any]:
        """A message came, whole or not; return what may be handed on now."""
        if whole and not self._held:
            return (item,)
        message, last = item.message, self._last
        lanes = RULES[message.__class__](message)
        found = [last.get(lane) or last.get("all") for lane in lanes]
        before = last.values() if lanes is ALL else found
        ahead = {id(one): one for one in before if one is not None}
        if whole and not ahead:
            return (item,)
        if self._held >= self._held_max:
            raise ProtocolError(
                f"{self._held} messages of one peer wait for each other: at most "
                f"{self._held_max} may"
            )
        self._held += 1
        held = _Held(item, lanes, whole)
        held.ahead = len(ahead)
        for one in ahead.values():
            one.followers.append(held)
        if lanes is ALL:
            last.clear()
        last.update(dict.fromkeys(lanes, held))
        if not whole:
            self._partial[id(item)] = held
        return ()

    def completed(self, item: Any) -> Sequence[Any]:
        """A message that was not whole is; return what may be handed on now."""
        held = self._partial.pop(id(item))
        held.whole = True
        ready: list[Any] = []
        free = deque([] if held.ahead else [held])
        while free:  # Bounded: each that is held is freed once.
            one = free.popleft()
            self._held -= 1
            ready.append(one.item)
            for lane in one.lanes:
                if self._last.get(lane) is one:
                    del self._last[lane]
            for follower in one.followers:
                follower.ahead -= 1
                if follower.whole and not follower.ahead:
                    free.append(follower)
        return ready
