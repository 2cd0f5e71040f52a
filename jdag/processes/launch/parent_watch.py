"""What a worker process does before it imports JAX: it watches its parent, and signals.

The arguments are the number of an inherited socket, the worker's name, the process
that this one must not outlive (0 for none), and a folder to remove when that has gone
without doing so. Over the socket come the options, as one line of JSON; while its other
end is open the parent lives.

Signals and the end of the parent are noticed on a thread of its own, since the main one
imports modules for seconds, and then may be in the middle of a computation. SIGTERM
drains: what is under way is finished, peers are told, the exit code is 0. A second one
stops at once, and so does the end of a parent, or a first one before there is anything
to finish in a process without a parent.
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

PARTING_S = 5.0
_PR_SET_PDEATHSIG = 1
_LINE_BYTES_MAX = 1 << 24
_KILLED = 128


class Watch:
    """Waits for signals and for the end of the parent, on a thread of its own."""

    def __init__(self, arguments: Sequence[str]) -> None:
        descriptor, _, parent, self._litter = arguments
        self.has_parent = int(parent) > 0
        self._socket = socket.socket(fileno=int(descriptor))
        self._socket.set_inheritable(False)
        self._lock = threading.Lock()
        self._asked = 0
        self._told = threading.Event()
        self._stop: Callable[[], None] | None = None
        self._signals, self._written = socket.socketpair()
        self._written.setblocking(False)
        signal.set_wakeup_fd(self._written.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, _noted)
        # Ctrl-C in the terminal of a parent is for the parent.
        signal.signal(signal.SIGINT, signal.SIG_IGN if self.has_parent else _noted)
        # `jdag worker` blocks them until here.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
        if self.has_parent:
            self._die_with(int(parent))
        self.options, said = self._read_options()
        threading.Thread(target=self._run, args=(said,), daemon=True).start()

    def say(self, what: dict[str, Any]) -> None:
        """Send a message to the parent, if it still listens."""
        with suppress(OSError):
            self._socket.sendall(json.dumps(what).encode() + b"\n")

    def on_stop(self, stop: Callable[[], None]) -> None:
        """Set the function that drains this process; call it if already requested."""
        with self._lock:
            self._stop = stop
            asked = self._asked
        if asked:
            stop()

    def part(self) -> None:
        """Wait for the parent to release this process, or to end itself.

        If main was killed, its loss is detected before its process has ended.
        """
        if self.has_parent:
            self._told.wait(PARTING_S)

    def _die_with(self, parent: int) -> None:
        # By SIGHUP, even if other processes hold its socket. SIGTERM would request a
        # drain, during which the dying parent may seem alive.
        signal.signal(signal.SIGHUP, self._orphaned)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)
        if os.getppid() != parent:  # It died before this process could ask for that.
            self._orphaned()

    def _read_options(self) -> tuple[bytes, bytes]:
        line, came = b"", b""
        while b"\n" not in came and len(line) < _LINE_BYTES_MAX:
            came = heard(self._socket)
            if not came:
                self._orphaned()
            line += came
        options, _, rest = line.partition(b"\n")
        return options, rest

    def _run(self, said: bytes) -> None:
        if said:
            self._ask(signal.SIGTERM)
        sources = [self._signals, *([self._socket] if self.has_parent else [])]
        while True:
            for source in select.select(sources, (), ())[0]:
                came = heard(source)
                if not came or (source is self._signals and signal.SIGHUP in came):
                    self._orphaned()
                self._ask(came[-1] if source is self._signals else signal.SIGTERM)

    def _ask(self, number: int) -> None:
        """Drain; a second signal stops at once."""
        self._told.set()
        with self._lock:
            self._asked += 1
            asked, stop = self._asked, self._stop
        if asked > 1:
            leave(_KILLED + number)
        if stop is None and not self.has_parent:
            signals.exit_by_signal(number)  # Nothing is under way yet.
        if stop is not None:
            threading.Thread(target=stop, name="stop", daemon=True).start()

    def _orphaned(self, *_: object) -> NoReturn:
        if self._litter:
            shutil.rmtree(self._litter, ignore_errors=True)
        os._exit(1)


def heard(source: socket.socket) -> bytes:
    """Return bytes from a socket; empty if its other end has closed."""
    try:
        return source.recv(1 << 16)
    except ConnectionError:  # It had not read what we said.
        return b""


def _noted(*_: object) -> None:
    """Ignore the signal here; the watch thread reads it from the wakeup fd."""


def leave(code: int) -> NoReturn:
    """End this process without Python's cleanup, as XLA may still be computing."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
