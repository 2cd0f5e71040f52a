"""Entry point of a worker process: options, device, control server and sessions.

The process reads its options from an inherited socket, as one line of JSON, so that no
argument or environment variable contains a secret. It reports over the same socket that
it is ready, or why it failed. `jdag.processes.launch.parent_watch` handles signals and
the end of the parent.
"""

import gc
import logging
import os
import pkgutil
import signal
import socket
import sys
from typing import NoReturn

from jdag.errors import JdagError, JoinError
from jdag.processes.functions.allowed import missing
from jdag.processes.functions.script import expect
from jdag.processes.launch.device import configure, use_device
from jdag.processes.launch.parent_watch import Watch, leave
from jdag.processes.launch.worker_server import WorkerServer
from jdag.processes.net.addresses import Address
from jdag.processes.net.handshake import ours
from jdag.processes.net.pulse import helper_at
from jdag.processes.net.tls import load_tls
from jdag.processes.session.cluster_file import WorkerOptions
from jdag.processes.session.control import ControlServer

# Arguments of Python, before those that `jdag.processes.launch.parent_watch` reads.
COMMAND = ("-u", "-P", "-m", "jdag.processes")
STOP = b"stop\n"
# The computing thread waits for each result, so asynchronous dispatch would only add a
# switch to an XLA thread.
_WORKER_CONFIG = {"jax_cpu_enable_async_dispatch": False}

_log = logging.getLogger("jdag")


def become(options: WorkerOptions) -> NoReturn:
    """Replace this process by a worker process without a parent (`os.execve`)."""
    near, far = socket.socketpair()
    near.sendall(options.written() + b"\n")
    near.close()
    far.set_inheritable(True)
    arguments = [str(far.detach()), options.worker, "0", ""]
    # Block signals until `jdag.processes.launch.parent_watch` installs handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    os.execve(sys.executable, [sys.executable, *COMMAND, *arguments], environment())


def environment() -> dict[str, str]:
    path = os.pathsep.join([folder or os.getcwd() for folder in sys.path])
    return {**os.environ, "PYTHONPATH": path}


def _run(options: WorkerOptions, watch: Watch) -> None:
    """Serve sessions until a stop. Raises JdagError if the worker cannot start."""
    if modules := missing(options.allow):
        raise JoinError(
            f"allow contains {', '.join(modules)}: expected modules that can be "
            "imported on this host"
        )
    expect(options.script)
    use_device(options.device, options.worker)
    configure({**options.config, **_WORKER_CONFIG})
    gc.freeze()  # Exclude the objects of imported modules from garbage collection.
    gc.enable()
    _log.info("worker %s: process %d", options.worker, os.getpid())
    tls = None if options.tls is None else load_tls(*options.tls)
    make_node = pkgutil.resolve_name(options.node)(options)
    handshake = ours()
    control = Address.read(options.control)
    helper = helper_at(control.host)  # The helper process ends with this process.
    worker = WorkerServer(options, handshake, make_node, tls, helper)
    server = ControlServer(
        f"worker {options.worker!r}",
        control,
        worker.answers,
        tls=tls,
        hosts=options.hosts,
        knows=worker.knows,
    )
    watch.on_stop(worker.stop)
    if watch.has_parent:
        watch.report({"ready": str(server.address), "pid": os.getpid()})
    else:
        ready = f"worker {options.worker}: at {server.address}, process {os.getpid()}"
        sys.stdout.write(f"{ready}\n")
    try:
        worker.serve()
    finally:
        server.close()
    if not worker.is_stop_requested:
        watch.wait_for_release()


def main(watch: Watch) -> NoReturn:
    try:
        options = WorkerOptions.read(watch.options)
        if options.path is not None:
            sys.path[:] = options.path
        os.environ.pop("PYTHONPATH", None)
        if options.pythonpath is not None:
            os.environ["PYTHONPATH"] = options.pythonpath
        if options.cores:
            os.sched_setaffinity(0, options.cores)
        logging.basicConfig(format="%(asctime)s %(name)s: %(message)s")
        _run(options, watch)
    except JdagError as error:
        watch.report({"failed": str(error)})
        sys.stderr.write(f"jdag: {error}\n")
        leave(2)
    except BaseException:
        logging.getLogger("jdag").exception("unexpected error in a worker process")
        leave(1)
    leave(0)
