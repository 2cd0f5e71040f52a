"""Worker processes of this one: started, watched, stopped, whatever becomes of it.

One thread, the keeper, starts them all and waits for what they say and for their end.
It lives as long as any of them does, since Linux tells a process of the death of the
thread that started it. Each writes what it prints to a file of its own.

Invariants: when `Launch` is made, all are ready or none is left; when it is closed,
none is left, and of its folders those alone that somebody asked for or needs to read.
Should this process be killed, each worker notices and ends, and removes what is left.
"""

import atexit
import json
import logging
import os
import selectors
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
from types import FrameType

from jdag.errors import JoinError, ScenarioError, reason, unusable
from jdag.rpc.addresses import Address, bound
from jdag.rpc.settings import READY_S
from jdag.rpc.worker import COMMAND, STOP, WorkerOptions, environment

LOGS = "the path of a folder that can be written"
STOP_S = 5.0
_STOPPING = (signal.SIGINT, signal.SIGTERM)
_LINES_MAX, _TAIL_BYTES_MAX = 10, 2048
_SHOWN_MAX = 200

_log = logging.getLogger(__name__)


class _Child:
    """One worker process."""

    def __init__(
        self, options: WorkerOptions, log: Path, env: Mapping[str, str], litter: str
    ) -> None:
        self.name = options.worker
        self.log = log
        self.address: Address | None = None
        self.failed = ""  # What it said itself of why it cannot start.
        self.ended: str | None = None
        self._said = b""
        self.socket, theirs = socket.socketpair()
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
                # Ctrl-C in a terminal is for the process that is in front.
                process_group=0,
            )
        self.pidfd = os.pidfd_open(self.process.pid)
        self.socket.sendall(options.model_dump_json().encode() + b"\n")
        self.socket.setblocking(False)

    def hear(self) -> bool:
        """Take what it says; False once it says no more."""
        try:
            came = self.socket.recv(1 << 16)
        except OSError:
            came = b""
        self._said += came
        *lines, self._said = self._said.split(b"\n")
        for line in lines:
            if self.failed:  # What else it says changes nothing.
                break
            try:
                said = json.loads(line)
                if "ready" in said:
                    self.address = Address.read(said["ready"])
                self.failed = said.get("failed", "")
            except Exception:  # Whatever it is, the others are to be kept.
                self.failed = f"it said {line[:_SHOWN_MAX]!r}, which is not understood"
                self.process.kill()
        return bool(came)

    def reap(self) -> None:
        """Take note of its end: it has ended, or says no more and is made to."""
        try:
            code = self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self.socket.close()
        os.close(self.pidfd)
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        self.ended = f"it {how} (process {self.process.pid})"

    def ask_to_stop(self) -> None:
        """Let it finish, also if it is stopped by SIGSTOP; asked again, end at once."""
        self.process.send_signal(signal.SIGCONT)
        with suppress(OSError):  # It ends by itself at this moment.
            self.socket.sendall(STOP)

    def last_lines(self, where: str = "of what it printed") -> str:
        """Return the last lines of its output, to go on with after how it ended."""
        try:
            with self.log.open("rb") as output:
                nbytes = self.log.stat().st_size
                output.seek(max(self._begins, nbytes - _TAIL_BYTES_MAX))
                said = output.read().decode(errors="replace")
        except OSError as error:  # Somebody has removed its file.
            return f"; what it printed cannot be read: {error}"
        lines = said.splitlines()[-_LINES_MAX:]
        if not lines:
            return "; it has printed nothing"
        return "\n    ".join([f"\nthe end {where}:", *lines])


def _kill(child: _Child) -> None:
    child.process.kill()


# How workers are made to end, and how long each way is given.
_Endings = tuple[tuple[Callable[[_Child], None], float], ...]
_ENDINGS: _Endings = (
    (_Child.ask_to_stop, STOP_S),
    (_Child.ask_to_stop, 1.0),
    (_kill, STOP_S),
)
# Until all are ready none holds anything; the last may be just about to be started.
_ENDINGS_EARLY = ((_kill, 1.0), (_kill, STOP_S))


