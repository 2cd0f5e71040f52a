"""Clusters by the driver that runs them: in virtual time, on processes, on hosts.

Under `jdag replay` a script's own process repeats what its workers have journaled.
"""

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

REPLAY = "JDAG_REPLAY"  # The folder of the journals that a script repeats.
REPLAYED = "JDAG_REPLAYED"  # A file that is written once all of them are repeated.

_VARIABLES = 'texts by name, such as {"JAX_LOG_COMPILES": "1"}'
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
    """Make a cluster in virtual time, in this process; a context manager.

    The same program with the same settings and seed does the same, event by event.
    The first function that `launch` would refuse is a `jdag.errors.PortabilityWarning`.

    Args:
        workers: their names, all different; their order numbers them.
        seed: the one source of chance: of jitter, faults, and schedules.
        home: the worker where the main program runs; the first if None.
        values: "real", where JAX computes, or "abstract", where only shapes are known
            and a thousand workers fit on a laptop.
        nesting_max: how deep programs may call each other.
        recover: keep what `Cluster.recover` needs after the loss of a worker.
        schedule: the order of the work of pipelines, such as `jdag.schedules.zb_h1`.
        network: how long messages take; None: no time.
        faults: a list of `jdag.sim.Drop`, `Crash` and their like.
        devices: how long computing takes, of all workers or by worker; None: no time.
        policy: the name of the order in which ready jobs run: "path" or
            "backward_first".
        link: the timeouts of links; None: derived from latencies.
        detect_ns: the delay until a worker learns that a peer has given it up.
        events_max: the limit for events of the whole run.
        trace: whether a trace is kept.
        chooser: makes all choices; None: by `seed` and `policy`.

    Raises:
        ScenarioError: names a setting that is unusable, its value and what is allowed.
    """
    return recoverable(simulated(settings), settings.recover)


def recoverable(cluster: Cluster, recover: bool) -> Cluster:
    """Return the cluster, from now on with a log if that is wanted."""
    if recover:
        Recovery(cluster)
    return cluster


def simulated(made: SimSettings) -> Cluster:
    """Make a cluster in virtual time of checked settings."""
    shared = ClusterState(made, made.values == "abstract")
    shared.driver = Simulation(made, partial(run_program, shared), warn_unportable)
    return Cluster(shared, shared.driver.port)


def _node(state: ClusterState | None, allow: Sequence[str], place: SessionInfo) -> Node:
    """Make the node of this process; without a state for its programs make one."""
    state = state or ClusterState(place.settings, False)
    state.driver = node = Node(
        place,
        run_program=partial(run_program, state),
        functions=FunctionDecoder(allow),
    )
    return node


def member(options: WorkerOptions) -> MakeNode:
    """Return the node factory of a worker process with these options."""
    return partial(_node, None, options.allow)


def worker_options(name: str, device: str | None, **settings: Any) -> WorkerOptions:
    """Return options for a worker process of this host, to compute as this one does.

    `settings` are the other fields of `WorkerOptions`.
    """
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
def launch(asked: LaunchSettings) -> Cluster:  # noqa: D417 - of its fields.
    """Make a cluster of processes; a context manager that ends them.

    The caller is the first worker; each other is a process of its own, which computes
    with the settings of JAX, the cores and the environment of this one. They are on
    this host, or where Ray places them: `on="ray"`, the extra `jdag[ray]`.

    Args:
        workers: their names, all different; the first is this process.
        device: where the others compute: "cpu", "gpu" or "gpu:1", which several may
            share: memory of it is taken as needed, by this process too unless it has
            computed before. None: as JAX chooses.
        allow: modules, or packages, whose functions and programs the others may run by
            name, beside those of a script with a guard (`if __name__ == "__main__":`).
            Other functions travel compiled (`jax.export`), programs not at all.
        deadline_s: a worker that gives no sign of life for so many seconds is lost.
        env: variables of the environment for the others, beside those of this process.
        logs: a folder for their output; None: a temporary one, kept if one died.
        nesting_max: how deep programs may call each other.
        on: "ray": each is a Ray actor, with TLS between them. If one is lost, Ray
            starts it again, and it joins again, without its leaves.
        ready_s: how many seconds they may take until they are ready.
        recover: keep what `Cluster.recover` needs after the loss of a worker.
        resources: with Ray, what it reserves for each, `{"CPU": 1, "GPU": 1}`, or such
            a table by worker, or a placement group of Ray. None: one CPU.
        schedule: the order of the work of pipelines, such as `jdag.schedules.zb_h1`.
        trace: whether each worker records what it does; `cluster.trace` collects that
            as one trace, in the time of this process. Its settings have the error of
            each worker's clock, and whose part is missing, such as that of a lost one.
        events_max: how many events of its trace each worker keeps; then it says so in a
            warning, and records no more.
        journal: a new folder, where each worker writes the order of what its engine
            handles, without values. `jdag replay FOLDER -- python script.py` repeats
            the run from it, in one process.
        journal_bytes: how long the journal of each worker may be; then it ends with a
            warning, and what is there can be replayed.
        value_bytes_max: the largest array that leaves the worker it is on, in bytes.

    Raises:
        JdagError: an argument is unusable, or a worker does not start: why, and the
            last lines that it printed. Nothing is left running then.
    """
    refuse_import("jdag.launch")
    refuse_unusable("jdag.launch")
    return _launched(asked)


