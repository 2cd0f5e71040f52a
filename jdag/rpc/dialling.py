"""Going to other nodes: a ticket from the control server, then a dial."""

import logging
import threading
from collections.abc import Mapping

from jdag.errors import JoinError
from jdag.rpc.addresses import Address, address_of
from jdag.rpc.control import ControlClient
from jdag.rpc.listener import CARRIED, dial
from jdag.rpc.node import Node
from jdag.rpc.requests import (
    AttachWorker,
    Health,
    Healthy,
    Ticket,
    TicketIssued,
    Whereabouts,
)
from jdag.rpc.streams import Stream
from jdag.rpc.tls import Tls

_log = logging.getLogger(__name__)


class Routes:
    """The other processes of a session, and the ways there; thread-safe.

    `secrets` are those that this process shares with each other one; they may change.
    `timeout_s` bounds each request and each dial.
    """

    def __init__(
        self,
        worker: str,
        incarnation: int,
        secrets: Mapping[str, str],
        *,
        tls: Tls | None,
        timeout_s: float,
    ) -> None:
        self._worker = worker
        self._incarnation = incarnation
        self._secrets = secrets
        self._tls = tls
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._clients: dict[str, ControlClient] = {}
        self._known: dict[str, Whereabouts] = {}

    def reach(self, peer: str, control: Address) -> ControlClient:
        """Return what asks a peer, which is at this address from now on."""
        client = ControlClient(f"worker {peer!r}", control, tls=self._tls)
        with self._lock:
            former = self._clients.pop(peer, None)
            self._clients[peer] = client
        if former is not None:
            former.close()
        return client

    def know(self, peer: str, whereabouts: Whereabouts) -> None:
        """Know a peer, and where it is reached."""
        control = address_of(whereabouts.control)
        if control is None:
            raise JoinError(f"{whereabouts.control!r} is no address of {peer!r}")
        with self._lock:
            client = self._clients.get(peer)
        if client is None or client.address != control:
            self.reach(peer, control)
        with self._lock:
            self._known[peer] = whereabouts

    def client(self, peer: str) -> ControlClient:
        """Return the client of a peer; JoinError if its address is not known."""
        with self._lock:
            found = self._clients.get(peer)
        if found is None:
            raise JoinError(f"worker {peer!r} is not known here")
        return found

    def dial(self, peer: str, received: int) -> tuple[Stream, int]:
        """Connect to a known peer, of which so many messages were received.

        Return the stream, and how many messages the peer has received.

        Raises:
            JdagError: the peer refuses, or is not reached.
        """
        client = self.client(peer)
        with self._lock:
            data = self._known[peer].data
        if data == CARRIED:
            data = f"grpc:{client.address}"
        asked = Ticket(
            secret=self._secrets[peer],
            worker=self._worker,
            incarnation=self._incarnation,
        )
        answer = client.learn(asked, TicketIssued, timeout_s=self._timeout_s)
        ticket = bytes.fromhex(answer.ticket)
        return dial(data, ticket, received, tls=self._tls, timeout_s=self._timeout_s)

    def connect(self, node: Node, peer: str) -> None:
        """Connect a node to a peer that is known, by a stream that the node adopts."""
        stream, theirs = self.dial(peer, node.received(peer))
        node.adopt(peer, self._known[peer].incarnation, stream, theirs)

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
    own address tells at once that its process has ended.
    """

    def __init__(self, asked: AttachWorker, routes: Routes) -> None:
        self._asked = asked
        self._routes = routes
        self._has_found = False

    def find(self) -> None:
        """Find out whether main can be looked for; before its end is suspected."""
        control = address_of(self._asked.control)
        if control is None:
            return
        self._routes.reach(self._asked.main, control)
        try:
            self._look()
        except JoinError as error:
            _log.info("main %r cannot be looked for: %s", self._asked.main, error)
        else:
            self._has_found = True

    def look(self, peer: str) -> None:
        """See whether a peer may still be there, if it is main.

        Raises:
            JoinError: it is not, or is not reached.
        """
        if peer == self._asked.main and self._has_found:
            self._look()

    def _look(self) -> None:
        main = self._asked.main
        found = self._routes.client(main).learn(Health(), Healthy)
        if found.pid != self._asked.handshake.get("pid"):
            raise JoinError(f"process {found.pid} is where main {main!r} was")
