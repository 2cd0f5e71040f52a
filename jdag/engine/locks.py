"""Locks of hosted objects: a program starts when it holds all objects that it uses.

Inputs:  Spawns in order of arrival, and the ends of their programs and contexts.
Outputs: the Spawns that may start.
Invariants: each object has a queue of programs; a program holds its objects if it is
first in the queues of all of them; it leaves all its queues at once.
"""

from collections import deque

from msgspec import Struct

from jdag.engine.protocol import ContextId, ObjectId, Path, Run, Spawn

_Program = tuple[ContextId, Path]


class Locks(Struct, eq=False):
    _queues: dict[ObjectId, deque[_Program]] = {}
    _spawns: dict[_Program, Spawn] = {}  # Of queued programs, in order of arrival.

    def _holds(self, program: _Program) -> bool:
        spawn = self._spawns.get(program)
        queues = [self._queues[id] for id in spawn.objects] if spawn else ()
        return spawn is not None and all([queue[0] == program for queue in queues])

    def refusal(self, run: Run) -> str:
        for id in [id for id in run.objects if id in self._queues]:
            context, path = first = self._queues[id][0]
            if context != run.context or run.path[: len(path)] != path:
                continue
            if self._holds(first):
                return (
                    f"deadlock: {id} is held by the call at "
                    f"{self._spawns[first].call_site}, which waits for this call, at "
                    f"{run.call_site}. A program that holds an object uses it "
                    "directly; programs that it calls cannot use the handle"
                )
        return ""

    def acquire(self, spawn: Spawn) -> list[Spawn]:
        program = spawn.context, spawn.path
        if not spawn.objects:
            return [spawn]
        self._spawns[program] = spawn
        for id in spawn.objects:
            self._queues.setdefault(id, deque()).append(program)
        return [spawn] if self._holds(program) else []

    def release(self, context: ContextId, path: Path) -> list[Spawn]:
        """Remove an ended or waiting program; return the Spawns that may start now."""
        program, successors = (context, path), dict[_Program, None]()
        spawn = self._spawns.pop(program, None)
        for id in spawn.objects if spawn else ():
            queue = self._queues[id]
            if queue[0] == program:
                successors.update(dict.fromkeys([*queue][1:2]))
            queue.remove(program)
            if not queue:
                del self._queues[id]
        return [self._spawns[program] for program in successors if self._holds(program)]

    def forget(self, context: ContextId) -> list[Spawn]:
        """Remove the waiting programs of a released context. Running programs go on."""
        programs = [program for program in self._spawns if program[0] == context]
        waiting = [program for program in programs if not self._holds(program)]
        # In reverse order, so that the removals make no other program ready.
        return [
            spawn for program in reversed(waiting) for spawn in self.release(*program)
        ]