def _launched(asked: LaunchSettings) -> Cluster:
    names = tuple(asked.workers)
    if (folder := os.environ.get(REPLAY)) is not None:
        state = ClusterState(asked, False)
        return recoverable(_replayed(state, Path(folder)), asked.recover)
    settings = part(SessionSettings, asked)
    if asked.journal is not None:
        folder = os.path.abspath(asked.journal)
        if any(Path(folder).glob(f"*{SUFFIX}")):
            allowed = "a new folder, or an empty one: this one has journals of a run"
            raise ScenarioError(unusable("journal", asked.journal, allowed))
        settings = replace(settings, journal=folder)
    elif asked.journal_bytes != JOURNAL_BYTES_MAX:
        allowed = "a number beside journal=, a folder"
        raise ScenarioError(unusable("journal_bytes", asked.journal_bytes, allowed))
    share_gpu(asked.device)
    with ExitStack() as stack:
        token, script = fresh_secret(), main_script()
        allow = (*asked.allow, *(() if script is None else (MAIN,)))
        options = [
            worker_options(
                name,
                asked.device,
                allow=allow,
                token=token,
                script=script,
            )
            for name in names[1:]
        ]
        started, tls = _started(asked, names[0], options)
        stack.callback(started.close)
        state = ClusterState(settings, False)
        plan = SessionPlan(
            main=names[0],
            settings=settings,
            controls=started.addresses,
            handshake=ours(),
            make_node=partial(_node, state, allow),
            token=token,
            allow=allow,
            program=program_name(),
            rejoin=asked.on is not None,
            watched=asked.on is None,
            tls=tls,
        )
        return recoverable(_joined(stack, plan, state, started), asked.recover)


def _started(
    asked: LaunchSettings, main: str, options: Sequence[WorkerOptions]
) -> tuple[Any, Tls | None]:
    """Start worker processes here or on Ray; return them, and main's TLS."""
    settings: dict[str, Any]
    settings = {"env": asked.env, "logs": asked.logs, "ready_s": asked.ready_s}
    if asked.on is None:
        if asked.resources is not None:
            said = unusable("resources", asked.resources, 'None without on="ray"')
            raise ScenarioError(said)
        here = [replace(one, once=True) for one in options]
        return Launch(here, **settings), None
    from jdag.processes.launch.on_ray import RayLaunch  # noqa: PLC0415 - imports Ray.

    # The cores are of another host.
    there = [replace(one, cores=()) for one in options]
    started = RayLaunch(main, there, resources=asked.resources, **settings)
    return started, started.tls


@takes(ConnectSettings)
def connect(asked: ConnectSettings) -> Cluster:  # noqa: D417 - of its fields.
    """Join the running workers of a cluster's file; a context manager that leaves them.

    Waits for those that are not reached yet, for the `ready_s` of the file in all.

    Args:
        path: the file, which `jdag up` and `jdag worker` take as well.
        name: the worker of the file that this process is.
        recover: as for `launch`.
        trace: as for `launch`.
        events_max: as for `launch`.

    Raises:
        JdagError: the file is unusable, or has no such worker; a worker is not reached,
            refuses, or differs in versions or configuration: both are named.
    """
    refuse_import("jdag.connect")
    refuse_unusable("jdag.connect")
    path, name = asked.path, asked.name
    file = load_cluster_file(Path(path))
    mine = file.worker(name)
    tls = None if file.tls_files is None else load_tls(*file.tls_files)
    settings = part(SessionSettings, file, asked, workers=file.names)
    state = ClusterState(settings, False)
    others = {key: one for key, one in file.workers.items() if key != name}
    for one in others.values():
        share_gpu(one.device if is_here(one.control.host) else "cpu")
    plan = SessionPlan(
        main=name,
        settings=settings,
        controls={key: one.control for key, one in others.items()},
        handshake=ours(),
        make_node=partial(_node, state, mine.allow),
        token=file.token,
        allow=tuple(mine.allow),
        ready_s=file.ready_s,
        control=mine.control,
        rejoin=True,
        tls=tls,
    )
    with ExitStack() as stack:
        try:
            return recoverable(_joined(stack, plan, state, None), asked.recover)
        except JoinError as error:
            if not error.absent:
                raise
            hint = f"is it running there, by jdag up {path} or jdag worker?"
            raise JoinError(f"{error}; {hint}", reached=False, absent=True) from None


def _joined(
    stack: ExitStack, plan: SessionPlan, state: ClusterState, started: Any
) -> Cluster:
    """Begin a session; unwind the stack when it ends or fails."""
    undo: list[Callable[[], None]] = []
    stack.callback(lambda: [each() for each in undo])  # After all else has ended.
    session = stack.enter_context(Session(plan))
    node: Any = state.driver
    undo.append(node.guard_signals())
    if plan.watched:
        started.on_death(session.lost)
        session.restart = started.restart
    node.session, node.launch, node.rejoined = session, started, session.rejoined
    node.sample_clocks()
    state.close = stack.pop_all().close  # Leaves the session, and stops the processes.
    return Cluster(state, node.port)


def _replayed(state: ClusterState, folder: Path) -> Cluster:
    """Return a cluster that repeats the run of these journals.

    Raises:
        ScenarioError: they are not of this program, or of other workers.
    """
    # What ends the script by an error of its journals is the user's mistake.
    sys.excepthook = partial(_in_one_line, sys.excepthook, state)
    journals = read_journals(folder, state.workers, program_name())

    def say(inputs: int) -> None:
        text = f"as in {folder}: {inputs:,} events of {len(state.workers)} workers"
        text += "; there the journals end, at journal_bytes\n" * driver.is_cut or "\n"
        sys.stderr.write(text)
        if (path := os.environ.get(REPLAYED)) is not None:
            Path(path).write_text(text)

    run = partial(run_program, state)
    state.driver = driver = Replaying(state.workers, journals, run, say)
    return Cluster(state, driver.port)


def _in_one_line(
    otherwise: Any,
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
    otherwise(kind, error, trace)
