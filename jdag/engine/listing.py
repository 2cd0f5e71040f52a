"""What may come of lists of a schedule: told when a program waits, or a pass begins.

A list waits for an action as long as that may come (`jdag.runtime.ready`). While the
program of a context waits for anything but a pass, no pass of it begins; once one has
begun, no call comes before it ends, and marking has shown what it needs.

Inputs:  events by which programs wait; the begin of a pass; Listing from other workers.
Outputs: Listing to the workers with listed calls of a program; Listed.
"""

from functools import partial
from typing import Any

from msgspec import Struct

from jdag.engine.graph import Fragment, FrameRecord
from jdag.engine.program_frames import ProgramFrames
from jdag.engine.protocol import (
    Asked,
    Collected,
    Differentiated,
    Fetched,
    Left,
    Listed,
    Listing,
    Stepping,
    Tag,
    Worker,
)
from jdag.engine.state import State

WAITS = frozenset((Asked, Collected, Differentiated, Fetched, Left, Stepping))


class Lists(Struct, eq=False):
    """What one engine says, and hears, of lists."""

    _state: State
    _frames: ProgramFrames

    def waits(self, event: Any) -> None:
        """A program here waits: until it goes on, its other contexts begin no pass."""
        frames, self._state.listing = self._state.listing, {}
        own = event.context if type(event) in (Differentiated, Left) else None
        for context, path in frames:
            frame = self._state.frame(context, path)
            if frame is not None and context != own:
                tell = partial(self.tell, frame, Listing(context, 0, False))
                self._frames.when_acknowledged(frame, tell)

    def tell(self, frame: FrameRecord, message: Listing) -> None:
        """Tell all workers with listed calls of a program that these are there."""
        for worker in frame.listed:
            self._state.send(worker, message)

    def listing(self, _: Worker, message: Listing) -> None:
        """The listed calls of a context are there; say which actions may come."""
        fragment = self._state.contexts.get(message.context)
        number = message.number
        if fragment is None or not fragment.listed or 0 < number <= fragment.ended:
            return
        actions = [("F", tag) for tag in fragment.tags]
        if number:
            actions += _backwards(fragment, message.marked)
        self._state.out.append(Listed(message.context, tuple(actions)))


def _backwards(fragment: Fragment, marked: bool) -> list[tuple[str, Tag]]:
    """The backward actions that a pass needs; if nothing is marked, those it may."""
    dues = {} if fragment.live is None else fragment.live.dues
    tags = [
        node.tag
        for node in fragment.nodes.values()
        if node.tag is not None and (not marked or node in dues or node.spent)
    ]
    kinds = [(tag, "IW" if tag.halves else "B") for tag in tags if tag.listed]
    return [(kind, tag) for tag, of in kinds for kind in of]
