"""Going to other nodes: a ticket from the control server, then a dial."""

import logging
import threading
from collections.abc import Mapping

from jdag.errors import JoinError
from jdag.rpc.addresses import Address, address_of
from jdag.rpc.control import ControlClient
from jdag.rpc.listener import CARRIED, dial
from jdag.rpc.membership import Membership
from jdag.rpc.node import Node
from jdag.rpc.requests import Health, Healthy, Ticket, TicketIssued
from jdag.rpc.streams import Stream
from jdag.rpc.tls import Tls

_log = logging.getLogger(__name__)


class Routes:
    """The ways to the other processes of a session; thread-safe.

    `secrets` are those that this process shares with each other one; they may change.
    `timeout_s` bounds each request and each dial.
    """

    def __init__(
        self,
        members: Membership,
        secrets: Mapping[str, str],
        *,
        tls: Tls | None,
        timeout_s: float,
    ) -> None:
        self._members = members
        self._secrets = secrets
        self._tls = tls
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._clients: dict[str, ControlClient] = {}

    def reach(self, peer: str, control: Address) -> ControlClient:
        """Return what asks a peer, which is at this address from now on."""
        client = ControlClient(f"worker {peer!r}", control, tls=self._tls)
        with self._lock:
            former = self._clients.pop(peer, None)
            self._clients[peer] = client
        if former is not None:
            former.close()
        return client

    def client(self, peer: str) -> ControlClient:
        """Return the client of a peer; JoinError if its address is not known."""
        known = self._members[peer].whereabouts
        control = None if known is None else address_of(known.control)
        if control is None:
            raise JoinError(f"the address of worker {peer!r} is not known here")
        with self._lock:
            client = self._clients.get(peer)
        if client is None or client.address != control:
            client = self.reach(peer, control)
        return client

    def dial(self, peer: str, received: int) -> tuple[Stream, int]:
        """Connect to a known peer, of which so many messages were received.

        Return the stream, and how many messages the peer has received.

        Raises:
            JdagError: the peer refuses, or is not reached.
        """
        client = self.client(peer)
        known = self._members[peer].whereabouts
        assert known is not None, peer
        data = f"grpc:{client.address}" if known.data == CARRIED else known.data
        asked = Ticket(
            secret=self._secrets[peer],
            worker=self._members.here,
            incarnation=self._members.incarnation,
        )
        answer = client.learn(asked, TicketIssued, timeout_s=self._timeout_s)
        ticket = bytes.fromhex(answer.ticket)
        return dial(data, ticket, received, tls=self._tls, timeout_s=self._timeout_s)

    def connect(self, node: Node, peer: str) -> None:
        """Connect a node to a peer that is known, by a stream that the node adopts."""
        stream, theirs = self.dial(peer, node.received(peer))
        node.adopt(peer, self._members[peer].incarnation, stream, theirs)

    def close(self) -> None:
        """Close all clients."""
        with self._lock:
            clients = list(self._clients.values())
            self._clients.clear()
        for client in clients:
            client.close()


class Lookout:
    """Looks whether main is still at the address that it gave, if it once was there.

    Main dials its workers, so a worker that has lost the stream could only wait; main's
    own address tells at once that its process `pid` has ended.
    """

    def __init__(self, routes: Routes, main: str, pid: object) -> None:
        self._routes = routes
        self._main = main
        self._pid = pid
        self._has_found = False

    def find(self) -> None:
        """Find out whether main can be looked for; before its end is suspected."""
        try:
            self._look()
        except JoinError as error:
            _log.info("main %r cannot be looked for: %s", self._main, error)
        else:
            self._has_found = True

    def look(self, peer: str) -> None:
        """See whether a peer may still be there, if it is main.

        Raises:
            JoinError: it is not, or is not reached.
        """
        if peer == self._main and self._has_found:
            self._look()

    def _look(self) -> None:
        found = self._routes.client(self._main).learn(Health(), Healthy)
        if found.pid != self._pid:
            raise JoinError(f"process {found.pid} is where main {self._main!r} was")
