"""Addresses of nodes, as text and as sockets.

`tcp:HOST:PORT` (`tcp:[::1]:0`; port 0 lets the system choose) and `unix:@NAME` (an
abstract Unix socket name; `unix:@` chooses a random one).
"""

import ipaddress
import os
import re
import secrets
import socket
import struct
from typing import Any, NamedTuple

from jdag.errors import JdagError, JoinError, reason

_CREDENTIALS = struct.Struct("3i")
_NAME_BYTES_MAX = 100
# Listen backlog. The system drops connections beyond it, which retry after a second.
BACKLOG_MAX = 1024


class Address(NamedTuple):
    """A host, by name or number, and a port; port 0 lets the system choose.

    `kind` is `unix` (then `host` is the socket name) or `tcp` for a data connection,
    and empty for a control server.
    """

    host: str
    port: int = 0
    kind: str = ""

    @classmethod
    def read(cls, text: str) -> "Address":
        """Parse the address of a control server, as formatted by `str`."""
        address = address_of(text)
        assert address is not None, text
        return address

    def __str__(self) -> str:
        if self.kind == "unix":
            return f"unix:@{self.host}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.kind}:{host}:{self.port}".removeprefix(":")

    @property
    def is_loopback(self) -> bool:
        """Whether the address can be reached only from this host."""
        try:
            return self.kind == "unix" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def address_of(text: str) -> Address | None:
    """Parse `host:port`; None if malformed."""
    host, _, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) >= 1 << 16:
        return None
    try:
        bare.encode("idna")
    except UnicodeError:  # A label is empty or longer than 63 bytes.
        return None
    if not bare or bare != bare.strip() or not bare.isprintable():
        return None
    return None if bare == host and ":" in bare else Address(bare, int(port))


def parse(text: str) -> Address:
    """Parse the address of a data connection; JdagError if malformed."""
    kind, _, rest = text.partition(":")
    if kind == "unix" and rest.startswith("@"):
        if len(rest.encode()) > _NAME_BYTES_MAX or "\0" in rest:
            raise JdagError(
                f"address {text!r}: the name has over 100 bytes or a zero byte"
            )
        return Address(rest[1:], kind=kind)
    found = address_of(rest)
    if found is None or kind != "tcp":
        raise JdagError(
            f"address {text!r} is neither tcp:HOST:PORT, with a port below 65536, nor "
            "unix:@NAME"
        )
    return found._replace(kind=kind)


def hold_to_loopback(address: Address, what: str) -> None:
    """Refuse a non-loopback address, which requires TLS."""
    if not address.is_loopback:
        raise JoinError(
            f"{address} {what} without TLS, and only loopback may be: name certificates"
            " in the [tls] of the cluster's file, or use 127.0.0.1"
        )


def bound(address: Address) -> socket.socket:
    """Return a socket bound to the address; OSError if that fails."""
    family: int = socket.AF_UNIX
    where: Any = f"\0{address.host}"
    if address.kind != "unix":
        found = socket.getaddrinfo(*address[:2], type=socket.SOCK_STREAM)[0]
        family, where = found[0], found[-1]
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(where)
    except OSError:
        made.close()
        raise
    return made


def listen(address: Address) -> tuple[socket.socket, Address]:
    """Listen at an address; return the socket and the actual address.

    Raises:
        JoinError: the address is in use, or does not belong to this host.
    """
    if address.kind == "unix" and not address.host:
        address = address._replace(host=f"jdag-{secrets.token_hex(8)}")
    try:
        listener = bound(address)
    except OSError as error:
        raise JoinError(f"cannot listen at {address}: {reason(error)}") from error
    listener.listen(BACKLOG_MAX)
    listener.setblocking(False)
    if address.kind != "unix":
        address = address._replace(port=listener.getsockname()[1])
    return listener, address


def open_socket(address: Address, timeout_s: float) -> socket.socket:
    """Connect to a Unix or TCP address; OSError if that fails."""
    if address.kind == "unix":
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connected.settimeout(timeout_s)
            connected.connect(f"\0{address.host}")
        except OSError:
            connected.close()
            raise
        return connected
    return socket.create_connection(address[:2], timeout_s)


def datagrams(address: Address, *, binds: bool) -> socket.socket:
    """Return a UDP socket that does not block, bound or connected to an address."""
    found = socket.getaddrinfo(*address[:2], type=socket.SOCK_DGRAM)[0]
    made = socket.socket(found[0], socket.SOCK_DGRAM)
    try:
        made.setblocking(False)
        (made.bind if binds else made.connect)(found[-1])
    except OSError:
        made.close()
        raise
    return made


def host_towards(address: Address) -> str:
    """Return the host by which one at an address reaches this process, or ""."""
    try:
        with datagrams(address, binds=False) as towards:
            return str(towards.getsockname()[0])
    except OSError:
        return ""


def hold_to_own_user(connected: socket.socket) -> None:
    """Raise ConnectionError if the peer of a Unix socket runs as another user."""
    if connected.family != socket.AF_UNIX:
        return
    wanted = socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
    process, user, _ = _CREDENTIALS.unpack(connected.getsockopt(*wanted))
    if user != (ours := os.geteuid()):
        raise ConnectionError(
            f"process {process} there runs as user {user}, not {ours}"
        )
