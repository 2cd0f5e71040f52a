"""Certificates of a session whose processes start on hosts not yet known."""

import stat
from contextlib import nullcontext
from pathlib import Path

import pytest

from jdag.errors import JoinError
from jdag.processes.net.addresses import Address
from jdag.processes.net.tls import Tls, load_tls
from jdag.processes.session.authority import Authority, fresh_authority
from jdag.processes.session.control import ControlClient, ControlServer
from jdag.processes.session.requests import Health
from tests.tools.error_texts import fails_with


def tls_of(authority: Authority, worker: str, host: str, folder: Path) -> Tls:
    (folder / worker).mkdir()
    return load_tls(*authority.issue(worker, host, folder / worker))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_processes_of_a_session_take_each_other_at_the_hosts_of_their_certificates(
    host: str, tmp_path: Path
):
    authority = fresh_authority()
    tls = tls_of(authority, "a", host, tmp_path)
    address = Address("127.0.0.1")
    server = ControlServer("worker 'a'", address, {Health: lambda _: {}}, tls=tls)
    mine = tls_of(authority, "m", "some.host", tmp_path)
    client = ControlClient("worker 'a'", server.address, tls=mine)
    refused = fails_with(JoinError, "processes.certificate_has_to_be_for")
    with nullcontext() if host == address.host else refused:
        client.ask(Health())
    client.close()
    server.close()


def test_only_its_user_reads_a_key_and_no_text_shows_the_authoritys(
    tmp_path: Path,
):
    authority = fresh_authority()
    *_, key = authority.issue("a", "127.0.0.1", tmp_path)
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert "KEY" in authority.key and "KEY" not in repr(authority)
