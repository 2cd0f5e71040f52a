"""A listener lets in peers with a ticket; nobody else costs it anything."""

import logging
import os
import queue
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from jdag.errors import JdagError, JoinError
from jdag.rpc import listener as listeners
from jdag.rpc.handshake import PROTOCOL
from jdag.rpc.listener import CARRIED, Admission, Listener, dial
from jdag.rpc.streams import SocketStream, Stream
from tests.stream_cases import no_new_descriptors, receive, send_all, soon
from tests.tiers import sized

TOKEN = bytes(range(32))
PLACES = ("unix:@", "tcp:127.0.0.1:0", "tcp:[::1]:0", "tcp:localhost:0")
HELLO = listeners._HELLO


class Host:
    """A gate, the tokens that it admits, and who has come in."""

    def __init__(self, address: str) -> None:
        self.tokens = {TOKEN: Admission("ps0", 3, 41)}
        self.came: queue.Queue[tuple[Admission, Stream, int]] = queue.Queue()
        self.listener = Listener(
            address,
            admit=lambda token, shown: self.tokens.get(token),
            take=lambda *arrival: self.came.put(arrival),
        )
        self.address = self.listener.address

    def close(self) -> None:
        self.listener.close()
        while not self.came.empty():
            self.came.get()[1].close()


@pytest.fixture(params=PLACES)
def host(request) -> Iterator[Host]:
    made = Host(request.param)
    yield made
    made.close()


@pytest.fixture
def tcp() -> Iterator[Host]:
    made = Host("tcp:127.0.0.1:0")
    yield made
    made.close()


def raw(host: Host) -> socket.socket:
    kind, name, *port = host.address.split(":")
    if kind == "unix":
        near = socket.socket(socket.AF_UNIX)
        near.connect(name.replace("@", "\0"))
        return near
    return socket.create_connection((name, int(port[0])), 20)


def good_still_get_in(host: Host) -> None:
    stream, received = dial(host.address, TOKEN, 7, timeout_s=60)
    admission, far, theirs = host.came.get(timeout=60)
    assert (received, admission.worker, theirs) == (41, "ps0", 7)
    send_all(stream, b"ping")
    assert receive(far, 4) == b"ping"
    stream.close()
    far.close()


def closed(connected: socket.socket) -> bool:
    """Whether the other end closes soon; what it says before does not matter."""
    connected.settimeout(20)
    try:
        while connected.recv(1 << 16):
            pass
    except ConnectionError:
        return True
    return True


def test_who_has_a_token_comes_in_and_both_learn_what_was_received(host: Host):
    stream, received = dial(host.address, TOKEN, 2**64 - 1, timeout_s=60)
    admission, far, theirs = host.came.get(timeout=60)
    assert admission == Admission("ps0", 3, 41)
    assert (received, theirs) == (41, 2**64 - 1)
    assert stream.local == far.local == host.address.startswith("unix")
    for near, other, said in ((stream, far, b"to"), (far, stream, b"fro")):
        send_all(near, said)
        assert receive(other, len(said)) == said
    stream.close()
    far.close()


def test_two_gates_of_one_host_never_have_one_address():
    hosts = [Host(place) for place in ("unix:@", "tcp:127.0.0.1:0") for _ in range(5)]
    assert len({host.address for host in hosts}) == 10
    for host in hosts:
        host.close()


def test_an_unknown_token_is_refused_by_name(host: Host, caplog):
    with pytest.raises(JdagError, match=r"^cannot reach .*: it refused the ticket: "):
        dial(host.address, bytes(32), 0, timeout_s=60)
    good_still_get_in(host)
    refusals = [
        record for record in caplog.records if record.name == listeners.__name__
    ]
    assert len(refusals) == 1 and "its ticket is unknown" in refusals[0].getMessage()


@pytest.mark.parametrize("theirs", [PROTOCOL - 1, PROTOCOL + 1])
def test_a_dialler_of_another_protocol_is_refused(tcp: Host, theirs: int, caplog):
    near = raw(tcp)
    near.sendall(HELLO.pack(b"jdag", theirs, TOKEN, 0))
    assert listeners._ANSWER.unpack(near.recv(99)) == (b"jdag", PROTOCOL, 2, 0)
    near.close()
    older = "it" if theirs < PROTOCOL else "this worker"
    soon(lambda: f"it speaks version {theirs} of jdag's protocol and" in caplog.text)
    assert f"version {PROTOCOL}; upgrade jdag for {older}\n" in caplog.text
    good_still_get_in(tcp)


