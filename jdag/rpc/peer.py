"""One node's end of its pair with another, over a stream that may be remade.

All frames go through one `wire.link.Link`, which lives as long as the pair does: when a
connection breaks, the next one goes on where the peer's link stood.

Told:  `send`, `define`, `aside`; `flush` at the end of a turn; `adopt` for a stream;
       what the stream has to read; `lose`.
Gives: to its `Owner`: `speaks` when there is something to flush; `arrived` for each
       message whose turn it is, whole; `defined`, `told`; `broken` when the stream
       ended; `silent` when the peer was not heard for most of the deadline, so that
       who waits hears of it within that, or when it broke the protocol.

Invariants: frames reach the peer's link once and in order; a lost peer takes and gives
nothing any more; a peer whose stream is open is heard, or asked for a sign of life,
four times in each deadline.
"""

import logging
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from jdag.compute.buffers import Buffers
from jdag.engine.vocabulary import Message, incarnated
from jdag.errors import JdagError
from jdag.rpc.inbox import PING, Inbox
from jdag.rpc.loop import READ, WRITE, Loop, Timer, clock_ns
from jdag.rpc.outbox import FORGOTTEN, FREED, OFFERED, Outbox
from jdag.rpc.segments import Borrowed, Segment, Segments
from jdag.rpc.streams import Stream
from jdag.wire.link import Link, LinkSettings
from jdag.wire.messages import Codec

ACK_BYTES = 1024 * 1024  # So many bytes of chunks are acknowledged at once.
PONG = b"!"
LAST_READS_MAX = 64
SILENT = 90  # A peer may be silent for so much of the deadline, in percent.
# A stream loses nothing: what is not acknowledged is sent again when it is remade.
LINK = LinkSettings(resend_ns=1 << 62, resend_max=0, ack_delay_ns=20_000_000)

_log = logging.getLogger(__name__)


class Owner(Protocol):
    """The node that a peer belongs to."""

    def arrived(self, peer: "Peer", message: Message, values: Sequence[Any]) -> None:
        """A message is here, with its values in the order of `landing(message)`."""

    def defined(self, peer: "Peer", digest: bytes, data: bytes) -> None:
        """The peer will call a function of this digest."""

    def told(self, peer: "Peer", what: dict[str, Any]) -> None:
        """The peer's node asks or tells something beside the engines."""

    def speaks(self, peer: "Peer") -> None:
        """The peer is to be flushed at the end of this turn."""

    def broken(self, peer: "Peer", why: str) -> None:
        """The stream ended; another one may be adopted."""

    def silent(self, peer: "Peer", why: str) -> None:
        """The peer is to be given up."""

    def exhausted(self, peer: "Peer", why: str) -> None:
        """This node cannot take what the peer sends, and is to be given up."""


