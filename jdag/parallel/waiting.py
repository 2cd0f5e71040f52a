"""Waiting for other processes up to a deadline; errors name the missing ones.

A collective that one process does not enter blocks all others inside JAX. So a separate
thread enters it, and the program waits for that thread. After `SAYS_AFTER_S` a waiting
process registers in the key-value store of `jax.distributed`; at the deadline it reads
there which processes are missing, and gives up.

Invariants: the store has one verdict per meeting, MET or GIVEN_UP; the first write
wins. A process that may be too late reads the verdict.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from math import inf
from queue import SimpleQueue
from typing import Any

import jax
from jax._src import distributed

from jdag.compute.configuration import carried
from jdag.errors import JdagError, WorkerLost, unusable

DEADLINE_S = 600.0
SAYS_AFTER_S = 1.0
MET, GIVEN_UP = "met", "given up"

Enter = Callable[[], Any]


def check_deadline(deadline_s: Any) -> None:
    """Raise JdagError unless this is a positive, finite number of seconds."""
    is_number = isinstance(deadline_s, int | float) and not isinstance(deadline_s, bool)
    if not is_number or not 0 < deadline_s < inf:
        allowed = "a number of seconds above 0"
        raise JdagError(unusable("deadline_s", deadline_s, allowed))


class Waiting:
    """Meetings of this process with all others; `room` prefixes their keys."""

    def __init__(self, room: str) -> None:
        self._room = room
        self._number = 0  # Of the meeting.
        # When this process entered the last meeting. No other process can have entered
        # the next one earlier, however late this one learned of the result.
        self._came_s = -inf
        self._todo: SimpleQueue[tuple[Enter, Future[Any]]] = SimpleQueue()
        run = threading.Thread(target=_enter_all, args=(self._todo,), daemon=True)
        run.start()

    def met(self, enter: Enter, what: str, deadline_s: float) -> Any:
        """Enter a collective of all processes by `enter`; return its result.

        Raises:
            WorkerLost: others did not enter within `deadline_s`, which is the same on
                all processes, or this process was too late.
        """
        self._number += 1
        came_s = time.monotonic()
        found: Future[Any] = Future()
        self._todo.put((partial(carried(), enter), found))
        says_after_s = min(SAYS_AFTER_S, deadline_s / 2)
        if not wait([found], says_after_s).done:
            self._wait_on(found, what, deadline_s, deadline_s - says_after_s)
        made = found.result()
        is_late = time.monotonic() - self._came_s > deadline_s / 2
        if is_late and self._verdict(MET) == GIVEN_UP:
            raise WorkerLost(
                f"{what}: process {jax.process_index()} came too late; others have "
                f"waited for deadline_s = {deadline_s:g} seconds and given up"
            )
        self._came_s = came_s
        return made

    def _wait_on(
        self, found: Future[Any], what: str, deadline_s: float, rest_s: float
    ) -> None:
        store, prefix = _store(), self._prefix
        own = f"{prefix}/waits/{jax.process_index()}"
        store.key_value_set(own, "")
        if wait([found], rest_s).done or self._verdict(GIVEN_UP) == MET:
            wait([found])
            store.key_value_delete(own)
            return
        listed = store.key_value_dir_get(f"{prefix}/waits/")
        there = [int(key.rpartition("/")[2]) for key, _ in listed]
        gone = [n for n in range(jax.process_count()) if n not in there]
        who = f"process{'es' * (len(gone) > 1)} {', '.join(map(str, gone))}"
        raise WorkerLost(
            f"{what}: {who} did not come within {deadline_s:g} seconds (deadline_s); "
            "all processes must call it equally often"
        )

    @property
    def _prefix(self) -> str:
        return f"jdag/{self._room}/{self._number}"

    def _verdict(self, mine: str) -> str:
        """Write this verdict unless there is one; return the stored one."""
        key = f"{self._prefix}/verdict"
        try:
            _store().key_value_set(key, mine)
        except jax.errors.JaxRuntimeError:  # There is a verdict already.
            verdict: str = _store().key_value_try_get(key)
            return verdict
        return mine


def _enter_all(todo: "SimpleQueue[tuple[Enter, Future[Any]]]") -> None:
    while True:
        enter, found = todo.get()
        try:
            found.set_result(enter())
        except BaseException as error:  # Raised again by the waiting thread.
            found.set_exception(error)
        del enter, found


def _store() -> Any:
    return distributed.global_state.client
