"""Local worker processes: start, monitor and stop them.

Each worker writes its output to its own log file. Workers are started on the thread of
the asyncio loop, because Linux sends the parent-death signal when the thread that
started the child ends, and that thread ends last.

Invariants: when the constructor of `Launch` returns, all workers are ready; if it
raises, no worker is running. After `close` no worker is running, and a temporary log
folder remains only if a worker has failed. If this process is killed, each worker
detects it, exits and removes the folder.
"""

import asyncio
import atexit
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from jdag.errors import JoinError, ScenarioError, reason, unusable
from jdag.processes.launch.worker import COMMAND, STOP, environment
from jdag.processes.net.addresses import Address, bound
from jdag.processes.net.background import loop, wait_for
from jdag.processes.session.cluster_file import READY_S, WorkerOptions

LOGS = "the path of a writable folder"
STOP_S = 5.0
_STOPPING = (signal.SIGINT, signal.SIGTERM)
_LINES_MAX, _TAIL_BYTES_MAX = 10, 2048
_SHOWN_MAX = 200

_log = logging.getLogger(__name__)


class _Child:
    """A worker process. Its methods run on the thread of the asyncio loop."""

    def __init__(
        self, options: WorkerOptions, log: Path, env: Mapping[str, str], temporary: str
    ) -> None:
        self.name = options.worker
        self.log = log
        self.address: Address | None = None
        self.failed = ""  # The reason that the worker reported for a failed start.
        self.ended: str | None = None
        self.settled = asyncio.Event()  # The worker is ready or has ended.
        self._received = b""  # The incomplete last line of the input.
        self._silent, self._dead = asyncio.Event(), asyncio.Event()
        self._socket, child_socket = socket.socketpair()
        with child_socket, log.open("ab") as output:
            self._begins = output.tell()  # Skip the output of earlier processes.
            descriptor = child_socket.fileno()
            arguments = (str(descriptor), options.worker, str(os.getpid()), temporary)
            self.process = subprocess.Popen(
                [sys.executable, *COMMAND, *arguments],
                pass_fds=(descriptor,),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env),
                # Only the foreground process receives Ctrl-C from the terminal.
                process_group=0,
            )
        self._pidfd = os.pidfd_open(self.process.pid)
        self._socket.sendall(options.written() + b"\n")
        self._socket.setblocking(False)
        loop().add_reader(self._socket, self._receive)
        loop().add_reader(self._pidfd, self._die)

    def _receive(self) -> None:
        try:
            data = self._socket.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            loop().remove_reader(self._socket)
            self._silent.set()
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            if self.failed:  # Ignore later lines.
                break
            try:
                message = json.loads(line)
                if "ready" in message:
                    self.address = Address.read(message["ready"])
                    self.settled.set()
                self.failed = message.get("failed", "")
            except Exception:  # One worker's malformed message must not end the others.
                self.failed = f"malformed message: {line[:_SHOWN_MAX]!r}"
                self.process.kill()

    def _die(self) -> None:
        loop().remove_reader(self._pidfd)
        self._receive()  # Read the last messages of the worker.
        loop().remove_reader(self._socket)
        self._silent.set()
        self._dead.set()

    async def wait(self) -> None:
        """Wait until the process ends. If it closes its socket but runs on, kill it."""
        await self._silent.wait()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._dead.wait(), STOP_S)
        self.process.kill()
        await self._dead.wait()
        self._socket.close()
        os.close(self._pidfd)
        code = self.process.wait()
        killed_by = f"was killed by {signal.Signals(-code).name}" if code < 0 else ""
        ending = killed_by or f"ended with exit code {code}"
        self.ended = f"it {ending} (process {self.process.pid})"
        self.settled.set()

    async def wait_until_ready(self) -> None:
        await self.settled.wait()
        why = self.failed or (self.ended and f"{self.ended}{self.last_lines()}")
        if why:
            raise JoinError(f"worker {self.name!r} did not start: {why}")

    def ask_to_stop(self) -> None:
        """Request a drain. A second request ends the worker at once."""
        self.process.send_signal(signal.SIGCONT)  # Resume a stopped process.
        with suppress(OSError):  # The process is ending already.
            self._socket.sendall(STOP)

    def last_lines(self, source: str = "of its output") -> str:
        try:
            with self.log.open("rb") as output:
                nbytes = self.log.stat().st_size
                output.seek(max(self._begins, nbytes - _TAIL_BYTES_MAX))
                text = output.read().decode(errors="replace")
        except OSError as error:
            return f"; its output cannot be read: {error}"
        lines = text.splitlines()[-_LINES_MAX:]
        if not lines:
            return "; it has printed nothing"
        return "\n    ".join([f"\nthe end {source}:", *lines])


# Ways to stop a worker, in the order of use, with the time allowed for each.
_ENDINGS: tuple[tuple[Callable[[_Child], None], float], ...] = (
    (_Child.ask_to_stop, STOP_S),
    (_Child.ask_to_stop, 1.0),
    (lambda child: child.process.kill(), STOP_S),
)


