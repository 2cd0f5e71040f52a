"""Worker processes and runs of experiments on a Ray cluster. Requires `jdag[ray]`.

Each worker is an ordinary worker process whose parent is a Ray actor. If the process
ends, its actor ends too, and Ray restarts the actor, perhaps on another node. Main then
attaches the new process as the next incarnation. Only two things are sent through Ray:
the options of the process (with the token and the certificate authority of the session)
and its control address. All other data use jdag's own connections, with TLS.
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

_ADDRESS_S = 2.0
_RESOURCES = (
    'positive amounts of Ray resources for each worker, such as {"CPU": 1, "GPU": 1}, '
    "or a table that maps workers to such tables, or a Ray placement group with one "
    "bundle for each worker except main"
)


def need_ray(caller: str) -> None:
    if ray is None or not IS_USABLE:
        raise ScenarioError(
            f"{caller} needs Ray, which is not installed: pip install 'jdag[ray]'"
        )


class _Parent:
    """A Ray actor that is the parent of a worker process, and starts it."""

    def __init__(
        self, options: bytes, ca: tuple[str, str], env: Any, logs: Any, ready_s: float
    ) -> None:
        self._options = WorkerOptions.read(options)
        self._ca = Authority(*ca)
        self._settings = {"env": env, "logs": logs, "ready_s": ready_s}
        self._launch: Launch | None = None
        self._failed = self._start()

    def _start(self) -> str:
        """Start the process; return why the start failed, or "" if it succeeded."""
        host = ray.util.get_node_ip_address()
        options = self._options
        # The runtime environment of this node may keep modules in other folders.
        path = tuple(dict.fromkeys((*(options.path or ()), *sys.path)))
        with tempfile.TemporaryDirectory(prefix="jdag-") as folder:
            tls = self._ca.issue(options.worker, host, Path(folder))
            options = replace(
                options,
                control=str(Address(host)),
                data=f"tcp:{Address(host)}",
                path=path,
                tls=tls,
            )
            try:
                self._launch = Launch([options], **self._settings)
            except JdagError as error:  # Ray adds a long traceback to raised errors.
                return str(error)
        self._launch.on_death(_end_actor)
        return ""

    def where(self) -> tuple[str, str]:
        """Return (control address, ""), or ("", why the start failed).

        The next call after a failure starts the process again.
        """
        if self._launch is None and not self._failed:
            self._failed = self._start()
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
    os._exit(1)  # Ray restarts the actor.


class _Controls(Mapping[str, Address]):
    """Control addresses. Each access queries the actor, which may have restarted."""

    def __init__(self, actors: Mapping[str, Any], group: Any) -> None:
        self._actors = actors
        self._group = group

    def __getitem__(self, name: str) -> Address:
        try:
            future = self._actors[name].where.remote()
            address, failed = ray.get(future, timeout=_ADDRESS_S)
        except RayError as error:
            why = f"Ray raised {type(error).__name__}"
            if placement_group_table(self._group)["state"] == "RESCHEDULING":
                why = f"Ray can no longer place {self._group.bundle_specs}"
            raise JoinError(
                f"worker {name!r} is not available: {why}", reached=False, absent=True
            ) from None
        if failed:
            raise JoinError(f"worker {name!r} did not start on Ray: {failed}")
        return Address.read(address)

    def __iter__(self) -> Iterator[str]:
        return iter(self._actors)

    def __len__(self) -> int:
        return len(self._actors)


class RayLaunch:
    """Running worker processes on the nodes of a Ray cluster.

    Args:
        main: the name of this process.
        options: the options of each worker except main.
        resources: Ray resources to reserve for each worker; see `jdag.launch`.
        env: environment variables, added to those of the Ray node.
        logs: the folder of the log files on each Ray node; see `Launch`.
        ready_s: time limit for the placement of all workers; also the time limit for
            their start.

    Raises:
        JoinError: Ray lacks the resources, or a worker does not start. All workers are
            stopped.
        ScenarioError: the resources are invalid, or Ray is not installed.
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
        names = [each.worker for each in options]
        bundles = _bundles(names, resources)
        ca = fresh_authority()
        with tempfile.TemporaryDirectory(prefix="jdag-") as folder:
            self.tls: Tls = load_tls(*ca.issue(main, "localhost", Path(folder)))
        self._started_ray = not ray.is_initialized()
        self._actors: dict[str, Any] = {}
        self._group = None
        try:
            if self._started_ray:
                ray.init()
            group = resources
            if bundles and not isinstance(group, PlacementGroup):
                self._group = group = placement_group(bundles)
            if bundles and not group.wait(ready_s):
                raise JoinError(
                    f"Ray did not place {bundles} within ready_s={ready_s:g}; the "
                    f"resources of the Ray cluster are {ray.cluster_resources()}"
                )
            self.addresses = _Controls(self._actors, group)
            log_folder = None if logs is None else os.path.abspath(logs)
            for index, each in enumerate(options):
                others = dict(bundles[index])
                cpus, gpus = others.pop("CPU", 0), others.pop("GPU", 0)
                strategy = PlacementGroupSchedulingStrategy(group, index)
                self._actors[each.worker] = (
                    ray.remote(_Parent)
                    .options(
                        num_cpus=cpus,
                        num_gpus=gpus,
                        resources=others,
                        max_restarts=-1,
                        scheduling_strategy=strategy,
                    )
                    .remote(each.written(), tuple(ca), env, log_folder, ready_s)
                )
            self._wait(ready_s)
        except BaseException:
            self.close()
            raise

    def _wait(self, ready_s: float) -> None:
        futures = [actor.where.remote() for actor in self._actors.values()]
        try:
            answers = ray.get(futures, timeout=ready_s)
        except GetTimeoutError:
            why = f"not all workers are ready within ready_s={ready_s:g}"
            raise JoinError(why) from None
        except RayError as error:
            first_line = " ".join(str(error).split("\n")[0].split())
            raise JoinError(f"Ray cannot start workers: {first_line}") from None
        for _, failed in answers:
            if failed:
                raise JoinError(failed)

    def close(self) -> None:
        """Stop all workers, and Ray if this object started it. Idempotent."""
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
        if self._started_ray:
            ray.shutdown()


