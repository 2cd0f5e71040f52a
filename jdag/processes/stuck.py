"""The waits of programs on one node, and how main finds that its own can never end.

While main's program waits, its node asks the others again and again whether they rest:
nothing is computed or can be, all that was sent has been handled, every program waits,
and no alarm is set. If all do, twice in a row and with the same counts of messages,
nothing happened in between and nothing will: a node that rests acts on messages alone.
So an answer that takes long is no sign of anything, and no time limit is involved.
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
from jdag.processes.peers import OpenQuestions
from jdag.runtime.waiters import Waiters, stuck_wait_text

LOOK_NS = 150_000_000


class Waits:
    """The waits of one node.

    `running` are its programs but the user's, which runs on `main`.
    """

    def __init__(
        self,
        asks: NodeQueries,
        waiters: Waiters,
        *,
        running: Mapping[threading.Thread, None],
        main: bool,
    ) -> None:
        self._loop = loop = asks.peers.loop
        self._asks = asks
        self._peers = asks.peers
        self._waiters = waiters
        self._running = running
        self._main = main
        self._blocked: dict[int, FrameType] = {}  # Waiters, with where they wait.
        self._looked = 0  # The waiter of main's program when it last looked.
        self._users = 0  # Its waiter now; 0 for none.
        self._found = ""  # Why that can never be resumed.
        self._asked: OpenQuestions | None = None
        self._before: object = None
        if main:
            loop.at(clock_ns() + LOOK_NS, self.look)

    def block(self, waiter: int, *, users: bool) -> None:
        """Drive the loop until a waiter is given something, or the node is closed.

        `users`: the program that waits is the user's, on main.

        Raises:
            JdagError: the waiter of the user's program will never be resumed.
        """
        given = self._waiters.given
        self._blocked[waiter] = sys._getframe()
        try:
            if not users:
                self._loop.drive(partial(given.__contains__, waiter))
                return
            self._users, self._found = waiter, ""
            self._loop.drive(lambda: waiter in given or bool(self._found))
            if self._found and waiter not in given:
                raise JdagError(self._found)
        finally:
            del self._blocked[waiter]
            if users:
                self._users = 0

    def rest(self) -> dict[str, Any]:
        """Return whether this node acts on messages alone, and its waiting programs."""
        found, waiters, blocked = self._asks.quiet_now(), self._waiters, self._blocked
        waits = [waiter for waiter in blocked if waiter not in waiters.given]
        all_wait = len(waits) == len(self._running) + self._main
        rests = found["idle"] and all_wait and not waiters.alarms
        said = waiters.waiting(blocked.get) if rests else []
        return {**found, "idle": rests, "waits": said, "list": self._asks.jobs.stalled}

    def look(self) -> None:
        """Take the answers of a round, and begin the next one."""
        self._loop.at(clock_ns() + LOOK_NS, self.look)
        asked, before = self._asked, self._before
        if not self._users or self._users != self._looked:
            self._looked, self._before, self._asked = self._users, None, None
            if asked is not None:
                self._peers.answers(asked)  # Of a wait that is over.
        elif asked is None:
            self._asked = self._peers.ask({"what": "rest"})
        elif self._peers.have_answered(asked):
            answers = {**self._peers.answers(asked), "": self.rest()}
            self._asked = self._peers.ask({"what": "rest"})
            self._before = now = sorted(answers.items())
            if now == before and all([one["idle"] for _, one in now]):
                self._judge([one for _, one in now])

    def _judge(self, nodes: list[dict[str, Any]]) -> None:
        """All rest since the round before: say so, unless something is under way."""
        if sum([one["sent"] - one["got"] for one in nodes]) == 0:
            waits = [wait for one in nodes for wait in one["waits"]]
            lists = [one["list"] for one in nodes if one["list"]]
            self._found = (
                f"nothing is left to happen, and {stuck_wait_text(waits, lists)}"
            )
            self._loop.wake_waiting()
