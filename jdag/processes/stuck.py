"""Deadlock detection on main: its program waits for an event that can never happen.

While main's program waits, its node repeatedly queries whether the other nodes are at
rest. A node is at rest if no job runs or can run, all sent messages have been handled,
every program waits, and no alarm is set. A node at rest acts only when it receives a
message. If all nodes are at rest twice in a row, with equal counts of messages, no
event happened between the two queries and no event will ever happen. The check has no
time limit, so slow replies do not matter.
"""

import sys
import threading
from collections.abc import Mapping
from functools import partial
from types import FrameType
from typing import Any

from jdag.errors import JdagError
from jdag.processes.net.loop import clock_ns
from jdag.processes.node_queries import NodeQueries
from jdag.processes.peers import OpenQueries
from jdag.runtime.recorder import NO_CAUSE
from jdag.runtime.waiters import Waiters, stuck_wait_text

LOOK_NS = 150_000_000


class Waits:
    """The waiting programs of a node. `running` excludes the user's program on main."""

    def __init__(
        self,
        queries: NodeQueries,
        waiters: Waiters,
        *,
        running: Mapping[threading.Thread, None],
        main: bool,
    ) -> None:
        self._loop = loop = queries.peers.loop
        self._node_queries = queries
        self._peers = queries.peers
        self._waiters = waiters
        self._running = running
        self._main = main
        self._blocked: dict[int, FrameType] = {}  # Stack frames of waiting programs.
        self._looked = 0  # `_users` at the last check.
        self._users = 0  # The waiter of the user's program, or 0.
        self._stuck = ""  # The error if the user's program can never continue.
        self._queries: OpenQueries | None = None
        self._before: object = None
        if main:
            loop.at(clock_ns() + LOOK_NS, self.look)

    def block(self, waiter: int, *, users: bool) -> None:
        """Block until a waiter has its result or the node is closed.

        `users` says whether the user's program waits. If it would wait forever, this
        raises JdagError.
        """
        results = self._waiters.results
        self._blocked[waiter] = sys._getframe()
        if users:
            self._users, self._stuck = waiter, ""
        try:
            self._loop.drive(partial(results.__contains__, waiter))
            if users and self._stuck:
                raise JdagError(self._stuck)
        finally:
            del self._blocked[waiter]
            if users:
                self._users = 0

    def rest(self) -> dict[str, Any]:
        quiet, waiters = self._node_queries.quiet_now(), self._waiters
        blocked = self._blocked
        waits = [waiter for waiter in blocked if waiter not in waiters.results]
        all_wait = len(waits) == len(self._running) + self._main
        rests = quiet["idle"] and all_wait and not waiters.alarms
        texts = waiters.waiting(blocked.get) if rests else []
        stalled = self._node_queries.jobs.stalled
        return {**quiet, "idle": rests, "waits": texts, "list": stalled}

    def look(self) -> None:
        self._loop.at(clock_ns() + LOOK_NS, self.look)
        queries, before = self._queries, self._before
        if not self._users or self._users != self._looked:
            self._looked, self._before, self._queries = self._users, None, None
            if queries is not None:
                self._peers.answers(queries)  # Drop queries about an earlier wait.
        elif queries is None:
            self._queries = self._peers.ask({"what": "rest"})
        elif self._peers.have_answered(queries):
            answers = {**self._peers.answers(queries), "": self.rest()}
            self._queries = self._peers.ask({"what": "rest"})
            self._before = nodes = sorted(answers.items())
            if nodes == before and all([node["idle"] for _, node in nodes]):
                self._judge([node for _, node in nodes])

    def _judge(self, nodes: list[dict[str, Any]]) -> None:
        """Report a stuck program, unless a message is still in flight."""
        if sum([node["sent"] - node["got"] for node in nodes]) == 0:
            waits = [wait for node in nodes for wait in node["waits"]]
            lists = [node["list"] for node in nodes if node["list"]]
            text = stuck_wait_text(waits, lists)
            self._stuck = f"nothing is left to happen, and {text}"
            self._waiters.results[self._users] = None, NO_CAUSE  # It ends the wait.
            self._loop.wake_waiting()
