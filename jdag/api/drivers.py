"""Clusters by the driver that runs them: in virtual time, on processes, on hosts."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from jdag.api.cluster import Cluster
from jdag.api.cluster_state import ClusterState
from jdag.api.programs import run_program
from jdag.api.recovery import Recovery
from jdag.api.replays import REPLAY, replayed
from jdag.engine.protocol import NAMES, WORKERS_MAX, is_name
from jdag.errors import JoinError, ScenarioError, meant, unusable
from jdag.rpc.device import refuse_unusable, settings_of, share_gpu
from jdag.rpc.function_decoder import FunctionDecoder
from jdag.rpc.function_encoder import warn_unportable
from jdag.rpc.handshake import ours
from jdag.rpc.launch import LOGS, Launch, is_here
from jdag.rpc.node import MakeNode, Node
from jdag.rpc.node_trace import EVENTS_MAX
from jdag.rpc.requests import Journaled
from jdag.rpc.script import MAIN, main_script, program_name, refuse_import
from jdag.rpc.session import Session, SessionPlan
from jdag.rpc.session_info import SessionInfo
from jdag.rpc.settings import (
    ALLOW,
    DEADLINE_S,
    DEVICE,
    FILE,
    READY_S,
    VALUE_BYTES_MAX,
    WAIT_S,
    WorkerOptions,
    load,
)
from jdag.rpc.shared_secrets import fresh_secret
from jdag.rpc.tls import Tls
from jdag.rpc.tls import load as load_tls
from jdag.runtime.journal import BYTES_MAX, SUFFIX
from jdag.runtime.tables import (
    COUNT,
    FLAG,
    NESTING,
    NESTING_MAX,
    Table,
    checked,
    is_listed,
    is_path,
    one_of,
    only,
)
from jdag.schedules import Schedule
from jdag.schedules.schedule import check_for
from jdag.sim.settings import SimSettings
from jdag.sim.simulation import Simulation

# The settings that `simulate` passes to the simulator.
SIMULATED = (
    *("network", "faults", "devices", "policy", "link", "detect_ns", "events_max"),
    *("trace", "schedule"),
)


def simulate(
    workers: Sequence[str],
    *,
    seed: int,
    home: str | None = None,
    values: str = "real",
    nesting_max: int = NESTING_MAX,
    recover: bool = False,
    **settings: Any,
) -> Cluster:
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
        **settings: `network`, `faults`, `devices`, `policy`, `link`, `detect_ns`,
            `events_max`, `trace`, `schedule`; see `jdag.sim.settings.SimSettings`.
            Without a network messages take no time, without devices computing none.

    Raises:
        ScenarioError: names a setting that is unusable, its value and what is allowed.
    """
    workers = _kept(workers)
    for key in settings:
        if key not in SIMULATED:
            allowed = f"one of {', '.join(SIMULATED)}{meant(key, SIMULATED)}"
            raise ScenarioError(f"simulate has no setting {key}: allowed is {allowed}")
    checked(_Simulated, {"nesting_max": nesting_max, "recover": recover})
    if home is None:
        home = next(iter(workers), "") if is_listed(workers) else ""
    made = SimSettings(workers=workers, seed=seed, home=home, values=values, **settings)
    return recoverable(simulated(made, nesting_max), recover)


def recoverable(cluster: Cluster, recover: bool) -> Cluster:
    """Return the cluster, from now on with a log if that is wanted."""
    if recover:
        Recovery(cluster)
    return cluster


def simulated(made: SimSettings, nesting_max: int = NESTING_MAX) -> Cluster:
    """Make a cluster in virtual time of checked settings."""
    shared = ClusterState(made.workers, made.values == "abstract", nesting_max)
    shared.schedule = made.schedule
    shared.driver = Simulation(made, partial(run_program, shared), warn_unportable)
    return Cluster(shared, shared.driver.port)


def _node(
    state: ClusterState | None,
    allow: Sequence[str],
    value_bytes_max: int,
    place: SessionInfo,
) -> Node:
    """Make the node of this process; without a state for its programs make one."""
    state = state or ClusterState(place.workers, False, place.nesting_max)
    state.schedule = place.schedule
    state.driver = node = Node(
        place,
        run_program=partial(run_program, state),
        functions=FunctionDecoder(allow),
        value_bytes_max=value_bytes_max,
    )
    return node


def member(options: WorkerOptions) -> MakeNode:
    """Return the node factory of a worker process with these options."""
    return partial(_node, None, options.allow, options.value_bytes_max)


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


def launch(  # noqa: PLR0913 - keyword options.
    workers: Sequence[str],
    *,
    device: str | None = None,
    allow: Sequence[str] = (),
    deadline_s: float = DEADLINE_S,
    env: Mapping[str, str] | None = None,
    logs: str | os.PathLike[str] | None = None,
    nesting_max: int = NESTING_MAX,
    on: str | None = None,
    ready_s: float = READY_S,
    recover: bool = False,
    resources: Any = None,
    schedule: Schedule | None = None,
    trace: bool = False,
    events_max: int = EVENTS_MAX,
    journal: str | os.PathLike[str] | None = None,
    journal_bytes: int = BYTES_MAX,
    value_bytes_max: int = VALUE_BYTES_MAX,
) -> Cluster:
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
    return _launched(checked(_Launch, {**locals(), "workers": _kept(workers)}))


