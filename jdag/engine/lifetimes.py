"""Lifetimes of values: a value is dropped when no program or graph can use it again.

Inputs:  Discarded from programs here, and the discards in Issued and Returned; Discard
         from other workers, and the discards in Call, Ship and Return.
Outputs: Drop and Discard.

A value is stored while it has users (`Value.users`): one for the programs that can name
it, and one for each call, transfer and assignment that waits for it or reads it. The
graph does not count as a user, except for the current gradient, to which the next pass
adds.

Ownership of keys. A key belongs to the frame that made it until its program returns it,
and then to the frame that called that program. Any other program that receives the key
runs while the key's holder waits. A copy that a transfer made belongs to the frame that
issued the transfer: it is discarded with its original, with the frame, or when the next
transfer of a leaf replaces it.

Delivery of discards. A discard is sent with the frame's next Call or Ship to the same
worker, with the Return of its program, or in a message of its own before its program
waits.

Why a discarded value is never used. Each use of a key is a message from the frame's
worker to the value's worker, and the discard follows on the same ordered link. Uses by
a program that received the key are all acknowledged before that program returns. A
discard may arrive before its value: the value is then dropped once it has settled and
its calls have run.

Invariants: each key is discarded at most once; a failure is kept by its fragment, so
that it is reported even if no program holds the failed value.
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


class Lives(Struct, eq=False):
    """Discards on one engine: sent for its frames, and received."""

    _state: State

    def discarded(self, event: Discarded) -> None:
        """A program here discards keys and is about to wait: send all its notices."""
        frame = self._state.frame(event.context, event.path)
        if frame is None:
            return  # The context was released, and all its values with it.
        self.note(frame, event.keys)
        notices, frame.notices = frame.notices, {}
        for worker, keys in notices.items():
            self._state.send(worker, Discard(event.context, tuple(keys)))

    def note(self, frame: FrameRecord, places: Iterable[tuple[Key, Worker]]) -> None:
        """A frame discards keys, and with each key the copies made for the frame."""
        for key, owner in places:
            self._note(frame, owner, key)
            if key in frame.moved:
                self._note_copies(frame, key)

    def note_leaves(self, frame: FrameRecord) -> None:
        """A pass spends transfers: discard tracked copies of leaves."""
        for key, copies in frame.moved.items():
            if key.kind in LEAF_KINDS:
                for what in [what for what in copies if what[1]]:
                    self._note(frame, what[0], copies.pop(what))

    def note_older(
        self, frame: FrameRecord, key: Key, arguments: Iterable[Argument]
    ) -> None:
        """A leaf version is transferred: discard copies of the previous version."""
        older = frame.versions.get(key.name, key)
        frame.versions[key.name] = key
        if older not in [key, *(argument.key for argument in arguments)]:
            self._note_copies(frame, older)

    def renewed(self, keys: Sequence[Key]) -> None:
        """Contexts of programs here now read new versions: discard older copies."""
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
        """The notices that a returning program passes to its caller."""
        for key in tuple(frame.moved):
            self._note_copies(frame, key)
        return tuple(
            Notice(worker, tuple(keys)) for worker, keys in frame.notices.items()
        )

    def discard(self, keys: Iterable[Key]) -> None:
        """Discard keys that no program can name any more."""
        for key in keys:
            fragment = self._state.contexts.get(key.context)
            if fragment is None:
                continue  # Released.
            value = fragment.values.get(key)
            if key.kind == "gradient":  # One gradient may have a key from each pass.
                fragment.values.pop(key, None)
            if value is not None:
                self._state.release((value,))
