"""Local worker processes: start, watch and stop them, however this process ends.

They are started on the thread of the asyncio loop, which ends last: Linux signals the
death of a parent when the thread that started the child ends. Each worker writes its
output to its own file.

Invariants: once `Launch` is made, all workers are ready, or none is left. After
`close` none is left, and the temporary folder is kept only if a worker has died. If
this process is killed, each worker detects that, ends and removes the folder.
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

LOGS = "the path of a folder that can be written"
STOP_S = 5.0
_STOPPING = (signal.SIGINT, signal.SIGTERM)
_LINES_MAX, _TAIL_BYTES_MAX = 10, 2048
_SHOWN_MAX = 200

_log = logging.getLogger(__name__)


class _Child:
    """One worker process; used on the loop."""

    def __init__(
        self, options: WorkerOptions, log: Path, env: Mapping[str, str], litter: str
    ) -> None:
        self.name = options.worker
        self.log = log
        self.address: Address | None = None
        self.failed = ""  # The reason for not starting, as reported by the worker.
        self.ended: str | None = None
        self.settled = asyncio.Event()  # It is ready, or has ended.
        self._said = b""
        self._silent, self._dead = asyncio.Event(), asyncio.Event()
        self._socket, theirs = socket.socketpair()
        with theirs, log.open("ab") as output:
            self._begins = output.tell()  # Another one may have written there before.
            mine = (str(os.getpid()), litter)
            arguments = (str(theirs.fileno()), options.worker, *mine)
            self.process = subprocess.Popen(
                [sys.executable, *COMMAND, *arguments],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env),
                # Ctrl-C in a terminal is for the process in the foreground.
                process_group=0,
            )
        self._pidfd = os.pidfd_open(self.process.pid)
        self._socket.sendall(options.written() + b"\n")
        self._socket.setblocking(False)
        loop().add_reader(self._socket, self._hear)
        loop().add_reader(self._pidfd, self._die)

    def _hear(self) -> None:
        try:
            came = self._socket.recv(1 << 16)
        except OSError:
            came = b""
        if not came:
            loop().remove_reader(self._socket)
            self._silent.set()
        *lines, self._said = (self._said + came).split(b"\n")
        for line in lines:
            if self.failed:  # Later lines do not matter.
                break
            try:
                said = json.loads(line)
                if "ready" in said:
                    self.address = Address.read(said["ready"])
                    self.settled.set()
                self.failed = said.get("failed", "")
            except Exception:  # Malformed output of one worker must not end the others.
                self.failed = f"it sent {line[:_SHOWN_MAX]!r}, which is not understood"
                self.process.kill()

    def _die(self) -> None:
        loop().remove_reader(self._pidfd)
        self._hear()  # Its last words.
        loop().remove_reader(self._socket)
        self._silent.set()
        self._dead.set()

    async def wait(self) -> None:
        """Wait until it has ended; kill it if only its socket is closed."""
        await self._silent.wait()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._dead.wait(), STOP_S)
        self.process.kill()
        await self._dead.wait()
        self._socket.close()
        os.close(self._pidfd)
        code = self.process.wait()
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        self.ended = f"it {how} (process {self.process.pid})"
        self.settled.set()

    async def wait_until_ready(self) -> None:
        await self.settled.wait()
        if self.failed or self.ended is not None:
            why = self.failed or f"{self.ended}{self.last_lines()}"
            raise JoinError(f"worker {self.name!r} did not start: {why}")

    def ask_to_stop(self) -> None:
        """Request a drain, even if it is stopped by SIGSTOP; twice ends it at once."""
        self.process.send_signal(signal.SIGCONT)
        with suppress(OSError):  # It is just ending by itself.
            self._socket.sendall(STOP)

    def last_lines(self, where: str = "of what it printed") -> str:
        try:
            with self.log.open("rb") as output:
                nbytes = self.log.stat().st_size
                output.seek(max(self._begins, nbytes - _TAIL_BYTES_MAX))
                said = output.read().decode(errors="replace")
        except OSError as error:  # The file has been removed.
            return f"; what it printed cannot be read: {error}"
        lines = said.splitlines()[-_LINES_MAX:]
        if not lines:
            return "; it has printed nothing"
        return "\n    ".join([f"\nthe end {where}:", *lines])


# How workers are stopped, and how long each way is given.
_ENDINGS: tuple[tuple[Callable[[_Child], None], float], ...] = (
    (_Child.ask_to_stop, STOP_S),
    (_Child.ask_to_stop, 1.0),
    (lambda child: child.process.kill(), STOP_S),
)


class Launch:
    """Worker processes, from when all are ready; a context manager that stops them.

    Args:
        options: for each worker.
        env: variables of the environment to add to those of this process.
        logs: a folder for the output of each, `NAME.log`; None: a temporary one, which
            is kept only if a worker has died.
        ready_s: how long all may take until they are ready.

    Raises:
        JoinError: one cannot start, dies, or is not ready in time: why, and its last
            lines. Then none is left.
        ScenarioError: the folder for their output cannot be written.
    """

    def __init__(
        self,
        options: Sequence[WorkerOptions],
        *,
        env: Mapping[str, str] | None = None,
        logs: str | os.PathLike[str] | None = None,
        ready_s: float = READY_S,
    ) -> None:
        self._options = {one.worker: one for one in options}
        self._env = {**environment(), **(env or {})}
        self._is_litter = logs is None
        self.logs = _folder(logs)
        self._process = os.getpid()
        self._children: dict[str, _Child] = {}
        self._keeping: dict[str, asyncio.Task[None]] = {}
        self._tell: Callable[[str, str], None] | None = None
        self._deaths: dict[str, str] = {}
        self._is_ready = self._closing = self._someone_failed = False
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
        """Where the control server of each worker listens."""
        children = self._children.values()
        return {one.name: one.address for one in children if one.address is not None}

    @property
    def pids(self) -> dict[str, int]:
        """The process of each worker."""
        return {name: child.process.pid for name, child in self._children.items()}

    @property
    def alive(self) -> tuple[str, ...]:
        """The workers whose processes have not ended."""
        return tuple(one.name for one in self._children.values() if one.ended is None)

    def log_of(self, worker: str) -> Path:
        """Return the file with the output of a worker."""
        return self._children[worker].log

    def on_death(self, tell: Callable[[str, str], None]) -> None:
        """Call `tell(worker, why)` for each worker that ends unasked, also before now.

        It is called on the loop's thread, and must not block.
        """
        wait_for(self._on_death(tell))

    async def _on_death(self, tell: Callable[[str, str], None]) -> None:
        self._tell = tell
        for worker, why in self._deaths.items():
            self._report(worker, why)

    def wait(self) -> None:
        """Wait for SIGINT or SIGTERM, or until none is left; on the main thread."""

        def told(*_: object) -> None:
            self._over.set()

        before = {one: signal.signal(one, told) for one in _STOPPING}
        told_before = signal.set_wakeup_fd(-1)  # No other thread is to act on them.
        try:
            self._over.wait()
        finally:
            signal.set_wakeup_fd(told_before)
            for one, handler in before.items():
                signal.signal(one, handler)

    def restart(self, worker: str, ready_s: float) -> Address:
        """Start the process of a worker anew; return where its control server listens.

        Raises:
            JoinError: as `Launch` does; then the worker has no process.
        """
        return wait_for(self._restart(worker, ready_s))

    async def _restart(self, worker: str, ready_s: float) -> Address:
        self._children[worker].process.kill()
        await self._keeping[worker]  # Its end is reported.
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
        litter = str(self.logs) if self._is_litter else ""
        log = self.logs / f"{worker}.log"
        try:
            child = _Child(self._options[worker], log, self._env, litter)
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
                    late = f"worker {child.name!r} is not ready within ready_s="
                    said = f"{late}{ready_s:g}{child.last_lines()}"
                    raise JoinError(said) from None
        for child in children:  # One may have ended since it was ready.
            await child.wait_until_ready()

    async def _keep(self, child: _Child) -> None:
        await child.wait()
        if self._is_ready and not self._closing:
            self._someone_failed |= child.process.returncode != 0
            why = f"{child.ended}{child.last_lines(f'of {child.log}')}"
            self._deaths[child.name] = why
            self._report(child.name, why)
        if not self.alive:
            self._over.set()

    def _report(self, worker: str, why: str) -> None:
        try:
            if self._tell is not None:
                self._tell(worker, why)
        except Exception:  # Of the receiver; the other workers are kept.
            _log.exception("worker %s has died, and reporting it failed", worker)

    def close(self) -> None:
        """Stop all workers: drain, then stop at once, then kill; idempotent."""
        if self._process != os.getpid():
            return  # A forked child: the workers are its parent's.
        self._closing = True
        wait_for(self._close())
        atexit.unregister(self.close)
        if self._is_litter and not self._someone_failed:
            shutil.rmtree(self.logs, ignore_errors=True)

    async def _close(self) -> None:
        # Until all are ready, no worker has anything to finish.
        for make_end, wait_s in _ENDINGS if self._is_ready else _ENDINGS[-1:]:
            for child in self._children.values():
                if child.ended is None:
                    make_end(child)
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
        said = f"{LOGS}; {reason(error)}"
        raise ScenarioError(unusable("logs", str(logs), said)) from error


def is_here(host: str) -> bool:
    """Whether a host, by name or number, is this one."""
    try:
        bound(Address(host)).close()
    except OSError:
        return False
    return True
