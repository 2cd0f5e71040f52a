"""A worker process: its options, its device, its control server, its sessions.

Options come as one line of JSON over a socket that is inherited (secrets are in no
argument and no environment); over the same socket it says that it is ready, or why not.
Signals and the end of its parent are for `jdag.processes.launch.parent_watch`.
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

# Options of Python; the arguments of `jdag.processes.launch.parent_watch` follow them.
COMMAND = ("-u", "-P", "-m", "jdag.processes")
STOP = b"stop\n"
# The computing thread waits for its result; XLA's own thread would be woken first.
_OWN_CONFIG = {"jax_cpu_enable_async_dispatch": False}

_log = logging.getLogger("jdag")


def become(options: WorkerOptions) -> NoReturn:
    """Replace this process by a worker process."""
    ours, theirs = socket.socketpair()
    ours.sendall(options.written() + b"\n")
    ours.close()
    theirs.set_inheritable(True)
    arguments = [str(theirs.detach()), options.worker, "0", ""]
    # Until `jdag.processes.launch.parent_watch` handles them.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    os.execve(sys.executable, [sys.executable, *COMMAND, *arguments], environment())


def environment() -> dict[str, str]:
    """Return the environment of a worker, with the module path of this process."""
    path = os.pathsep.join([one or os.getcwd() for one in sys.path])
    return {**os.environ, "PYTHONPATH": path}


def _run(options: WorkerOptions, watch: Watch) -> None:
    """Serve as a worker until the process is to stop.

    Raises:
        JdagError: it cannot: no such module or device, a port in use.
    """
    if lacking := missing(options.allow):
        said = f"allow names {', '.join(lacking)}: not importable as a module here"
        raise JoinError(said)
    expect(options.script)
    use_device(options.device, options.worker)
    configure({**options.config, **_OWN_CONFIG})
    gc.collect()
    gc.freeze()  # Exclude the objects of imported modules from collection.
    _log.info("worker %s: process %d", options.worker, os.getpid())
    tls = None if options.tls is None else load_tls(*options.tls)
    make_node = pkgutil.resolve_name(options.node)(options)
    handshake = ours()
    control = Address.read(options.control)
    helper = helper_at(control.host)  # It ends with this process.
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
        watch.say({"ready": str(server.address), "pid": os.getpid()})
    else:
        ready = f"worker {options.worker}: at {server.address}, process {os.getpid()}"
        sys.stdout.write(f"{ready}\n")
    try:
        worker.serve()
    finally:
        server.close()
    if not worker.asked_to_stop:
        watch.part()


def main(watch: Watch) -> NoReturn:
    """Run a worker with the options received over the socket of the watch."""
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
        watch.say({"failed": str(error)})
        sys.stderr.write(f"jdag: {error}\n")
        leave(2)
    except BaseException:
        logging.getLogger("jdag").exception("a worker process ends by an error")
        leave(1)
    leave(0)
