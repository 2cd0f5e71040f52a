"""The peers of a node: who is here, who is gone, and what nodes say beside engines.

Told:  by the session, from any thread: `joined`, `received` and `adopt` for a stream,
       `lost`. By peers: that a stream ended, that one is silent, asides.
Gives: to its `Host`: messages and functions that came; `left` when a peer is gone,
       `back` when its name joins anew, `given_up` when this node is. Asks its `Place`
       to `dial`, and says who is `gone`.

A peer whose stream ended is dialled again by whoever of the two dials, until its
deadline, or until nobody is at its address any more, or who is there has nothing to do
with this session. Who finds that one is gone tells all others, so that nobody waits for
what only that one could have sent.

Invariants: a peer is lost once, and everybody here, its other peers and, if it hears,
itself are told; what a former incarnation of a name says is not heard.
"""

import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from jdag.compute.buffers import Buffers
from jdag.compute.machine import said
from jdag.engine.vocabulary import (
    Message,
    Worker,
    incarnated,
    incarnation_of,
    named,
)
from jdag.errors import JdagError, JoinError, ProtocolError, WorkerLost
from jdag.rpc.loop import Loop, clock_ns
from jdag.rpc.peer import Peer
from jdag.rpc.place import Place
from jdag.rpc.streams import Stream
from jdag.rpc.trust import check
from jdag.wire.messages import Codec

REDIAL_S = 0.1
SHORT_LIVED_NS = 1_000_000_000
REFUSALS_MAX = 3  # In a row: then a peer will not be there again.
LEFT = "it has left"  # What who goes in order says.
WHY_MAX = 4096
WAITING_BYTES_MAX = 8 * 1024 * 1024
BULK_BYTES_MAX = 256 * 1024 * 1024  # Of large values; one that is larger goes alone.

_log = logging.getLogger(__name__)


def broke(error: BaseException) -> str:
    """Return what who ends by an error says, in one line."""
    return f"it ended by an error of its own: {' '.join(said(error).split())}"[:WHY_MAX]


class Host(Protocol):
    """The node whose peers these are."""

    def arrived(self, peer: Peer, message: Message, values: Sequence[Any]) -> None:
        """A message came."""

    def defined(self, digest: bytes, data: bytes) -> None:
        """A function came."""

    def left(self, worker: str, why: str) -> None:
        """A peer is gone."""

    def back(self, worker: str, incarnation: int) -> None:
        """A worker of that name has joined anew."""

    def given_up(self) -> None:
        """The others go on without this node."""

    def answer(self, asked: Mapping[str, Any]) -> Any:
        """Return what another node asks for."""


