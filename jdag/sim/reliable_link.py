"""One end of a link to one peer: delivers every payload once and in order.

The transport may drop, duplicate, delay or reorder frames. The link does no I/O and
reads no clock: time is an int of nanoseconds, passed as an argument.

Inputs:  `send(payload)`, `receive(frame)`, and `tick()` when `deadline_ns` has come.
Outputs: the frames that `send` and `tick` return, to be put on the wire; the payloads
         that `receive` returns, to be delivered in this order, each once.

How it works. Data frames are numbered 1, 2, ...; each frame, data or not, carries the
highest number up to which everything has arrived. Acknowledgements ride on data; a pure
one (sequence 0) is sent only when nothing was sent for `ack_delay_ns`. Early frames are
kept until the gap is filled; duplicates are counted and dropped.

Resends. There is one timer, for the oldest unacknowledged frame, and only that frame is
sent again: the peer keeps frames after the gap, so most of the rest is already there.
When an acknowledgement exposes a further gap that is also overdue, it is filled at
once: k lost frames cost one wait and k round trips. Waits double, up to `backoff_max`
times the first; any progress resets the wait. After `resend_max` resends of one frame
the peer is lost, which is final.

A wait must not end while bytes are still in flight, or a slow but sound network would
look like a lossy one. So `send` takes the expected flight time of its frame
(`flight_ns`), and `tick` the time until which the path is known to be busy
(`busy_until_ns`: the acknowledgement may be queued behind a large payload). This
postpones each resend at most once, so that steady traffic cannot starve a lost frame.

Invariants: at most `window_max` frames are unacknowledged, and as many wait for a gap
to be filled; when both ends are idle, neither holds a frame; a delivered payload is
never delivered again. A restarted peer needs a new link.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from jdag.errors import ProtocolError, WorkerLost, unusable
from jdag.settings.validation import COUNT, NATURAL, Settings

NEVER = 1 << 128  # Later than any time.


class Frame(Struct, frozen=True):
    """One frame.

    `sequence` is 0 for a pure acknowledgement; `acknowledged` is the highest number up
    to which its sender has received everything.
    """

    sequence: int
    acknowledged: int
    payload: Any = None


class LinkSettings(Settings, frozen=True):
    """The timing and limits of a link.

    `resend_ns`: the first wait after a frame should have arrived (see `Link.send`); it
    covers the peer's `ack_delay_ns` and the way back. `resend_max`: resends of one
    frame after which the peer is lost. `ack_delay_ns`: how long an acknowledgement
    waits for data to ride on; less than `resend_ns`. `backoff_max`: the longest wait,
    in first waits. `window_max`: unacknowledged frames at once; the same at both ends.

    Raises:
        ScenarioError: a value is not an int or too small, or `ack_delay_ns` is not less
            than `resend_ns`.
    """

    resend_ns: COUNT
    resend_max: NATURAL
    ack_delay_ns: NATURAL
    backoff_max: COUNT = 64
    window_max: COUNT = 1 << 20

    def contradictions(self) -> Iterator[str]:
        """Each frame would be sent twice."""
        if self.ack_delay_ns >= self.resend_ns:
            allowed = f"an integer below resend_ns = {self.resend_ns}, or each frame is"
            allowed += " sent twice"
            yield unusable("ack_delay_ns", self.ack_delay_ns, allowed)


class Link:
    """One end of a link to `peer`.

    `deadline_ns` is when `tick` must be called next, or `NEVER`; a time in the past
    means now. It changes with every call, so a driver arms one timer at the earliest
    deadline it saw and checks again when that fires.

    Counters: `sent` data frames (also the number of the last one), `resent` frames and
    received `duplicates`.
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
        self.acknowledged = 0  # The peer is known to have everything up to here.
        self.received = 0  # Everything up to here has arrived.
        self._early: dict[int, Any] = {}
        # Oldest first: (payload, flight_ns, when its acknowledgement is overdue).
        self._unacked: deque[tuple[Any, int, int]] = deque()
        self.deadline_ns = self._resend_due_ns = self._ack_due_ns = NEVER
        self._tries = 0
        self._put_off = False

    def send(self, payload: Any, now_ns: int, flight_ns: int = 0) -> Frame:
        """The next data frame, to be put on the wire now.

        `flight_ns` is the expected time of this frame on the path: queueing,
        transmission and latency. Its acknowledgement is awaited for `flight_ns +
        resend_ns`; a driver that leaves it 0 needs a `resend_ns` that covers the
        largest payload.

        Raises:
            WorkerLost: the link has given up.
            ProtocolError: `window_max` frames are unacknowledged.
        """
        unacked = self._unacked
        settings = self._settings
        if self.lost:
            raise WorkerLost(f"{self.peer}: lost after {settings.resend_max} resends")
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
        """The payloads that this frame makes deliverable, in order; often one or none.

        Raises:
            ProtocolError: numbers that violate the protocol.
        """
        if self.lost:
            return ()  # Lost is final: later frames are ignored.
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
        """The frames that are due: a resend, a pure acknowledgement, or none.

        `busy_until_ns` is when everything now on the path, in both directions, will
        have arrived, as far as the driver knows; silence until then is no loss. Sets
        `lost`, and sends nothing more, when the oldest frame was resent `resend_max`
        times.
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
                f"link to {self.peer}: frame {acknowledged} is acknowledged;"
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
                    f"link to {self.peer}: frame {sequence}; the first is 1"
                )
            self.duplicates += 1
            return ()
        if sequence >= first + self._settings.window_max:
            raise ProtocolError(
                f"link to {self.peer}: frame {sequence}; the next is {first}, and"
                f" window_max = {self._settings.window_max} bounds how early one comes"
            )
        self._early[sequence] = payload
        ready = []
        while self.received + 1 in self._early:  # Bounded by the frames kept.
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
    """A link whose frames all arrive, each once and in order: nothing acknowledges."""

    __slots__ = ()

    def send(self, payload: Any, now_ns: int, flight_ns: int = 0) -> Frame:
        """See `Link.send`."""
        self.sent += 1
        return Frame(self.sent, 0, payload)

    def receive(self, frame: Frame, now_ns: int) -> tuple[Any, ...]:
        """See `Link.receive`."""
        return (frame.payload,)
