"""Where nodes listen: addresses as text, and the sockets made of them.

`tcp:HOST:PORT` (`tcp:[::1]:0`; port 0 lets the system choose), `unix:@NAME` (a name of
this host's network, not of its file system; `unix:@` chooses one at random), and
`grpc:HOST:PORT`, a control server whose streams carry the bytes.
"""

import ipaddress
import os
import secrets
import socket
import struct
from dataclasses import dataclass

from jdag.errors import JdagError, reason

KINDS = ("unix", "tcp", "grpc")
_CREDENTIALS = struct.Struct("3i")
_NAME_BYTES_MAX = 100
# Connections that the system keeps until they are accepted; one more would be told
# nothing, and try again after a second.
BACKLOG_MAX = 1024


@dataclass(frozen=True)
class Address:
    """A kind (`unix`, `tcp`, `grpc`) and what it says: a name, or host and port."""

    kind: str
    host: str
    port: int = 0

    def __str__(self) -> str:
        if self.kind == "unix":
            return f"unix:@{self.host}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.kind}:{host}:{self.port}"


def parse(text: str) -> Address:
    """Read an address; JdagError says what is wrong with it."""
    kind, _, rest = text.partition(":")
    if kind == "unix" and rest.startswith("@"):
        if len(rest.encode()) > _NAME_BYTES_MAX or "\0" in rest:
            raise JdagError(f"address {text!r}: the name has over 100 bytes or a zero")
        return Address(kind, rest[1:])
    host, _, port = rest.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if kind in ("tcp", "grpc") and is_host(host) and port.isascii() and port.isdigit():
        if int(port) < 1 << 16:
            return Address(kind, host, int(port))
        raise JdagError(f"address {text!r}: port {port} is not below 65536")
    raise JdagError(
        f"address {text!r} is none of tcp:HOST:PORT, unix:@NAME and grpc:HOST:PORT"
    )


def hold_to_loopback(address: Address, what: str) -> None:
    """Refuse an address that other hosts reach, which needs TLS."""
    if address.kind == "unix" or is_loopback(address.host):
        return
    raise JdagError(
        f"{address} {what} without TLS, and only loopback may be: set certificates, or"
        " use 127.0.0.1"
    )


def is_loopback(host: str) -> bool:
    """Whether only this host reaches a host, by name or number."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_host(host: str) -> bool:
    """Whether a text could be a host, so that the system may be asked for it."""
    try:
        host.encode("idna")
    except UnicodeError:  # A part of it is empty, or has over 63 bytes.
        return False
    return bool(host) and host == host.strip() and host.isprintable()


def listen(address: Address) -> tuple[socket.socket, Address]:
    """Listen at an address; return the socket and where it is in fact.

    Raises JdagError: the address is in use, is none of this host's, is not allowed.
    """
    try:
        if address.kind == "unix":
            name = address.host or f"jdag-{secrets.token_hex(8)}"
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            _bind(listener, f"\0{name}")
            return listener, Address("unix", name)
        family, *_, where = _resolved(address)
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _bind(listener, where)
    except OSError as error:
        raise JdagError(f"cannot listen at {address}: {reason(error)}") from error
    return listener, Address("tcp", address.host, listener.getsockname()[1])


def _bind(listener: socket.socket, where: object) -> None:
    try:
        listener.bind(where)  # type: ignore[arg-type]
        listener.listen(BACKLOG_MAX)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise


def _resolved(address: Address) -> tuple[int, int, int, str, object]:
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    return found[0]


def connect(address: Address, timeout_s: float) -> socket.socket:
    """Connect to a Unix or TCP address; OSError says why it cannot."""
    if address.kind == "unix":
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connected.settimeout(timeout_s)
            connected.connect(f"\0{address.host}")
        except OSError:
            connected.close()
            raise
        return connected
    return socket.create_connection((address.host, address.port), timeout_s)


def hold_to_own_user(connected: socket.socket) -> None:
    """Refuse, by ConnectionError, a Unix socket whose other end is another user's."""
    if connected.family != socket.AF_UNIX:
        return
    wanted = socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
    process, user, _ = _CREDENTIALS.unpack(connected.getsockopt(*wanted))
    if user != (ours := os.geteuid()):
        raise ConnectionError(f"process {process} there is of user {user}, not {ours}")
