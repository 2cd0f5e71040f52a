"""Certificates of a session whose processes start on hosts not yet known."""

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from jdag.errors import JoinError
from jdag.rpc.addresses import Address
from jdag.rpc.authority import Authority, fresh_authority
from jdag.rpc.control import ControlClient, ControlServer
from jdag.rpc.requests import Health
from jdag.rpc.tls import Tls, load


def tls_of(authority: Authority, worker: str, host: str, folder: Path) -> Tls:
    (folder / worker).mkdir()
    return load(*authority.issue(worker, host, folder / worker))


@pytest.fixture
def authority() -> Authority:
    return fresh_authority()


@pytest.fixture
def server(authority: Authority, tmp_path: Path) -> Iterator[ControlServer]:
    """The control server of worker a, at 127.0.0.1."""
    tls = tls_of(authority, "a", "127.0.0.1", tmp_path)
    address = Address("127.0.0.1")
    made = ControlServer("worker 'a'", address, {Health: lambda _: {}}, tls=tls)
    yield made
    made.close()


def ask(server: ControlServer, tls: Tls) -> None:
    client = ControlClient("worker 'a'", server.address, tls=tls)
    try:
        client.ask(Health())
    finally:
        client.close()


def test_processes_of_a_session_take_the_certificates_of_its_authority(
    server: ControlServer, authority: Authority, tmp_path: Path
):
    ask(server, tls_of(authority, "m", "some.host", tmp_path))


def test_a_worker_at_another_host_than_its_certificate_says_is_refused(
    authority: Authority, tmp_path: Path
):
    tls = tls_of(authority, "a", "127.0.0.2", tmp_path)
    address = Address("127.0.0.1")
    made = ControlServer("worker 'a'", address, {Health: lambda _: {}}, tls=tls)
    with pytest.raises(JoinError, match=r"certificate has to be for 127\.0\.0\.1"):
        ask(made, tls_of(authority, "m", "x", tmp_path))
    made.close()


def test_only_its_user_reads_a_key_and_no_text_shows_the_authoritys(
    authority: Authority, tmp_path: Path
):
    *_, key = authority.issue("a", "127.0.0.1", tmp_path)
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert "KEY" in authority.key and "KEY" not in repr(authority)
