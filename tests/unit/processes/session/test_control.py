"""The control plane: what is asked and refused, over real sockets on loopback."""

import json
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from jdag.errors import JoinError
from jdag.processes.net.addresses import Address
from jdag.processes.net.handshake import PROTOCOL
from jdag.processes.net.shared_secrets import proof_of
from jdag.processes.net.tls import Tls, load_tls
from jdag.processes.session import control
from jdag.processes.session.control import (
    ANSWERS_MAX,
    BODY_BYTES_MAX,
    Answers,
    ControlClient,
    ControlServer,
    channel_to,
)
from jdag.processes.session.requests import Detach, Health, Info, Mesh, Request
from tests.tools.certificates import Issuer
from tests.tools.error_texts import fails_with
from tests.tools.rpc_cases import free_address
from tests.tools.stream_cases import soon

ANY = Address("127.0.0.1", 0)
NAME = "worker 'w'"
VERSION = ((control.VERSION, str(PROTOCOL)),)
HEALTH = Health()


class Asked:
    """Answers, and what they were asked."""

    def __init__(self) -> None:
        self.let = threading.Event()
        self.began = threading.Semaphore(0)
        self.answers: Answers = {
            Health: lambda asked: {"worker": "w"},
            Info: lambda asked: {"token": asked.token},
            Mesh: self.mesh,
            Detach: self.detach,
        }

    def mesh(self, asked: Mesh) -> dict[str, object]:
        raise JoinError("worker 'w' is in no session")

    def detach(self, asked: Detach) -> dict[str, object]:
        self.began.release()
        self.let.wait(60)
        return {}


@contextmanager
def serving(
    asked: Asked, **settings: Any
) -> Iterator[tuple[ControlServer, ControlClient]]:
    server = ControlServer(NAME, ANY, asked.answers, **settings)
    with closing(server), closing(ControlClient(NAME, server.address)) as client:
        try:
            yield server, client
        finally:
            asked.let.set()


@pytest.fixture(scope="module")
def server() -> Iterator[ControlServer]:
    with serving(Asked()) as (server, _):
        yield server


@pytest.fixture
def client(server: ControlServer) -> Iterator[ControlClient]:
    with closing(ControlClient(NAME, server.address)) as client:
        yield client


def refusal_at(address: Address, tls: Tls | None = None) -> JoinError:
    with closing(ControlClient(NAME, address, tls=tls)) as client:
        return refused(client, timeout_s=60)


def refused(
    client: ControlClient, asked: Request = HEALTH, *, timeout_s: float = 10.0
) -> JoinError:
    with pytest.raises(JoinError) as caught:
        client.ask(asked, timeout_s=timeout_s)
    assert "\n" not in str(caught.value)
    return caught.value


def raw(client: ControlClient, method: str, body: bytes) -> grpc.RpcError:
    """Send bytes as they are; what comes back has to be a refusal."""
    with pytest.raises(grpc.RpcError) as caught:
        client.channel.unary_unary(f"/jdag.Control/{method}")(
            body, timeout=60, metadata=VERSION
        )
    return caught.value


def test_a_refusal_comes_back_as_it_was_said(client: ControlClient):
    error = refused(client, Mesh(secret="s", peers={}, dial=()))
    assert str(error) == "worker 'w' is in no session"
    assert error.reached


def test_a_port_in_use_is_one_clear_line(server: ControlServer):
    said = f"cannot listen at {server.address}: Address already in use"
    with pytest.raises(JoinError, match=f"^{re.escape(said)}$"):
        ControlServer(NAME, server.address, {})


def test_without_tls_only_loopback_is_listened_at_or_asked():
    for address in (Address("0.0.0.0", 0), Address("192.0.2.1", 7000)):
        with fails_with(JoinError, "processes.without_tls_only_loopback"):
            ControlServer(NAME, address, {})
        with fails_with(JoinError, "processes.without_tls_only_loopback"):
            ControlClient("w", address)


def test_who_is_not_there_is_one_clear_line():
    address = free_address()
    error = refusal_at(address)
    assert str(error) == f"cannot reach worker 'w' at {address}: Connection refused"
    assert error.absent and not error.reached


