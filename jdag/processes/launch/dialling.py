"""Routes to other nodes (their data connections), and the liveness check of main."""

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
    """Opens data connections to the other processes of a session.

    `secret_with` maps a worker to the secret that this process shares with that
    worker's current incarnation. `timeout_s` bounds each connection attempt.
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
        members, member = self._members, self._members[peer]
        if member.whereabouts is None:
            raise JoinError(f"the address of worker {peer!r} is not known here")
        pair = ConnectionPair(
            incarnated(members.worker, members.incarnation),
            incarnated(peer, member.incarnation),
            self._secret_with(peer),
        )
        data = member.whereabouts.data
        return dial(data, pair, received, tls=self._tls, timeout_s=self._timeout_s)

    def connect(self, node: Node, peer: str) -> None:
        stream, peer_received = self.dial(peer, node.received(peer))
        node.adopt(peer, self._members[peer].incarnation, stream, peer_received)


class MainLiveness:
    """Checks that main is alive: process `pid` must answer at its control address.

    Main dials its workers, so a worker that lost its stream to main could only wait for
    the deadline. This check detects the end of main at once. It is used only if main
    has answered at this address before.
    """

    def __init__(self, main: str, control: str, pid: object, tls: Tls | None) -> None:
        self._main = main
        self._control = address_of(control)
        self._pid = pid
        self._tls = tls
        self._was_reached = False

    def find(self) -> None:
        """Test whether this process can reach main. If not, `look` does nothing."""
        try:
            self._look()
        except JoinError as error:
            _log.info("main %r cannot be checked for liveness: %s", self._main, error)
        else:
            self._was_reached = True

    def look(self, peer: str) -> None:
        if peer == self._main and self._was_reached:
            self._look()

    def _look(self) -> None:
        if self._control is None:
            raise JoinError("main has no control address")
        client = ControlClient(f"main {self._main!r}", self._control, tls=self._tls)
        with closing(client):
            pid = client.ask(Health()).get("pid")
        if pid != self._pid:
            raise JoinError(
                f"main {self._main!r} has ended: process {pid} answers at its address"
            )
