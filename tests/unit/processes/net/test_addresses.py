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


MALFORMED = ("", "tcp:", "tcp:host", "tcp::1", "tcp:a:-1", "unix:/tmp/a", "udp:a:1")


@pytest.mark.parametrize("address", [*MALFORMED, "tcp:a:²", "tcp:a:65536"])
def test_a_malformed_address_is_refused(address: str):
    with fails_with(JdagError, "processes.malformed_address"):
        parse(address)


def test_the_name_of_a_unix_socket_has_at_most_100_bytes():
    with pytest.raises(JdagError, match="at most 100 bytes"):
        parse("unix:@" + "n" * 101)


LOOPBACK = ("tcp:127.0.0.1:1", "tcp:127.9.9.9:1", "tcp:[::1]:1", "tcp:localhost:1")


@pytest.mark.parametrize("text", [*LOOPBACK, "unix:@a"])
def test_loopback_is_what_only_this_host_reaches(text: str):
    hold_to_loopback(parse(text), "cannot dial")


@pytest.mark.parametrize(
    "text", ["tcp:0.0.0.0:1", "tcp:[::]:1", "tcp:10.0.0.1:1", "tcp:localhost.evil:1"]
)
def test_anything_else_needs_tls(text: str):
    with fails_with(JdagError, "processes.is_dialled_without_tls"):
        hold_to_loopback(parse(text), "cannot dial")


def test_names_of_unix_sockets_leave_no_file_and_are_taken_once():
    listener, where = listen(parse("unix:@"))
    assert where.host not in os.listdir() and not os.path.exists(where.host)
    with fails_with(JdagError, "processes.unix_address_in_use"):
        listen(where)
    listener.close()
    listen(where)[0].close()


def test_an_address_of_another_host_cannot_be_listened_at():
    with fails_with(JdagError, "processes.cannot_listen_at_another_host"):
        listen(parse("tcp:192.0.2.1:0"))
