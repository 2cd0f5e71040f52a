"""Dialling other nodes: get a ticket from the control server, then connect."""

import logging
import threading
from collections.abc import Mapping

from jdag.errors import JoinError
from jdag.rpc.addresses import Address, address_of
from jdag.rpc.control import ControlClient
from jdag.rpc.listener import dial
from jdag.rpc.membership import Membership
from jdag.rpc.node import Node
from jdag.rpc.requests import Health, Healthy, Ticket, TicketIssued
from jdag.rpc.streams import Stream
from jdag.rpc.tls import Tls

_log = logging.getLogger(__name__)


class Routes:
    """Connections to the other processes of a session; thread-safe.

    `secrets` are shared with each other process, and may change. `timeout_s` bounds
    each request and each dial.
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
        self._is_closed = False

    def reach(self, peer: str, control: Address) -> ControlClient:
        """Return a new client for a peer, whose address is `control` from now on."""
        client = ControlClient(f"worker {peer!r}", control, tls=self._tls)
        with self._lock:
            is_closed = self._is_closed
            former = None if is_closed else self._clients.pop(peer, None)
            if not is_closed:
                self._clients[peer] = client
        if is_closed:  # A dial that was under way when the session ended.
            client.close()
            raise JoinError(f"worker {peer!r} is not dialled: the session is closed")
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
        """Connect to a known peer, from which `received` frames have arrived.

        Return the stream, and the number of frames that the peer has received.

        Raises:
            JdagError: the peer refuses, or is not reached.
        """
        client = self.client(peer)
        known = self._members[peer].whereabouts
        assert known is not None, peer
        asked = Ticket(
            secret=self._secrets[peer],
            worker=self._members.here,
            incarnation=self._members.incarnation,
        )
        answer = client.learn(asked, TicketIssued, timeout_s=self._timeout_s)
        ticket = bytes.fromhex(answer.ticket)
        return dial(
            known.data, ticket, received, tls=self._tls, timeout_s=self._timeout_s
        )

    def connect(self, node: Node, peer: str) -> None:
        """Connect a node to a known peer."""
        stream, theirs = self.dial(peer, node.received(peer))
        node.adopt(peer, self._members[peer].incarnation, stream, theirs)

    def close(self) -> None:
        """Close all clients."""
        with self._lock:
            self._is_closed = True
            clients = list(self._clients.values())
            self._clients.clear()
        for client in clients:
            client.close()


class Lookout:
    """Checks whether main is still at its address, if it was found there once.

    Main dials its workers, so a worker that has lost the stream could only wait. Main's
    address shows at once that process `pid` has ended.
    """

    def __init__(self, routes: Routes, main: str, pid: object) -> None:
        self._routes = routes
        self._main = main
        self._pid = pid
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
        """Check whether a peer is alive, if it is main.

        Raises:
            JoinError: it has ended, or is not reached.
        """
        if peer == self._main and self._has_found:
            self._look()

    def _look(self) -> None:
        found = self._routes.client(self._main).learn(Health(), Healthy)
        if found.pid != self._pid:
            raise JoinError(f"process {found.pid} is where main {self._main!r} was")
