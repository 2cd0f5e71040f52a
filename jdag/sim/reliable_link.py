"""One end of a reliable link to a peer: delivers every payload once and in order.

The transport may drop, duplicate, delay or reorder frames. The link does no I/O and
reads no clock: time is an int of nanoseconds, passed as an argument.

Inputs:  calls of `send(payload)`, `receive(frame)`, and of `tick()` at `deadline_ns`.
Outputs: the frames that `send` and `tick` return, to be transmitted; the payloads that
         `receive` returns, to be delivered in this order, each once.

Protocol. Data frames are numbered 1, 2, ...; every frame carries the highest number up
to which all frames have arrived. Acknowledgements are part of data frames; a pure
acknowledgement (sequence 0) is sent only if no data was sent for `ack_delay_ns`. Early
frames are kept until the gap before them is filled; duplicates are counted and dropped.

Resends. There is one timer, for the oldest unacknowledged frame, and only that frame is
sent again: the peer keeps frames after the gap, so most other frames have arrived. If
an acknowledgement shows that the next missing frame is also overdue, that frame is
resent at once, so k lost frames cost one timeout and k round trips. Timeouts double, up
to `backoff_max` times the first; any progress resets them. After `resend_max` resends
of one frame the peer is permanently lost.

A timeout must not expire while bytes are still in flight, or a slow network would look
like a lossy one. So `send` takes the expected flight time of its frame (`flight_ns`),
and `tick` the time until which the path is known to be busy (`busy_until_ns`: the
acknowledgement may be queued behind a large payload). This postpones each resend at
most once, so that steady traffic cannot starve a lost frame.

Invariants: at most `window_max` frames are unacknowledged, and at most as many early
frames are kept; when both ends are idle, neither holds a frame; a payload is delivered
once. A restarted peer needs a new link.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from jdag.errors import ProtocolError, WorkerLost, unusable
from jdag.settings.validation import COUNT, NATURAL, Settings

NEVER = 1 << 128  # Later than any time.


class Frame(Struct, frozen=True):
    """A frame; `sequence` is its number, or 0 for a pure acknowledgement.

    The sender of this frame has received all frames up to the number `acknowledged`.
    """

    sequence: int
    acknowledged: int
    payload: Any = None


class LinkSettings(Settings, frozen=True):
    """Timeouts and limits of a simulated link; times in ns.

    Attributes:
        resend_ns: the first timeout, counted from a frame's expected arrival. It must
            exceed the peer's `ack_delay_ns` plus the way back.
        resend_max: the number of resends of one frame after which the peer is lost.
        ack_delay_ns: how long an acknowledgement waits for a data frame to carry it;
            less than `resend_ns`.
        backoff_max: the longest timeout, as a multiple of the first.
        window_max: limit of unacknowledged frames. Both ends must have the same limit.

    Raises:
        ScenarioError: a value is not an integer or too small, or `ack_delay_ns` is not
            less than `resend_ns`.
    """

    resend_ns: COUNT
    resend_max: NATURAL
    ack_delay_ns: NATURAL
    backoff_max: COUNT = 64
    window_max: COUNT = 1 << 20

    def contradictions(self) -> Iterator[str]:
        """Yield an error if every frame would be sent twice."""
        if self.ack_delay_ns >= self.resend_ns:
            allowed = f"an integer below resend_ns = {self.resend_ns}, since otherwise "
            allowed += "each frame is sent twice"
            yield unusable("ack_delay_ns", self.ack_delay_ns, allowed)


class Link:
    """One end of a link to `peer`.

    `tick` must be called at `deadline_ns` (a time in the past means at once). Every
    call of a method may change `deadline_ns`. A driver sets one timer at the earliest
    deadline so far, and checks `deadline_ns` again when the timer expires.

    Counters: `sent` data frames (also the sequence number of the last one), `resent`
    frames and received `duplicates`.
    """

    __slots__ = (
        "_ack_due_ns",
        "_early",
        "_put_off",
        "_resend_due_ns",
        "_settings",
        "_tries",
        "_unacked",
        "acknowledged",
        "deadline_ns",
        "duplicates",
        "lost",
        "peer",
        "received",
        "resent",
        "sent",
    )

    def __init__(self, peer: str, settings: LinkSettings) -> None:
        self.peer = peer
        self.lost = False
        self.sent = self.resent = self.duplicates = 0
        self._settings = settings
        self.acknowledged = 0  # The peer has acknowledged frames up to this number.
        self.received = 0  # All frames up to this number have arrived.
        self._early: dict[int, Any] = {}
        # Oldest first: (payload, flight_ns, time at which it is overdue).
        self._unacked: deque[tuple[Any, int, int]] = deque()
        self.deadline_ns = self._resend_due_ns = self._ack_due_ns = NEVER
        self._tries = 0
        self._put_off = False

    def send(self, payload: Any, now_ns: int, flight_ns: int = 0) -> Frame:
        """Return the next data frame, to be transmitted now.

        `flight_ns` is the expected time of this frame on the path: queueing,
        transmission and latency. The frame is overdue after `flight_ns + resend_ns`; a
        driver that passes 0 needs a `resend_ns` that covers the largest payload. Raises
        WorkerLost if the link has given up its peer, and ProtocolError if `window_max`
        frames are unacknowledged.
        """
        unacked = self._unacked
        settings = self._settings
        if self.lost:
            raise WorkerLost(f"{self.peer} is lost after {settings.resend_max} resends")
        if len(unacked) >= settings.window_max:
            raise ProtocolError(
                f"link to {self.peer}: {len(unacked)} frames are unacknowledged;"
                f" window_max = {settings.window_max} allows no more"
            )
        due_ns = now_ns + flight_ns + settings.resend_ns
        if not unacked:
            self._resend_due_ns = due_ns
        unacked.append((payload, flight_ns, due_ns))
        self.sent += 1
        self._ack_due_ns = NEVER
        self.deadline_ns = self._resend_due_ns
        return Frame(self.sent, self.received, payload)

    def receive(self, frame: Frame, now_ns: int) -> tuple[Any, ...]:
        """Return the payloads that this frame makes deliverable, in order.

        Raises ProtocolError for numbers that violate the protocol.
        """
        if self.lost:
            return ()  # A lost peer stays lost: later frames are ignored.
        sequence, payload = frame.sequence, frame.payload
        if frame.acknowledged > self.acknowledged:
            self._acknowledge(frame.acknowledged)
        ready: tuple[Any, ...] = ()
        if sequence:
            if sequence == self.received + 1 and not self._early:
                self.received = sequence
                ready = (payload,)
            else:
                ready = self._reorder(sequence, payload)
            if self._ack_due_ns == NEVER:
                self._ack_due_ns = now_ns + self._settings.ack_delay_ns
        resend_ns, ack_ns = self._resend_due_ns, self._ack_due_ns
        self.deadline_ns = resend_ns if resend_ns < ack_ns else ack_ns
        return ready

    def tick(self, now_ns: int, busy_until_ns: int = 0) -> tuple[Frame, ...]:
        """Return the frames to send now: a resend, a pure acknowledgement or both.

        `busy_until_ns` is the time at which all frames that are now on the path, in
        both directions, will have arrived; silence until then does not indicate a loss.
        If the oldest frame is overdue and was resent `resend_max` times, this sets
        `lost` and returns nothing; so do all later calls.
        """
        if self.lost:
            return ()
        frames: list[Frame] = []
        if self._resend_due_ns <= now_ns:
            if busy_until_ns > now_ns and not self._put_off:
                self._put_off = True
                self._resend_due_ns = busy_until_ns + self._settings.resend_ns
            elif self._tries == self._settings.resend_max:
                self.lost = True
                self.deadline_ns = self._resend_due_ns = self._ack_due_ns = NEVER
                return ()
            else:
                frames.append(self._resend(now_ns))
        if self._ack_due_ns <= now_ns:
            self._ack_due_ns = NEVER
            frames.append(Frame(0, self.received))
        self.deadline_ns = min(self._resend_due_ns, self._ack_due_ns)
        return tuple(frames)

    def _acknowledge(self, acknowledged: int) -> None:
        if acknowledged > self.sent:
            raise ProtocolError(
                f"link to {self.peer}: frame {acknowledged} is acknowledged, but frame"
                f" {self.sent} is the last that was sent"
            )
        unacked = self._unacked
        for _ in range(acknowledged - self.acknowledged):
            unacked.popleft()
        self.acknowledged = acknowledged
        self._tries = 0
        self._put_off = False
        self._resend_due_ns = unacked[0][2] if unacked else NEVER

    def _reorder(self, sequence: int, payload: Any) -> tuple[Any, ...]:
        first = self.received + 1
        if sequence < first or sequence in self._early:
            if sequence < 1:
                raise ProtocolError(
                    f"link to {self.peer}: frame {sequence}; expected 1 or more"
                )
            self.duplicates += 1
            return ()
        if sequence >= first + self._settings.window_max:
            raise ProtocolError(
                f"link to {self.peer}: frame {sequence} is too early; the next is"
                f" {first}, and window_max = {self._settings.window_max}"
            )
        self._early[sequence] = payload
        ready = []
        while self.received + 1 in self._early:  # Bounded by the early frames.
            self.received += 1
            ready.append(self._early.pop(self.received))
        return tuple(ready)

    def _resend(self, now_ns: int) -> Frame:
        payload, flight_ns, _ = self._unacked[0]
        settings = self._settings
        self._tries += 1
        self._put_off = False
        self.resent += 1
        waits = min(1 << self._tries, settings.backoff_max)
        self._resend_due_ns = now_ns + flight_ns + settings.resend_ns * waits
        self._ack_due_ns = NEVER
        return Frame(self.acknowledged + 1, self.received, payload)


class SureLink(Link):
    """A link without acknowledgements, over a transport that delivers exactly once."""

    __slots__ = ()

    def send(self, payload: Any, now_ns: int, flight_ns: int = 0) -> Frame:
        self.sent += 1
        return Frame(self.sent, 0, payload)

    def receive(self, frame: Frame, now_ns: int) -> tuple[Any, ...]:
        return (frame.payload,)
