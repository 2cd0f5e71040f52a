"""Watch for signals and the end of the parent, in a worker process.

The command line arguments are the descriptor of an inherited socket, the worker's name,
the process id of the parent (0: none), and a temporary folder to remove if the parent
is killed. The parent sends the worker's options over the socket, as one line of JSON.
The parent is alive while its end of the socket is open.

The watch starts before JAX is imported and has its own thread, because the main thread
imports modules for seconds and later computes. SIGTERM drains the worker: jobs finish,
peers are notified, and the exit code is 0. The process ends at once after a second
SIGTERM or after the end of its parent. A process without a parent also ends at once if
SIGTERM arrives before its first session.
"""

import ctypes
import json
import os
import select
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from jdag.processes.launch import signals

RELEASE_S = 5.0
_PR_SET_PDEATHSIG = 1
_LINE_BYTES_MAX = 1 << 24
_KILLED = 128


class Watch:
    """Waits on a separate thread for signals and for the end of the parent."""

    def __init__(self, arguments: Sequence[str]) -> None:
        descriptor, _, parent, self._temporary = arguments
        self.has_parent = int(parent) > 0
        self._socket = socket.socket(fileno=int(descriptor))
        self._socket.set_inheritable(False)
        self._lock = threading.Lock()
        self._requests = 0
        self._released = threading.Event()
        self._stop: Callable[[], None] | None = None
        self._signals, self._written = socket.socketpair()
        self._written.setblocking(False)
        signal.set_wakeup_fd(self._written.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, _ignored)
        # The parent handles Ctrl-C in its terminal.
        signal.signal(signal.SIGINT, signal.SIG_IGN if self.has_parent else _ignored)
        # `jdag worker` has blocked these signals.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
        if self.has_parent:
            self._die_with(int(parent))
        self.options, rest = self._read_options()
        threading.Thread(target=self._run, args=(rest,), daemon=True).start()

    def report(self, message: dict[str, Any]) -> None:
        with suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def on_stop(self, stop: Callable[[], None]) -> None:
        with self._lock:
            self._stop = stop
            is_requested = self._requests > 0
        if is_requested:
            stop()

    def wait_for_release(self) -> None:
        """Wait for at most `RELEASE_S` until the parent stops this process.

        If main was killed, its connections close shortly before its process has ended.
        """
        if self.has_parent:
            self._released.wait(RELEASE_S)

    def _die_with(self, parent: int) -> None:
        # Linux sends SIGHUP when the parent dies, even while other processes hold the
        # parent's socket. SIGTERM would only request a drain.
        signal.signal(signal.SIGHUP, self._orphaned)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)
        if os.getppid() != parent:  # The parent died before the call of prctl.
            self._orphaned()

    def _read_options(self) -> tuple[bytes, bytes]:
        line, data = b"", b""
        while b"\n" not in data and len(line) < _LINE_BYTES_MAX:
            data = received_from(self._socket)
            if not data:
                self._orphaned()
            line += data
        options, _, rest = line.partition(b"\n")
        return options, rest

    def _run(self, rest: bytes) -> None:
        if rest:
            self._request_stop(signal.SIGTERM)
        sources = [self._signals, *([self._socket] if self.has_parent else [])]
        while True:
            for source in select.select(sources, (), ())[0]:
                data = received_from(source)
                if not data or (source is self._signals and signal.SIGHUP in data):
                    self._orphaned()
                number = data[-1] if source is self._signals else signal.SIGTERM
                self._request_stop(number)

    def _request_stop(self, number: int) -> None:
        self._released.set()
        with self._lock:
            self._requests += 1
            requests, stop = self._requests, self._stop
        if requests > 1:
            leave(_KILLED + number)
        if stop is None and not self.has_parent:
            signals.exit_by_signal(number)  # No session to drain has started yet.
        if stop is not None:
            threading.Thread(target=stop, name="stop", daemon=True).start()

    def _orphaned(self, *_: object) -> NoReturn:
        if self._temporary:
            shutil.rmtree(self._temporary, ignore_errors=True)
        os._exit(1)


def received_from(source: socket.socket) -> bytes:
    try:
        return source.recv(1 << 16)
    except ConnectionError:  # The other end was closed with unread data.
        return b""


def _ignored(*_: object) -> None:
    """Do nothing: the watch thread reads the signal from the wakeup fd."""


def leave(code: int) -> NoReturn:
    """End this process without Python's cleanup, since XLA may still be computing."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
