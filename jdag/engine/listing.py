"""Announces which actions of a schedule can still occur in a context.

Each worker executes its list of a schedule in order, and waits for the next action if
it may still occur (`jdag.runtime.ready`). While the program of a context waits for
anything but a pass, only the forwards of its issued calls can occur. Once a pass has
begun, no call is issued before it ends, and marking shows which backwards it needs.

Inputs:  events of waiting programs; the begin of a pass; Listing from other workers.
Outputs: Listing to the workers with scheduled calls of a program; Listed.
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

WAIT_EVENTS = frozenset((Asked, Collected, Differentiated, Fetched, Left, Stepping))


class Listings(Struct, eq=False):
    _state: State
    _frames: ProgramFrames

    def program_waits(self, event: Any) -> None:
        """Tell the workers of each context which scheduled calls were issued so far."""
        frames, self._state.listing = self._state.listing, {}
        active = event.context if type(event) in (Differentiated, Left) else None
        for context, path in frames:
            frame = self._state.frame(context, path)
            if frame is not None and context != active:
                send = partial(self.announce, frame, Listing(context, 0, False))
                self._frames.when_acknowledged(frame, send)

    def announce(self, frame: FrameRecord, message: Listing) -> None:
        for worker in frame.listed:
            self._state.send(worker, message)

    def listing(self, _: Worker, message: Listing) -> None:
        """List a context's possible actions: all its scheduled calls have arrived."""
        fragment = self._state.contexts.get(message.context)
        number = message.number
        if fragment is None or not fragment.listed or 0 < number <= fragment.ended:
            return
        actions = [("F", tag) for tag in fragment.tags]
        if number:
            actions += _backwards(fragment, message.marked)
        self._state.out.append(Listed(message.context, tuple(actions)))


def _backwards(fragment: Fragment, marked: bool) -> list[tuple[str, Tag]]:
    dues = {} if fragment.live is None else fragment.live.dues
    tags = [
        node.tag
        for node in fragment.nodes.values()
        if node.tag is not None and (not marked or node in dues or node.spent)
    ]
    listed = [(tag, "IW" if tag.halves else "B") for tag in tags if tag.listed]
    return [(action, tag) for tag, actions in listed for action in actions]