def test_a_host_without_a_name_is_one_clear_line(tmp_path: Path):
    tls = load_tls(*Issuer(tmp_path, "ca").issue("a"))
    error = refusal_at(Address("no.such.invalid", 7000), tls)
    assert "cannot reach worker 'w' at no.such.invalid:7000: " in str(error)
    assert not (error.absent or error.reached)


def test_who_does_not_answer_in_time_is_named():
    with serving(Asked()) as (server, client):
        client.ask(Health(), timeout_s=60)  # To connect may take longer.
        error = refused(client, Detach(secret="s"), timeout_s=0.2)
    said = f"worker 'w' at {server.address} did not answer Detach within 0.2 s"
    assert str(error) == said


def test_what_listens_there_and_is_no_worker_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        def answer() -> None:
            came, _ = other.accept()
            with came:
                came.recv(100)
                came.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        error = refusal_at(Address("127.0.0.1", port))
    assert f"cannot reach worker 'w' at 127.0.0.1:{port}: " in str(error)


@pytest.mark.parametrize(
    ("method", "body", "words"),
    [
        ("Info", b"", "Info: Input data was truncated"),
        ("Info", b"\xff\xfe", "Info: JSON is malformed"),
        ("Info", b'{"token": 3}', "Info: Expected `str`, got `int` - at `$.token`"),
        ("Info", b'{"token": "a", "x": 1}', "Info: Object contains unknown field `x`"),
        ("Other", b"{}", "Method not found!"),
        ("Info", b"[" * 100_000, "Info: Expected `object`, got `array`"),
    ],
)
def test_what_is_no_request_is_refused_with_what_is_wrong(
    client: ControlClient, method: str, body: bytes, words: str
):
    error = raw(client, method, body)
    assert words in error.details()
    assert client.ask(Health()) == {"worker": "w"}


def test_a_secret_is_not_in_the_refusal(client: ControlClient):
    body = json.dumps({"token": ["hidden"], "hidden2": 1}).encode()
    assert "hidden'" not in (details := raw(client, "Info", body).details())
    assert "['hidden']" not in details


def test_a_request_that_is_too_large_is_refused(client: ControlClient):
    body = b'{"token": "' + b"a" * (BODY_BYTES_MAX + 100) + b'"}'
    error = raw(client, "Info", body)
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert client.ask(Health()) == {"worker": "w"}


def half_calls(channel: grpc.Channel, count: int, shown: str, ends: Any) -> list[Any]:
    """Calls that bring no request before the end."""

    def nothing() -> Iterator[bytes]:
        ends.wait(60)
        yield from ()

    call = channel.stream_unary("/jdag.Control/Health")
    metadata = ((control.PROOF, shown), (control.VERSION, str(PROTOCOL)))
    return [call.future(nothing(), metadata=metadata) for _ in range(count)]


