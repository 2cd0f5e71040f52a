"""Signs of life of a process that computes and cannot answer pings.

A single C call, such as `sorted` of a large list or a compilation, may hold Python's
interpreter lock for longer than the deadline. Meanwhile no thread of the process can
answer pings. Each process of a session therefore has a helper process
(`jdag.processes.net.pulse_helper`). The first frame of each connection contains the
helper's address and key. If a peer is silent for half of the deadline, the node queries
the peer's helper. A reply is a sign of life.

Without a reply the peer is lost at the deadline, as if it had no helper. There is no
reply if UDP is blocked, if the helper was killed, if the system has no /proc, or if the
deadline is below 0.4 s.
"""

import ipaddress
import logging
import os
import socket
import subprocess
import sys
from contextlib import suppress

from jdag.errors import ProtocolError
from jdag.processes.net import pulse_helper
from jdag.processes.net.addresses import Address, datagrams
from jdag.processes.net.pulse_helper import (
    KEY_BYTES,
    NONCE_BYTES,
    TAG_BYTES,
    pulse_answer,
    question,
)

_ENDING_S = 5.0
_READS_MAX = 64
_EXPECTED_MAX = 8

_log = logging.getLogger(__name__)


class Helper:
    """The helper process of this process. The constructor starts it on `host`."""

    def __init__(self, host: str) -> None:
        self._key = os.urandom(KEY_BYTES)
        with datagrams(Address(host), binds=True) as bound:
            self._address = Address(*bound.getsockname()[:2])
            arguments = (str(os.getpid()), str(bound.fileno()))
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", pulse_helper.__file__, *arguments],
                pass_fds=(bound.fileno(),),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,  # The helper gets no signals of the terminal.
            )
        assert self.process.stdin is not None
        with suppress(OSError), self.process.stdin as keys:
            keys.write(self._key)

    @property
    def frame(self) -> dict[str, str]:
        return {"pulse": str(self._address), "key": self._key.hex()}

    def close(self) -> None:
        self.process.kill()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_ENDING_S)


def helper_at(host: str) -> Helper | None:
    try:
        return Helper(host) if host else None
    except OSError as error:
        _log.info("cannot start the helper process: %s", error)
        return None


class Pulse:
    """Queries the helper process of one peer.

    Raises ProtocolError if the address or key in the peer's frame is malformed.
    """

    def __init__(self, address: str, key: str) -> None:
        try:
            self._address = Address.read(address)
            # A host name is refused, because it would require a lookup.
            ipaddress.ip_address(self._address.host)
            self._key = bytes.fromhex(key)
        except (AssertionError, ValueError):
            raise ProtocolError(
                f"{address!r} is not the address of a helper process"
            ) from None
        self._socket: socket.socket | None = None
        self._expected: dict[bytes, int] = {}  # Maps expected replies to query times.
        self._heard_ns = 0

    def look(self, now_ns: int, heard_ns: int, quarter_ns: int) -> None:
        """Query the helper if the peer was silent for half of the deadline.

        If the last sign of life was a reply of the helper, a quarter of the deadline is
        enough. `quarter_ns` is a quarter of the deadline.
        """
        quarters = 1 if heard_ns == self._heard_ns else 2
        if now_ns - heard_ns >= quarters * quarter_ns:
            self.ask(now_ns)

    def ask(self, now_ns: int) -> None:
        nonce = os.urandom(NONCE_BYTES)
        try:
            if self._socket is None:
                self._socket = datagrams(self._address, binds=False)
            self._socket.send(question(self._key, nonce))
        except OSError as error:
            _log.debug("%s: a helper cannot be queried: %s", self._address, error)
        else:
            self._expected[pulse_answer(self._key, nonce)] = now_ns
            if len(self._expected) > _EXPECTED_MAX:
                del self._expected[next(iter(self._expected))]

    def heard_ns(self) -> int:
        """Return the time of the newest query that was answered, or 0."""
        with suppress(OSError):  # No reply arrived, or nothing listens at the address.
            for _ in range(_READS_MAX if self._expected else 0):
                assert self._socket is not None
                reply = self._socket.recv(TAG_BYTES + 1)
                self._heard_ns = max(self._heard_ns, self._expected.pop(reply, 0))
        return self._heard_ns

    def close(self) -> None:
        self._expected.clear()
        if self._socket is not None:
            self._socket.close()
