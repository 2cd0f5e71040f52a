"""Makes clusters: simulated, of new processes, of running workers, or replayed."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

from msgspec import Meta
from msgspec.structs import replace

from jdag.api.cluster import Cluster
from jdag.context.cluster_state import ClusterState
from jdag.context.program_runner import run_program
from jdag.errors import JoinError, JournalsEnd, ReplayError, ScenarioError, unusable
from jdag.processes.functions.decoder import FunctionDecoder
from jdag.processes.functions.encoder import warn_unportable
from jdag.processes.functions.script import (
    MAIN,
    main_script,
    program_name,
    refuse_import,
)
from jdag.processes.launch.device import refuse_unusable, settings_of, share_gpu
from jdag.processes.launch.launch import LOGS, Launch, is_here
from jdag.processes.launch.main_session import Session, SessionPlan
from jdag.processes.net.handshake import ours
from jdag.processes.net.shared_secrets import fresh_secret
from jdag.processes.net.tls import Tls, load_tls
from jdag.processes.node import MakeNode, Node
from jdag.processes.session.cluster_file import (
    ALLOW,
    DEVICE,
    FILE,
    READY_S,
    TRACE_EVENTS_MAX,
    WAIT_S,
    SessionSettings,
    WorkerOptions,
    load_cluster_file,
)
from jdag.processes.session.session_info import SessionInfo
from jdag.runtime.journal import JOURNAL_BYTES_MAX, SUFFIX, read_journals
from jdag.settings.validation import (
    COUNT,
    Settings,
    is_path,
    one_of,
    part,
    takes,
    where,
)
from jdag.sim.replaying import Replaying
from jdag.sim.settings import SimSettings
from jdag.sim.simulation import Simulation
from jdag.training.recovery import Recovery

# Variables of `jdag replay`: the folder of the journals that the script replays, and a
# file that is written after all of them were replayed.
REPLAY = "JDAG_REPLAY"
REPLAYED = "JDAG_REPLAYED"

_VARIABLES = 'a mapping from names to strings, such as {"JAX_LOG_COMPILES": "1"}'
_VARIABLE = Annotated[str, where(lambda text: "\0" not in text, _VARIABLES)]


class LaunchSettings(SessionSettings, frozen=True, kw_only=True):
    """The arguments of `launch`, which describes them."""

    device: DEVICE | None = None
    allow: ALLOW = ()
    env: Annotated[Mapping[str, _VARIABLE], Meta(description=_VARIABLES)] | None = None
    logs: Annotated[Any, where(is_path, LOGS)] | None = None
    on: Annotated[str, one_of("ray")] | None = None
    ready_s: WAIT_S = READY_S
    resources: Any = None


class _FileOf(Settings, frozen=True):
    path: Annotated[Any, where(is_path, f"the path of {FILE}")]


class ConnectSettings(_FileOf, frozen=True, kw_only=True):
    """The arguments of `connect`, which describes them."""

    name: Any
    recover: bool = False
    trace: bool = False
    events_max: COUNT = TRACE_EVENTS_MAX


@takes(SimSettings)
def simulate(settings: SimSettings) -> Cluster:  # noqa: D417 - of its fields.
    """Make a simulated cluster in this process, in virtual time; a context manager.

    The same program with the same settings and seed repeats every event. A
    `jdag.errors.PortabilityWarning` is given for the first function that `launch` would
    refuse.

    Args:
        workers: the names of the workers, all different; their order numbers them.
        seed: the seed of all random choices: jitter, faults, and order of jobs.
        home: the worker that runs the main program; None: the first.
        values: "real": JAX computes; or "abstract": only shapes and dtypes are
            computed, so that a laptop can simulate a thousand workers.
        nesting_max: how deep programs may call each other.
        recover: keep the data that `Cluster.recover` needs after a loss of a worker.
        schedule: the order of the work of pipelines, such as `jdag.schedules.zb_h1`.
        network: the transfer times of messages; None: zero.
        faults: a list of faults, such as `jdag.sim.Drop` and `jdag.sim.Crash`.
        devices: a `jdag.sim.DeviceModel` of compute times for all workers, or a mapping
            from workers to such models; None: zero.
        policy: the order in which ready jobs run: "path" or "backward_first".
        link: the timeouts of links; None: derived from latencies.
        detect_ns: the delay in ns until a worker is notified that a peer considers it
            lost.
        events_max: the maximum number of events of the run.
        trace: whether to record a trace.
        chooser: an object that makes all choices; None: they follow from `seed` and
            `policy`.

    Raises:
        ScenarioError: a setting is unusable; the error names the setting, its value
            and the allowed values.
    """
    return recoverable(simulated(settings), settings.recover)


def recoverable(cluster: Cluster, recover: bool) -> Cluster:
    if recover:
        Recovery(cluster)
    return cluster


def simulated(settings: SimSettings) -> Cluster:
    state = ClusterState(settings, settings.values == "abstract")
    state.driver = Simulation(settings, partial(run_program, state), warn_unportable)
    return Cluster(state, state.driver.port)


def _node(state: ClusterState | None, allow: Sequence[str], info: SessionInfo) -> Node:
    """Make the node of this process. If `state` is None, a new state is made."""
    state = state or ClusterState(info.settings, False)
    state.driver = node = Node(
        info, run_program=partial(run_program, state), functions=FunctionDecoder(allow)
    )
    return node


def member(options: WorkerOptions) -> MakeNode:
    return partial(_node, None, options.allow)


def worker_options(name: str, device: str | None, **settings: Any) -> WorkerOptions:
    """Return a worker process's options on this host; `settings` are further fields."""
    return WorkerOptions(
        worker=name,
        node=f"{member.__module__}:{member.__name__}",
        control="127.0.0.1:0",
        device=device,
        config=settings_of(device),
        path=tuple(sys.path),
        pythonpath=os.environ.get("PYTHONPATH"),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        **settings,
    )