class Launch:
    """Running worker processes; a context manager that stops them.

    Args:
        options: the options of each worker.
        env: environment variables, added to those of this process.
        logs: the folder of the log files `NAME.log`. None means a temporary folder,
            which is kept only if a worker fails.
        ready_s: time in which all workers must become ready.

    Raises:
        JoinError: a worker cannot start, ends, or is not ready in time. The message
            contains its last lines of output. All workers are stopped.
        ScenarioError: the log folder is not writable.
    """

    def __init__(
        self,
        options: Sequence[WorkerOptions],
        *,
        env: Mapping[str, str] | None = None,
        logs: str | os.PathLike[str] | None = None,
        ready_s: float = READY_S,
    ) -> None:
        self._options = {each.worker: each for each in options}
        self._env = {**environment(), **(env or {})}
        self._is_temporary = logs is None
        self.logs = _folder(logs)
        self._process = os.getpid()
        self._children: dict[str, _Child] = {}
        self._keeping: dict[str, asyncio.Task[None]] = {}
        self._on_death: Callable[[str, str], None] | None = None
        self._deaths: dict[str, str] = {}
        self._is_ready = self._closing = self._has_failure = False
        self._over = threading.Event()
        atexit.register(self.close)
        try:
            wait_for(self._begin(ready_s))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Launch":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def addresses(self) -> dict[str, Address]:
        return {c.name: c.address for c in self._children.values() if c.address}

    @property
    def pids(self) -> dict[str, int]:
        return {name: child.process.pid for name, child in self._children.items()}

    @property
    def alive(self) -> tuple[str, ...]:
        return tuple(n for n, child in self._children.items() if child.ended is None)

    def log_of(self, worker: str) -> Path:
        return self._children[worker].log

    def on_death(self, report: Callable[[str, str], None]) -> None:
        """Call `report(worker, reason)` when a worker process ends unexpectedly.

        Past unexpected ends are reported too. The calls run on the loop's thread and
        must not block.
        """

        async def set_report() -> None:
            self._on_death = report
            for worker, why in self._deaths.items():
                self._report(worker, why)

        wait_for(set_report())

    def wait(self) -> None:
        """On the main thread, wait for SIGINT, SIGTERM or the end of all workers."""

        def stop(*_: object) -> None:
            self._over.set()

        handlers = {number: signal.signal(number, stop) for number in _STOPPING}
        wakeup_fd = signal.set_wakeup_fd(-1)  # No other thread may handle the signals.
        try:
            self._over.wait()
        finally:
            signal.set_wakeup_fd(wakeup_fd)
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def restart(self, worker: str, ready_s: float) -> Address:
        """Replace the process of a worker; return the new control address.

        Raises:
            JoinError: the new process does not start. The worker then has no process.
        """
        return wait_for(self._restart(worker, ready_s))

    async def _restart(self, worker: str, ready_s: float) -> Address:
        self._children[worker].process.kill()
        await self._keeping[worker]  # Wait until its end is reported.
        self._deaths.pop(worker, None)
        self._start(worker)
        child = self._children[worker]
        try:
            await self._ready((child,), ready_s)
        except JoinError:
            child.process.kill()
            raise
        assert child.address is not None, worker
        return child.address

    def _start(self, worker: str) -> None:
        temporary = str(self.logs) if self._is_temporary else ""
        log = self.logs / f"{worker}.log"
        try:
            child = _Child(self._options[worker], log, self._env, temporary)
        except (OSError, ValueError) as error:
            raise JoinError(f"cannot start workers: {error}") from error
        self._children[worker] = child
        self._keeping[worker] = asyncio.create_task(self._keep(child))

    async def _begin(self, ready_s: float) -> None:
        for worker in self._options:
            self._start(worker)
        await self._ready(tuple(self._children.values()), ready_s)
        self._is_ready = True

    async def _ready(self, children: Sequence[_Child], ready_s: float) -> None:
        try:
            async with asyncio.timeout(ready_s):
                await asyncio.gather(*[child.wait_until_ready() for child in children])
        except TimeoutError:
            for child in children:
                if not child.settled.is_set():
                    raise JoinError(
                        f"worker {child.name!r} is not ready within "
                        f"ready_s={ready_s:g}{child.last_lines()}"
                    ) from None
        for child in children:  # A worker may have ended after it was ready.
            await child.wait_until_ready()

    async def _keep(self, child: _Child) -> None:
        await child.wait()
        if self._is_ready and not self._closing:
            self._has_failure |= child.process.returncode != 0
            why = f"{child.ended}{child.last_lines(f'of {child.log}')}"
            self._deaths[child.name] = why
            self._report(child.name, why)
        if not self.alive:
            self._over.set()

    def _report(self, worker: str, why: str) -> None:
        try:
            if self._on_death is not None:
                self._on_death(worker, why)
        except Exception:  # The other workers must go on.
            _log.exception("the report of the end of worker %s failed", worker)

    def close(self) -> None:
        """Stop all workers: drain, then stop at once, then kill. Idempotent."""
        if self._process != os.getpid():
            return  # A forked child must not stop the workers of its parent.
        self._closing = True
        wait_for(self._close())
        atexit.unregister(self.close)
        if self._is_temporary and not self._has_failure:
            shutil.rmtree(self.logs, ignore_errors=True)

    async def _close(self) -> None:
        # If not all workers are ready, none has work to finish: kill them.
        for stop, wait_s in _ENDINGS if self._is_ready else _ENDINGS[-1:]:
            for child in self._children.values():
                if child.ended is None:
                    stop(child)
            if self.alive:
                await asyncio.wait(self._keeping.values(), timeout=wait_s)


def _folder(logs: str | os.PathLike[str] | None) -> Path:
    if logs is None:
        return Path(tempfile.mkdtemp(prefix="jdag-"))
    folder = Path(logs).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, ValueError) as error:
        allowed = f"{LOGS}; {reason(error)}"
        raise ScenarioError(unusable("logs", str(logs), allowed)) from error


def is_here(host: str) -> bool:
    try:
        bound(Address(host)).close()
    except OSError:
        return False
    return True
