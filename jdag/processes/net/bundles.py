"""Bundles: the messages of one turn of the loop in one frame, with an acknowledgement.

The header of a bundle tells how many messages of `ACKNOWLEDGED` of the peer had been
handled when the first message of the bundle was sent. If more are handled, the next
message begins another bundle. If none follows in that turn, an empty bundle tells the
number. So the peer gets messages and acknowledgements in the order in which they were
sent and handled here.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jdag.processes.net.large_values import BulkQueue, Parcel
from jdag.wire.frames import FRAME_BYTES, MESSAGE_BYTES, FrameKind
from jdag.wire.order import Order

BUNDLE_BYTES = 64 * 1024  # Maximum size of a bundle of several messages.


class Bundles:
    """The outgoing messages of a connection. `order` counts those handled here."""

    def __init__(
        self, order: Order, bulk: BulkQueue, put: Callable[[Parcel], object]
    ) -> None:
        self.told = 0  # The number of the newest parcel.
        self._order = order
        self._bulk = bulk
        self._put = put
        self.open: Parcel | None = None
        self._views: list[Any] = []  # Of the open bundle.

    def add(self, head: bytes, sizes: Sequence[int], values: Sequence[Any]) -> int:
        """Add an encoded message. Return the bytes of the headers before it."""
        length, header_bytes = len(head), MESSAGE_BYTES
        inline: list[memoryview] = []
        if values:
            inline, inline_bytes = self._bulk.split(sizes, values)
            length += inline_bytes
        bundle, handled = self.open, self._order.handled
        nbytes = MESSAGE_BYTES + length
        fits = bundle is not None and bundle.nbytes + nbytes <= BUNDLE_BYTES
        if bundle is None or not fits or bundle.handled != handled:
            self.close()
            self._views = []
            self.open = bundle = Parcel(FrameKind.MESSAGE, self._views, 0, handled)
            self.told = handled
            header_bytes += FRAME_BYTES
        self._views += (length.to_bytes(MESSAGE_BYTES, "little"), head, *inline)
        bundle.nbytes += nbytes
        return header_bytes

    def close(self) -> None:
        bundle, self.open = self.open, None
        if bundle is not None:
            self._put(bundle)

    def flush(self) -> int:
        """Close the bundle. Return the number of messages that an empty one tells."""
        self.close()
        handled = self._order.handled
        count, self.told = handled - self.told, handled
        if count:
            self._put(Parcel(FrameKind.MESSAGE, (), 0, handled))
        return count
