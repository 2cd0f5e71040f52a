"""Waiting for other processes up to a deadline; those that are missing are named.

A collective that one process does not enter blocks all others inside of JAX. So a
thread beside the program enters it, and the program waits for the thread. A process
that has waited for some time notes that in the store of `jax.distributed`; at the
deadline it reads there which processes have not, and gives up.

Invariants: the store has one verdict for each meeting, MET or GIVEN_UP, the first that
is written; a process that came late enough to have been given up reads it.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from math import inf
from queue import SimpleQueue
from typing import Any

import jax
from jax._src import distributed

from jdag.errors import JdagError, WorkerLost, unusable

DEADLINE_S = 600.0
SAYS_AFTER_S = 1.0
MET, GIVEN_UP = "met", "given up"

Enter = Callable[[], Any]


def check_deadline(deadline_s: Any) -> None:
    """Raise JdagError unless this is a time to wait for."""
    is_number = isinstance(deadline_s, int | float) and not isinstance(deadline_s, bool)
    if not is_number or not 0 < deadline_s < inf:
        allowed = "a number of seconds above 0"
        raise JdagError(unusable("deadline_s", deadline_s, allowed))


class Waiting:
    """How this process waits for all others; `room` tells its meetings from others."""

    def __init__(self, room: str) -> None:
        self._room = room
        self._number = 0  # Of the meeting.
        # When this process came to the last one. No other can have come to the next one
        # before that, however long this process then took to hear of it.
        self._came_s = -inf
        self._todo: SimpleQueue[tuple[Enter, Future[Any]]] = SimpleQueue()
        run = threading.Thread(target=_enter_all, args=(self._todo,), daemon=True)
        run.start()

    def met(self, enter: Enter, what: str, deadline_s: float) -> Any:
        """Return what a collective gives, which all processes enter.

        `enter` enters it, and blocks. Where others have not come within `deadline_s`,
        which is the same on all, or this process has come too late, it raises
        WorkerLost.
        """
        self._number += 1
        came_s = time.monotonic()
        found: Future[Any] = Future()
        self._todo.put((enter, found))
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
        """Say that this process waits; give up when there is nothing left to wait."""
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
            "all processes call it, as often"
        )

    @property
    def _prefix(self) -> str:
        return f"jdag/{self._room}/{self._number}"

    def _verdict(self, mine: str) -> str:
        """Write this verdict unless there is one; return the one that holds."""
        key = f"{self._prefix}/verdict"
        try:
            _store().key_value_set(key, mine)
        except jax.errors.JaxRuntimeError:  # There is one.
            verdict: str = _store().key_value_try_get(key)
            return verdict
        return mine


def _enter_all(todo: "SimpleQueue[tuple[Enter, Future[Any]]]") -> None:
    while True:
        enter, found = todo.get()
        try:
            found.set_result(enter())
        except BaseException as error:  # It is for whoever waits.
            found.set_exception(error)
        del enter, found


def _store() -> Any:
    return distributed.global_state.client
