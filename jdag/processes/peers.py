"""The peers of a node: connected ones, lost ones, and their control frames.

The session calls `joined`, `received`, `adopt` and `lost`, on any thread. The node
calls the other methods. The engine receives `Joined` and `Lost`. Losses are also
recorded in the session's `Membership`.

When a stream ends, the node that opened it dials again until the deadline. It gives up
earlier if nothing listens at the address or if another process answers there. A node
that detects a loss announces it to all other nodes, so that they do not wait for
messages from the lost peer.

Invariants: a peer is lost once. The loss is reported to the engine, to all other peers
and, if possible, to the lost peer. Messages of former incarnations are ignored.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from jdag.engine.protocol import (
    Event,
    Joined,
    Lost,
    Worker,
    incarnated,
    incarnation_of,
    named,
)
from jdag.errors import JdagError, JoinError, ProtocolError, WorkerLost
from jdag.processes.net.connection import Connection
from jdag.processes.net.loop import Loop, clock_ns
from jdag.processes.net.pulse import Pulse
from jdag.processes.net.streams import Stream
from jdag.processes.session.session_info import SessionInfo
from jdag.runtime.failures import error_text
from jdag.wire.messages import Codec

REDIAL_S = 0.1
SHORT_LIVED_NS = 1_000_000_000
REFUSALS_MAX = 3  # Consecutive refusals after which the peer is considered lost.
LEFT = "it has left"  # The reason that a node sends when it leaves in an orderly way.
WHY_MAX = 4096
WAITING_BYTES_MAX = 8 * 1024 * 1024
BULK_BYTES_MAX = 256 * 1024 * 1024  # Queued large values. One value may be larger.

OpenQueries = dict[int, Connection]  # Maps query numbers to the queried peers.

_log = logging.getLogger(__name__)


def broke(error: BaseException) -> str:
    text = " ".join(error_text(error).split())
    return f"it ended by an error of its own: {text}"[:WHY_MAX]


class PeerTable:
    """The peers of one node. `losses` maps each lost worker to the reason."""

    def __init__(
        self,
        session: SessionInfo,
        *,
        loop: Loop,
        codec: Codec,
        losses: dict[str, str],
        connect: Callable[[str, int], Connection],
        tell: Callable[[Event], object],
        answer: Callable[[Mapping[str, Any]], Any],
    ) -> None:
        self.connections: dict[Worker, Connection] = {}  # For all incarnations.
        # Incarnations of workers that joined again, as reported to the engine.
        self.incarnations: dict[str, int] = {}
        self.workers = tuple(session.settings.workers)
        self.losses = losses
        self.stopping = threading.Event()
        self.hurries = False  # Whether more than acknowledgements must be flushed.
        self._session = session
        self._worker = incarnated(session.worker, session.members.incarnation)
        self.loop = loop
        self.codec = codec
        self._connect = connect
        self._tell = tell
        self._answer = answer
        self._queries_n = 0
        self._answers: dict[int, Any] = {}

    @property
    def living(self) -> list[Connection]:
        return [peer for peer in tuple(self.connections.values()) if not peer.lost]

    @property
    def congested(self) -> bool:
        waiting = bulk_bytes = 0
        # Copied because programs read this without the loop lock while peers may join.
        for peer in tuple(self.connections.values()):
            waiting += peer.waiting_bytes
            bulk_bytes += peer.bulk.nbytes
        return waiting > WAITING_BYTES_MAX or bulk_bytes > BULK_BYTES_MAX

    def allowed_on(self, worker: Worker) -> tuple[str, ...]:
        peer = self.connections.get(worker)
        return () if peer is None else peer.allowed

    def end(self) -> None:
        self.stopping.set()
        self.loop.stop()

    def close(self, why: str) -> None:
        self.stopping.set()
        for peer in self.connections.values():
            peer.lose({"bye": why})

    def joined(self, peer: str, incarnation: int) -> None:
        """Register a worker or the new process of a lost worker. Thread-safe."""
        with self.loop:
            self._joined(peer, incarnation)

    def _joined(self, name: str, incarnation: int) -> None:
        # A node is not its own peer, and has no peers after it left the session.
        if name == self._session.worker or self.stopping.is_set():
            return
        member = self._session.members[name]
        if incarnation < member.incarnation:
            return
        self._session.members.attach(name, incarnation)
        current = self.incarnations.get(name, 0)
        if incarnation > current:
            former = self.connections.get(incarnated(name, current))
            if former is not None:
                self.lose(former, f"incarnation {incarnation} replaced it")
            self.codec.joined(name, incarnation)
            self.incarnations[name] = incarnation
            self._tell(Joined(name, incarnation))
            # Peers must receive this before messages that name the new incarnation.
            for peer in self.living:
                if peer.name != name:
                    peer.control({"joined": name, "incarnation": incarnation})
        peer = self.peer(incarnated(name, incarnation))
        peer.allowed = member.allowed

    def peer(self, worker: Worker) -> Connection:
        """Return the connection with an incarnation. It may have no stream yet."""
        peer = self.connections.get(worker)
        if peer is None:
            peer = self._connect(named(worker), incarnation_of(worker))
            self.connections[worker] = peer
            if self._session.helper is not None:
                peer.control(self._session.helper.frame)
        return peer

    def _current(self, name: str) -> Connection:
        return self.peer(incarnated(name, self._session.members[name].incarnation))

    def received(self, name: str) -> int:
        with self.loop:
            peer = self._current(name)
            peer.drop_stream()
            return peer.numbers.received

    def adopt(self, name: str, incarnation: int, stream: Stream, received: int) -> None:
        """Use a new stream to a peer, after the handshake. Thread-safe."""
        self.loop.acquire()
        peer = self.peer(incarnated(name, incarnation))
        try:
            if peer.lost:
                stream.close()
            else:
                peer.adopt(stream, received)
        except ProtocolError as error:
            self.lose(peer, f"it broke the protocol: {error}")
        finally:
            self.loop.release()

    def lost(self, name: str, why: str, incarnation: int | None = None) -> None:
        """Treat a peer as lost if `incarnation` is current or None. Thread-safe."""
        with self.loop:
            peer = self._current(name)
            if incarnation in (None, peer.incarnation):
                self.lose(peer, why)

    def control(self, peer: Connection, content: dict[str, Any]) -> None:
        match content:
            case {"ask": int(number), **query}:
                peer.control({"answer": number, "is": self._answer(query)})
            case {"answer": int(number), "is": answer}:
                if number in self._answers:
                    self._answers[number] = answer
                    self.loop.wake_waiting()
            case {"gone": str(name), "incarnation": int(incarnation), "why": str(why)}:
                worker = incarnated(name, incarnation)
                if worker == self._worker:
                    self._given_up(peer, why)
                elif worker in self.connections:
                    self.lose(self.connections[worker], why)
            case {"joined": str(name), "incarnation": int(incarnation)}:
                if name not in self._session.settings.workers or incarnation < 1:
                    raise ProtocolError(f"{content!r} is not a valid join")
                self._joined(name, incarnation)
            case {"pulse": str(address), "key": str(key)} if peer.pulse is None:
                peer.pulse = Pulse(address, key)
            case {"bye": str(why)}:
                self.lose(peer, why)
            case _:
                raise ProtocolError(f"unknown control frame {content!r}")

    def redial(self, peer: Connection, why: str) -> None:
        """Handle the end of a stream. Dial again if this node opened the stream.

        A node also checks main when main's stream has ended, since no other node
        reports the end of main.
        """
        if peer.lost or self.stopping.is_set():
            return
        session = self._session
        _log.info("%s: the stream to %s ended: %s", session.worker, peer.name, why)
        if session.members[peer.name].is_dialled or peer.name == session.main:
            name = f"dialling {peer.name}"
            run = partial(self._redial, peer)
            threading.Thread(target=run, name=name, daemon=True).start()

    def _redial(self, peer: Connection) -> None:
        refusals = 0
        if clock_ns() - peer.adopted_ns < SHORT_LIVED_NS:  # The peer may refuse us.
            self.stopping.wait(REDIAL_S)
        while not (self.stopping.is_set() or peer.lost or peer.stream is not None):
            try:
                if not self._session.members[peer.name].is_dialled:
                    self._session.look(peer.name)
                    self.stopping.wait(REDIAL_S)
                    continue
                dialled = self._session.dial(peer.name, self.received(peer.name))
            except (JdagError, OSError) as error:
                _log.info("%s: dialling %s: %s", self._session.worker, peer.name, error)
                if isinstance(error, JoinError) and error.given_up:
                    with self.loop:
                        self._given_up(peer, str(error))
                refusals = refusals + 1 if self._refuses(peer, error) else 0
                if refusals >= REFUSALS_MAX:
                    with self.loop:
                        if peer.stream is None:  # The peer has not connected itself.
                            why = f"its connection ended, and dialling failed: {error}"
                            self.lose(peer, why)
                self.stopping.wait(REDIAL_S)  # The peer's deadline ends this loop.
            else:
                self.adopt(peer.name, peer.incarnation, *dialled)

    def _refuses(self, peer: Connection, error: Exception) -> bool:
        # The parent of a watched process reports the end of the process to main.
        if not isinstance(error, JoinError):
            return False
        is_watched = self._session.watched and not peer.incarnation
        return error.reached or (error.absent and not is_watched)

    def _given_up(self, peer: Connection, why: str) -> None:
        text = f"{peer.name!r} has given it up: {why}"[:WHY_MAX]
        if self._session.worker == self._session.main:
            self.lose(peer, text)
        elif not self.stopping.is_set():
            _log.warning("worker %r leaves the session: %s", self._worker, text)
            self.end()

    def exhausted(self, peer: Connection, why: str) -> None:
        if self._session.worker == self._session.main:
            self.lose(peer, f"main has no memory for its message: {why}")
        elif not self.stopping.is_set():
            _log.warning("worker %r leaves the session: %s", self._worker, why)
            self.close(why)
            self.end()

    def failed(self, peer: Connection, why: str) -> None:
        """Treat a peer as lost, or main if it was silent for half of the deadline.

        If main is silent too, the network of this node has failed. This node then
        leaves the session, and `peer` stays in the session.
        """
        session = self._session
        if session.main not in (session.worker, peer.name):
            main = self._current(session.main)
            silent_s = main.silent_ns(clock_ns()) / 1e9
            if not main.lost and silent_s > session.settings.deadline_s / 2:
                peer, why = main, f"it gave no sign of life for {silent_s:.1f} s"
        self.lose(peer, why)

    def lose(self, peer: Connection, why: str) -> None:
        if peer.lost or self.stopping.is_set():
            return
        why = why[:WHY_MAX]
        level = logging.INFO if why == LEFT else logging.WARNING
        text = "%s: worker %r is lost: %s"
        _log.log(level, text, self._session.worker, peer.worker, why)
        # Further lines of `why` are output of the lost process. Only main reports them.
        brief = why.partition("\n")[0]
        notice = {"gone": peer.name, "incarnation": peer.incarnation, "why": brief}
        peer.lose(notice)
        self.losses[peer.worker] = why
        self._session.members.lose(peer.name, peer.incarnation, why)
        if peer.name == self._session.main:
            # A node that loses main leaves; the others detect main's loss themselves.
            lost = f"it has lost {peer.name!r}: {brief}"[:WHY_MAX]
            notice = {"bye": why if why == LEFT else lost}
        for receiver in tuple(self.connections.values()):
            receiver.control(notice)
        self._tell(Lost(peer.worker, why))
        if peer.name == self._session.main:
            self.end()
        self.loop.wake_waiting()

    def ask_all(
        self,
        query: dict[str, Any],
        within_s: float | None = None,
        *,
        peers: Sequence[Connection] | None = None,
        or_raise: bool = False,
    ) -> dict[str, Any]:
        """Send a query to all live peers, or to `peers`; return their replies by name.

        The replies of lost and late peers are missing. With `or_raise`, the loss of a
        peer raises WorkerLost.
        """
        loop = self.loop
        due_ns = None if within_s is None else clock_ns() + round(within_s * 1e9)
        with loop:
            queries = self.ask(query, peers)
            if due_ns is not None:
                loop.at(due_ns, loop.wake_waiting)

        def done() -> bool:
            late = due_ns is not None and clock_ns() >= due_ns
            return late or self.stopping.is_set() or self.have_answered(queries)

        loop.drive(done)
        answers = self.answers(queries)
        for peer in queries.values() if or_raise else ():
            if peer.name not in answers and peer.lost:
                why = self.losses.get(peer.worker, "")
                raise WorkerLost(
                    f"worker {peer.name!r} was lost before it replied: {why}"
                )
        return answers

    def ask(
        self, query: dict[str, Any], peers: Sequence[Connection] | None = None
    ) -> OpenQueries:
        """Send a query to all live peers, or to `peers`. Requires the loop lock."""
        queries: OpenQueries = {}
        for peer in self.living if peers is None else peers:
            self._queries_n += 1
            queries[self._queries_n] = peer
            self._answers[self._queries_n] = None
            peer.control({"ask": self._queries_n, **query})
        return queries

    def have_answered(self, queries: OpenQueries) -> bool:
        return all(
            self._answers[number] is not None or peer.lost
            for number, peer in queries.items()
        )

    def answers(self, queries: OpenQueries) -> dict[str, Any]:
        """Close the queries; return the replies received so far, by worker name."""
        answers = {peer.name: self._answers.pop(n) for n, peer in queries.items()}
        return {name: answer for name, answer in answers.items() if answer is not None}
