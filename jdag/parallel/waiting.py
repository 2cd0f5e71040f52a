"""Waiting for other processes up to a deadline; errors name the missing ones.

A collective that one process does not enter blocks all others inside JAX. So a separate
thread enters it, and the program waits for that thread. After `REGISTER_AFTER_S` a
waiting process registers in the key-value store of `jax.distributed`. At the deadline
it reads from the store which processes are missing, and raises an error.

Invariants: the store has one verdict per collective, MET or GIVEN_UP; the first write
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

from jdag.compute.configuration import with_local_settings
from jdag.errors import JdagError, WorkerLost, unusable

DEADLINE_S = 600.0
REGISTER_AFTER_S = 1.0
MET, GIVEN_UP = "met", "given up"

Enter = Callable[[], Any]


def check_deadline(deadline_s: Any) -> None:
    is_number = isinstance(deadline_s, int | float) and not isinstance(deadline_s, bool)
    if not is_number or not 0 < deadline_s < inf:
        allowed = "a number of seconds above 0"
        raise JdagError(unusable("deadline_s", deadline_s, allowed))


class Waiting:
    """Enters collectives of all processes. Its keys in the store contain `room`."""

    def __init__(self, room: str) -> None:
        self._room = room
        self._number = 0  # The number of the last collective.
        # The time of entry into the last collective. No other process can have entered
        # the next one earlier.
        self._entered_s = -inf
        self._todo: SimpleQueue[tuple[Enter, Future[Any]]] = SimpleQueue()
        run = threading.Thread(target=_enter_all, args=(self._todo,), daemon=True)
        run.start()

    def met(self, enter: Enter, what: str, deadline_s: float) -> Any:
        """Call `enter`, which enters a collective of all processes; return its result.

        Raises:
            WorkerLost: other processes did not enter within `deadline_s` (equal on all
                processes), or this process was too late.
        """
        self._number += 1
        entered_s = time.monotonic()
        future: Future[Any] = Future()
        self._todo.put((partial(with_local_settings(), enter), future))
        register_after_s = min(REGISTER_AFTER_S, deadline_s / 2)
        if not wait([future], register_after_s).done:
            self._wait_on(future, what, deadline_s, deadline_s - register_after_s)
        result = future.result()
        is_late = time.monotonic() - self._entered_s > deadline_s / 2
        if is_late and self._verdict(MET) == GIVEN_UP:
            raise WorkerLost(
                f"{what}: process {jax.process_index()} is too late; the other "
                f"processes stopped waiting after deadline_s = {deadline_s:g} seconds"
            )
        self._entered_s = entered_s
        return result

    def _wait_on(
        self, future: Future[Any], what: str, deadline_s: float, rest_s: float
    ) -> None:
        store, prefix = _store(), self._prefix
        key = f"{prefix}/waits/{jax.process_index()}"
        store.key_value_set(key, "")
        if wait([future], rest_s).done or self._verdict(GIVEN_UP) == MET:
            wait([future])
            store.key_value_delete(key)
            return
        listed = store.key_value_dir_get(f"{prefix}/waits/")
        waiting = [int(key.rpartition("/")[2]) for key, _ in listed]
        absent = [n for n in range(jax.process_count()) if n not in waiting]
        names = f"process{'es' * (len(absent) > 1)} {', '.join(map(str, absent))}"
        raise WorkerLost(
            f"{what}: {names} did not make this call within {deadline_s:g} seconds "
            "(deadline_s); all processes must make the same number of calls"
        )

    @property
    def _prefix(self) -> str:
        return f"jdag/{self._room}/{self._number}"

    def _verdict(self, verdict: str) -> str:
        """Store a verdict if none is stored; return the stored verdict."""
        key = f"{self._prefix}/verdict"
        try:
            _store().key_value_set(key, verdict)
        except jax.errors.JaxRuntimeError:  # The key exists.
            return str(_store().key_value_try_get(key))
        return verdict


def _enter_all(todo: "SimpleQueue[tuple[Enter, Future[Any]]]") -> None:
    while True:
        enter, future = todo.get()
        try:
            future.set_result(enter())
        except BaseException as error:  # Raised again by the waiting thread.
            future.set_exception(error)
        del enter, future


def _store() -> Any:
    return distributed.global_state.client