@takes(LaunchSettings)
def launch(settings: LaunchSettings) -> Cluster:  # noqa: D417 - of its fields.
    """Start a cluster of worker processes. The result, a context manager, stops them.

    This process is the first worker; each other worker is a new process with this
    process's JAX configuration, cores and environment. The processes run on this host,
    or with `on="ray"` where Ray places them (the extra `jdag[ray]`).

    Args:
        workers: the names of the workers, all different; the first is this process.
        device: the device of the other workers: "cpu", "gpu" or "gpu:1"; None: JAX's
            default. Workers may share a GPU: they allocate its memory as needed, not in
            advance. So does this process, unless its JAX backend has already started.
        allow: modules or packages whose functions and programs workers may import by
            name. Those of a script with a guard (`if __name__ == "__main__":`) are
            always allowed. Other functions are sent compiled (`jax.export`); other
            programs are refused.
        env: environment variables for the other workers, added to those of this
            process.
        logs: a folder for the workers' output; None: a temporary one, which is kept if
            a worker died.
        nesting_max: how deep programs may call each other.
        on: "ray": each worker is a Ray actor, with TLS between workers. Ray restarts a
            lost worker, which then joins again without its leaves.
        ready_s: the time limit in seconds for the workers' start.
        recover: keep the data that `Cluster.recover` needs after a loss of a worker.
        resources: with Ray, the resources of each worker, such as `{"CPU": 1, "GPU":
            1}`, or such a mapping by worker, or a placement group. None: one CPU.
        schedule: the order of the work of pipelines, such as `jdag.schedules.zb_h1`.
        Session options: see `SessionSettings`.

    Raises:
        JdagError: an argument is unusable, or a worker does not start; the error has
            the reason and the last lines of the worker's output. No process is left
            running.
    """
    refuse_import("jdag.launch")
    refuse_unusable("jdag.launch")
    return _launched(settings)


launch.__doc__ = (launch.__doc__ or "").replace(
    "Session options: see `SessionSettings`.",
    (SessionSettings.__doc__ or "").partition("Args:\n")[2].strip(),
)


def _launched(launch: LaunchSettings) -> Cluster:
    names = tuple(launch.workers)
    if (folder := os.environ.get(REPLAY)) is not None:
        state = ClusterState(launch, False)
        return recoverable(_replayed(state, Path(folder)), launch.recover)
    settings = part(SessionSettings, launch)
    if launch.journal is not None:
        folder = os.path.abspath(launch.journal)
        if any(Path(folder).glob(f"*{SUFFIX}")):
            allowed = "a new or an empty folder; this one contains journals of a run"
            raise ScenarioError(unusable("journal", launch.journal, allowed))
        settings = replace(settings, journal=folder)
    elif launch.journal_bytes != JOURNAL_BYTES_MAX:
        allowed = "a number together with journal=, which names a folder"
        raise ScenarioError(unusable("journal_bytes", launch.journal_bytes, allowed))
    share_gpu(launch.device)
    with ExitStack() as stack:
        token, script = fresh_secret(), main_script()
        allow = (*launch.allow, *(() if script is None else (MAIN,)))
        fixed = {"allow": allow, "token": token, "script": script}
        options = [worker_options(name, launch.device, **fixed) for name in names[1:]]
        processes, tls = _start(launch, names[0], options)
        stack.callback(processes.close)
        state = ClusterState(settings, False)
        plan = SessionPlan(
            main=names[0],
            settings=settings,
            controls=processes.addresses,
            handshake=ours(),
            make_node=partial(_node, state, allow),
            token=token,
            allow=allow,
            program=program_name(),
            rejoin=launch.on is not None,
            watched=launch.on is None,
            tls=tls,
        )
        return recoverable(_joined(stack, plan, state, processes), launch.recover)


