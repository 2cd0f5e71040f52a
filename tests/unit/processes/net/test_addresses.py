"""Addresses are read, written and refused by what is wrong with them."""

import os

import pytest

from jdag.errors import JdagError
from jdag.processes.net.addresses import Address, hold_to_loopback, listen, parse
from tests.tools.error_texts import fails_with


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("tcp:127.0.0.1:80", Address("127.0.0.1", 80, "tcp")),
        ("tcp:[::1]:0", Address("::1", 0, "tcp")),
        ("unix:@name:with:colons", Address("name:with:colons", 0, "unix")),
        ("unix:@", Address("", 0, "unix")),
    ],
)
def test_an_address_is_read_and_written_alike(text: str, address: Address):
    assert parse(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "address",
    ["", "tcp:", "tcp:host", "tcp::1", "tcp:a:-1", "unix:/tmp/a", "udp:a:1", "tcp:a:²"],
)
def test_what_is_no_address_is_said_to_be_none(address: str):
    with fails_with(JdagError, "processes.is_neither_tcp_host_port"):
        parse(address)


@pytest.mark.parametrize("address", ["tcp:a:65536", "unix:@" + "n" * 101])
def test_an_address_out_of_range_is_refused(address: str):
    with pytest.raises(JdagError, match=r"65536|over 100 bytes"):
        parse(address)


@pytest.mark.parametrize(
    "text", ["tcp:127.0.0.1:1", "tcp:127.9.9.9:1", "tcp:[::1]:1", "tcp:localhost:1"]
)
def test_loopback_is_what_only_this_host_reaches(text: str):
    hold_to_loopback(parse(text), "is dialled")
    hold_to_loopback(parse("unix:@a"), "is dialled")


@pytest.mark.parametrize(
    "text", ["tcp:0.0.0.0:1", "tcp:[::]:1", "tcp:10.0.0.1:1", "tcp:localhost.evil:1"]
)
def test_anything_else_needs_tls(text: str):
    with fails_with(JdagError, "processes.is_dialled_without_tls_and"):
        hold_to_loopback(parse(text), "is dialled")


def test_names_of_unix_sockets_leave_no_file_and_are_taken_once():
    listener, where = listen(parse("unix:@"))
    assert where.host not in os.listdir() and not os.path.exists(where.host)
    with fails_with(JdagError, "processes.cannot_listen_at_unix_jdag"):
        listen(where)
    listener.close()
    listen(where)[0].close()


def test_an_address_of_another_host_cannot_be_listened_at():
    with fails_with(JdagError, "processes.cannot_listen_at_tcp_192"):
        listen(parse("tcp:192.0.2.1:0"))
