"""State that the parts of one simulated run share: workers, time, choices, records."""

from jdag.compute.machine import Machine
from jdag.engine import Engine
from jdag.engine.protocol import Worker, incarnated
from jdag.runtime.chooser import Chooser
from jdag.runtime.recorder import NoRecorder, Recorder
from jdag.runtime.step_values import StepValues
from jdag.runtime.trace import Trace
from jdag.runtime.waiters import Waiters
from jdag.runtime.worker_runtime import Driver, WorkerRuntime
from jdag.sim.faults import Faults
from jdag.sim.settings import SimSettings
from jdag.sim.timeline import SimTimeline
from jdag.sim.untimed import StepChooser, UntimedTimeline


class Environment:
    """Shared state of one simulated run.

    `lost` has, for each incarnation of a worker, the peers that it has lost, each with
    the reason. `incarnations` has the newest incarnation of each restarted worker.
    """

    def __init__(self, settings: SimSettings, driver: Driver) -> None:
        self.settings = settings
        self.workers = tuple(settings.workers)
        self.chooser = settings.chooser or Chooser(settings.seed, settings.policy)
        self.timeline = (
            UntimedTimeline(settings.events_max, settings.main)
            if self.chooser.untimed
            else SimTimeline(settings.events_max)
        )
        self.recorder: Recorder | NoRecorder = NoRecorder()
        if settings.trace:
            self.recorder = Recorder(Trace(), self.timeline)
            self.recorder.trace.settings = settings.described()
        self.waiters = Waiters()
        self.faults = Faults(settings.faults, self.workers)
        self.hosts: dict[Worker, WorkerRuntime] = {}
        self.lost: dict[Worker, dict[Worker, str]] = {}
        self.incarnations: dict[str, int] = {}
        self.driver = driver
        for name in self.workers:
            self.start(name, 0, Machine(settings.values))

    def start(self, name: str, incarnation: int, machine: Machine) -> None:
        worker = incarnated(name, incarnation)
        engine = Engine(name, self.workers, incarnation)
        engine.drive(StepValues(machine))
        if isinstance(self.chooser, StepChooser):
            self.chooser.watch(engine)
        self.lost[worker] = {}
        self.hosts[worker] = WorkerRuntime(
            worker,
            engine,
            machine,
            driver=self.driver,
            waiters=self.waiters,
            lost=self.lost[worker],
            recorder=self.recorder if self.settings.trace else None,
        )

    def restart(self, name: str) -> WorkerRuntime:
        """Start a worker's next incarnation, which keeps its machine and counters."""
        machine = self.newest(name).machine
        self.incarnations[name] = incarnation = self.incarnations.get(name, 0) + 1
        self.start(name, incarnation, machine)
        return self.newest(name)

    def newest(self, name: str) -> WorkerRuntime:
        return self.hosts[incarnated(name, self.incarnations.get(name, 0))]