@pytest.mark.parametrize("mine", [PROTOCOL - 1, PROTOCOL + 1])
def test_a_listener_of_another_protocol_is_named_with_both(
    mine: int,
):
    def answer() -> None:
        came, _ = other.accept()
        with came:
            came.recv(listeners._HELLO.size)
            came.sendall(listeners._ANSWER.pack(b"jdag", mine, 2, 0))

    with socket.create_server(("127.0.0.1", 0)) as other:
        thread = threading.Thread(target=answer)
        thread.start()
        address = f"tcp:127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(JoinError) as caught:
            dial(address, TOKEN, 0, timeout_s=60)
        thread.join()
    older = f"the worker at {address}" if mine < PROTOCOL else "this process"
    assert str(caught.value) == (
        f"the worker at {address} speaks version {mine} of jdag's protocol and this "
        f"process version {PROTOCOL}; upgrade jdag for {older}"
    )


def test_bytes_that_follow_the_hello_at_once_are_left_to_the_node(tcp: Host):
    near = raw(tcp)
    near.sendall(HELLO.pack(b"jdag", PROTOCOL, TOKEN, 9) + b"first frame")
    _, far, _ = tcp.came.get(timeout=60)
    assert receive(far, 11) == b"first frame"
    near.close()
    far.close()


def test_a_hello_in_single_bytes_is_whole(tcp: Host):
    near = raw(tcp)
    for byte in HELLO.pack(b"jdag", PROTOCOL, TOKEN, 9):
        near.send(bytes([byte]))
    _, far, received = tcp.came.get(timeout=60)
    assert received == 9
    near.close()
    far.close()


def mutated(hello: bytes, chance: random.Random) -> bytes:
    bad = bytearray(hello)
    for _ in range(chance.randint(1, 4)):
        bad[chance.randrange(len(bad))] = chance.randrange(256)
    cut = chance.choice((len(bad), len(bad), chance.randrange(len(bad))))
    return bytes(bad[:cut]) + chance.randbytes(chance.choice((0, 0, 0, 200)))


def test_mutated_hellos_hurt_nobody(caplog, monkeypatch):
    monkeypatch.setattr(listeners, "HELLO_S", 600.0)  # However busy this is.
    host = Host("unix:@")
    caplog.set_level(logging.CRITICAL)
    chance = random.Random(4)
    good = HELLO.pack(b"jdag", PROTOCOL, TOKEN, 0)
    host.tokens.clear()  # A mutation may leave the token as it was.
    with no_new_descriptors():
        for _ in range(sized(20, 200)):
            nears = [raw(host) for _ in range(50)]
            for near in nears:
                near.sendall(mutated(good, chance))
                with suppress(OSError):  # It may be refused, and cut off, already.
                    near.shutdown(socket.SHUT_WR)
            for near in nears:
                assert closed(near)
                near.close()
    assert host.came.empty()
    host.tokens[TOKEN] = Admission("ps0", 3, 41)
    good_still_get_in(host)
    host.close()


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" * 9, b"\x16\x03\x01" * 99]
)
def test_what_speaks_another_protocol_is_closed(tcp: Host, said: bytes, caplog):
    near = raw(tcp)
    near.sendall(said)
    assert closed(near)
    near.close()
    good_still_get_in(tcp)
    soon(lambda: "does not speak jdag's protocol" in caplog.text)


def test_half_a_hello_is_closed_in_time_and_nobody_waits_for_it(
    tcp: Host, monkeypatch, caplog
):
    half = HELLO.pack(b"jdag", PROTOCOL, TOKEN, 0)[:20]
    monkeypatch.setattr(listeners, "HELLO_S", 0.3)
    with raw(tcp) as slow:
        slow.sendall(half)
        assert closed(slow)
    soon(lambda: "no whole hello came within 0.3 s" in caplog.text)
    monkeypatch.setattr(listeners, "HELLO_S", 600.0)
    with raw(tcp) as slow:
        slow.sendall(half)
        soon(lambda: len(tcp.listener._visitors) == 1)
        good_still_get_in(tcp)
        assert len(tcp.listener._visitors) == 1


def test_those_who_say_nothing_make_room_for_those_who_come(tcp: Host, monkeypatch):
    monkeypatch.setattr(listeners, "HELLO_S", 600.0)
    idle = [raw(tcp) for _ in range(3 * listeners.VISITORS_MAX)]
    good_still_get_in(tcp)
    for near in idle[: 2 * listeners.VISITORS_MAX]:
        assert closed(near)
    for near in idle:
        near.close()


