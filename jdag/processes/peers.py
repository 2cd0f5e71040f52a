"""The peers of a node: which are here, which are gone, and their control frames.

The session calls `joined`, `received`, `adopt` and `lost`, on any thread; the node the
rest. The engine is told of `Joined` and `Lost`, and the session's `Membership` of
losses.

A peer whose stream ended is dialled again by whichever of the two dials, until its
deadline, or until nothing listens at its address, or until the process there is not
part of this session. A node that detects a loss announces it to all others, so that
they do not wait for messages of the lost peer.

Invariants: a peer is lost once; the loss is reported to the engine, to all other peers
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
REFUSALS_MAX = 3  # After so many in a row the peer is given up.
LEFT = "it has left"  # The goodbye of an orderly exit.
WHY_MAX = 4096
WAITING_BYTES_MAX = 8 * 1024 * 1024
BULK_BYTES_MAX = 256 * 1024 * 1024  # Of large values; one that is larger goes alone.

OpenQuestions = dict[int, Connection]  # By number of the question.

_log = logging.getLogger(__name__)


def broke(error: BaseException) -> str:
    """Return the one-line goodbye of a node that ends by an error."""
    return f"it ended by an error of its own: {' '.join(error_text(error).split())}"[
        :WHY_MAX
    ]


class PeerTable:
    """The peers of one node; `gone` is filled with why each lost one is gone.

    `connect` makes the connection with a worker of this name and incarnation. `tell`
    has the engine handle an event. `answer` returns what another node asks for.
    """

    def __init__(
        self,
        session: SessionInfo,
        *,
        loop: Loop,
        codec: Codec,
        gone: dict[str, str],
        connect: Callable[[str, int], Connection],
        tell: Callable[[Event], object],
        answer: Callable[[Mapping[str, Any]], Any],
    ) -> None:
        self.connections: dict[Worker, Connection] = {}  # With all incarnations.
        # Of workers that joined again, as far as the engine has been told.
        self.incarnations: dict[str, int] = {}
        self.workers = tuple(session.settings.workers)
        self.gone = gone
        self.stopping = threading.Event()
        self._session = session
        self._worker = incarnated(session.worker, session.members.incarnation)
        self.loop = loop
        self.codec = codec
        self._connect = connect
        self._tell = tell
        self._answer = answer
        self._asks = 0
        self._answers: dict[int, Any] = {}

    @property
    def living(self) -> list[Connection]:
        """The peers that are not lost."""
        return [peer for peer in tuple(self.connections.values()) if not peer.lost]

    @property
    def congested(self) -> bool:
        """Whether programs must wait because too much output is queued."""
        waiting = bulk_bytes = 0
        # At once: a program asks without the loop lock, and peers may join meanwhile.
        for peer in tuple(self.connections.values()):
            waiting += peer.waiting_bytes
            bulk_bytes += peer.bulk.nbytes
        return waiting > WAITING_BYTES_MAX or bulk_bytes > BULK_BYTES_MAX

    def allowed_on(self, worker: Worker) -> tuple[str, ...]:
        """The modules that a worker allows."""
        peer = self.connections.get(worker)
        return () if peer is None else peer.allowed

    def end(self) -> None:
        """End the loop, as the session is over."""
        self.stopping.set()
        self.loop.stop()

    def close(self, why: str) -> None:
        """Send a goodbye to all peers."""
        self.stopping.set()
        for peer in self.connections.values():
            peer.lose({"bye": why})

    # ------------------------------------------------------------------ the session's

    def joined(self, peer: str, incarnation: int) -> None:
        """Register a worker, or the new process of a lost one; from any thread."""
        with self.loop:
            self._joined(peer, incarnation)

    def _joined(self, name: str, incarnation: int) -> None:
        # A node is no peer of itself, and one that has left has no peers.
        if name == self._session.worker or self.stopping.is_set():
            return
        member = self._session.members[name]
        if incarnation < member.incarnation:
            return
        self._session.members.attach(name, incarnation)
        now = self.incarnations.get(name, 0)
        if incarnation > now:
            former = self.connections.get(incarnated(name, now))
            if former is not None:
                self.lose(former, f"incarnation {incarnation} has taken its place")
            self.codec.joined(name, incarnation)
            self.incarnations[name] = incarnation
            self._tell(Joined(name, incarnation))
            # Ahead of what this node says of it from now on.
            for other in self.living:
                if other.name != name:
                    other.control({"joined": name, "incarnation": incarnation})
        peer = self.peer(incarnated(name, incarnation))
        peer.allowed = member.allowed

    def peer(self, worker: Worker) -> Connection:
        """Return the peer of an incarnation; frames to it wait for a stream."""
        peer = self.connections.get(worker)
        if peer is None:
            peer = self._connect(named(worker), incarnation_of(worker))
            self.connections[worker] = peer
            if self._session.helper is not None:
                peer.control(self._session.helper.frame)
        return peer

    def _current(self, name: str) -> Connection:
        """The current peer of a worker's name, also before it has joined."""
        return self.peer(incarnated(name, self._session.members[name].incarnation))

    def received(self, peer: str) -> int:
        """Return how many frames of a peer were received; drop its old stream."""
        with self.loop:
            known = self._current(peer)
            known.drop_stream()
            return known.numbers.received

    def adopt(self, peer: str, incarnation: int, stream: Stream, received: int) -> None:
        """Go on with a peer over a stream whose hello is done; from any thread."""
        self.loop.acquire()
        known = self.peer(incarnated(peer, incarnation))
        try:
            if known.lost:
                stream.close()
            else:
                known.adopt(stream, received)
        except ProtocolError as error:
            self.lose(known, f"it broke the protocol: {error}")
        finally:
            self.loop.release()

    def lost(self, peer: str, why: str, incarnation: int | None = None) -> None:
        """Give a peer up, unless it is another incarnation; from any thread."""
        with self.loop:
            known = self._current(peer)
            if incarnation in (None, known.incarnation):
                self.lose(known, why)

    # ------------------------------------------------------------------ what peers say

    def control(self, peer: Connection, what: dict[str, Any]) -> None:
        """Handle a control frame of a peer's node."""
        match what:
            case {"ask": int(number), **asked}:
                peer.control({"answer": number, "is": self._answer(asked)})
            case {"answer": int(number), "is": answer}:
                if number in self._answers:
                    self._answers[number] = answer
                    self.loop.wake_waiting()
            case {"gone": str(name), "incarnation": int(incarnation), "why": str(why)}:
                gone = incarnated(name, incarnation)
                if gone == self._worker:
                    self._given_up(peer, why)
                elif gone in self.connections:
                    self.lose(self.connections[gone], why)
            case {"joined": str(name), "incarnation": int(incarnation)}:
                if name not in self._session.settings.workers or incarnation < 1:
                    raise ProtocolError(f"{what!r}: no worker can join by that")
                self._joined(name, incarnation)
            case {"pulse": str(address), "key": str(key)} if peer.pulse is None:
                peer.pulse = Pulse(address, key)
            case {"bye": str(why)}:
                self.lose(peer, why)
            case _:
                raise ProtocolError(f"unknown control frame {what!r}")

    def redial(self, peer: Connection, why: str) -> None:
        """A peer's stream ended: dial again, if this node is the one that dials.

        No other node reports the end of main, so a node that main dials watches it.
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
        """Dial, or look, until there is a stream again, or the peer is given up."""
        refusals = 0
        if clock_ns() - peer.adopted_ns < SHORT_LIVED_NS:  # Perhaps it is not wanted.
            self.stopping.wait(REDIAL_S)
        while not (self.stopping.is_set() or peer.lost or peer.stream is not None):
            try:
                if not self._session.members[peer.name].is_dialled:
                    self._session.look(peer.name)
                    self.stopping.wait(REDIAL_S)
                    continue
                got = self._session.dial(peer.name, self.received(peer.name))
            except (JdagError, OSError) as error:
                _log.info("%s: dialling %s: %s", self._session.worker, peer.name, error)
                if isinstance(error, JoinError) and error.given_up:
                    with self.loop:
                        self._given_up(peer, str(error))
                refusals = refusals + 1 if self._refuses(peer, error) else 0
                if refusals >= REFUSALS_MAX:
                    with self.loop:
                        if peer.stream is None:  # It has not dialled us just now.
                            why = f"its connection ended, and then: {error}"
                            self.lose(peer, why)
                self.stopping.wait(REDIAL_S)  # Bounded by the peer's deadline.
            else:
                self.adopt(peer.name, peer.incarnation, *got)

    def _refuses(self, peer: Connection, error: Exception) -> bool:
        # The end of a watched process is reported to main by its watcher.
        if not isinstance(error, JoinError):
            return False
        is_watched = self._session.watched and not peer.incarnation
        return error.reached or (error.absent and not is_watched)

    def _given_up(self, peer: Connection, why: str) -> None:
        """A peer has given this node up, so it leaves; main loses the peer instead."""
        said = f"{peer.name!r} has given it up: {why}"[:WHY_MAX]
        if self._session.worker == self._session.main:
            self.lose(peer, said)
        elif not self.stopping.is_set():
            _log.warning("worker %r leaves the session: %s", self._worker, said)
            self.end()

    def exhausted(self, peer: Connection, why: str) -> None:
        """Leave because memory is exhausted; main loses the peer instead."""
        if self._session.worker == self._session.main:
            self.lose(peer, f"there is no place for what it sent: {why}")
        elif not self.stopping.is_set():
            _log.warning("worker %r leaves the session: %s", self._worker, why)
            self.close(why)
            self.end()

    def failed(self, peer: Connection, why: str) -> None:
        """Give a peer up, or main if it has been silent for half of the deadline.

        Then this node is cut off itself: it leaves, and no other node gives `peer` up.
        """
        session = self._session
        if session.main not in (session.worker, peer.name):
            main = self._current(session.main)
            silent_s = main.silent_ns(clock_ns()) / 1e9
            if not main.lost and silent_s > session.settings.deadline_s / 2:
                peer, why = main, f"it gave no sign of life for {silent_s:.1f} s"
        self.lose(peer, why)

    def lose(self, peer: Connection, why: str) -> None:
        """Give a peer up, and announce the loss to the others."""
        if peer.lost or self.stopping.is_set():
            return
        why, here = why[:WHY_MAX], self._session.worker
        level = logging.INFO if why == LEFT else logging.WARNING
        _log.log(level, "%s: worker %r is lost: %s", here, peer.worker, why)
        # The other lines are output of its process, which only main reports.
        brief = why.partition("\n")[0]
        gone = {"gone": peer.name, "incarnation": peer.incarnation, "why": brief}
        peer.lose(gone)
        self.gone[peer.worker] = why
        self._session.members.lose(peer.name, peer.incarnation, why)
        if peer.name == self._session.main:
            # A node that loses main leaves; the others detect main's loss themselves.
            lost = f"it has lost {peer.name!r}: {brief}"[:WHY_MAX]
            gone = {"bye": why if why == LEFT else lost}
        for other in tuple(self.connections.values()):
            other.control(gone)
        self._tell(Lost(peer.worker, why))
        if peer.name == self._session.main:
            self.end()
        self.loop.wake_waiting()

    # ------------------------------------------------------------------ asking aside

    def ask_all(
        self,
        what: dict[str, Any],
        within_s: float | None = None,
        *,
        of: Sequence[Connection] | None = None,
        or_raise: bool = False,
    ) -> dict[str, Any]:
        """Ask the nodes of all peers; return the answers of live peers, by name.

        With `of` only these are asked.

        Raises:
            WorkerLost: with `or_raise`, if a peer is lost before it answers.
        """
        loop = self.loop
        due_ns = None if within_s is None else clock_ns() + round(within_s * 1e9)
        with loop:
            asked = self.ask(what, of)
            if due_ns is not None:
                loop.at(due_ns, loop.wake_waiting)

        def done() -> bool:
            late = due_ns is not None and clock_ns() >= due_ns
            return late or self.stopping.is_set() or self.have_answered(asked)

        loop.drive(done)
        answers = self.answers(asked)
        for peer in asked.values() if or_raise else ():
            if peer.name not in answers and peer.lost:
                why = self.gone.get(peer.worker, "")
                raise WorkerLost(f"worker {peer.name!r} was lost when asked: {why}")
        return answers

    def ask(
        self, what: dict[str, Any], of: Sequence[Connection] | None = None
    ) -> OpenQuestions:
        """Ask the nodes of all live peers, or of these; requires the lock."""
        asked: OpenQuestions = {}
        for peer in self.living if of is None else of:
            self._asks += 1
            asked[self._asks] = peer
            self._answers[self._asks] = None
            peer.control({"ask": self._asks, **what})
        return asked

    def have_answered(self, asked: OpenQuestions) -> bool:
        """Whether all that were asked have answered, or are lost."""
        return all(
            self._answers[number] is not None or peer.lost
            for number, peer in asked.items()
        )

    def answers(self, asked: OpenQuestions) -> dict[str, Any]:
        """Return the answers that have come, by name; wait for no others."""
        answers = {peer.name: self._answers.pop(n) for n, peer in asked.items()}
        return {name: answer for name, answer in answers.items() if answer is not None}