def _bundles(names: Sequence[str], resources: Any) -> list[dict[str, float]]:
    if isinstance(resources, PlacementGroup):
        bundles = resources.bundle_specs
    else:
        needs = {"CPU": 1} if resources is None else resources
        is_by_name = isinstance(needs, Mapping) and sorted(needs) == sorted(names)
        bundles = [needs[name] if is_by_name else needs for name in names]
    is_usable = len(bundles) == len(names) and all(
        isinstance(each, Mapping)
        and bool(each)
        and all(isinstance(k, str) and is_number(v) and v > 0 for k, v in each.items())
        for each in bundles
    )
    if not is_usable:
        raise ScenarioError(unusable("resources", resources, _RESOURCES))
    return [dict(each) for each in bundles]


def ray_results(
    function: str, arguments: Mapping[int, Sequence[Any]], at_once: int
) -> Iterator[tuple[int, Any]]:
    """Run a function as Ray tasks, one for each entry of `arguments`.

    Yields (number, result) in order of completion. At most `at_once` tasks run. All Ray
    nodes need the same modules and files, such as in a shared folder.

    Raises:
        JoinError: a task was lost or raised an error.
    """
    started_ray = not ray.is_initialized()
    if started_ray:
        ray.init()
    task = ray.remote(num_cpus=1)(_call)
    waiting, running = iter(arguments.items()), dict[Any, int]()
    try:
        while True:
            while len(running) < at_once and (job := next(waiting, None)) is not None:
                number, values = job
                running[task.remote(tuple(sys.path), function, tuple(values))] = number
            if not running:
                return
            (done, *_), _ = ray.wait(list(running), num_returns=1)
            try:
                reply = ray.get(done)
            except RayError as error:
                *_, last_line = str(error).strip().splitlines()
                raise JoinError(f"a task on Ray failed: {last_line}") from None
            yield running.pop(done), reply
    finally:
        for future in running:
            ray.cancel(future, force=True)
        if started_ray:
            ray.shutdown()


def _call(path: Sequence[str], function: str, arguments: Sequence[Any]) -> Any:
    sys.path[:] = dict.fromkeys((*path, *sys.path))
    return pkgutil.resolve_name(function)(*arguments)
