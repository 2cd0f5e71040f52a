"""Worker processes, and runs of experiments, where Ray places them: extra `jdag[ray]`.

A worker is an ordinary worker process whose parent is a Ray actor. If the process ends,
so does its actor, and Ray starts it again, perhaps on another node; main then finds the
new process and has it join again. Over Ray go the options of the process with the token
and the authority of the session, and the address of its control server; all else goes
over jdag's own connections, with TLS.
"""

import os
import pkgutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from jdag.errors import JdagError, JoinError, ScenarioError, unusable
from jdag.processes.launch.launch import STOP_S, Launch
from jdag.processes.net.addresses import Address
from jdag.processes.net.tls import Tls, load_tls
from jdag.processes.session.authority import IS_USABLE, Authority, fresh_authority
from jdag.processes.session.cluster_file import READY_S, WorkerOptions
from jdag.settings.validation import is_number

try:
    import ray
    from ray.exceptions import GetTimeoutError, RayError
    from ray.util.placement_group import (
        PlacementGroup,
        placement_group,
        placement_group_table,
        remove_placement_group,
    )
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError:
    ray = None

_ASKED_S = 2.0
_RESOURCES = (
    'amounts of what Ray has, such as {"CPU": 1, "GPU": 1}, all above 0, for each '
    "worker, or a table of such tables by worker; or a placement group of Ray with a "
    "bundle for each worker but main"
)


def need_ray(what: str) -> None:
    """Raise ScenarioError if Ray is not installed; `what` needs it."""
    if ray is None or not IS_USABLE:
        said = f"{what} needs Ray, which is not here: pip install 'jdag[ray]'"
        raise ScenarioError(said)


class _Parent:
    """A Ray actor: the parent of one worker process, made anew by each restart."""

    def __init__(
        self, options: bytes, ca: tuple[str, str], env: Any, logs: Any, ready_s: float
    ) -> None:
        self._options = WorkerOptions.read(options)
        self._ca = Authority(*ca)
        self._settings = {"env": env, "logs": logs, "ready_s": ready_s}
        self._launch: Launch | None = None
        self._failed = self._begun()

    def _begun(self) -> str:
        host = ray.util.get_node_ip_address()
        made = self._options
        # Modules may lie elsewhere on this node, as its runtime environment has them.
        path = tuple(dict.fromkeys((*(made.path or ()), *sys.path)))
        with tempfile.TemporaryDirectory(prefix="jdag-") as folder:
            tls = self._ca.issue(made.worker, host, Path(folder))
            where = {"control": str(Address(host)), "data": f"tcp:{Address(host)}"}
            made = replace(made, **where, path=path, tls=tls)
            try:
                self._launch = Launch([made], **self._settings)
            except JdagError as error:  # Ray would add pages to it.
                return str(error)
        self._launch.on_death(_end_actor)
        return ""

    def where(self) -> tuple[str, str]:
        """Return the address of the process, or why there is none.

        The next request after that starts the process again.
        """
        if self._launch is None and not self._failed:
            self._failed = self._begun()
        if self._launch is None:
            failed, self._failed = self._failed, ""
            return "", failed
        return str(self._launch.addresses[self._options.worker]), ""

    def close(self) -> None:
        if self._launch is not None:
            self._launch.close()


def _end_actor(worker: str, why: str) -> None:
    sys.stderr.write(f"jdag: worker {worker!r}: {why}\n")
    sys.stderr.flush()
    os._exit(1)  # Ray starts another one.


class _Controls(Mapping[str, Address]):
    """Where control servers listen now: Ray is asked, since restarts change it."""

    def __init__(self, actors: Mapping[str, Any], group: Any) -> None:
        self._actors = actors
        self._group = group

    def __getitem__(self, name: str) -> Address:
        try:
            address, failed = ray.get(
                self._actors[name].where.remote(), timeout=_ASKED_S
            )
        except RayError as error:
            why = f"Ray says {type(error).__name__}"
            if placement_group_table(self._group)["state"] == "RESCHEDULING":
                why = f"Ray has no place for {self._group.bundle_specs} any more"
            said = f"worker {name!r} is not there: {why}"
            raise JoinError(said, reached=False, absent=True) from None
        if failed:
            raise JoinError(f"worker {name!r} on Ray: {failed}")
        return Address.read(address)

    def __iter__(self) -> Iterator[str]:
        return iter(self._actors)

    def __len__(self) -> int:
        return len(self._actors)


