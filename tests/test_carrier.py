"""A stream through gRPC is a stream: whole, in order, bounded, and gone when closed."""

import asyncio
import gc
import random
import select
import socket
import threading
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest

from jdag.errors import JdagError
from jdag.rpc.background import loop
from jdag.rpc.carrier import MESSAGE_BYTES_MAX, CarriedStream
from jdag.rpc.control import ControlServer
from jdag.rpc.listener import CARRIED, dial
from jdag.rpc.streams import SOCKET_BUFFER_BYTES
from jdag.rpc.tls import Tls, load
from tests.certificates import Issuer
from tests.rpc_cases import ANY
from tests.stream_cases import (
    TOKEN,
    Gate,
    descriptors,
    pour,
    receive,
    send_all,
    soon,
    talk,
    wait,
)

# gRPC lets its window grow to 16 MiB. Beside it the pumps hold a message each, and the
# sockets of both pairs their buffers, which Linux makes twice as large as it is asked.
INSIDE_BYTES_MAX = (16 << 20) + 2 * MESSAGE_BYTES_MAX + 4 * 2 * SOCKET_BUFFER_BYTES


class Host(Gate):
    """A control server that carries streams, and its gate."""

    def __init__(self, tls: Tls | None = None) -> None:
        super().__init__(CARRIED, tls)
        enter = self.listener.enter
        self.server = ControlServer("worker 'w'", ANY, {}, tls=tls, enter=enter)
        self.address = f"grpc:{self.server.address}"

    def close(self) -> None:
        self.server.close(0)
        super().close()


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    made = Host()
    yield made
    made.close()


def test_a_stream_comes_in_by_the_gate_and_carries_both_ways(host: Host):
    stream, far = host.dial()
    assert isinstance(stream, CarriedStream)
    assert not stream.local and not far.local
    talk(stream, far)


def test_random_bytes_arrive_whole_and_in_order_both_ways_at_once(host: Host):
    ends = host.dial()
    data = [random.Random(seed).randbytes(7 << 20) for seed in (1, 2)]
    pumps = [
        threading.Thread(target=pour, args=(end, sent, random.Random(3)))
        for end, sent in zip(ends, data, strict=True)
    ]
    for pump in pumps:
        pump.start()
    assert receive(ends[1], len(data[0])) == data[0]
    assert receive(ends[0], len(data[1])) == data[1]
    for pump in pumps:
        pump.join()
    for end in ends:
        end.close()


@pytest.mark.parametrize("sender", [0, 1])
def test_who_sends_is_held_back_by_who_does_not_read(host: Host, sender: int):
    ends = host.dial()
    near, far = ends[sender], ends[1 - sender]
    block = memoryview(bytes(1 << 20))
    sent = 0
    poller = select.poll()
    poller.register(near.fileno(), select.POLLOUT)
    while poller.poll(1000):
        sent += near.send([block])
        assert sent <= INSIDE_BYTES_MAX
    receive(far, sent)
    wait(near, select.POLLOUT)
    for end in ends:
        end.close()


@pytest.mark.parametrize("closing", [0, 1])
def test_what_was_sent_before_the_end_arrives_and_then_the_end(
    host: Host, closing: int
):
    ends = host.dial()
    data = random.Random(4).randbytes(300_000)
    send_all(ends[closing], data)
    ends[closing].close()
    assert receive(ends[1 - closing], len(data)) == data
    with pytest.raises(ConnectionError):
        receive(ends[1 - closing], 1)
    ends[1 - closing].close()


def pumps() -> list[str]:
    """The streams that the asyncio loop still moves bytes of."""
    return sorted(
        str(task.get_coro())
        for task in asyncio.all_tasks(loop())
        if "carrier" in str(task.get_coro())
    )


def test_opening_and_closing_many_leaves_no_task_and_no_descriptor(host: Host):
    stream, far = host.dial()
    stream.close()
    far.close()
    soon(lambda: not pumps())
    before, running = descriptors(), threading.active_count()
    for turn in range(60):
        ends = host.dial()
        send_all(ends[0], b"abc")
        if turn % 3:
            assert receive(ends[1], 3) == b"abc"
        for end in ends[:: 1 if turn % 2 else -1]:
            end.close()
    soon(lambda: not pumps())
    soon(lambda: len(descriptors() - before) <= 2)
    soon(lambda: threading.active_count() <= running + 1)


