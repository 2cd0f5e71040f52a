"""A listener lets in who proves itself; nobody else costs it anything."""

import logging
import os
import random
import socket
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest

from jdag.errors import JdagError, JoinError
from jdag.processes.net import listener as listeners
from jdag.processes.net.listener import dial
from tests.tools.error_texts import fails_with
from tests.tools.stream_cases import (
    PAIR,
    Gate,
    hello_by,
    no_new_descriptors,
    receive,
    send_all,
    soon,
    talk,
)
from tests.tools.tiers import sized

PLACES = ("unix:@", "tcp:127.0.0.1:0", "tcp:[::1]:0", "tcp:localhost:0")


@pytest.fixture(params=PLACES)
def host(request) -> Iterator[Gate]:
    with closing(Gate(request.param)) as made:
        yield made


@pytest.fixture
def tcp() -> Iterator[Gate]:
    with closing(Gate("tcp:127.0.0.1:0")) as made:
        yield made


def closed(connected: socket.socket) -> bool:
    """Whether the other end closes soon; what it says before does not matter."""
    connected.settimeout(20)
    with suppress(ConnectionError):
        while connected.recv(1 << 16):
            pass
    return True


def test_who_knows_the_secret_comes_in_and_both_learn_what_was_received(host: Gate):
    stream, far = host.dial(2**64 - 1)
    assert stream.local == far.local == host.address.startswith("unix")
    talk(stream, far)


def test_who_does_not_know_the_secret_is_refused(tcp: Gate, caplog):
    for other in ({"secret": "other"}, {"dialler": "ps1"}, {"listener": "w#1"}):
        with fails_with(JoinError, "processes.does_not_know_it"):
            tcp.dialled(PAIR._replace(**other))
    talk(*tcp.dial())
    assert caplog.text.count("did not prove that it is a worker of this session") == 3


def test_bytes_that_follow_the_hello_at_once_are_left_to_the_node(tcp: Gate):
    with tcp.raw() as near:
        near.sendall(hello_by(near) + b"first frame")
        _, far, _ = tcp.came.get(timeout=60)
        assert receive(far, 11) == b"first frame"
        far.close()


def test_a_hello_in_single_bytes_is_whole(tcp: Gate):
    with tcp.raw() as near:
        for byte in hello_by(near):
            near.send(bytes([byte]))
        worker, far, received = tcp.came.get(timeout=60)
        assert (worker, received) == (PAIR.dialler, 8)
        far.close()


def mutated(hello: bytes, chance: random.Random) -> bytes:
    bad = bytearray(hello)
    for _ in range(chance.randint(1, 4)):
        bad[chance.randrange(len(bad))] = chance.randrange(256)
    cut = chance.choice((len(bad), len(bad), chance.randrange(len(bad))))
    return bytes(bad[:cut]) + chance.randbytes(chance.choice((0, 0, 0, 200)))


def test_mutated_hellos_hurt_nobody(caplog, monkeypatch):
    monkeypatch.setattr(listeners, "HELLO_S", 600.0)  # However busy this is.
    host = Gate("unix:@")
    caplog.set_level(logging.CRITICAL)
    chance = random.Random(4)
    with no_new_descriptors():
        for _ in range(sized(20, 200)):
            nears = [host.raw() for _ in range(50)]
            for near in nears:
                good = hello_by(near)
                bad = mutated(good, chance)
                if bad[: len(good)] == good:  # It was left as it was.
                    bad = good[:-1]
                near.sendall(bad)
                with suppress(OSError):  # It may be refused, and cut off, already.
                    near.shutdown(socket.SHUT_WR)
            for near in nears:
                assert closed(near)
                near.close()
    assert host.came.empty()
    talk(*host.dial())
    host.close()


def test_half_a_hello_is_closed_in_time_and_nobody_waits_for_it(
    tcp: Gate, monkeypatch, caplog
):
    monkeypatch.setattr(listeners, "HELLO_S", 0.3)
    with tcp.raw() as slow:
        slow.sendall(hello_by(slow)[:20])
        assert closed(slow)
    soon(lambda: "no complete greeting within 0.3 s" in caplog.text)
    monkeypatch.setattr(listeners, "HELLO_S", 600.0)
    with tcp.raw() as slow:
        slow.sendall(hello_by(slow)[:20])
        soon(lambda: len(tcp.listener._visitors) == 1)
        talk(*tcp.dial())
        assert len(tcp.listener._visitors) == 1


def test_the_host_that_has_most_makes_room_for_the_others(tcp: Gate, monkeypatch):
    def come_from(source: str) -> socket.socket:
        _, name, port = tcp.address.split(":")
        return socket.create_connection((name, int(port)), 20, (source, 0))

    monkeypatch.setattr(listeners, "HELLO_S", 600.0)
    slow = [come_from(f"127.0.0.{number}") for number in (3, 4)]
    hellos = {near: hello_by(near) for near in slow}
    for near, hello in hellos.items():
        near.sendall(hello[:20])
    idle = [come_from("127.0.0.2") for _ in range(3 * listeners.VISITORS_MAX)]
    left = listeners.VISITORS_MAX - len(slow)
    for near in idle[:-left]:
        assert closed(near)
    for near, hello in hellos.items():
        near.sendall(hello[20:])
        tcp.came.get(timeout=60)[1].close()
    soon(lambda: len(tcp.listener._visitors) == left)
    for near in (*idle, *slow):
        near.close()


def test_a_gate_that_can_accept_nobody_rests_and_then_goes_on(tcp: Gate, monkeypatch):
    accept, failures = socket.socket.accept, iter([OSError(24, "Too many open files")])

    def accept_or_fail(listener):
        for error in failures:
            raise error
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accept_or_fail)
    talk(*tcp.dial())


def test_another_user_of_this_host_is_refused(monkeypatch):
    host = Gate("unix:@")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with fails_with(JdagError, "processes.runs_as_another_user"):
        host.dialled()
    assert host.came.empty()
    monkeypatch.undo()
    talk(*host.dial())
    host.close()


def test_closing_closes_those_at_the_gate_and_leaves_those_inside(tcp: Gate):
    stream, _ = tcp.dialled()
    outside = tcp.raw()
    tcp.listener.close()
    assert closed(outside)
    outside.close()
    _, far, _ = tcp.came.get(timeout=60)
    send_all(far, b"still here")
    assert receive(stream, 10) == b"still here"
    stream.close()
    far.close()
    said = r"cannot reach worker 'w' at tcp:.*: Connection refused"
    with pytest.raises(JoinError, match=said) as caught:
        tcp.dialled()
    assert caught.value.absent and not caught.value.reached


@pytest.mark.parametrize(
    "address", ["tcp:0.0.0.0:0", "tcp:example.org:1", "tcp:[::]:0"]
)
def test_other_hosts_are_neither_listened_to_nor_dialled_without_tls(address: str):
    with fails_with(JdagError, "processes.without_tls_only_loopback"):
        Gate(address)
    with fails_with(JdagError, "processes.without_tls_only_loopback"):
        dial(address, PAIR, 0, timeout_s=1)


def test_a_gate_outlives_what_its_owner_does_wrong(tcp: Gate, caplog):
    tcp.pairs = [PAIR._replace(secret=5)]  # type: ignore[arg-type]
    with fails_with(JdagError, "processes.closed_the_connection"):
        tcp.dialled()
    soon(lambda: "AttributeError" in caplog.text)
    tcp.pairs = [PAIR]
    talk(*tcp.dial())
