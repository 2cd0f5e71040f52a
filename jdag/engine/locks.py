"""Locks of objects: which programs here hold them, and which wait, in which order.

Inputs:  Spawns in order of arrival, and the ends of their programs and contexts.
Outputs: the Spawns that may start now.
Invariants: an object is held by the first of its queue, if that is first in the queues
of all its objects; a program leaves its queues together.
"""

from collections import deque

from msgspec import Struct

from jdag.engine.protocol import ContextId, ObjectId, Path, Run, Spawn

_Program = tuple[ContextId, Path]


class Locks(Struct, eq=False):
    """The locks of the objects of one worker."""

    _queues: dict[ObjectId, deque[_Program]] = {}
    _spawns: dict[
        _Program, Spawn
    ] = {}  # Of those that are queued, in order of arrival.

    def _holds(self, program: _Program) -> bool:
        spawn = self._spawns.get(program)
        queues = [self._queues[one] for one in spawn.objects] if spawn else ()
        return spawn is not None and all([queue[0] == program for queue in queues])

    def refusal(self, run: Run) -> str:
        """Say why a program would wait for ever: for one that waits for its end."""
        for one in [one for one in run.objects if one in self._queues]:
            context, path = first = self._queues[one][0]
            if context != run.context or run.path[: len(path)] != path:
                continue
            if self._holds(first):
                return (
                    f"{one} is held by the call at {self._spawns[first].call_site}, "
                    f"which cannot end before this one, at {run.call_site}: it would "
                    "wait for ever. A program that holds an object has the object "
                    "itself; what it calls elsewhere cannot use the handle"
                )
        return ""

    def acquire(self, spawn: Spawn) -> list[Spawn]:
        """Queue a program for its objects; return it if it may start at once."""
        program = spawn.context, spawn.path
        if not spawn.objects:
            return [spawn]
        self._spawns[program] = spawn
        for one in spawn.objects:
            self._queues.setdefault(one, deque()).append(program)
        return [spawn] if self._holds(program) else []

    def release(self, context: ContextId, path: Path) -> list[Spawn]:
        """A program ended, or waits no more; return those that may start now."""
        program, after = (context, path), dict[_Program, None]()
        spawn = self._spawns.pop(program, None)
        for one in spawn.objects if spawn else ():
            queue = self._queues[one]
            if queue[0] == program:
                after.update(dict.fromkeys([*queue][1:2]))
            queue.remove(program)
            if not queue:
                del self._queues[one]
        return [self._spawns[one] for one in after if self._holds(one)]

    def forget(self, context: ContextId) -> list[Spawn]:
        """The context is gone: its programs that wait leave; those that run go on."""
        own = [one for one in self._spawns if one[0] == context]
        waiting = [one for one in own if not self._holds(one)]
        # The last first, so that none of these is found ready.
        return [spawn for one in reversed(waiting) for spawn in self.release(*one)]
