"""Clusters by the driver that runs them: in virtual time, on processes, on hosts."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from jdag.api.cluster import Cluster
from jdag.api.cluster_state import Home
from jdag.api.context import run_program
from jdag.engine.drawing import Drawing
from jdag.engine.vocabulary import WORKERS_MAX, ContextId
from jdag.errors import JoinError, ScenarioError, meant, unusable
from jdag.rpc.device import settings_of, share_gpu
from jdag.rpc.functions import Functions
from jdag.rpc.gate import dial
from jdag.rpc.handshake import ours
from jdag.rpc.launch import LOGS, Launch, is_here
from jdag.rpc.node import Node
from jdag.rpc.place import MakeNode, Place
from jdag.rpc.session import Plan, Session
from jdag.rpc.settings import (
    CARRIERS,
    DEADLINE_S,
    DEVICES,
    FILE,
    MODULES,
    NAMES,
    READY_S,
    SECONDS,
    VALUE_BYTES_MAX,
    are_modules,
    is_device,
    is_name,
    is_seconds,
    load,
)
from jdag.rpc.tls import load as load_tls
from jdag.rpc.tokens import fresh_secret
from jdag.rpc.worker import Options
from jdag.runtime.host import Port
from jdag.runtime.tables import NESTING_MAX, is_listed, is_path, up_to
from jdag.sim.plan import WORKERS
from jdag.sim.simulation import Simulation

# What `simulate` hands on.
SIMULATED = (
    *("network", "faults", "devices", "policy", "link", "detect_ns", "events_max"),
    "trace",
)


def simulate(
    workers: Sequence[str],
    *,
    seed: int,
    home: str | None = None,
    values: str = "real",
    nesting_max: int = NESTING_MAX,
    **settings: Any,
) -> Cluster:
    """Make a cluster in virtual time, in this process; a context manager.

    The same program with the same settings and seed does the same, event by event.

    Args:
        workers: their names, all different; their order numbers them.
        seed: the one source of chance: of jitter, faults, and schedules.
        home: the worker where the main program runs; the first if None.
        values: "real", where JAX computes, or "abstract", where only shapes are known
            and a thousand workers fit on a laptop.
        nesting_max: how deep programs may call each other.
        **settings: `network`, `faults`, `devices`, `policy`, `link`, `detect_ns`,
            `events_max`, `trace`; see `jdag.sim.simulation.Simulation`. Without a
            network messages take no time, without devices computing takes none.

    Raises:
        ScenarioError: names a setting that is unusable, its value and what is allowed.
    """
    _check("workers", workers, is_listed(workers), WORKERS)
    names = tuple(workers)
    first = names[0] if names else ""
    for key in settings:
        if key not in SIMULATED:
            allowed = f"one of {', '.join(SIMULATED)}{meant(key, SIMULATED)}"
            raise ScenarioError(f"simulate has no setting {key}: allowed is {allowed}")
    _check_settings(nesting_max=nesting_max)
    shared = Home(names, values == "abstract", nesting_max)
    shared.driver = Simulation(
        names,
        seed=seed,
        home=first if home is None else home,
        values=values,
        run_program=partial(run_program, shared),
        **settings,
    )
    return Cluster(shared, shared.driver.port)


class Running:
    """A real cluster as its main program's `Cluster` sees it: a driver.

    Attributes:
        node: main's part.
        session: all of it.
        launch: the processes that were started for it, None if none were.
    """

    trace = None

    def __init__(
        self, node: Node, session: Session, launch: Launch | None, stack: ExitStack
    ) -> None:
        self.node = node
        self.session = session
        self.launch = launch
        self._stack = stack

    @property
    def port(self) -> Port:
        """The port of the main program."""
        return self.node.port

    @property
    def current(self) -> Port:
        """The port of the program that runs on this thread."""
        return self.node.current

    @property
    def now_ns(self) -> int:
        """The time since the cluster was made, on this host's clock."""
        return self.node.now_ns

    @property
    def incarnations(self) -> Mapping[str, int]:
        """How often each has joined anew, of the workers that have."""
        return self.node.incarnations

    def info(self) -> Mapping[str, Mapping[str, Any]]:
        """What each worker holds, and has sent."""
        return self.node.info()

    def graph(self, context: ContextId) -> Mapping[str, Drawing]:
        """The graph of a context: what each worker has of it."""
        return self.node.graph(context)

    def settle(self) -> None:
        """Wait until nothing goes on anywhere."""
        self.node.settle()

    def close(self) -> None:
        """Leave the session, and stop the processes that were started for it."""
        self._stack.close()


