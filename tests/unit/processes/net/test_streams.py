"""Bytes cross a stream whole and in order, whatever the sizes; ends say why."""

import os
import random
import resource
import select
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from jdag.processes.net.streams import DESCRIPTORS_MAX, VIEWS_MAX, SocketStream, Stream
from tests.tools.error_texts import fails_with
from tests.tools.stream_cases import (
    no_new_descriptors,
    pour,
    receive,
    send_all,
    sockets,
    streams,
    wait,
)

Ends = tuple[Stream, Stream]


@pytest.fixture(params=["unix", "tcp"])
def ends(request: Any) -> Iterator[Ends]:
    with streams(request.param) as made:
        yield made


def test_random_views_arrive_whole_and_in_order_by_random_reads(ends: Ends):
    chance = random.Random(1)
    data = chance.randbytes(6 << 20)
    near, far = ends
    thread = threading.Thread(target=pour, args=(near, data, random.Random(2)))
    thread.start()
    came = bytearray()
    while len(came) < len(data):
        most = min(chance.randint(1, 100_000), len(data) - len(came))
        came += receive(far, chance.randint(1, most))
    thread.join()
    assert came == data


def test_what_does_not_fit_is_left_to_the_caller(ends: Ends):
    near, far = ends
    block = memoryview(bytes(1 << 20))
    sent = 0
    with pytest.raises(BlockingIOError):
        while sent < 1 << 28:
            sent += near.send([block, block])
    assert sent
    receive(far, sent)
    with pytest.raises(BlockingIOError):
        far.recv_into(memoryview(bytearray(1)))
    wait(near, select.POLLOUT)  # The system may take a while to see that.
    assert near.send([block])


def test_more_views_than_the_system_takes_and_empty_ones_go_in_several_calls(
    ends: Ends,
):
    data = bytes(range(256)) * 16
    near, far = ends
    views = [memoryview(data)[i : i + 1] for i in range(len(data))]
    assert near.send(views) == VIEWS_MAX
    assert receive(far, VIEWS_MAX) == data[:VIEWS_MAX]
    assert near.send([memoryview(b"")] * 2000 + [memoryview(b"abc")]) == 3
    assert receive(far, 3) == b"abc"


def test_what_was_sent_before_the_end_arrives_and_then_the_end_is_said(ends: Ends):
    near, far = ends
    send_all(near, b"last words")
    near.close()
    assert receive(far, 10) == b"last words"
    with pytest.raises(ConnectionError, match=f"{near.peer} closed the connect"):
        receive(far, 1)


def test_sending_to_a_peer_that_is_gone_is_an_error_and_no_signal(ends: Ends):
    near, far = ends
    far.close()
    with pytest.raises(ConnectionError, match=f"to {near.peer} broke: "):
        while True:
            send_all(near, bytes(1 << 16))


def test_a_reset_says_so():
    near, far = sockets("tcp")
    stream = SocketStream(near, "tcp:127.0.0.1:7")
    far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    far.close()
    with fails_with(ConnectionError, "processes.tcp_127_0_0_1"):
        receive(stream, 1)
    stream.close()


def test_a_closed_end_refuses_and_closes_again(ends: Ends):
    near, _ = ends
    near.close()
    near.close()
    assert near.fileno() == -1
    with pytest.raises(ConnectionError):
        near.send([memoryview(b"a")])
    with pytest.raises(ConnectionError):
        near.recv_into(memoryview(bytearray(1)))


def test_small_messages_are_not_held_back():
    with streams("tcp") as (stream, _):
        nodelay = socket.IPPROTO_TCP, socket.TCP_NODELAY
        assert stream._socket.getsockopt(*nodelay)
        assert not stream.pending() and not stream.wants_write() and not stream.local


def content(descriptor: int) -> bytes:
    data = os.pread(descriptor, 100, 0)
    os.close(descriptor)
    return data


def numbered(number: int) -> int:
    descriptor = os.memfd_create(f"number {number}")
    os.write(descriptor, b"%d" % number)
    return descriptor


def test_descriptors_come_in_order_and_not_after_the_byte_they_went_with():
    chance = random.Random(3)
    with streams("unix") as (near, far):
        assert near.local
        starts, sent = [], 0
        for number in range(50):
            block = chance.randbytes(chance.randint(1, 900))
            send_all(near, block)
            descriptor = numbered(number)
            taken = near.send_segment([memoryview(b""), memoryview(block)], descriptor)
            os.close(descriptor)
            assert taken == len(block)
            starts.append(sent + len(block))
            sent += 2 * len(block)
        came = 0
        for number, start in enumerate(starts):
            while came <= start:
                most = min(chance.randint(1, 700), sent - came)
                came += len(receive(far, most))
            assert content(far.take_segment()) == b"%d" % number
        with fails_with(ConnectionError, "processes.no_descriptor_was_passed"):
            far.take_segment()


def test_descriptors_that_nobody_takes_are_closed_with_the_stream():
    with no_new_descriptors(), streams("unix") as (near, far):
        for number in range(9):
            descriptor = numbered(number)
            near.send_segment([memoryview(b"a")], descriptor)
            os.close(descriptor)
        receive(far, 9)


def test_a_descriptor_that_finds_no_room_is_missed_by_who_takes_it():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with streams("unix") as (near, far):
        near.send_segment([memoryview(b"a")], near.fileno())
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
        try:
            assert receive(far, 1) == b"a"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        with fails_with(OSError, "processes.too_many_open_files"):
            far.take_segment()


def test_a_flood_of_descriptors_ends_the_connection():
    with no_new_descriptors(), streams("unix") as (near, far):
        descriptor = numbered(0)
        with fails_with(ConnectionError, "processes.descriptors_without_a_frame"):
            for _ in range(DESCRIPTORS_MAX + 1):
                near.send_segment([memoryview(b"a")], descriptor)
                receive(far, 1)
        os.close(descriptor)


def test_several_descriptors_in_one_call_lose_none_silently():
    with no_new_descriptors():
        near, far = socket.socketpair()
        stream = SocketStream(far, "peer")
        socket.send_fds(near, [b"a"], [0, 1, 2])
        receive(stream, 1)
        stream.close()
        near.close()


def test_shared_memory_announced_over_a_network_ends_the_connection():
    with (
        streams("tcp") as (near, _),
        fails_with(ConnectionError, "processes.no_descriptor_was_passed"),
    ):
        near.take_segment()
