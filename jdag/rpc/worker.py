"""A worker process: its options, its device, its control server, its sessions, its end.

Options come as one line of JSON over a socket that is inherited (secrets are in no
argument and no environment); over the same socket it says that it is ready, or why not.
While the other end is open its parent lives, if it has one.

Two threads matter: the main one runs sessions; the watch waits for signals and for the
parent, since the main one may be in the middle of a computation. SIGTERM drains: what
is under way is finished, peers are told, the exit code is 0. A second one stops at
once, and so does the end of a parent.
"""

import ctypes
import gc
import importlib
import json
import logging
import os
import select
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from pydantic import BaseModel, ConfigDict, Field

from jdag.errors import JdagError, JoinError
from jdag.rpc.allowed import missing
from jdag.rpc.control import ControlServer
from jdag.rpc.device import configure, use_device
from jdag.rpc.gate import Admit, Gate, Take, dial
from jdag.rpc.handshake import ours
from jdag.rpc.place import MakeNode
from jdag.rpc.seat import Own, Seat
from jdag.rpc.settings import Address
from jdag.rpc.tls import load as load_tls
from jdag.rpc.tunnel import carrying

# What Python is told; the number of the socket and the worker's name come after it.
COMMAND = ("-u", "-P", "-m", "jdag.rpc")
STOP = b"stop\n"
PARTING_S = 5.0
_GATE_S = 10.0
_PR_SET_PDEATHSIG = 1
_LINE_BYTES_MAX = 1 << 24
_KILLED = 128
# Whoever computes waits for the result: XLA's own thread would have to be woken first.
_OWN_CONFIG = {"jax_cpu_enable_async_dispatch": False}

_log = logging.getLogger("jdag")


class Options(BaseModel):
    """What a worker process is told.

    `node` names what makes what makes nodes: `module:function`, called with these
    options. `data` is the gate's address, unless gRPC carries. `config` are settings of
    JAX, by name; `path` is Python's module search path and `pythonpath` what that
    variable is to be for processes started from here. `cores` are the CPUs to compute
    on. With `once` it stops after its first session. `parent` is the process that this
    one must not outlive, 0 for none; `litter` a folder to remove when that has gone
    without doing so. `hosts` are those of all workers, which certificates are held to.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    worker: str
    node: str
    control: str
    data: str = "unix:@"
    token: str = Field(default="", repr=False)
    carrier: str = "socket"
    allow: tuple[str, ...] = ()
    device: str | None = None
    config: dict[str, Any] = Field(default={})
    path: tuple[str, ...] | None = None
    pythonpath: str | None = None
    cores: tuple[int, ...] = ()
    tls: tuple[Path, Path, Path] | None = None
    hosts: dict[str, str] = Field(default={})
    value_bytes_max: int
    once: bool = False
    parent: int = 0
    litter: str | None = None


class Watch:
    """Waits for signals and for the end of the parent, on a thread of its own."""

    def __init__(self, parent: socket.socket, options: Options) -> None:
        self._parent = parent
        self._options = options
        self._lock = threading.Lock()
        self._asked = 0
        self._told = threading.Event()
        self._stop: Callable[[], None] | None = None
        self._signals, self._written = socket.socketpair()
        self._written.setblocking(False)
        signal.set_wakeup_fd(self._written.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, _noted)
        # Ctrl-C in the terminal of a parent is for the parent.
        signal.signal(signal.SIGINT, signal.SIG_IGN if options.parent else _noted)
        if options.parent:
            self._die_with(options.parent)
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def on_stop(self, stop: Callable[[], None]) -> None:
        """Say what drains this process; done at once if it was asked for before."""
        with self._lock:
            self._stop = stop
            asked = self._asked
        if asked:
            stop()

    def part(self) -> None:
        """Let the parent say that this one may go, or be found to be gone itself.

        A main that is killed is lost before its process has ended.
        """
        if self._options.parent:
            self._told.wait(PARTING_S)

    def _die_with(self, parent: int) -> None:
        """Get SIGHUP when the parent dies, also if others keep its socket open.

        Not SIGTERM, which asks to finish: while its threads die one by one, a parent
        seems to live.
        """
        signal.signal(signal.SIGHUP, _noted)
        libc = ctypes.CDLL(None)
        if hasattr(libc, "prctl"):
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)
        if os.getppid() != parent:
            self._orphaned()

    def _run(self) -> None:
        sources = [self._signals, *([self._parent] if self._options.parent else [])]
        while True:
            for source in select.select(sources, (), ())[0]:
                came = heard(source)
                if not came or (source is self._signals and signal.SIGHUP in came):
                    self._orphaned()
                self._ask(came[-1] if source is self._signals else signal.SIGTERM)

    def _ask(self, number: int) -> None:
        """Drain; who is asked a second time stops at once."""
        self._told.set()
        with self._lock:
            self._asked += 1
            asked, stop = self._asked, self._stop
        if asked > 1:
            leave(_KILLED + number)
        if stop is not None:
            threading.Thread(target=stop, name="stop", daemon=True).start()

    def _orphaned(self) -> NoReturn:
        """The parent is gone: nobody is left to finish anything for."""
        if self._options.litter is not None:
            shutil.rmtree(self._options.litter, ignore_errors=True)
        leave(1)


def heard(source: socket.socket) -> bytes:
    """Return what came over a socket; nothing if its other end is gone, however."""
    try:
        return source.recv(64)
    except ConnectionError:  # It had not read what we said.
        return b""


def _noted(number: int, frame: FrameType | None) -> None:
    """The watch reads of it."""


def leave(code: int) -> NoReturn:
    """End this process, without Python's tidying up: XLA may still be computing."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def become(options: Options) -> NoReturn:
    """Be a worker process from now on, in place of what this process was."""
    ours, theirs = socket.socketpair()
    ours.sendall(options.model_dump_json().encode() + b"\n")
    ours.close()
    theirs.set_inheritable(True)
    arguments = [str(theirs.detach()), options.worker]
    os.execve(sys.executable, [sys.executable, *COMMAND, *arguments], environment())