def _made(
    place: Place, allow: Sequence[str], value_bytes_max: int
) -> tuple[Home, Node]:
    home = Home(place.workers, False, place.nesting_max)
    node = Node(
        place,
        run_program=partial(run_program, home),
        functions=Functions(allow),
        value_bytes_max=value_bytes_max,
    )
    home.driver = node
    return home, node


def member(options: Options) -> MakeNode:
    """Return what makes the nodes of a worker process that was started with these."""

    def make(place: Place) -> Node:
        return _made(place, options.allow, options.value_bytes_max)[1]

    return make


def worker_options(
    name: str,
    *,
    carrier: str,
    device: str | None,
    allow: Sequence[str],
    value_bytes_max: int,
    token: str = "",
    once: bool = False,
) -> Options:
    """Return what a worker process of this host is told, to compute as this one does.

    See `launch`; `token` is what main has to show, `once` that it serves one cluster.
    """
    return Options(
        worker=name,
        node=f"{member.__module__}:{member.__name__}",
        control="127.0.0.1:0",
        token=token,
        carrier=carrier,
        allow=tuple(allow),
        device=device,
        config=settings_of(device),
        path=tuple(sys.path),
        pythonpath=os.environ.get("PYTHONPATH"),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        value_bytes_max=value_bytes_max,
        once=once,
    )


def launch(  # noqa: PLR0913 - each is an option of its own, by keyword.
    workers: Sequence[str],
    *,
    device: str | None = None,
    allow: Sequence[str] = (),
    carrier: str = "socket",
    deadline_s: float = DEADLINE_S,
    env: Mapping[str, str] | None = None,
    logs: str | os.PathLike[str] | None = None,
    nesting_max: int = NESTING_MAX,
    ready_s: float = READY_S,
    value_bytes_max: int = VALUE_BYTES_MAX,
) -> Cluster:
    """Make a cluster of processes on this host; a context manager that ends them.

    The caller is the first worker; each other is a process of its own, which computes
    with the settings of JAX, the cores and the environment of this one.

    Args:
        workers: their names, all different; the first is this process.
        device: where the others compute: "cpu", "gpu" or "gpu:1", which several may
            share: memory of it is taken as needed, by this process too unless it has
            computed before. None: as JAX chooses.
        allow: modules, or packages, whose functions and programs the others may run by
            name. Other functions travel compiled (`jax.export`), programs not at all.
        carrier: "socket", or "grpc" where only that passes.
        deadline_s: a worker that gives no sign of life for so many seconds is lost.
        env: variables of the environment for the others, beside those of this process.
        logs: a folder for their output; None: a temporary one, kept if one died.
        nesting_max: how deep programs may call each other.
        ready_s: how many seconds they may take until they are ready.
        value_bytes_max: the largest array that leaves the worker it is on, in bytes.

    Raises:
        JdagError: an argument is unusable, or a worker does not start: why, and the
            last lines that it printed. Nothing is left running then.
    """
    names = _checked_names(workers)
    _check_settings(device=device, carrier=carrier, env=env, logs=logs, ready_s=ready_s)
    _check_settings(allow=allow, deadline_s=deadline_s, value_bytes_max=value_bytes_max)
    _check_settings(nesting_max=nesting_max)
    share_gpu(device)
    with ExitStack() as stack:
        token = fresh_secret()
        told = partial(worker_options, carrier=carrier, device=device, allow=allow)
        told = partial(told, value_bytes_max=value_bytes_max, token=token, once=True)
        options = [told(name) for name in names[1:]]
        started = Launch(options, env=env, logs=logs, ready_s=ready_s)
        stack.callback(started.close)
        maker = _Maker(allow, value_bytes_max)
        plan = Plan(
            main=names[0],
            workers=names,
            controls=started.addresses,
            handshake=ours(value_bytes_max),
            make_node=maker,
            dial_gate=dial,
            token=token,
            allow=tuple(allow),
            deadline_s=deadline_s,
            nesting_max=nesting_max,
            watched=True,
        )
        return _joined(stack, plan, maker, started)