def _start(
    launch: LaunchSettings, main: str, options: Sequence[WorkerOptions]
) -> tuple[Any, Tls | None]:
    settings: dict[str, Any]
    settings = {"env": launch.env, "logs": launch.logs, "ready_s": launch.ready_s}
    if launch.on is None:
        if launch.resources is not None:
            allowed = 'None without on="ray"'
            raise ScenarioError(unusable("resources", launch.resources, allowed))
        options = [replace(worker, once=True) for worker in options]
        return Launch(options, **settings), None
    from jdag.processes.launch.on_ray import RayLaunch  # noqa: PLC0415 - imports Ray.

    # Numbers of this host's cores mean nothing on another host.
    options = [replace(worker, cores=()) for worker in options]
    processes = RayLaunch(main, options, resources=launch.resources, **settings)
    return processes, processes.tls


@takes(ConnectSettings)
def connect(settings: ConnectSettings) -> Cluster:  # noqa: D417 - of its fields.
    """Attach the running workers of a cluster file; a context manager.

    Waits for workers that cannot be reached yet, up to the `ready_s` of the file.
    Leaving detaches the workers, which keep running.

    Args:
        path: the cluster file, which `jdag up` and `jdag worker` also take.
        name: the worker of the file that this process is.
        recover: as for `launch`.
        trace: as for `launch`.
        events_max: as for `launch`.

    Raises:
        JdagError: the file is unusable or does not name that worker; or a worker cannot
            be reached, refuses to join, or runs with different versions of packages or
            a different configuration.
    """
    refuse_import("jdag.connect")
    refuse_unusable("jdag.connect")
    path, name = settings.path, settings.name
    file = load_cluster_file(Path(path))
    main = file.worker(name)
    tls = None if file.tls_files is None else load_tls(*file.tls_files)
    session = part(SessionSettings, file, settings, workers=file.names)
    state = ClusterState(session, False)
    peers = {key: worker for key, worker in file.workers.items() if key != name}
    for worker in peers.values():
        share_gpu(worker.device if is_here(worker.control.host) else "cpu")
    plan = SessionPlan(
        main=name,
        settings=session,
        controls={key: worker.control for key, worker in peers.items()},
        handshake=ours(),
        make_node=partial(_node, state, main.allow),
        token=file.token,
        allow=tuple(main.allow),
        ready_s=file.ready_s,
        control=main.control,
        rejoin=True,
        tls=tls,
    )
    with ExitStack() as stack:
        try:
            return recoverable(_joined(stack, plan, state, None), settings.recover)
        except JoinError as error:
            if not error.absent:
                raise
            hint = f"is it running there, by jdag up {path} or jdag worker?"
            raise JoinError(f"{error}; {hint}", reached=False, absent=True) from None


def _joined(
    stack: ExitStack, plan: SessionPlan, state: ClusterState, processes: Any
) -> Cluster:
    """Begin a session. When it ends, or cannot begin, the stack is unwound."""
    undo: list[Callable[[], None]] = []
    stack.callback(lambda: [action() for action in undo])  # After the session.
    session = stack.enter_context(Session(plan))
    node: Any = state.driver
    undo.append(node.guard_signals())
    if plan.watched:
        processes.on_death(session.lost)
        session.restart = processes.restart
    node.session, node.launch, node.rejoined = session, processes, session.rejoined
    node.sample_clocks()
    state.close = stack.pop_all().close  # Ends the session, then the processes.
    return Cluster(state, node.port)


def _replayed(state: ClusterState, folder: Path) -> Cluster:
    # An error of the journals ends the script: print it without a traceback.
    sys.excepthook = partial(_print_journal_errors, sys.excepthook, state)
    journals = read_journals(folder, state.workers, program_name())

    def report(inputs: int) -> None:
        text = f"as in {folder}: {inputs:,} events of {len(state.workers)} workers"
        text += "; the journals end here, at journal_bytes\n" * driver.is_cut or "\n"
        sys.stderr.write(text)
        if (path := os.environ.get(REPLAYED)) is not None:
            Path(path).write_text(text)

    run = partial(run_program, state)
    state.driver = driver = Replaying(state.workers, journals, run, report)
    return Cluster(state, driver.port)


def _print_journal_errors(
    former_hook: Any,
    state: ClusterState,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    if isinstance(error, JournalsEnd):
        state.driver.close()
        raise SystemExit(0)
    if isinstance(error, ReplayError | ScenarioError):
        sys.stderr.write(f"jdag: {' '.join(str(error).split())}\n")
        raise SystemExit(1 if isinstance(error, ReplayError) else 2)
    former_hook(kind, error, trace)