@pytest.mark.parametrize("shown", ["", proof_of("stranger")])
def test_a_flood_of_strangers_leaves_callers_that_are_known_theirs(
    shown: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(control, "READ_S", 600.0)  # None is cancelled meanwhile.
    ends, most = threading.Event(), control.STRANGERS_MAX
    with (
        serving(Asked(), knows=[proof_of("other")].__contains__) as (server, client),
        ExitStack() as attackers,
    ):
        halves = []
        for _ in range(4):
            one = attackers.enter_context(channel_to(server.address, None))
            halves += half_calls(one, 100, shown, ends)
        soon(lambda: sum(half.done() for half in halves) >= len(halves) - most)
        said = {half.code() for half in halves if half.done()}
        assert said == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert sum(not half.done() for half in halves) == most
        for _ in range(3):
            assert client.ask(Info(token="other"), timeout_s=60) == {"token": "other"}
        assert "64 concurrent unauthenticated calls is reached" in str(refused(client))
        # A call under way has no thread at the server; here each has one that sends.
        threads = [one.name.startswith("control") for one in threading.enumerate()]
        assert sum(threads) <= ANSWERS_MAX
        ends.set()


def test_a_flood_of_known_callers_keeps_others_out_no_longer_than_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(control, "READ_S", 1.0)
    monkeypatch.setattr(control, "CALLS_MAX", 16)
    known, ends = [proof_of(name) for name in ("mad", "other")], threading.Event()
    with (
        serving(Asked(), knows=known.__contains__) as (server, client),
        channel_to(server.address, None) as attacker,
    ):
        halves = half_calls(attacker, 32, known[0], ends)
        soon(lambda: sum(half.done() for half in halves) >= 16)
        said = str(refused(client, Info(token="other")))
        assert "16 concurrent calls is reached; try again" in said
        soon(lambda: all(half.done() for half in halves))
        ended = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED
        assert {half.code() for half in halves} == {*ended}
        assert client.ask(Info(token="other")) == {"token": "other"}
        ends.set()


@pytest.mark.parametrize("theirs", [PROTOCOL - 1, PROTOCOL + 1])
def test_a_caller_of_another_protocol_is_refused_with_both_versions(
    client: ControlClient, theirs: int, monkeypatch: pytest.MonkeyPatch
):
    older = "this process" if theirs < PROTOCOL else NAME
    said = (
        f"this process uses version {theirs} of jdag's protocol, and {NAME} uses "
        f"version {PROTOCOL}; upgrade jdag for {older}"
    )
    metadata = ((control.VERSION, str(theirs)),)
    call = client.channel.unary_unary("/jdag.Control/Health")
    with pytest.raises(grpc.RpcError) as caught:
        call(b"not even JSON", timeout=60, metadata=metadata)
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert caught.value.details() == said
    # As the client of that version says it.
    assert str(client._refusal("Health", caught.value, 1.0)) == said


def test_who_is_known_waits_for_a_turn_and_a_stranger_does_not(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(control, "ANSWERS_MAX", 1)
    monkeypatch.setattr(control, "READ_S", 60.0)  # However busy this is.
    asked, knows = Asked(), [proof_of("k")].__contains__
    with serving(asked, knows=knows) as (_, client), ThreadPoolExecutor(2) as threads:
        first = threads.submit(client.ask, Detach(secret="k"), timeout_s=60)
        assert asked.began.acquire(timeout=60)
        second = threads.submit(client.ask, Info(token="k"), timeout_s=60)
        assert "1 concurrent answers is reached; try again" in str(refused(client))
        asked.let.set()
        assert (first.result(), second.result()) == ({}, {"token": "k"})


# --------------------------------------------------------------------------------- TLS


@pytest.fixture(scope="module")
def issuer(tmp_path_factory: pytest.TempPathFactory) -> Issuer:
    return Issuer(tmp_path_factory.mktemp("certificates"), "ca")


@pytest.fixture(scope="module")
def secured(issuer: Issuer) -> Iterator[ControlServer]:
    tls = load_tls(*issuer.issue("server"))
    with closing(ControlServer(NAME, ANY, Asked().answers, tls=tls)) as server:
        yield server


def test_who_is_certified_by_another_is_refused_in_one_line(secured, tmp_path: Path):
    tls = load_tls(*Issuer(tmp_path, "ca").issue("client"))
    assert str(refusal_at(secured.address, tls)) == (
        f"cannot reach worker 'w' at {secured.address}: TLS refused: unable to get "
        "local issuer certificate; its certificate must be for 127.0.0.1, and be "
        "issued by an authority in the ca file of this process"
    )


def test_who_shows_no_certificate_is_refused(secured, issuer: Issuer):
    credentials = grpc.ssl_channel_credentials(issuer.ca.read_bytes())
    with grpc.secure_channel(str(secured.address), credentials) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/jdag.Control/Health")(b"{}", timeout=60)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


def test_a_caller_without_tls_is_told_that_the_worker_uses_it(secured, monkeypatch):
    monkeypatch.setattr(control, "_PROBE_S", 60.0)  # However busy this is.
    assert str(refusal_at(secured.address)) == (
        f"cannot reach worker 'w' at {secured.address}: it uses TLS and this process "
        "does not; [tls] must be in the cluster file on both sides"
    )


def test_a_caller_with_tls_is_told_that_the_worker_does_not_use_it(
    server, issuer: Issuer, monkeypatch
):
    monkeypatch.setattr(control, "_PROBE_S", 60.0)
    tls = load_tls(*issuer.issue("client"))
    assert str(refusal_at(server.address, tls)) == (
        f"cannot reach worker 'w' at {server.address}: it does not use TLS and this "
        "process does; [tls] must be in the cluster file on both sides"
    )