def connect(path: str | os.PathLike[str], *, name: str) -> Cluster:
    """Join the running workers of a cluster's file; a context manager that leaves them.

    Waits for those that are not reached yet, for the `ready_s` of the file in all.

    Args:
        path: the file, which `jdag up` and `jdag worker` take as well.
        name: the worker of the file that this process is.

    Raises:
        JdagError: the file is unusable, or has no such worker; a worker is not reached,
            refuses, or differs in versions or configuration: both are named.
    """
    _check_settings(path=path)
    settings = load(Path(path))
    mine = settings.worker(name)
    tls = None if settings.tls_files is None else load_tls(*settings.tls_files)
    maker = _Maker(mine.allow, settings.value_bytes_max)
    others = {key: one for key, one in settings.workers.items() if key != name}
    for one in others.values():
        share_gpu(one.device if is_here(one.address.host) else "cpu")
    plan = Plan(
        main=name,
        workers=settings.names,
        controls={key: one.address for key, one in others.items()},
        handshake=ours(settings.value_bytes_max),
        make_node=maker,
        dial_gate=partial(dial, tls=tls),
        token=settings.token,
        allow=mine.allow,
        deadline_s=settings.deadline_s,
        ready_s=settings.ready_s,
        nesting_max=settings.nesting_max,
        control=mine.address,
        rejoin=True,
        tls=tls,
    )
    with ExitStack() as stack:
        try:
            return _joined(stack, plan, maker, None)
        except JoinError as error:
            if not error.absent:
                raise
            hint = f"is it running there, by jdag up {path} or jdag worker?"
            raise JoinError(f"{error}; {hint}", reached=False, absent=True) from None


class _Maker:
    """Makes main's node, and remembers its home."""

    def __init__(self, allow: Sequence[str], value_bytes_max: int) -> None:
        self._allow = allow
        self._value_bytes_max = value_bytes_max
        self.made: tuple[Home, Node] | None = None

    def __call__(self, place: Place) -> Node:
        self.made = _made(place, self._allow, self._value_bytes_max)
        return self.made[1]


def _joined(
    stack: ExitStack, plan: Plan, maker: _Maker, started: Launch | None
) -> Cluster:
    """Have a session begin; what is on the stack is undone when it ends, or fails."""
    undo: list[Callable[[], None]] = []
    stack.callback(lambda: [each() for each in undo])  # After all else has ended.
    session = stack.enter_context(Session(plan))
    assert maker.made is not None, plan.main
    home, node = maker.made
    undo.append(node.guard_signals())
    if started is not None:
        started.on_death(session.lost)
    home.driver = Running(node, session, started, stack.pop_all())
    return Cluster(home, node.port)


def _checked_names(workers: Any) -> tuple[str, ...]:
    names = tuple(workers) if is_listed(workers) else ()
    usable = 1 <= len(names) <= WORKERS_MAX and all(map(is_name, names))
    allowed = f"a list of one name or more, none twice; each of {NAMES}"
    once = len(dict.fromkeys(map(repr, names))) == len(names)
    _check("workers", workers, usable and once, allowed)
    return names


def _are_variables(env: Any) -> bool:
    return isinstance(env, Mapping) and all(
        isinstance(part, str) and "\0" not in part
        for pair in env.items()
        for part in pair
    )


# What `launch` and `connect` take: whether a value is usable, and what is allowed.
_USABLE: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "allow": (are_modules, MODULES),
    "carrier": (CARRIERS.__contains__, "one of " + ", ".join(CARRIERS)),
    "deadline_s": (is_seconds, SECONDS),
    "device": (lambda device: device is None or is_device(device), DEVICES),
    "env": (
        lambda env: env is None or _are_variables(env),
        'texts by name, such as {"JAX_LOG_COMPILES": "1"}',
    ),
    "logs": (lambda logs: logs is None or is_path(logs), LOGS),
    "nesting_max": (up_to(4000), "an integer from 1 to 4,000"),
    "path": (is_path, f"the path of {FILE}"),
    "ready_s": (is_seconds, SECONDS),
    "value_bytes_max": (
        lambda most: type(most) is int and most > 0,
        "a number of bytes, an integer > 0",
    ),
}


def _check_settings(**settings: Any) -> None:
    for key, value in settings.items():
        _check(key, value, _USABLE[key][0](value), _USABLE[key][1])


def _check(key: str, value: Any, usable: bool, allowed: str) -> None:
    if not usable:
        raise ScenarioError(unusable(key, value, allowed))
