"""Lifetimes of values: a value is dropped when no program or graph can use it again.

Inputs:  Discarded from programs here, and the discards in Issued and Returned; Discard
         from other workers, and the discards in Call, Ship and Return.
Outputs: Drop and Discard.

A value is stored while it has users (`Value.users`): one for the programs that can name
it, and one for each call, transfer and assignment that waits for it or reads it. The
graph is not a user, except of the current gradient, to which the next pass adds.

Ownership of keys. A key belongs to the frame that created it until its program returns
it, and then to the frame that called that program. Any other program that receives the
key runs while the owner waits. A transferred copy belongs to the frame that issued the
transfer: it is discarded with its original, with the frame, or when the next transfer
of a leaf replaces it.

Delivery of discards. A discard is sent with the frame's next Call or Ship to the same
worker, with the Return of its program, or in a Discard message before its program
waits.

Why a discarded value is never used. Each use of a key is a message from the frame's
worker to the value's worker, and the discard follows on the same ordered link. Uses by
a program that received the key are all acknowledged before that program returns. A
discard may arrive before its value: the value is then dropped once it has settled and
its calls have run.

Invariants: each key is discarded at most once; the fragment stores each failure, so it
is reported even if no program has a ref to the failed value.
"""

from collections.abc import Iterable, Sequence

from msgspec import Struct

from jdag.engine.graph import FrameRecord
from jdag.engine.protocol import (
    LEAF_KINDS,
    Argument,
    Discard,
    Discarded,
    Key,
    Notice,
    Worker,
)
from jdag.engine.state import State


class Lifetimes(Struct, eq=False):
    _state: State

    def discarded(self, event: Discarded) -> None:
        frame = self._state.frame(event.context, event.path)
        if frame is None:
            return  # The context and all its values were released.
        self.note(frame, event.keys)
        notices, frame.notices = frame.notices, {}
        for worker, keys in notices.items():
            self._state.send(worker, Discard(event.context, tuple(keys)))

    def note(self, frame: FrameRecord, places: Iterable[tuple[Key, Worker]]) -> None:
        for key, owner in places:
            self._note(frame, owner, key)
            if key in frame.moved:
                self._note_copies(frame, key)

    def note_leaves(self, frame: FrameRecord) -> None:
        """Discard the tracked copies of leaves, since a pass spends their transfers."""
        for key, copies in frame.moved.items():
            if key.kind in LEAF_KINDS:
                for copy in [copy for copy in copies if copy[1]]:
                    self._note(frame, copy[0], copies.pop(copy))

    def note_older(
        self, frame: FrameRecord, key: Key, arguments: Iterable[Argument]
    ) -> None:
        older = frame.versions.get(key.name, key)
        frame.versions[key.name] = key
        if older not in [key, *(argument.key for argument in arguments)]:
            self._note_copies(frame, older)

    def renewed(self, keys: Sequence[Key]) -> None:
        for fragment in self._state.contexts.values() if keys else ():
            if fragment.owner == self._state.worker:
                for frame in fragment.frames.values():
                    for key in keys:
                        self._note_copies(frame, key)

    def _note_copies(self, frame: FrameRecord, key: Key) -> None:
        for (worker, _), copy in frame.moved.pop(key, {}).items():
            self._note(frame, worker, copy)

    def _note(self, frame: FrameRecord, worker: Worker, key: Key) -> None:
        if worker == self._state.worker:
            self.discard((key,))
        else:
            frame.notices.setdefault(worker, []).append(key)

    def returning(self, frame: FrameRecord) -> tuple[Notice, ...]:
        for key in tuple(frame.moved):
            self._note_copies(frame, key)
        return tuple(
            Notice(worker, tuple(keys)) for worker, keys in frame.notices.items()
        )

    def discard(self, keys: Iterable[Key]) -> None:
        """Drop values that no program can name any more, after their last use."""
        for key in keys:
            fragment = self._state.contexts.get(key.context)
            if fragment is None:
                continue  # The context was released already.
            value = fragment.values.get(key)
            if key.kind == "gradient":  # One gradient may have a key from each pass.
                fragment.values.pop(key, None)
            if value is not None:
                self._state.release((value,))