class Launch:
    """Worker processes, from when all are ready; a context manager that stops them.

    Args:
        options: for each worker.
        env: variables of the environment to add to those of this process.
        logs: a folder for the output of each, `NAME.log`; None: a fresh one, which goes
            in the end unless a worker has died.
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
        self._is_litter = logs is None
        self.logs = _folder(logs)
        self._process = os.getpid()
        self._children: dict[str, _Child] = {}
        self._changed = threading.Condition()
        self._on_death: Callable[[str, str], None] | None = None
        self._untold: list[tuple[str, str]] = []
        self._closing = False
        self._over = threading.Event()
        self._someone_died = False
        self._trouble: Exception | None = None
        self._keeper = threading.Thread(
            target=self._keep,
            args=(options, {**environment(), **(env or {})}),
            name="launch",
        )
        # As a daemon: at the end of the program atexit comes after other threads.
        self._keeper.daemon = True
        atexit.register(self.close)
        self._endings: _Endings = _ENDINGS_EARLY
        try:
            self._keeper.start()
            self._wait_until_ready([one.worker for one in options], ready_s)
        except BaseException:
            self._someone_died = False  # What it has said is in the error.
            self.close()
            raise
        self._endings = _ENDINGS

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
        """The number of the process of each worker."""
        return {name: child.process.pid for name, child in self._children.items()}

    @property
    def alive(self) -> tuple[str, ...]:
        """The workers whose processes have not ended."""
        return tuple(
            name for name, child in self._children.items() if child.ended is None
        )

    def log_of(self, worker: str) -> Path:
        """Return the file with what a worker has printed."""
        return self._children[worker].log

    def on_death(self, tell: Callable[[str, str], None]) -> None:
        """Have `tell(worker, why)` called of each that ends unasked, also before now.

        It is called on the keeper's thread, and must not block.
        """
        with self._changed:
            self._on_death = tell
            untold, self._untold = self._untold, []
        for worker, why in untold:
            tell(worker, why)

    def wait(self) -> None:
        """Wait for SIGINT or SIGTERM, or until none is left; on the main thread."""

        def told(number: int, frame: FrameType | None) -> None:
            self._over.set()

        before = {one: signal.signal(one, told) for one in _STOPPING}
        told_before = signal.set_wakeup_fd(-1)  # No other thread is to act on them.
        try:
            self._over.wait()
        finally:
            signal.set_wakeup_fd(told_before)
            for one, handler in before.items():
                signal.signal(one, handler)

    # ------------------------------------------------------------------- beginning

    def _wait_until_ready(self, names: Sequence[str], ready_s: float) -> None:
        def lacking() -> list[str]:
            return [name for name in names if name not in self.addresses]

        def settled() -> bool:
            children = self._children.values()
            has_ended = any(child.ended is not None for child in children)
            return self._trouble is not None or has_ended or not lacking()

        with self._changed:
            self._changed.wait_for(settled, ready_s)
            if self._trouble is not None:
                raise JoinError(f"cannot start workers: {self._trouble}")
            for child in self._children.values():
                if child.ended is not None:
                    raise JoinError(_not_started(child))
            for name in lacking():
                late = self._children.get(name)
                said = "; it is not started yet" if late is None else late.last_lines()
                raise JoinError(
                    f"worker {name!r} is not ready within ready_s={ready_s:g}{said}"
                )

    # --------------------------------------------------------------------- keeping

    def _keep(self, options: Sequence[WorkerOptions], env: Mapping[str, str]) -> None:
        with selectors.DefaultSelector() as selector:
            litter = str(self.logs) if self._is_litter else ""
            try:
                for one in options:
                    child = _Child(one, self.logs / f"{one.worker}.log", env, litter)
                    with self._changed:
                        self._children[child.name] = child
                    for source in (child.socket, child.pidfd):
                        selector.register(source, selectors.EVENT_READ, child)
                    if self._closing:
                        break
            except Exception as error:  # Whatever it is, somebody waits.
                with self._changed:
                    self._trouble = error
                    self._changed.notify_all()
            for child in self._children.values() if self._closing else ():
                child.ask_to_stop()
            while self.alive:
                for key, _ in selector.select():
                    if key.data.ended is None:
                        self._heard(key.data, key.fileobj, selector)
        self._over.set()

    def _heard(
        self, child: _Child, source: object, selector: selectors.BaseSelector
    ) -> None:
        """A child has said something, or has ended."""
        if source is child.socket and child.hear():
            with self._changed:
                self._changed.notify_all()
            return
        while source is not child.socket and child.hear():
            pass  # What it said before it ended.
        for one in (child.socket, child.pidfd):
            selector.unregister(one)
        child.reap()
        with self._changed:
            self._changed.notify_all()
            if self._closing:
                return
            self._someone_died |= child.process.returncode != 0
            why = f"{child.ended}{child.last_lines(f'of {child.log}')}"
            tell, news = self._on_death, (child.name, why)
            if tell is None:
                self._untold.append(news)
        try:
            if tell is not None:
                tell(*news)
        except Exception:  # Of one receiver; the others are kept.
            _log.exception("worker %s has died, and who was told failed", child.name)

    # ---------------------------------------------------------------------- ending

    def close(self) -> None:
        """Stop all: ask them, then at once, then by force; may be called again."""
        if self._process != os.getpid():
            return  # A copy of this one, by os.fork; they are not its workers.
        with self._changed:
            self._closing = True
        for make_end, waits_s in self._endings:
            for child in tuple(self._children.values()):
                if child.ended is None:
                    make_end(child)
            self._keeper.join(waits_s)
            if not self._keeper.is_alive():
                break
        atexit.unregister(self.close)
        if self._is_litter and not self._someone_died:
            shutil.rmtree(self.logs, ignore_errors=True)


def _not_started(child: _Child) -> str:
    if child.failed:  # It has said by itself what is wrong.
        return f"worker {child.name!r} did not start: {child.failed}"
    return f"worker {child.name!r} did not start: {child.ended}{child.last_lines()}"


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