def environment() -> dict[str, str]:
    """Return this environment, in which a worker finds the modules that we find.

    gRPC prints its errors alone there, if nothing else is set: else each certificate
    that is refused, which is told to whoever shows it, is several lines of its own.
    """
    path = os.pathsep.join([one or os.getcwd() for one in sys.path])
    return {"GRPC_VERBOSITY": "ERROR", **os.environ, "PYTHONPATH": path}


def run(options: Options, parent: socket.socket) -> None:
    """Be a worker until told to stop.

    Raises:
        JdagError: it cannot: no such module or device, a port in use.
    """
    watch = Watch(parent, options)
    if lacking := missing(options.allow):
        said = f"allow names {', '.join(lacking)}: no module that can be imported here"
        raise JoinError(said)
    use_device(options.device, options.worker)
    configure({**options.config, **_OWN_CONFIG})
    gc.collect()
    gc.freeze()  # What imports have made is not for the collector to walk again.
    _log.info("worker %s: process %d", options.worker, os.getpid())
    tls = None if options.tls is None else load_tls(*options.tls)
    control: Future[Address] = Future()

    def open_gate(*, admit: Admit, take: Take) -> Gate:
        data = options.data
        if options.carrier == "grpc":  # By streams of the control server.
            data = f"grpc:{control.result(_GATE_S)}"
        return Gate(data, tls=tls, admit=admit, take=take)

    own = Own(
        worker=options.worker,
        token=options.token,
        allow=options.allow,
        handshake=ours(options.value_bytes_max),
        make_node=found(options.node)(options),
        open_gate=open_gate,
        dial_gate=partial(dial, tls=tls),
        tls=tls,
        hosts=options.hosts,
        once=options.once,
    )
    seat = Seat(own)
    carry = carrying(seat.enter) if options.carrier == "grpc" else None
    address = Address.read(options.control)
    server = ControlServer(
        address,
        seat.answers,
        tls=tls,
        carry=carry,
        hosts=options.hosts,
        knows=seat.knows,
    )
    control.set_result(server.address)
    watch.on_stop(seat.stop)
    if options.parent:
        _say(parent, {"ready": str(server.address), "pid": os.getpid()})
    else:
        ready = f"worker {options.worker}: at {server.address}, process {os.getpid()}"
        sys.stdout.write(f"{ready}\n")
    try:
        seat.serve()
    finally:
        server.close()
    if not seat.asked_to_stop:
        watch.part()


def found(reference: str) -> Callable[[Options], MakeNode]:
    """Return what `module:function` names."""
    module, _, name = reference.partition(":")
    made: Callable[[Options], MakeNode] = getattr(importlib.import_module(module), name)
    return made


def _say(parent: socket.socket, what: dict[str, Any]) -> None:
    try:
        parent.sendall(json.dumps(what).encode() + b"\n")
    except OSError as error:
        _log.info("nobody listens to %s: %s", what, error)


def _options(parent: socket.socket) -> Options:
    line = bytearray()
    while not line.endswith(b"\n"):
        came = parent.recv(1 << 16)
        line += came
        if not came or len(line) > _LINE_BYTES_MAX:
            raise JoinError("a worker process was started without its options")
    return Options.model_validate_json(bytes(line))


def main(arguments: list[str]) -> NoReturn:
    """Read options from the inherited socket whose number is the first argument."""
    parent = socket.socket(fileno=int(arguments[0]))
    parent.set_inheritable(False)
    try:
        options = _options(parent)
        if options.path is not None:
            sys.path[:] = options.path
        os.environ.pop("PYTHONPATH", None)
        if options.pythonpath is not None:
            os.environ["PYTHONPATH"] = options.pythonpath
        if options.cores:
            os.sched_setaffinity(0, options.cores)
        logging.basicConfig(format="%(asctime)s %(name)s: %(message)s")
        run(options, parent)
    except JdagError as error:
        _say(parent, {"failed": str(error)})
        sys.stderr.write(f"jdag: {error}\n")
        leave(2)
    except BaseException:
        logging.getLogger("jdag").exception("a worker process ends by an error")
        leave(1)
    leave(0)