class Peer:
    """This node's end of its pair with the node of that name and incarnation.

    Args:
        name: of the other worker.
        incarnation: of the other worker.
        loop: of this node.
        codec: of its cluster.
        owner: the node.
        buffers: where large values are received.
        deadline_ns: a peer that is silent for so long is given up.
        value_bytes_max: the largest value that is taken.
    """

    def __init__(
        self,
        name: str,
        incarnation: int,
        *,
        loop: Loop,
        codec: Codec,
        owner: Owner,
        buffers: Buffers,
        deadline_ns: int,
        value_bytes_max: int,
    ) -> None:
        self.name = name
        self.incarnation = incarnation
        self.worker = incarnated(name, incarnation)
        self.lost = False
        self.flushing = False  # Whether its owner knows that there is more to send.
        self.stream: Stream | None = None
        self.link = Link(name, LINK)
        self._segments = Segments(name, self._offer)
        self._offering = False  # Whether there may be a segment to offer.
        self._to_offer: deque[Segment] = deque()
        self._returned: deque[int] = deque()  # Segments that hold no array any more.
        self._borrowed = borrowed = Borrowed(name, self._return)
        self.outbox = Outbox(self.link, codec, self._segments)
        self.inbox = Inbox(self.link, codec, self, buffers, borrowed, value_bytes_max)
        self.heard_ns = self.adopted_ns = clock_ns()
        self.allowed: tuple[str, ...] = ()  # Modules whose functions it may name.
        self.zero_bytes = 0
        self._sent: dict[bytes, None] = {}  # Functions that it was sent.
        self._loop = loop
        self._owner = owner
        self._deadline_ns = deadline_ns
        self._waits_to_write = False
        self._said_bytes = 0  # Of chunks that came, and were acknowledged.
        self._ack_timer: Timer | None = None
        self._look_ns = self.heard_ns + deadline_ns // 4
        self._alive_timer = loop.at(self._look_ns, self._check_alive)

    def __repr__(self) -> str:
        return f"Peer({self.name}, incarnation {self.incarnation})"

    # ------------------------------------------------------------------ its stream

    def adopt(self, stream: Stream, received: int) -> None:
        """Go on over a new stream, from where the peer's link stands."""
        self.drop_stream()
        self.outbox.again(received)
        self.stream = stream
        self.outbox.local = stream.local
        self.adopted_ns = clock_ns()
        self._loop.register(stream.fileno(), self._ready)
        self._pure(PING)  # That it can be connected to is no sign of life.

    def lose(self, last: dict[str, Any]) -> None:
        """Be done with the peer; it is told a last thing, if it hears that at once."""
        self.aside(last)
        self.lost = True
        self.flush()
        self.drop_stream()
        self._alive_timer.cancel()
        if self._ack_timer is not None:
            self._ack_timer.cancel()
        self.outbox.clear()
        self.inbox.clear()
        self._segments.close()

    def drop_stream(self) -> None:
        """Let go of the stream, and of what was half said or half heard on it."""
        stream, self.stream = self.stream, None
        if stream is not None:
            self._loop.unregister(stream.fileno())
            stream.close()
        self.outbox.unsend()
        self.inbox.interrupt()
        self._waits_to_write = False

    def _break(self, why: object) -> None:
        self.drop_stream()
        self._owner.broken(self, str(why))

    def _check_alive(self) -> None:
        """Now and then: ask for a sign of life, or give the peer up for want of it."""
        now_ns, quarter_ns = clock_ns(), self._deadline_ns // 4
        if now_ns - self._look_ns >= quarter_ns:
            # It was this node that was away: what has come meanwhile is not read yet.
            self.heard_ns = max(self.heard_ns, now_ns - 2 * quarter_ns)
        limit_ns = self._deadline_ns * SILENT // 100
        if now_ns - self.heard_ns >= limit_ns and self.stream is not None:
            self._ready(READ)  # Perhaps it was said, and nobody has looked.
            if self.lost:
                return
        silent_ns = now_ns - self.heard_ns
        if silent_ns >= limit_ns:
            seconds = silent_ns / 1e9
            self._owner.silent(self, f"it gave no sign of life for {seconds:.1f} s")
            return
        if silent_ns >= quarter_ns and self.stream is not None:
            self._pure(PING)
        self._borrowed.let_go()
        for number in self._segments.sweep(now_ns):
            self._say_of_segment(FORGOTTEN, number)
        again_ns = min(now_ns + quarter_ns, self.heard_ns + limit_ns)
        self._look_ns = max(again_ns, now_ns + 1)
        self._alive_timer = self._loop.at(self._look_ns, self._check_alive)

    # ------------------------------------------------------------------ what leaves

    def send(self, message: Message, values: Sequence[Any]) -> None:
        """Send a message with its values; it leaves with the next flush.

        Raises:
            ProtocolError: it has in it what cannot travel.
        """
        if not self.lost:
            self.outbox.send(message, values)
            self._has_more()

    def define(self, digest: bytes, data: bytes) -> None:
        """Send a function that messages after this one name by its digest, once."""
        if not self.lost and digest not in self._sent:
            self._sent[digest] = None
            self.outbox.define(digest, data)

    def aside(self, what: dict[str, Any]) -> None:
        """Tell the peer's node something."""
        if not self.lost:
            self.outbox.aside(what)
            self._has_more()

    def _pure(self, payload: bytes = b"") -> None:
        self.outbox.pure(payload)
        self._has_more()

    def _has_more(self) -> None:
        """There is something to flush: the owner is to do that in this turn."""
        if not self.flushing:
            self.flushing = True
            self._owner.speaks(self)
            self._loop.dirty()

    def flush(self) -> None:
        """Give the stream all that it takes now."""
        outbox = self.outbox
        self.flushing = False
        stream = self.stream
        if stream is None or self._waits_to_write:
            return
        if outbox.empty and not (self._offering or stream.wants_write()):
            return
        try:
            if self._offering:
                self._offer_on(stream)
            while outbox.fill():  # Bounded by what waits; each round gives bytes away.
                outbox.taken(stream.send(outbox.views()))
                if self._offering:
                    self._offer_on(stream)
            stream.flush()
            if outbox.copying:
                self._has_more()
        except BlockingIOError:
            self._wait_to_write(True)
        except (ConnectionError, OSError) as error:
            self._hear_out(stream)
            if self.stream is stream:
                self._break(error)

    def _hear_out(self, stream: Stream) -> None:
        """Read what the peer said before it hung up: it may be why."""
        for _ in range(LAST_READS_MAX):
            if self.lost or self.stream is not stream:
                return
            self._ready(READ)

    def _wait_to_write(self, waits: bool) -> None:
        assert self.stream is not None, self
        self._waits_to_write = waits
        self._loop.watch(self.stream.fileno(), READ | WRITE if waits else READ)

    # ------------------------------------------------------------------ shared memory

    def _offer(self) -> None:
        """There is a new segment to be offered; from any thread."""
        self._loop.post(self._offer_soon)

    def _offer_soon(self) -> None:
        if not self.lost:
            self._offering = True
            self._has_more()

    def _offer_on(self, stream: Stream) -> None:
        """Offer a new segment, if there is one, between two frames."""
        if self.outbox.queued or not stream.local:
            return
        self._offering = False
        self._to_offer.extend(self._segments.offers(clock_ns()))
        while self._to_offer:  # Each turn offers one, or raises.
            segment = self._to_offer[0]
            payload = OFFERED + segment.number.to_bytes(7, "little")
            payload += segment.nbytes.to_bytes(8, "little")
            frame = self.outbox.bare(payload)
            try:
                sent = stream.send_segment([memoryview(frame)], segment.descriptor)
            except (ConnectionError, BlockingIOError):
                self._offering = True
                raise
            except OSError as error:  # Without it, arrays go by the socket.
                _log.info("%s: no segment is offered: %s", self, error)
                sent = len(frame)
            self._to_offer.popleft()
            self.outbox.rest(frame[sent:])
            if self.outbox.queued:
                self._offering = bool(self._to_offer)
                return

    def _return(self, number: int) -> None:
        """An array in a segment of the peer's is gone; from any thread, any time."""
        self._returned.append(number)
        self._loop.post(self._return_now)

    def _return_now(self) -> None:
        while self._returned:
            self._say_of_segment(FREED, self._returned.popleft())

    def _say_of_segment(self, what: bytes, number: int) -> None:
        if not self.lost:
            self.outbox.about_segment(what, number)
            self._has_more()

    def freed(self, segment: int) -> None:
        """The peer needs a segment no more."""
        self._segments.freed(segment, clock_ns())

    # ------------------------------------------------------------------ what comes

    def _ready(self, mask: int) -> None:
        """The stream has something to read, or room to write."""
        if mask & WRITE and self._waits_to_write:
            self._wait_to_write(False)
            self._has_more()
        if not mask & ~WRITE or self.stream is None:
            return
        try:
            heard = self.inbox.read(self.stream)
        except JdagError as error:  # What it sent is no frame, or no message.
            self._owner.silent(self, f"it broke the protocol: {error}")
        except MemoryError as error:  # Not its doing; nobody can go on from here.
            self._owner.exhausted(self, f"it has no memory for what was sent: {error}")
        except (ConnectionError, OSError) as error:
            self._break(error)
        except Exception as error:  # Whatever it made of this node is its doing.
            _log.exception("%s: what it sent cannot be read", self)
            self._owner.silent(self, f"it broke the protocol: {error!r}")
        else:
            if heard:
                self.heard_ns = clock_ns()
            self._after_reading()
            if self.stream is not None and self.stream.pending():
                self._loop.soon(self._read_on)  # What TLS has, the poller does not see.

    def _read_on(self) -> None:
        if self.stream is not None and self.stream.pending():
            self._ready(READ)

    def _after_reading(self) -> None:
        if self.lost:
            return
        if self.outbox.acknowledged():
            self._has_more()
        if self.inbox.chunk_bytes - self._said_bytes >= ACK_BYTES:
            self._said_bytes = self.inbox.chunk_bytes
            self._pure()
        self._await_tick()

    def _await_tick(self) -> None:
        """Look when an acknowledgement is due; what is to be resent never is."""
        due_ns = self.link.deadline_ns
        if due_ns is not None and due_ns < LINK.resend_ns and self._ack_timer is None:
            self._ack_timer = self._loop.at(due_ns, self._tick)

    def _tick(self) -> None:
        """An acknowledgement may be due that nothing carried."""
        self._ack_timer = None
        link, now_ns = self.link, clock_ns()
        if self.lost or link.deadline_ns is None or self.stream is None:
            return
        if link.deadline_ns <= now_ns and link.tick(now_ns):
            self._pure()
        else:
            self._await_tick()

    # ------------------------------------------------------------------ its inbox's

    def arrived(self, message: Message, values: Sequence[Any]) -> None:
        """A message came; see `Owner`."""
        self._owner.arrived(self, message, values)

    def defined(self, digest: bytes, data: bytes) -> None:
        """A function came; see `Owner`."""
        self._owner.defined(self, digest, data)

    def told(self, what: dict[str, Any]) -> None:
        """An aside came; see `Owner`."""
        self._owner.told(self, what)

    def pinged(self) -> None:
        """It wants a sign of life."""
        self._pure(PONG)
