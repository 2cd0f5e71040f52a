"""Which of a peer's messages may be delivered before earlier ones are complete.

Large values follow their message in pieces, so a later message on the link may be
complete first. It must not wait where that is not needed, and engines must not receive
it before the messages on which it depends.

Inputs:  `arrived(item, whole)` for each message, in the order of the link; then, for
         each incomplete one, `completed(item)` when it is complete.
Outputs: the items that may be delivered now, in a valid order.

An item is any object with a `message`; items are compared by identity. Invariants: each
is delivered once, when it is complete; of two ordered items (`RULES`) the earlier one
is delivered first; at most `held_max` are held at once.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from jdag.engine.protocol import (
    Acknowledge,
    Assign,
    ContextId,
    Forget,
    Hop,
    Message,
    Read,
    Reading,
    Settle,
    Step,
    Stepped,
)
from jdag.errors import ProtocolError

HELD_MAX = 1 << 20


# Messages that share a lane are ordered; ALL is ordered with every message in a lane.
Lanes = tuple[ContextId | str, ...]
ALL: Lanes = ("all",)


def _own(message: Any) -> Lanes:
    return (message.context,)


def _all(_: Any) -> Lanes:
    return ALL


def _read(message: Read) -> Lanes:
    contexts = [key.context for key in message.keys if key.context is not None]
    return tuple(dict.fromkeys(contexts)) or ("leaves",)


RULES: Mapping[type, Callable[[Any], Lanes]] = {
    # Notices and the release of a context follow all uses of its values; a cotangent
    # follows the call whose edge it traverses; an end follows what it ends. Contexts
    # share nothing but leaves.
    **dict.fromkeys(get_args(Message), _own),
    # The issuer of an assignment waits only for its arrival.
    Acknowledge: lambda ack: () if ack.context is None else (ack.context,),
    # After the messages that make the values, before those that drop them.
    Read: _read,
    # Answers a request; independent of everything else.
    Reading: lambda _: (),
    # Earlier messages read older versions, or leaves not yet dropped; later messages
    # read newer versions.
    Assign: _all,
    Forget: _all,
    # A step reads leaves, and commits new versions.
    Step: _all,
    Settle: _all,
    # Values of a step wait for it where they arrive.
    Hop: lambda _: (),
    Stepped: lambda _: (),
}


class _Held:
    """An item that waits for its values, or for `ahead` earlier items."""

    __slots__ = ("ahead", "followers", "item", "lanes", "whole")

    def __init__(self, item: Any, lanes: Lanes, whole: bool) -> None:
        self.item = item
        self.lanes = lanes
        self.whole = whole
        self.ahead = 0
        self.followers: list[_Held] = []


class Order:
    """The delivery order of one peer's messages."""

    __slots__ = ("_held", "_held_max", "_last", "_partial")

    def __init__(self, held_max: int = HELD_MAX) -> None:
        self._held_max = held_max
        self._held = 0
        self._partial: dict[int, _Held] = {}  # By the identity of their items.
        # The last held item of each lane. An item of ALL waits for all of these, and
        # then is the last of every lane.
        self._last: dict[ContextId | str, _Held] = {}

    def __len__(self) -> int:
        """Number of held items."""
        return self._held

    def arrived(self, item: Any, whole: bool) -> Sequence[Any]:
        """A message arrived, complete or not; return what may be delivered now."""
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
        """A message is now complete; return what may be delivered now."""
        held = self._partial.pop(id(item))
        held.whole = True
        ready: list[Any] = []
        free = deque([] if held.ahead else [held])
        while free:  # Bounded: each held item is freed once.
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
