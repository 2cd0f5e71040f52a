"""Addresses of nodes: their text form, and sockets bound to them.

The address of a data connection is `tcp:HOST:PORT` or `unix:@NAME`. With port 0, as in
`tcp:[::1]:0`, the system chooses a port. `unix:@NAME` is an abstract Unix socket; with
`unix:@` the system chooses the name.
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
# Listen backlog. The system drops further connections, which then retry after a second.
BACKLOG_MAX = 1024


class Address(NamedTuple):
    """A host name or IP address with a port. For port 0 the system chooses a port.

    For a data connection, `kind` is `tcp` or `unix`; with `unix`, `host` is the socket
    name. For a control server, `kind` is empty.
    """

    host: str
    port: int = 0
    kind: str = ""

    @classmethod
    def read(cls, text: str) -> "Address":
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
        try:
            return self.kind == "unix" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def address_of(text: str) -> Address | None:
    """Parse `host:port`; return None if the text is malformed."""
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
    kind, _, rest = text.partition(":")
    if kind == "unix" and rest.startswith("@"):
        if len(rest.encode()) > _NAME_BYTES_MAX or "\0" in rest:
            raise JdagError(
                f"address {text!r}: expected a name of at most 100 bytes without a "
                "zero byte"
            )
        return Address(rest[1:], kind=kind)
    address = address_of(rest)
    if address is None or kind != "tcp":
        raise JdagError(
            f"address {text!r} is neither tcp:HOST:PORT, with a port below 65536, nor "
            "unix:@NAME"
        )
    return address._replace(kind=kind)


def hold_to_loopback(address: Address, usage: str) -> None:
    if not address.is_loopback:
        raise JoinError(
            f"{usage} {address} without TLS, which is only allowed for loopback "
            "addresses: set [tls] in the cluster file, or use 127.0.0.1"
        )


def bound(address: Address) -> socket.socket:
    family: int = socket.AF_UNIX
    where: Any = f"\0{address.host}"
    if address.kind != "unix":
        info = socket.getaddrinfo(*address[:2], type=socket.SOCK_STREAM)[0]
        family, where = info[0], info[-1]
    created = socket.socket(family, socket.SOCK_STREAM)
    try:
        created.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        created.bind(where)
    except OSError:
        created.close()
        raise
    return created


def listen(address: Address) -> tuple[socket.socket, Address]:
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
    info = socket.getaddrinfo(*address[:2], type=socket.SOCK_DGRAM)[0]
    created = socket.socket(info[0], socket.SOCK_DGRAM)
    try:
        created.setblocking(False)
        (created.bind if binds else created.connect)(info[-1])
    except OSError:
        created.close()
        raise
    return created


def host_towards(address: Address) -> str:
    """Return the local IP address of a connection to `address`, or "" if unknown."""
    try:
        with datagrams(address, binds=False) as towards:
            return str(towards.getsockname()[0])
    except OSError:
        return ""


def hold_to_own_user(connected: socket.socket) -> None:
    if connected.family != socket.AF_UNIX:
        return
    option = socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
    process, user, _ = _CREDENTIALS.unpack(connected.getsockopt(*option))
    if user != (expected := os.geteuid()):
        raise ConnectionError(
            f"process {process} at the other end runs as user {user}; expected user "
            f"{expected}"
        )
