"""The outbox of one peer: what it counts as waiting, and what leaves in which order."""

import jax.numpy as jnp

from jdag.rpc.outbox import OUT_BYTES, WINDOW_BYTES, Outbox
from jdag.rpc.peer import LINK
from jdag.rpc.segments import Segments
from jdag.wire.frames import CHUNK_MAX_BYTES
from jdag.wire.link import Frame, Link
from jdag.wire.messages import Codec
from tests.peer_cases import primal


def made() -> tuple[Outbox, Link]:
    link = Link("b", LINK)
    return Outbox(link, Codec(("a", "b")), Segments("b", lambda: None)), link


def leave(outbox: Outbox) -> int:
    """Have the stream take all there is; how many bytes that were."""
    total = 0
    while outbox.fill():
        nbytes = sum(len(view) for view in outbox.views())
        outbox.taken(nbytes)
        total += nbytes
    return total


def test_frames_without_a_number_still_wait_when_their_stream_breaks():
    outbox, _ = made()
    for number in (1, 2, 3):
        outbox.send(primal(number), [jnp.arange(1_000.0)])
    waiting = outbox.waiting
    assert waiting > 3 * 8_000
    outbox.unsend()
    assert outbox.waiting == waiting
    assert leave(outbox) == waiting and outbox.waiting == 0


def test_after_a_break_bulk_waits_for_what_waits_for_the_stream_as_before():
    outbox, link = made()
    for number in (1, 2, 3, 4, 5):
        outbox.send(primal(number), [jnp.arange(25_000.0)])
    outbox.send(primal(6), [jnp.arange(500_000.0)])
    outbox.unsend()
    assert outbox.fill() and outbox.waiting > OUT_BYTES
    assert link.sent == 6  # The messages, and no chunk yet.
    leave(outbox)
    assert link.sent > 6 and outbox.waiting == 0


def test_bulk_waits_while_a_window_of_it_is_unacknowledged():
    outbox, link = made()
    outbox.send(primal(1), [jnp.zeros(3 * WINDOW_BYTES, jnp.uint8)])
    for left in (True, True, False):
        sent = leave(outbox)
        assert bool(outbox.bulk_bytes) == left
        assert sent <= WINDOW_BYTES + CHUNK_MAX_BYTES + 1_000  # With headers.
        link.receive(Frame(0, link.sent), 0)
        outbox.acknowledged()
    assert outbox.empty
