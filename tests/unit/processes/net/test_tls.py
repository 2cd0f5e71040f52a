"""Who has a certificate of the cluster gets through, both ways; others hear why not."""

import random
import select
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
from cryptography.x509.oid import ExtendedKeyUsageOID

from jdag.errors import JdagError
from jdag.processes.net import listener as listeners
from jdag.processes.net.background import wait_for
from jdag.processes.net.greeting import OPENING
from jdag.processes.net.listener import dial
from jdag.processes.net.streams import SocketStream
from jdag.processes.net.tls import Tls, TlsStream, load_tls
from tests.tools.certificates import Files, Issuer
from tests.tools.error_texts import fails_with
from tests.tools.stream_cases import (
    PAIR,
    Gate,
    hello_to,
    pour,
    receive,
    send_all,
    sockets,
    soon,
    talk,
    wait,
)


@pytest.fixture(scope="module")
def issuer(tmp_path_factory) -> Issuer:
    return Issuer(tmp_path_factory.mktemp("certificates"), "ca")


@pytest.fixture(scope="module")
def ps0(issuer: Issuer) -> Tls:
    return load_tls(*issuer.issue("ps0"))


@pytest.fixture(scope="module")
def trainer(issuer: Issuer) -> Tls:
    return load_tls(*issuer.issue("trainer"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory) -> Tls:
    """One of another cluster, whose issuer has the same name."""
    return load_tls(*Issuer(tmp_path_factory.mktemp("others"), "ca").issue("trainer"))


@pytest.fixture
def gate(ps0: Tls) -> Iterator[Gate]:
    made = Gate("tcp:127.0.0.1:0", ps0)
    yield made
    made.close()


@pytest.fixture
def ends(ps0: Tls, trainer: Tls) -> Iterator[tuple[TlsStream, TlsStream]]:
    """Two ends that have shaken hands.

    Their sockets are of Unix: those of TCP may find room by themselves.
    """
    near, far = sockets("unix")
    dialler = trainer.dial(SocketStream(near, "ps0"), "ps0")
    server = ps0.serve(SocketStream(far, "trainer"))
    thread = threading.Thread(target=shake_hands, args=(server,))
    thread.start()
    shake_hands(dialler)
    thread.join()
    yield dialler, server
    dialler.close()
    server.close()


def shake_hands(stream: TlsStream) -> None:
    while True:
        try:
            return stream.shake_hands()
        except BlockingIOError:
            wait(stream, select.POLLIN)


@pytest.mark.parametrize("name", [None, "ps0"], ids=["host", "worker"])
def test_both_ends_talk_if_the_certificate_is_for_the_host_or_worker(
    gate, trainer: Tls, name: str | None
):
    stream, far = gate.dial(tls=trainer, name=name)
    assert not stream.local and not far.local
    talk(stream, far)


def test_a_certificate_for_another_name_is_refused_by_name(gate, trainer: Tls):
    with fails_with(JdagError, "processes.tls_hostname_mismatch"):
        gate.dialled(tls=trainer, name="ps1")
    assert gate.came.empty()


def test_a_certificate_of_another_cluster_is_refused_by_both(gate, stranger, caplog):
    with fails_with(JdagError, "processes.tls_failed_certificate"):
        gate.dialled(tls=stranger)
    assert gate.came.empty()


def test_a_listener_refuses_whom_its_own_issuer_does_not_vouch_for(
    gate, stranger, trainer, caplog
):
    stranger.dialling.check_hostname = False
    stranger.dialling.verify_mode = ssl.CERT_NONE
    with fails_with(JdagError, "processes.does_not_trust_the_issuer"):
        gate.dialled(tls=stranger)
    assert gate.came.empty()
    soon(lambda: "refused tcp:127.0.0.1:" in caplog.text)
    talk(*gate.dial(tls=trainer))


def test_who_shows_no_certificate_is_refused(gate, trainer: Tls, issuer, caplog):
    bare = ssl.create_default_context(cafile=str(issuer.ca))
    with (
        gate.raw() as raw,
        bare.wrap_socket(raw, server_hostname="ps0") as near,
        pytest.raises(OSError),
    ):
        near.sendall(bytes(99))
        while near.recv(100):
            pass
    soon(lambda: "it sent no certificate" in caplog.text)
    talk(*gate.dial(tls=trainer))


def test_who_has_shown_a_certificate_is_not_driven_out_by_those_who_have_not(
    gate, trainer: Tls, monkeypatch, caplog
):
    monkeypatch.setattr(listeners, "HELLO_S", 600.0)

    def come() -> TlsStream:
        near = gate.raw()
        made = trainer.dial(SocketStream(near, "ps0"), "ps0")
        shake_hands(made)
        hellos.append(hello_to(receive(made, OPENING.size)))
        send_all(made, hellos[-1][:20])
        return made

    async def certified() -> int:
        return sum(bool(one.certificate) for one in visitors.values())

    visitors = gate.listener._visitors
    hellos: list[bytes] = []
    known = [come()]
    soon(lambda: wait_for(certified()) == 1)
    idle = [gate.raw() for _ in range(2 * listeners.VISITORS_MAX)]
    soon(lambda: caplog.text.count("other connections wait") > listeners.VISITORS_MAX)
    send_all(known[0], hellos[0][20:])
    gate.came.get(timeout=60)[1].close()
    # Nor do those who have come before all others.
    for _ in range(listeners.VISITORS_MAX):
        known.append(come())
        soon(lambda: wait_for(certified()) == len(known) - 1)
    last = gate.raw()
    soon(lambda: "too many connections with cert" in caplog.text)
    for one in known:
        one.close()
    for near in (*idle, last):
        near.close()


def test_a_plain_dialler_is_refused_in_one_line(gate, trainer: Tls, caplog):
    with pytest.raises(JdagError, match=r"closed the connection|not speak jdag"):
        gate.dialled()
    soon(lambda: "it does not use TLS" in caplog.text)
    talk(*gate.dial(tls=trainer))


def test_dialling_a_plain_listener_with_tls_says_so(trainer: Tls):
    plain = Gate("tcp:127.0.0.1:0")
    with fails_with(JdagError, "processes.it_does_not_speak_tls"):
        plain.dialled(tls=trainer)
    plain.close()


def test_a_tls_handshake_that_is_not_answered_is_given_up_in_time(trainer: Tls):
    given_up = threading.Event()

    def say_nothing() -> None:
        came, _ = mute.accept()
        with came:  # A wait that ignores the deadline ends with this.
            given_up.wait(20)

    with socket.create_server(("127.0.0.1", 0)) as mute:
        thread = threading.Thread(target=say_nothing)
        thread.start()
        address = f"tcp:127.0.0.1:{mute.getsockname()[1]}"
        with fails_with(JdagError, "processes.no_answer_in_time"):
            dial(address, PAIR, 0, tls=trainer, timeout_s=0.2)
        given_up.set()
        thread.join()


def test_unix_sockets_need_no_certificates(trainer: Tls):
    inner = Gate("unix:@", trainer)
    stream, far = inner.dial(tls=trainer)
    assert stream.local
    talk(stream, far)
    inner.close()


def test_random_views_arrive_whole_and_in_order_through_tls(ends):
    dialler, server = ends
    chance = random.Random(5)
    data = chance.randbytes(1 << 20)

    thread = threading.Thread(target=pour, args=(server, data, random.Random(6)))
    thread.start()
    came = bytearray()
    while len(came) < len(data):
        came += receive(dialler, min(chance.randint(1, 90_000), len(data) - len(came)))
    thread.join()
    assert came == data


def test_what_is_decrypted_and_not_yet_read_is_pending(ends):
    dialler, server = ends
    send_all(server, b"abcdefgh")
    assert receive(dialler, 3) == b"abc"
    assert dialler.pending()
    assert dialler.recv_into(memoryview(bytearray(99))) == 5
    assert not dialler.pending()
    with pytest.raises(BlockingIOError):
        dialler.recv_into(memoryview(bytearray(99)))


@pytest.mark.parametrize("way", ["flush", "recv_into"])
def test_bytes_that_were_taken_and_wait_for_room_still_leave(ends, way: str):
    dialler, server = ends
    block = random.Random(7).randbytes(1 << 17)
    sent = 0
    with pytest.raises(BlockingIOError):
        while sent < 1 << 28:
            sent += server.send([b"", block])
    assert server.wants_write()
    with pytest.raises(BlockingIOError):
        server.flush()
    came = 0
    into = memoryview(bytearray(1 << 17))
    while came < sent:
        try:
            came += dialler.recv_into(into)
        except BlockingIOError:
            with suppress(BlockingIOError):
                server.flush() if way == "flush" else server.recv_into(into)
    assert not server.wants_write()
    server.flush()


def test_a_connection_cut_at_any_byte_ends_with_a_reason(ps0: Tls, trainer: Tls):
    chance = random.Random(8)
    for _ in range(40):
        near, far = sockets("tcp")
        relay, there = sockets("tcp")
        dialler = trainer.dial(SocketStream(near, "ps0"), "ps0")
        server = ps0.serve(SocketStream(there, "trainer"))
        left = chance.randint(0, 6000)
        for _ in range(6):
            for stream in (dialler, server):
                try:
                    stream.shake_hands()
                    stream.send([memoryview(bytes(900))])
                except BlockingIOError:
                    continue
            for here, over in ((far, relay), (relay, far)):
                here.setblocking(False)
                try:
                    over.sendall(bytes(memoryview(here.recv(left or 1))[:left]))
                except BlockingIOError:
                    continue
        far.close()
        relay.close()
        for stream in (dialler, server):
            with pytest.raises(ConnectionError):
                receive(stream, 1 << 20)
            stream.close()


def test_mutated_records_end_the_connection_and_nothing_else(ps0: Tls, trainer: Tls):
    chance = random.Random(9)
    for _ in range(40):
        near, far = sockets("tcp")
        server = ps0.serve(SocketStream(far, "trainer"))
        near.sendall(b"\x16\x03\x01" + chance.randbytes(chance.randint(20, 500)))
        near.close()
        with pytest.raises(ConnectionError):
            receive(server, 48)
        server.close()


# What is wrong with files is said before anything is dialled.


@pytest.mark.parametrize("which", Files._fields)
def test_a_file_that_is_missing_or_of_another_form_is_named(issuer, which, tmp_path):
    files, wrong = issuer.issue("whole"), tmp_path / "wrong.pem"
    for content in ("", "no certificate", "\x00\xff"):
        wrong.write_text(content)
        with fails_with(JdagError, "processes.wrong_pem_pem_form"):
            load_tls(*files._replace(**{which: wrong}))
    absent = tmp_path / "absent.pem"
    for path, why in ((absent, "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(JdagError, match=rf"^TLS {which} {path}: {why}"):
            load_tls(*files._replace(**{which: path}))


def test_a_key_of_another_certificate_or_with_a_passphrase_is_refused(issuer: Issuer):
    with fails_with(JdagError, "processes.key_of_another_certificate"):
        load_tls(*issuer.issue("one")._replace(key=issuer.issue("two").key))
    with fails_with(JdagError, "processes.locked_key_has_a_passphrase"):
        load_tls(*issuer.issue("locked", passphrase=b"secret"))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"starts": -20}, "certificate has expired"),
        ({"starts": 3}, "certificate is not yet valid"),
        ({"usage": ExtendedKeyUsageOID.CLIENT_AUTH}, "unsuitable certificate purpose"),
        ({"usage": ExtendedKeyUsageOID.SERVER_AUTH}, "unsuitable certificate purpose"),
    ],
)
def test_a_certificate_that_nobody_would_take_is_refused_at_once(issuer, settings, why):
    with pytest.raises(JdagError, match=rf"odd\.crt is not valid for peers .*: {why}"):
        load_tls(*issuer.issue("odd", **settings))


def test_a_certificate_of_another_issuer_is_refused_at_once(issuer, tmp_path):
    files = Issuer(tmp_path, "other").issue("ps9")._replace(ca=issuer.ca)
    with fails_with(JdagError, "processes.ps9_crt_is_not_valid"):
        load_tls(*files)
