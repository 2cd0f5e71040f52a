"""Dialling the other nodes of a session, and looking for main."""

import logging
from collections.abc import Callable
from contextlib import closing

from jdag.engine.protocol import incarnated
from jdag.errors import JoinError
from jdag.processes.net.addresses import address_of
from jdag.processes.net.greeting import ConnectionPair
from jdag.processes.net.listener import dial
from jdag.processes.net.streams import Stream
from jdag.processes.net.tls import Tls
from jdag.processes.node import Node
from jdag.processes.session.control import ControlClient
from jdag.processes.session.membership import Membership
from jdag.processes.session.requests import Health

_log = logging.getLogger(__name__)


class Routes:
    """Data connections to the other processes of a session.

    `secret_with` gives the secret that this process shares with that of a name now.
    `timeout_s` bounds each dial.
    """

    def __init__(
        self,
        members: Membership,
        secret_with: Callable[[str], str],
        *,
        tls: Tls | None,
        timeout_s: float,
    ) -> None:
        self._members = members
        self._secret_with = secret_with
        self._tls = tls
        self._timeout_s = timeout_s

    def dial(self, peer: str, received: int) -> tuple[Stream, int]:
        """Connect to a peer; see `jdag.processes.net.listener.dial`."""
        members, member = self._members, self._members[peer]
        if member.whereabouts is None:
            raise JoinError(f"the address of worker {peer!r} is not known here")
        here = incarnated(members.here, members.incarnation)
        there = incarnated(peer, member.incarnation)
        pair, data = (
            ConnectionPair(here, there, self._secret_with(peer)),
            member.whereabouts.data,
        )
        return dial(data, pair, received, tls=self._tls, timeout_s=self._timeout_s)

    def connect(self, node: Node, peer: str) -> None:
        """Connect a node to a known peer."""
        stream, theirs = self.dial(peer, node.received(peer))
        node.adopt(peer, self._members[peer].incarnation, stream, theirs)


class MainLiveness:
    """Checks whether main is still at its address, if it was found there once.

    Main dials its workers, so a worker that has lost the stream could only wait. Main's
    address shows at once that process `pid` has ended.
    """

    def __init__(self, main: str, control: str, pid: object, tls: Tls | None) -> None:
        self._main = main
        self._control = address_of(control)
        self._pid = pid
        self._tls = tls
        self._has_found = False

    def find(self) -> None:
        """Check whether main can be reached at its address at all."""
        try:
            self._look()
        except JoinError as error:
            _log.info("main %r cannot be looked for: %s", self._main, error)
        else:
            self._has_found = True

    def look(self, peer: str) -> None:
        """Raise JoinError if the peer is main, and has ended or is not reached."""
        if peer == self._main and self._has_found:
            self._look()

    def _look(self) -> None:
        if self._control is None:
            raise JoinError("it has no address")
        client = ControlClient(f"main {self._main!r}", self._control, tls=self._tls)
        with closing(client):
            pid = client.ask(Health()).get("pid")
        if pid != self._pid:
            raise JoinError(f"process {pid} is where main {self._main!r} was")
