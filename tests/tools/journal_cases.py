"""Journals of simulated runs, in any order that the simulator has; and replays."""

from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

from jdag.api.cluster import Cluster
from jdag.api.drivers import simulated
from jdag.context.cluster_state import ClusterState
from jdag.context.program_runner import run_program
from jdag.engine.protocol import Arrived, incarnated
from jdag.runtime.journal import END, Entries, entry
from jdag.settings.session_settings import RunSettings
from jdag.sim.replaying import Replaying
from jdag.sim.settings import SimSettings
from jdag.sim.untimed import StepChooser


class _Journals:
    """The journals of all workers of a cluster on which nothing has happened yet."""

    def __init__(self, driver: Any) -> None:
        self._driver, env = driver, driver._env
        self._env, self._send, self._start = env, driver.transmit, env.start
        driver.transmit, env.start = self._transmitted, self._started
        # By sender and receiver, the number of each message, which is kept alive here.
        self._numbers: dict[tuple[str, str], dict[int, Any]] = {}
        self.lines: dict[str, list[str]] = {}
        for host in env.hosts.values():
            self._add(host)

    def _add(self, host: Any) -> None:
        lines = self.lines[host.worker] = []
        host.journal = SimpleNamespace(note=partial(self._note, host.worker, lines))

    def _started(self, name: str, incarnation: int, machine: Any) -> None:
        self._start(name, incarnation, machine)
        self._add(self._env.hosts[incarnated(name, incarnation)])

    def _transmitted(self, host: Any, send: Any, message: Any, *rest: Any) -> None:
        sent = self._numbers.setdefault((host.worker, send.to), {})
        sent[id(message)] = len(sent) + 1, message
        self._send(host, send, message, *rest)

    def _note(self, worker: str, lines: list[str], noted: Any) -> None:
        event, causes = noted
        if isinstance(event, Arrived):
            sent = self._numbers[event.sender, worker]
            causes = (sent[id(event.message)][0],)
        lines.append(entry(event, causes))

    def entries(self) -> dict[str, Entries]:
        crashed = self._driver._outages.crashed
        return {
            worker: Entries(worker, lines, "" if worker in crashed else END)
            for worker, lines in self.lines.items()
        }


def journaled(run: Any, **settings: Any) -> tuple[Any, dict[str, Entries]]:
    cluster = simulated(SimSettings(seed=0, trace=False, **settings))
    journals = _Journals(cluster.driver)
    with cluster:
        result = run(cluster)
    return result, journals.entries()


def in_any_order(seed: int, **faults: int) -> StepChooser:
    """Return a chooser that picks among all steps, and at most so many faults."""
    random = Random(seed)
    return StepChooser(lambda steps: random.randrange(len(steps)), faults.items())


def replayed(
    journals: dict[str, Entries], run: Any, schedule: Any = None
) -> tuple[Any, int]:
    """Repeat a run. Return its result and the number of its inputs."""
    workers = tuple([name for name in journals if "#" not in name])
    state = ClusterState(RunSettings(workers, schedule=schedule), False)
    found: list[int] = []
    program = partial(run_program, state)
    state.driver = Replaying(workers, journals, program, found.append)
    with Cluster(state, state.driver.port) as c:
        result = run(c)
    return result, found[0]