class RayLaunch:
    """Worker processes on the nodes of a Ray cluster, from when all are ready.

    Args:
        main: the worker that this process is.
        options: for each of the others.
        resources: what Ray reserves for each; see `jdag.launch`.
        env: variables of the environment to add to those on the node.
        logs: a folder on the nodes for their output; see `Launch`.
        ready_s: how long all may take until they are placed, and then until ready.

    Raises:
        JoinError: Ray has not the resources, or a worker does not start. Then none is
            left.
        ScenarioError: the resources are unusable, or Ray is not installed.
    """

    def __init__(
        self,
        main: str,
        options: Sequence[WorkerOptions],
        *,
        resources: Any = None,
        env: Mapping[str, str] | None = None,
        logs: str | os.PathLike[str] | None = None,
        ready_s: float = READY_S,
    ) -> None:
        need_ray("jdag.launch(on='ray')")
        names = [one.worker for one in options]
        bundles = _bundles(names, resources)
        ca = fresh_authority()
        with tempfile.TemporaryDirectory(prefix="jdag-") as folder:
            self.tls: Tls = load_tls(*ca.issue(main, "localhost", Path(folder)))
        self._began = not ray.is_initialized()
        self._actors: dict[str, Any] = {}
        self._group = None
        try:
            if self._began:
                ray.init()
            group = resources
            if bundles and not isinstance(group, PlacementGroup):
                self._group = group = placement_group(bundles)
            if bundles and not group.wait(ready_s):
                said = f"Ray has no place for {bundles} within ready_s={ready_s:g}"
                raise JoinError(f"{said}; all that it has is {ray.cluster_resources()}")
            self.addresses = _Controls(self._actors, group)
            where = None if logs is None else os.path.abspath(logs)
            for at, one in enumerate(options):
                need = dict(bundles[at])
                cpus, gpus = need.pop("CPU", 0), need.pop("GPU", 0)
                self._actors[one.worker] = (
                    ray.remote(_Parent)
                    .options(
                        num_cpus=cpus,
                        num_gpus=gpus,
                        resources=need,
                        max_restarts=-1,
                        scheduling_strategy=PlacementGroupSchedulingStrategy(group, at),
                    )
                    .remote(one.written(), tuple(ca), env, where, ready_s)
                )
            self._wait(ready_s)
        except BaseException:
            self.close()
            raise

    def _wait(self, ready_s: float) -> None:
        asked = [actor.where.remote() for actor in self._actors.values()]
        try:
            answers = ray.get(asked, timeout=ready_s)
        except GetTimeoutError:
            raise JoinError(f"not all are ready within ready_s={ready_s:g}") from None
        except RayError as error:
            said = " ".join(str(error).split("\n")[0].split())
            raise JoinError(f"Ray cannot start workers: {said}") from None
        for _, failed in answers:
            if failed:
                raise JoinError(failed)

    def close(self) -> None:
        """Stop all workers, and Ray too if it was begun here; idempotent."""
        if not ray.is_initialized():
            return
        actors = list(self._actors.values())
        with suppress(RayError):
            ray.get([actor.close.remote() for actor in actors], timeout=2 * STOP_S)
        for actor in actors:
            ray.kill(actor)
        self._actors.clear()
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
        if self._began:
            ray.shutdown()


def _bundles(names: Sequence[str], resources: Any) -> list[dict[str, float]]:
    if isinstance(resources, PlacementGroup):
        bundles = resources.bundle_specs
    else:
        needs = {"CPU": 1} if resources is None else resources
        by_name = isinstance(needs, Mapping) and sorted(needs) == sorted(names)
        bundles = [needs[name] if by_name else needs for name in names]
    is_usable = len(bundles) == len(names) and all(
        isinstance(one, Mapping)
        and bool(one)
        and all(isinstance(k, str) and is_number(v) and v > 0 for k, v in one.items())
        for one in bundles
    )
    if not is_usable:
        raise ScenarioError(unusable("resources", resources, _RESOURCES))
    return [dict(one) for one in bundles]


def ray_results(
    function: str, arguments: Mapping[int, Sequence[Any]], at_once: int
) -> Iterator[tuple[int, Any]]:
    """Call a function of a module as tasks of Ray, each with arguments of a number.

    Yield what each returns with that number, as they come. Modules and files have to be
    where nodes find them, as in a folder that all share.

    Raises:
        JoinError: a task was lost or raised: why.
    """
    began = not ray.is_initialized()
    if began:
        ray.init()
    task = ray.remote(num_cpus=1)(_call)
    waiting, running = iter(arguments.items()), dict[Any, int]()
    try:
        while True:
            while len(running) < at_once and (one := next(waiting, None)) is not None:
                number, own = one
                running[task.remote(tuple(sys.path), function, tuple(own))] = number
            if not running:
                return
            (done, *_), _ = ray.wait(list(running), num_returns=1)
            try:
                reply = ray.get(done)
            except RayError as error:
                *_, said = str(error).strip().splitlines()
                raise JoinError(f"a run on Ray has failed: {said}") from None
            yield running.pop(done), reply
    finally:
        for one in running:
            ray.cancel(one, force=True)
        if began:
            ray.shutdown()


def _call(path: Sequence[str], function: str, arguments: Sequence[Any]) -> Any:
    sys.path[:] = dict.fromkeys((*path, *sys.path))
    return pkgutil.resolve_name(function)(*arguments)
