"""Signs of life of a process that computes and cannot answer.

One call of C may hold Python's interpreter lock for longer than the deadline: `sorted`
of a large list, a compilation. No thread of the process then answers pings. So each
process of a session has a helper process (`jdag.processes.net.pulse_helper`), whose
address and key it sends to all its peers, in the first frame of each connection. A node
asks the helper of a peer that is silent for half of the deadline. An answer is a sign
of life.

If there is none (UDP is blocked, the helper was killed, the system has no /proc, the
deadline is below 0.4 s), the peer is lost as one without a helper is.
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
_ASKED_MAX = 8

_log = logging.getLogger(__name__)


class Helper:
    """The helper process of this one, from now until `close`; may raise OSError.

    `host`, where its socket is bound, is the one of this process, as others know it.
    """

    def __init__(self, host: str) -> None:
        self._key = os.urandom(KEY_BYTES)
        with datagrams(Address(host), binds=True) as bound:
            self._address = Address(*bound.getsockname()[:2])
            arguments = (str(os.getpid()), str(bound.fileno()))
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", pulse_helper.__file__, *arguments],
                pass_fds=(bound.fileno(),),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,  # Signals of a terminal do not reach it.
            )
        assert self._process.stdin is not None
        with suppress(OSError), self._process.stdin as keys:
            keys.write(self._key)

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def frame(self) -> dict[str, str]:
        """The control frame by which a peer can ask it."""
        return {"pulse": str(self._address), "key": self._key.hex()}

    def close(self) -> None:
        """End it; idempotent."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDING_S)


def helper_at(host: str) -> Helper | None:
    """Start the helper of this process; None without a host, or if that fails."""
    try:
        return Helper(host) if host else None
    except OSError as error:
        _log.info("no helper process: %s", error)
        return None


class Pulse:
    """What is asked of the helper of one peer, by the peer's frame.

    Raises:
        ProtocolError: the frame is malformed.
    """

    def __init__(self, address: str, key: str) -> None:
        try:
            self._address = Address.read(address)
            ipaddress.ip_address(self._address.host)  # A name would be looked up.
            self._key = bytes.fromhex(key)
        except (AssertionError, ValueError):
            raise ProtocolError(f"no helper can be asked at {address!r}") from None
        self._socket: socket.socket | None = None
        self._asked: dict[bytes, int] = {}  # The answers that may come, and when asked.
        self._heard_ns = 0

    def look(self, now_ns: int, heard_ns: int, quarter_ns: int) -> None:
        """Ask, if a ping has not been answered, or the last answer was the helper's.

        `quarter_ns` is a quarter of the deadline.
        """
        quarters = 1 if heard_ns == self._heard_ns else 2
        if now_ns - heard_ns >= quarters * quarter_ns:
            self.ask(now_ns)

    def ask(self, now_ns: int) -> None:
        """Ask whether the peer computes; never blocks."""
        nonce = os.urandom(NONCE_BYTES)
        try:
            if self._socket is None:
                self._socket = datagrams(self._address, binds=False)
            self._socket.send(question(self._key, nonce))
        except OSError as error:
            _log.debug("%s: a helper is not asked: %s", self._address, error)
        else:
            self._asked[pulse_answer(self._key, nonce)] = now_ns
            if len(self._asked) > _ASKED_MAX:
                del self._asked[next(iter(self._asked))]

    def heard_ns(self) -> int:
        """Return when the last question that was answered was asked; 0: never."""
        with suppress(OSError):  # Nothing has come, or nothing listens there.
            for _ in range(_READS_MAX if self._asked else 0):
                assert self._socket is not None
                came = self._socket.recv(TAG_BYTES + 1)
                self._heard_ns = max(self._heard_ns, self._asked.pop(came, 0))
        return self._heard_ns

    def close(self) -> None:
        """Ask no more."""
        self._asked.clear()
        if self._socket is not None:
            self._socket.close()
