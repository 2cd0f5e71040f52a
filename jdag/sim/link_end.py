"""One worker's end of its link to a peer, and what travels between two ends."""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from msgspec import Struct

from jdag.engine.protocol import Message, Worker
from jdag.runtime.recorder import NO_CAUSE
from jdag.runtime.worker_runtime import WorkerRuntime
from jdag.sim.network import Lane, LinkModel
from jdag.sim.reliable_link import NEVER, Link, LinkSettings
from jdag.wire.order import Order

ACK_DELAY_NS = 1_000_000
RESEND_MAX = 10


class SimItem(Struct, frozen=True):
    """One message of a frame, with its values.

    `fields` describe the message in a trace, and are () without a trace. `record` is
    the trace record of its send. With a control lane, `value_bytes` is the size of its
    values on the data lane, which have all arrived at `whole_ns`.
    """

    message: Message
    fields: tuple[Any, ...]
    values: tuple[Any, ...]
    record: int
    value_bytes: int
    whole_ns: int


class SimBundle(Struct, frozen=True):
    """The payload of a frame: messages, and the number of handled messages.

    `handled` counts the messages of `ACKNOWLEDGED` of the other direction. `fields`
    and `record` are those of the first message in the trace, or of the frame itself if
    it has no message.
    """

    handled: int
    items: tuple[SimItem, ...]
    wire_bytes: int
    fields: tuple[Any, ...]
    record: int


# A message to be sent, its values, and its causes in the trace.
Unsent = tuple[Message, tuple[Any, ...], tuple[int, ...]]


@lru_cache(1024)
def link_settings(forth: LinkModel, back: LinkModel) -> LinkSettings:
    """Return timeouts for a pair of links. Without faults, no frame is resent."""
    trip_ns = forth.flight_ns + forth.jitter_ns + back.flight_ns + back.jitter_ns
    return LinkSettings(
        resend_ns=4 * ACK_DELAY_NS + 2 * trip_ns,
        resend_max=RESEND_MAX,
        ack_delay_ns=ACK_DELAY_NS,
    )


def gives_up_ns(settings: LinkSettings) -> int:
    """Return the time in ns (without latencies) until a link gives up its peer."""
    waits = [1 << tries for tries in range(settings.resend_max + 1)]
    return settings.resend_ns * sum(min(w, settings.backoff_max) for w in waits)


@dataclass(slots=True, eq=False)
class LinkEnd:
    """One worker's end of its link to a peer. Each incarnation has ends of its own.

    `route` has the names of worker and peer. `out` is the lane from this worker to the
    peer, and `back` the lane from the peer. If `out` is a control lane, `data` is the
    lane of values, and `order` holds messages that have arrived but must wait. `record`
    is the trace record of the last frame sent, `heard` that of the last one received.

    `unsent` has the messages of the next frame, which will tell the peer that `opened`
    of its messages were handled; `told` is the number that the last frame told, and
    `handled` the records of the messages handled since. The peer has handled
    `acknowledged` of this worker's messages.
    """

    host: WorkerRuntime
    worker: Worker
    peer: Worker
    route: tuple[str, str]
    link: Link
    out: Lane
    back: Lane
    data: Lane | None = None
    order: Order = field(default_factory=Order)
    twin: "LinkEnd" = field(init=False)
    open: bool = True
    timer_ns: int = NEVER
    record: int = NO_CAUSE
    heard: int = NO_CAUSE
    messages: int = 0
    payload_bytes: int = 0
    zero_bytes: int = 0  # Total size of arrays of zeros, which are not sent.
    unsent: list[Unsent] = field(default_factory=list)
    opened: int = 0
    told: int = 0
    handled: list[int] = field(default_factory=list)
    acknowledged: int = 0
    leaves: bool = False  # Whether `flush` will be called for this end.

    def passed(self, record: int, value_bytes: int) -> None:
        self.record = record
        self.out.passed(record)
        if value_bytes and self.data is not None:
            self.data.passed(record)