@pytest.mark.parametrize("is_read", [True, False])
@pytest.mark.parametrize("closing", [0, 1])
def test_a_connection_ends_with_its_stream_and_awaits_no_collection(
    host: Host, closing: int, is_read: bool
):
    for end in host.dial():
        end.close()
    soon(lambda: not pumps())
    gc.collect()
    gc.disable()
    try:
        before = descriptors()
        ends = host.dial()
        for near, far in (ends, ends[::-1]):
            send_all(near, bytes(3_000_000 if not is_read else 3))
            if is_read:
                receive(far, 3)
            else:
                wait(far, select.POLLIN)
        ends[closing].close()
        ends[1 - closing].close()
        soon(lambda: not pumps() and descriptors() <= before, most_ms=8_000)
    finally:
        gc.enable()


def test_a_connection_ends_where_grpc_has_failed_to_write(
    host: Host, monkeypatch: pytest.MonkeyPatch
):
    for end in host.dial():
        end.close()
    soon(lambda: not pumps())
    before = descriptors()
    pump = CarriedStream.pump

    async def failing(stream: CarriedStream, messages, write, done):
        call = getattr(write, "__self__", None)
        if isinstance(call, grpc.aio.Call):  # At the end that has dialled.
            sent = pump(stream, messages, write, done)
            await asyncio.wait([asyncio.create_task(sent)], timeout=0.5)
            call._cython_call.set_internal_error("Failed execute_batch")
        else:
            await pump(stream, messages, write, done)

    monkeypatch.setattr(CarriedStream, "pump", failing)
    near, far = host.dial()
    with pytest.raises(ConnectionError):
        receive(near, 1)
    near.close()
    with pytest.raises(ConnectionError):
        receive(far, 1)
    far.close()
    soon(lambda: descriptors() <= before, most_ms=8_000)


def test_a_server_that_is_not_there_is_named_with_the_reason():
    with pytest.raises(
        JdagError, match=r"^cannot reach grpc:.* UNAVAILABLE: .*refused"
    ):
        dial("grpc:127.0.0.1:1", TOKEN, 0, timeout_s=60)
    soon(lambda: not pumps())


def test_a_server_that_says_nothing_is_named_and_then_nothing_is_left(host: Host):
    for end in host.dial():
        end.close()
    soon(lambda: not pumps())
    with socket.create_server(("127.0.0.1", 0)) as mute:
        before, where = descriptors(), f"grpc:127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(JdagError, match=r"no answer within 0\.5 s$"):
            dial(where, TOKEN, 0, timeout_s=0.5)
        # gRPC itself would give up after 20 s.
        soon(lambda: not pumps() and descriptors() <= before, most_ms=8_000)


def test_a_server_that_carries_no_streams_is_named_with_the_reason():
    server = grpc.server(futures.ThreadPoolExecutor(1))
    address = f"grpc:127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    with pytest.raises(JdagError, match="UNIMPLEMENTED"):
        dial(address, TOKEN, 0, timeout_s=60)
    server.stop(0).wait()


def test_a_server_that_stops_ends_its_streams_at_both_ends():
    host = Host()
    stream, far = host.dial()
    send_all(stream, b"abc")
    assert receive(far, 3) == b"abc"
    host.server.close(0)
    for end in (stream, far):
        with pytest.raises(ConnectionError):
            receive(end, 1)
        end.close()
    soon(lambda: not pumps())
    host.close()


def test_a_stream_goes_through_tls_and_only_with_a_certificate(tmp_path):
    issuer = Issuer(tmp_path, "ca")
    host = Host(load(*issuer.issue("ps0")))
    trainer = load(*issuer.issue("trainer"))
    for name in ("ps0", None):
        for end in host.dial(tls=trainer, name=name):
            end.close()
    with pytest.raises(JdagError, match="UNAVAILABLE"):
        dial(host.address, TOKEN, 0, tls=trainer, name="ps1", timeout_s=60)
    with pytest.raises(JdagError, match="UNAVAILABLE"):
        dial(host.address, TOKEN, 0, timeout_s=60)
    host.close()
