"""Delivery order of a peer's messages if some are incomplete.

Large values follow their message in chunks, so a later message on the link may be
complete first. It is delivered then, unless it depends on an incomplete message.

Inputs:  `arrived(item, whole)` for each message, in the order of the link; then
         `completed(item)` for each message that was incomplete.
Outputs: the items that may be delivered now, in a valid order. If `handing` is called
         with each item just before it is handled, `handled` is the number of the peer's
         messages of `ACKNOWLEDGED` up to which all have been handled.

An item is any object with a `message`; items are compared by identity. Invariants: each
is delivered once, when it is complete; of two ordered items (`RULES`) the earlier one
is delivered first; at most `held_max` items wait at once.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from jdag.engine.protocol import (
    ACKNOWLEDGED,
    Assign,
    ContextId,
    Forget,
    Message,
    Read,
    Reading,
    Settle,
    StepFrame,
    Stepped,
)
from jdag.errors import ProtocolError

HELD_MAX = 1 << 20


# Messages that share a lane are ordered. ALL is ordered with the messages of all lanes.
Lanes = tuple[ContextId | str, ...]
ALL: Lanes = ("all",)


def _all(_: Any) -> Lanes:
    return ALL


def _read(message: Read) -> Lanes:
    contexts = [key.context for key in message.keys if key.context is not None]
    return tuple(dict.fromkeys(contexts)) or ("leaves",)


RULES: Mapping[type, Callable[[Any], Lanes]] = {
    # Notices and the release of a context follow all uses of its values; a cotangent
    # follows the call whose edge it traverses; End follows the messages of its pass.
    # Contexts share only leaves.
    **dict.fromkeys(get_args(Message), lambda message: (message.context,)),
    # Between the messages that create the values and the messages that drop them.
    Read: _read,
    # The answer to a request is independent of all other messages.
    Reading: lambda _: (),
    # Earlier messages read older versions, or leaves not yet dropped; later messages
    # read newer versions.
    Assign: _all,
    Forget: _all,
    # The beginning of a step reads leaves, and commits new versions. The receiver
    # stores values of a step that has not begun.
    StepFrame: lambda frame: ALL if frame.begins else (),
    Settle: _all,
    Stepped: lambda _: (),
}


class _Pending:
    __slots__ = ("followers", "item", "lanes", "predecessors", "whole")

    def __init__(self, item: Any, lanes: Lanes, whole: bool) -> None:
        self.item = item
        self.lanes = lanes
        self.whole = whole
        self.predecessors = 0
        self.followers: list[_Pending] = []


class Order:
    """The delivery order of one peer's messages. `len` counts the waiting items."""

    __slots__ = (
        *("_count", "_held_max", "_last", "_partial", "_unhandled", "_uncounted"),
        "handled",
    )

    def __init__(self, held_max: int = HELD_MAX) -> None:
        self.handled = 0
        # For each item of ACKNOWLEDGED since the first that waits, [whether it has been
        # handled]; and those that have not, by the `id` of the item. Items that have
        # been handled are not kept, since they may have large values.
        self._uncounted: deque[list[bool]] = deque()
        self._unhandled: dict[int, list[bool]] = {}
        self._held_max = held_max
        self._count = 0
        self._partial: dict[int, _Pending] = {}  # By the `id` of the item.
        # The last waiting item of each lane. An item of ALL waits for all of these
        # items, and then replaces them here.
        self._last: dict[ContextId | str, _Pending] = {}

    def __len__(self) -> int:
        return self._count

    def arrived(self, item: Any, whole: bool) -> Sequence[Any]:
        if whole and not self._count:
            return (item,)
        message, last = item.message, self._last
        if max(self._count, len(self._uncounted)) >= self._held_max:
            raise ProtocolError(
                f"{self._count} messages of one peer wait for each other: expected "
                f"at most {self._held_max}"
            )
        if message.__class__ in ACKNOWLEDGED:
            self._unhandled[id(item)] = is_handled = [False]
            self._uncounted.append(is_handled)
        lanes = RULES[message.__class__](message)
        in_lanes = [last.get(lane) or last.get("all") for lane in lanes]
        before = last.values() if lanes is ALL else in_lanes
        predecessors = {id(each): each for each in before if each is not None}
        if whole and not predecessors:
            return (item,)
        self._count += 1
        pending = _Pending(item, lanes, whole)
        pending.predecessors = len(predecessors)
        for each in predecessors.values():
            each.followers.append(pending)
        if lanes is ALL:
            last.clear()
        last.update(dict.fromkeys(lanes, pending))
        if not whole:
            self._partial[id(item)] = pending
        return ()

    def handing(self, item: Any) -> None:
        """Count an item that is about to be handled."""
        if item.message.__class__ not in ACKNOWLEDGED:
            return
        is_handled = self._unhandled.pop(id(item), None)
        if is_handled is None:
            self.handled += 1
            return
        is_handled[0] = True
        while self._uncounted and self._uncounted[0][0]:
            self._uncounted.popleft()
            self.handled += 1

    def completed(self, item: Any) -> Sequence[Any]:
        pending = self._partial.pop(id(item))
        pending.whole = True
        ready: list[Any] = []
        queue = deque([] if pending.predecessors else [pending])
        while queue:  # Bounded: each item is queued once.
            first = queue.popleft()
            self._count -= 1
            ready.append(first.item)
            for lane in first.lanes:
                if self._last.get(lane) is first:
                    del self._last[lane]
            for follower in first.followers:
                follower.predecessors -= 1
                if follower.whole and not follower.predecessors:
                    queue.append(follower)
        return ready
