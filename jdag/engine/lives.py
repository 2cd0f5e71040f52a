"""How long values live: what neither a program nor the graph can use again goes.

Told by programs here: Discarded, and with Issued and Returned what they discard; by
others: Discard, and with Call, Ship and Return the same. Asks for Drop and Discard.

A value is stored while it has users (`Value.users`): one for the programs that can name
it, and one for each call, transfer and assignment that waits for it or runs on it. The
graph is no user: vertices and residuals are all that a pass needs. A value of the graph
is then a name without an array; any other is forgotten altogether.

Who may discard. A key belongs to the activation that made it, until its program returns
it, and then to the one that called that. Whoever else was handed it runs while its
holder waits. A copy that a transfer made belongs to the activation that asked for it:
only that can name it, as what it stands for; so it goes with that, with the activation
itself, or when the next transfer of a leaf takes its place. Of a gradient, the current
one has the graph for another user: the next pass adds to it.

How it is told. Notices for another worker ride on the next Call or Ship that the
activation sends there, go up with the Return of its program, and when its program waits
for anything else, by themselves.

Why nothing is used after it went: who uses a key says so by messages from the
activation's worker to where the key is, and the notice goes the same way, after them;
pairs of workers keep the order. What another activation was handed is used by messages
that are all acknowledged before that returns. Values under way are no exception: a
notice that comes before its value has come lets it go as soon as it has settled and its
calls have run.

Invariants: each key is discarded at most once; a failure is kept by its fragment, so
that it is seen although nobody holds the value that it is.
"""

from collections.abc import Iterable

from jdag.engine.graph import Activation, Fragment, LeafEnd, Value
from jdag.engine.state import State
from jdag.engine.vocabulary import (
    LEAF_KINDS,
    Argument,
    Assigned,
    Discard,
    Discarded,
    GradientKey,
    Key,
    Notice,
    Worker,
    is_newest,
)


class Lives:
    """The notices of one engine: those of its activations, and those it is given."""

    def __init__(self, state: State) -> None:
        self._state = state

    # ---------------------------------------------------------------- what is noted

    def discarded(self, event: Discarded) -> None:
        """A program here cannot name these any more, and now it waits: say it all."""
        fragment = self._state.contexts.get(event.context)
        activation = None if fragment is None else fragment.activations.get(event.path)
        if activation is None:
            return  # The context was released from under it, with all of these.
        self.note(activation, event.keys)
        notices, activation.notices = activation.notices, {}
        for worker, keys in notices.items():
            self._state.send(worker, Discard(event.context, tuple(keys)))

    def note(
        self, activation: Activation, places: Iterable[tuple[Key, Worker]]
    ) -> None:
        """An activation discards keys, and with each the copies that it had made."""
        moved = activation.moved
        for key, owner in places:
            self._note(activation, owner, key)
            copies = moved.pop(key, None) if moved else None
            if copies:
                for (worker, _), copy in copies.items():
                    self._note(activation, worker, copy)

    def note_leaves(self, activation: Activation) -> None:
        """A pass spends transfers: a leaf is moved anew when it is used again."""
        for key, copies in activation.moved.items():
            if key.kind in LEAF_KINDS:
                for what in [what for what in copies if what[1]]:
                    self._note(activation, what[0], copies.pop(what))

    def note_older(
        self, activation: Activation, key: Key, arguments: Iterable[Argument]
    ) -> None:
        """A version of a leaf is moved: the one before it is not named any more."""
        older = activation.versions.get(key.name)
        activation.versions[key.name] = key
        if older is None or older == key:
            return
        if older not in [argument.key for argument in arguments]:
            for (worker, _), copy in activation.moved.pop(older, {}).items():
                self._note(activation, worker, copy)

    def assigned(self, event: Assigned) -> None:
        """Contexts of programs here read new versions of these leaves from now on."""
        keys = [k for part in event.parts for k in part.outputs if is_newest(k)]
        for fragment in self._state.contexts.values() if keys else ():
            if fragment.owner == self._state.worker:
                for activation in fragment.activations.values():
                    self._note_copies(activation, keys)

    def _note_copies(self, activation: Activation, keys: Iterable[Key]) -> None:
        for key in keys:
            for (worker, _), copy in activation.moved.pop(key, {}).items():
                self._note(activation, worker, copy)

    def note_notices(self, activation: Activation, notices: Iterable[Notice]) -> None:
        """A program that was called from here leaves these to its caller."""
        for notice in notices:
            for key in notice.keys:
                self._note(activation, notice.worker, key)

    def _note(self, activation: Activation, worker: Worker, key: Key) -> None:
        notices = activation.notices
        if worker == self._state.worker:
            self.discard((key,))
        elif worker in notices:
            notices[worker].append(key)
        else:
            notices[worker] = [key]

    # ---------------------------------------------------------------- what is told

    def riding(self, activation: Activation, worker: Worker) -> tuple[Key, ...]:
        """What a message to a worker takes along."""
        if not activation.notices:
            return ()
        return tuple(activation.notices.pop(worker, ()))

    def returning(self, activation: Activation) -> tuple[Notice, ...]:
        """What is left to the caller when a program returns; its copies go as well."""
        for copies in activation.moved.values():
            for (worker, _), copy in copies.items():
                self._note(activation, worker, copy)
        activation.moved = {}
        return tuple(
            Notice(worker, tuple(keys)) for worker, keys in activation.notices.items()
        )

    # --------------------------------------------------------------------- what goes

    def discard(self, keys: Iterable[Key]) -> None:
        """No program can name these any more."""
        for key in keys:
            fragment = self._state.contexts.get(key.context)  # type: ignore[arg-type]
            value = None if fragment is None else _find(fragment, key)
            if fragment is None or value is None:
                continue  # It was released.
            if key.kind == "gradient":
                del fragment.values[key]  # It may have had another name before.
            self._state.release((value,))

    def commit(
        self, fragment: Fragment, end: LeafEnd, staged: Key | None, number: int
    ) -> None:
        """A pass leaves a gradient: a new one, or, None, the one that there was."""
        key = GradientKey(fragment.context, end.leaf, number)
        if staged is not None:
            before = end.current
            value = end.current = Value(key, None, 0)
            value.stored = end.gradient = staged
            value.settled = True
            if before is not None:
                self._state.release((before,))
        assert end.current is not None, end.leaf
        end.current.users += 1
        fragment.values[key] = end.current


def _find(fragment: Fragment, key: Key) -> Value | None:
    if key.kind != "received":
        return fragment.values.get(key)
    recv = fragment.recvs.get(key.name)
    return None if recv is None else recv.outputs[key.index]