def _launched(asked: "_Launch") -> Cluster:
    names = tuple(asked.workers)
    check_for(asked.schedule, names)
    if (folder := os.environ.get(REPLAY)) is not None:
        state = ClusterState(names, False, asked.nesting_max)
        state.schedule = asked.schedule
        return recoverable(replayed(state, Path(folder)), asked.recover)
    journaled = None
    if asked.journal is not None:
        folder = os.path.abspath(asked.journal)
        if any(Path(folder).glob(f"*{SUFFIX}")):
            allowed = "a new folder, or an empty one: this one has journals of a run"
            raise ScenarioError(unusable("journal", asked.journal, allowed))
        journaled = Journaled(folder, asked.journal_bytes, program_name())
    elif asked.journal_bytes != BYTES_MAX:
        allowed = "a number beside journal=, a folder"
        raise ScenarioError(unusable("journal_bytes", asked.journal_bytes, allowed))
    share_gpu(asked.device)
    with ExitStack() as stack:
        token, script = fresh_secret(), main_script()
        allow = asked.allow if script is None else (*asked.allow, MAIN)
        options = [
            worker_options(
                name,
                asked.device,
                allow=allow,
                token=token,
                value_bytes_max=asked.value_bytes_max,
                script=script,
            )
            for name in names[1:]
        ]
        started, tls = _started(asked, names[0], options)
        stack.callback(started.close)
        state = ClusterState(names, False, asked.nesting_max)
        plan = SessionPlan(
            main=names[0],
            workers=names,
            controls=started.addresses,
            handshake=ours(asked.value_bytes_max),
            make_node=partial(_node, state, allow, asked.value_bytes_max),
            token=token,
            allow=allow,
            deadline_s=asked.deadline_s,
            nesting_max=asked.nesting_max,
            schedule=asked.schedule,
            events_max=asked.events_max if asked.trace else 0,
            journal=journaled,
            rejoin=asked.on is not None,
            watched=asked.on is None,
            tls=tls,
        )
        return recoverable(_joined(stack, plan, state, started), asked.recover)


def _started(
    asked: "_Launch", main: str, options: Sequence[WorkerOptions]
) -> tuple[Any, Tls | None]:
    """Start worker processes here or on Ray; return them, and main's TLS."""
    settings: dict[str, Any]
    settings = {"env": asked.env, "logs": asked.logs, "ready_s": asked.ready_s}
    if asked.on is None:
        if asked.resources is not None:
            said = unusable("resources", asked.resources, 'None without on="ray"')
            raise ScenarioError(said)
        here = [one.model_copy(update={"once": True}) for one in options]
        return Launch(here, **settings), None
    from jdag.rpc.on_ray import RayLaunch  # noqa: PLC0415 - it imports Ray.

    # The cores are of another host.
    there = [one.model_copy(update={"cores": ()}) for one in options]
    started = RayLaunch(main, there, resources=asked.resources, **settings)
    return started, started.tls


def connect(
    path: str | os.PathLike[str],
    *,
    name: str,
    recover: bool = False,
    trace: bool = False,
    events_max: int = EVENTS_MAX,
) -> Cluster:
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
    if not is_path(path):
        raise ScenarioError(unusable("path", path, f"the path of {FILE}"))
    asked = {"trace": trace, "events_max": events_max, "recover": recover}
    checked(_Connected, asked)
    settings = load(Path(path))
    mine = settings.worker(name)
    tls = None if settings.tls_files is None else load_tls(*settings.tls_files)
    state = ClusterState(settings.names, False, settings.nesting_max)
    others = {key: one for key, one in settings.workers.items() if key != name}
    for one in others.values():
        share_gpu(one.device if is_here(one.control.host) else "cpu")
    plan = SessionPlan(
        main=name,
        workers=settings.names,
        controls={key: one.control for key, one in others.items()},
        handshake=ours(settings.value_bytes_max),
        make_node=partial(_node, state, mine.allow, settings.value_bytes_max),
        token=settings.token,
        allow=mine.allow,
        deadline_s=settings.deadline_s,
        ready_s=settings.ready_s,
        nesting_max=settings.nesting_max,
        events_max=events_max if trace else 0,
        control=mine.control,
        rejoin=True,
        tls=tls,
    )
    with ExitStack() as stack:
        try:
            return recoverable(_joined(stack, plan, state, None), recover)
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


def _kept(workers: Any) -> Any:
    return list(workers) if isinstance(workers, Iterator) else workers


def _are_names(names: Any) -> bool:
    if not is_listed(names) or not all(map(is_name, names)):
        return False
    return 1 <= len(names) <= WORKERS_MAX and len(set(names)) == len(names)


def _are_variables(env: Any) -> bool:
    parts = (*env, *env.values()) if isinstance(env, Mapping) else (None,)
    return all(isinstance(part, str) and "\0" not in part for part in parts)


_NAMES = f"a list of one name or more, none twice; each of {NAMES}"
_VARIABLES = 'texts by name, such as {"JAX_LOG_COMPILES": "1"}'


class _Recoverable(Table):
    recover: FLAG


class _Simulated(_Recoverable):
    nesting_max: NESTING


class _Connected(_Recoverable):
    trace: FLAG
    events_max: COUNT


class _Launch(_Simulated, _Connected):
    journal: Annotated[Any, only("the path of a folder", is_path)] | None
    journal_bytes: COUNT
    workers: Annotated[Any, only(_NAMES, _are_names)]
    device: DEVICE | None
    env: Annotated[Mapping[str, str], only(_VARIABLES, _are_variables)] | None
    logs: Annotated[Any, only(LOGS, is_path)] | None
    on: Annotated[str, one_of("ray")] | None
    ready_s: WAIT_S
    resources: Any
    schedule: Any
    allow: ALLOW
    deadline_s: WAIT_S
    value_bytes_max: COUNT