class Company:
    """The peers of one node.

    Args:
        place: where the node stands in its session.
        host: the node.
        loop: of the node.
        codec: of its cluster.
        buffers: where large values are received.
        value_bytes_max: the largest value that is taken from a peer.
    """

    def __init__(
        self,
        place: Place,
        host: Host,
        *,
        loop: Loop,
        codec: Codec,
        buffers: Buffers,
        value_bytes_max: int,
    ) -> None:
        self.peers: dict[Worker, Peer] = {}  # Of all incarnations.
        self.incarnations: dict[str, int] = {}  # Of those that have joined anew.
        self.gone: dict[str, str] = {}  # Why each lost peer is.
        self.stopping = threading.Event()
        self._place = place
        self._worker = incarnated(place.worker, place.incarnations[place.worker])
        self._host = host
        self._loop = loop
        self._codec = codec
        self._buffers = buffers
        self._value_bytes_max = value_bytes_max
        self._speaking: deque[Peer] = deque()  # Those with something to flush.
        self._known: dict[tuple[str, int], None] = {}  # Who has joined.
        self._asks = 0
        self._answers: dict[int, Any] = {}

    @property
    def living(self) -> list[Peer]:
        """The peers that are not lost."""
        return [peer for peer in tuple(self.peers.values()) if not peer.lost]

    @property
    def congested(self) -> bool:
        """Whether so much waits to leave that who adds to it is to wait."""
        waiting = bulk_bytes = 0
        # At once: a program asks without the baton, and peers may join meanwhile.
        for peer in tuple(self.peers.values()):
            waiting += peer.outbox.waiting
            bulk_bytes += peer.outbox.bulk_bytes
        return waiting > WAITING_BYTES_MAX or bulk_bytes > BULK_BYTES_MAX

    def allowed_on(self, worker: Worker) -> tuple[str, ...]:
        """The modules that a worker was told to allow."""
        peer = self.peers.get(worker)
        return () if peer is None else peer.allowed

    def flush(self) -> None:
        """Let everything leave that can."""
        speaking = self._speaking
        for _ in range(len(speaking)):
            speaking.popleft().flush()

    def speaks(self, peer: Peer) -> None:
        """See `jdag.rpc.peer.Owner`."""
        self._speaking.append(peer)

    def close(self, why: str) -> None:
        """Say goodbye to all."""
        self.stopping.set()
        for peer in self.peers.values():
            peer.lose({"bye": why})

    # ------------------------------------------------------------------ the session's

    def joined(self, peer: str, incarnation: int) -> None:
        """Take a worker for a peer; from any thread. One that was lost joins anew."""
        with self._loop:
            self._joined(peer, incarnation)

    def _joined(self, name: str, incarnation: int) -> None:
        now = self.incarnations.get(name, 0)
        if incarnation < now or (name, incarnation) in self._known:
            return
        if name == self._place.worker:  # Nobody is a peer of its own.
            return
        self._known[name, incarnation] = None
        if incarnation:
            former = self.peers.get(incarnated(name, now))
            if former is not None:
                self._lose(former, f"incarnation {incarnation} has taken its place")
            self._codec.joined(name, incarnation)
            self.incarnations[name] = incarnation
            self._host.back(name, incarnation)
            # Ahead of what this node says of it from now on.
            for other in self.living:
                if other.name != name:
                    other.aside({"joined": name, "incarnation": incarnation})
        peer = self.peer(incarnated(name, incarnation))
        peer.allowed = self._place.allowed.get(name, ())

    def peer(self, worker: Worker) -> Peer:
        """Return the peer of an incarnation; what one says to it waits for a stream."""
        peer = self.peers.get(worker)
        if peer is None:
            peer = self.peers[worker] = Peer(
                named(worker),
                incarnation_of(worker),
                loop=self._loop,
                codec=self._codec,
                owner=self,
                buffers=self._buffers,
                deadline_ns=round(self._place.deadline_s * 1e9),
                value_bytes_max=self._value_bytes_max,
            )
        return peer

    def _current(self, name: str) -> Peer:
        """The peer of a worker's name, as it is now, also before it was told of."""
        now = max(self._place.incarnations[name], self.incarnations.get(name, 0))
        return self.peer(incarnated(name, now))

    def received(self, peer: str) -> int:
        """How much this node's link to a peer has received, before a stream is remade.

        The old stream is let go of. From any thread.
        """
        with self._loop:
            known = self._current(peer)
            known.drop_stream()
            return known.link.received

    def adopt(self, peer: str, incarnation: int, stream: Stream, received: int) -> None:
        """Go on with a peer over a stream whose hello is done; from any thread."""
        self._loop.acquire()
        known = self.peer(incarnated(peer, incarnation))
        try:
            if known.lost:
                stream.close()
            else:
                known.adopt(stream, received)
        except ProtocolError as error:
            self._lose(known, f"it broke the protocol: {error}")
        finally:
            self._loop.release()

    def lost(self, peer: str, why: str) -> None:
        """Give a peer up; from any thread."""
        with self._loop:
            self._lose(self._current(peer), why)

    # ------------------------------------------------------------------ what peers say

    def arrived(self, peer: Peer, message: Message, values: Sequence[Any]) -> None:
        """A message came; see `jdag.rpc.peer.Owner`."""
        place = self._place
        check(message, peer.worker, self._worker, place.workers, self.incarnations)
        self._host.arrived(peer, message, values)

    def defined(self, peer: Peer, digest: bytes, data: bytes) -> None:
        """A function came; see `jdag.rpc.peer.Owner`."""
        del peer
        self._host.defined(digest, data)

    def told(self, peer: Peer, what: dict[str, Any]) -> None:
        """A peer's node asks or tells something."""
        match what:
            case {"ask": int(number), **asked}:
                peer.aside({"answer": number, "is": self._host.answer(asked)})
            case {"answer": int(number), "is": answer}:
                if number in self._answers:
                    self._answers[number] = answer
                    self._loop.wake_waiting()
            case {"gone": str(name), "incarnation": int(incarnation), "why": str(why)}:
                gone = incarnated(name, incarnation)
                if gone == self._worker:
                    self._given_up(peer, why)
                elif gone in self.peers:
                    self._lose(self.peers[gone], why)
            case {"joined": str(name), "incarnation": int(incarnation)}:
                if name not in self._place.workers or incarnation < 1:
                    raise ProtocolError(f"nobody joins by {what!r}")
                self._joined(name, incarnation)
            case {"bye": str(why)}:
                self._lose(peer, why)
            case _:
                raise ProtocolError(f"nobody says {what!r} aside")

    def broken(self, peer: Peer, why: str) -> None:
        """A peer's stream ended: whoever of the two dials is to dial again.

        Nobody else would tell of main's end, so who is dialled by it looks after it.
        """
        if peer.lost or self.stopping.is_set():
            return
        _log.info("%s: the stream to %s ended: %s", self._place.worker, peer.name, why)
        if peer.name in self._place.dials or peer.name == self._place.main:
            name = f"dialling {peer.name}"
            run = partial(self._redial, peer)
            threading.Thread(target=run, name=name, daemon=True).start()

    def _redial(self, peer: Peer) -> None:
        """Dial, or look, until there is a stream again, or the peer is given up."""
        refusals = 0
        if clock_ns() - peer.adopted_ns < SHORT_LIVED_NS:  # Perhaps it is not wanted.
            self.stopping.wait(REDIAL_S)
        while not (self.stopping.is_set() or peer.lost or peer.stream is not None):
            try:
                if peer.name not in self._place.dials:
                    self._place.look(peer.name)
                    self.stopping.wait(REDIAL_S)
                    continue
                got = self._place.dial(peer.name, self.received(peer.name))
            except (JdagError, OSError) as error:
                _log.info("%s: dialling %s: %s", self._place.worker, peer.name, error)
                if isinstance(error, JoinError) and error.given_up:
                    with self._loop:
                        self._given_up(peer, str(error))
                refusals = refusals + 1 if self._refuses(peer, error) else 0
                if refusals >= REFUSALS_MAX:
                    self._refused(peer, f"its connection ended, and then: {error}")
                self.stopping.wait(REDIAL_S)  # Bounded by the peer's deadline.
            else:
                self.adopt(peer.name, peer.incarnation, *got)

    def _refuses(self, peer: Peer, error: Exception) -> bool:
        """Whether this says that the process that was there is not in the session.

        How one ended that is watched, main will be told by who watches it.
        """
        if not isinstance(error, JoinError):
            return False
        is_watched = self._place.watched and not peer.incarnation
        return error.reached or (error.absent and not is_watched)

    def _refused(self, peer: Peer, why: str) -> None:
        """A peer is gone, unless it has dialled us just now; from any thread."""
        with self._loop:
            if peer.stream is None:
                self._lose(peer, why)

    def _given_up(self, peer: Peer, why: str) -> None:
        """A peer has given this node up: so will all, and it is not let in again.

        Main is the session: what it loses is the peer.
        """
        said = f"{peer.name!r} has given it up: {why}"[:WHY_MAX]
        if self._place.worker == self._place.main:
            self._lose(peer, said)
        elif not self.stopping.is_set():
            _log.warning("worker %r leaves the session: %s", self._worker, said)
            self._host.given_up()

    def silent(self, peer: Peer, why: str) -> None:
        """A peer is not there any more, or does what none does."""
        self._lose(peer, why)

    def exhausted(self, peer: Peer, why: str) -> None:
        """This node has no memory for what a peer sends; see `jdag.rpc.peer.Owner`.

        So it leaves, and all others live on; main, which is the session, loses the
        peer.
        """
        if self._place.worker == self._place.main:
            self._lose(peer, f"there is no place for what it sent: {why}")
        elif not self.stopping.is_set():
            _log.warning("worker %r leaves the session: %s", self._worker, why)
            self.close(why)
            self._host.given_up()

    def _lose(self, peer: Peer, why: str) -> None:
        if peer.lost or self.stopping.is_set():
            return
        why, here = why[:WHY_MAX], self._place.worker
        level = logging.INFO if why == LEFT else logging.WARNING
        _log.log(level, "%s: worker %r is lost: %s", here, peer.worker, why)
        # The rest is what its process printed last: other workers would print it too.
        brief = why.partition("\n")[0]
        gone = {"gone": peer.name, "incarnation": peer.incarnation, "why": brief}
        peer.lose(gone)
        self.gone[peer.worker] = why
        if peer.name == self._place.main:
            # Main is the session: who loses it leaves, and whoever else does finds out.
            lost = f"it has lost {peer.name!r}: {brief}"[:WHY_MAX]
            gone = {"bye": why if why == LEFT else lost}
        for other in tuple(self.peers.values()):
            other.aside(gone)
        self._host.left(peer.worker, why)
        self._loop.wake_waiting()
        self._place.gone(peer.name, why)

    # ------------------------------------------------------------------ asking aside

    def ask_all(
        self,
        what: dict[str, Any],
        within_s: float | None = None,
        *,
        or_raise: bool = False,
    ) -> dict[str, Any]:
        """Ask the nodes of all peers; return what those answered that live, in time.

        Raises:
            WorkerLost: with `or_raise`, where one is lost before it has answered.
        """
        loop = self._loop
        due_ns = None if within_s is None else clock_ns() + round(within_s * 1e9)
        asked: dict[int, Peer] = {}
        with loop:
            for peer in self.living:
                self._asks += 1
                asked[self._asks] = peer
                self._answers[self._asks] = None
                peer.aside({"ask": self._asks, **what})
            if due_ns is not None:
                loop.at(due_ns, loop.wake_waiting)

        def done() -> bool:
            late = due_ns is not None and clock_ns() >= due_ns
            return (
                late
                or self.stopping.is_set()
                or all(
                    self._answers[number] is not None or peer.lost
                    for number, peer in asked.items()
                )
            )

        loop.drive(done)
        answers = {peer.name: self._answers.pop(n) for n, peer in asked.items()}
        for peer in asked.values() if or_raise else ():
            if answers[peer.name] is None and peer.lost:
                why = self.gone.get(peer.worker, "")
                raise WorkerLost(f"worker {peer.name!r} was lost when asked: {why}")
        return {name: answer for name, answer in answers.items() if answer is not None}