def come_from(host: Host, source: str) -> socket.socket:
    _, name, port = host.address.split(":")
    return socket.create_connection((name, int(port)), 20, (source, 0))


def test_the_host_that_has_most_makes_room_for_the_others(tcp: Host, monkeypatch):
    monkeypatch.setattr(listeners, "HELLO_S", 600.0)
    hello = HELLO.pack(b"jdag", PROTOCOL, TOKEN, 0)
    slow = [come_from(tcp, f"127.0.0.{number}") for number in (3, 4)]
    for near in slow:
        near.sendall(hello[:20])
    idle = [come_from(tcp, "127.0.0.2") for _ in range(3 * listeners.VISITORS_MAX)]
    left = listeners.VISITORS_MAX - len(slow)
    for near in idle[:-left]:
        assert closed(near)
    for near in slow:
        near.sendall(hello[20:])
        tcp.came.get(timeout=60)[1].close()
    soon(lambda: len(tcp.listener._visitors) == left)
    for near in (*idle, *slow):
        near.close()


def test_a_gate_that_can_accept_nobody_rests_and_then_goes_on(tcp: Host, monkeypatch):
    accept, failures = socket.socket.accept, iter([OSError(24, "Too many open files")])

    def accept_or_fail(listener):
        for error in failures:
            raise error
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accept_or_fail)
    good_still_get_in(tcp)


def test_another_user_of_this_host_is_refused(monkeypatch):
    host = Host("unix:@")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(
        JdagError, match=r"process \d+ there runs as user \d+, not 12345"
    ):
        dial(host.address, TOKEN, 0, timeout_s=60)
    assert host.came.empty()
    monkeypatch.undo()
    good_still_get_in(host)
    host.close()


def test_streams_that_another_listener_accepted_come_in_alike():
    host = Host(CARRIED)
    near, far = socket.socketpair()
    host.listener.enter(SocketStream(far, "through grpc"))
    near.sendall(HELLO.pack(b"jdag", PROTOCOL, TOKEN, 5))
    _, inside, received = host.came.get(timeout=60)
    assert received == 5
    assert host.address == CARRIED
    near.close()
    inside.close()
    host.close()


def test_closing_closes_those_at_the_gate_and_leaves_those_inside(tcp: Host):
    stream, _ = dial(tcp.address, TOKEN, 0, timeout_s=60)
    outside = raw(tcp)
    tcp.listener.close()
    assert closed(outside)
    outside.close()
    _, far, _ = tcp.came.get(timeout=60)
    send_all(far, b"still here")
    assert receive(stream, 10) == b"still here"
    stream.close()
    far.close()
    with pytest.raises(JdagError, match=r"cannot reach tcp:.*: Connection refused"):
        dial(tcp.address, TOKEN, 0, timeout_s=60)


def test_what_is_not_there_is_refused_in_one_line():
    with pytest.raises(
        JdagError, match=r"^cannot reach unix:@nobody: Connection refused$"
    ):
        dial("unix:@nobody", TOKEN, 0, timeout_s=60)


def test_what_never_answers_is_given_up_in_time():
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"tcp:127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(JdagError, match=r"no answer within 0\.2 s"):
            dial(address, TOKEN, 0, timeout_s=0.2)


def test_an_address_in_use_is_refused_by_name(tcp: Host):
    with pytest.raises(
        JdagError, match=r"^cannot listen at tcp:127.*: Address already"
    ):
        Listener(tcp.address, admit=lambda *_: None, take=lambda *_: None)


@pytest.mark.parametrize(
    "address", ["tcp:0.0.0.0:0", "tcp:example.org:1", "tcp:[::]:0"]
)
def test_other_hosts_are_neither_listened_to_nor_dialled_without_tls(address: str):
    with pytest.raises(JdagError, match="without TLS, and only loopback may be"):
        Listener(address, admit=lambda *_: None, take=lambda *_: None)
    with pytest.raises(JdagError, match="without TLS, and only loopback may be"):
        dial(address, TOKEN, 0, timeout_s=1)


def test_a_gate_outlives_what_its_owner_does_wrong(tcp: Host, caplog):
    tcp.tokens[b"x" * 32] = "no admission"  # type: ignore[assignment]
    with pytest.raises(JdagError, match="closed the connection"):
        dial(tcp.address, b"x" * 32, 0, timeout_s=60)
    soon(lambda: "AttributeError" in caplog.text)
    good_still_get_in(tcp)
