"""One simulated worker: its engine, its values and its devices."""

from collections.abc import Sequence
from typing import Any

from jdag.compute.machine import Machine
from jdag.engine import Engine
from jdag.engine.protocol import incarnated, incarnation_of, named
from jdag.runtime import host
from jdag.runtime.chooser import Chooser
from jdag.runtime.recorder import Recorder
from jdag.runtime.stats import Sent, info
from jdag.runtime.waiters import Waiters
from jdag.sim.devices import Device, models
from jdag.sim.faults import Faults
from jdag.sim.settings import SimSettings
from jdag.sim.transport import LinkEnd


class SimHost(host.Host):
    """The state of one worker in one run.

    `alive` is False from the moment in which it crashes (then it is `crashed` as well)
    or is closed. `device` is the default one; each that a call names is one of its own
    beside it. A worker that joins anew has another host: `busy_before_ns` is of those
    before it.
    """

    __slots__ = ("_named", "busy_before_ns", "crashed", "device", "lost")

    lost: dict[str, str]

    def __init__(
        self,
        worker: str,
        engine: Any,
        machine: Machine,
        device: Device,
        *,
        driver: host.Driver,
        waiters: Waiters,
        recorder: Recorder | None,
    ) -> None:
        super().__init__(
            worker,
            engine,
            machine,
            driver=driver,
            waiters=waiters,
            lost={},
            recorder=recorder,
        )
        self.device = device
        self._named: dict[str, Device] = {}
        self.busy_before_ns = 0
        self.crashed = False

    @property
    def devices(self) -> tuple[Device, ...]:
        """The default device, then the others in the order in which they were named."""
        return (self.device, *self._named.values())

    def on(self, name: str | None) -> Device:
        """The device of that name; None is the default one."""
        if name is None:
            return self.device
        if name not in self._named:
            self._named[name] = self.device.beside()
        return self._named[name]

    def clear(self) -> None:
        """Drop everything but counts."""
        assert not self.alive, self.worker
        super().clear()
        for device in self.devices:
            device.stop()

    @property
    def busy_ns(self) -> int:
        """How long its devices have computed."""
        return self.busy_before_ns + sum(device.busy_ns for device in self.devices)

    def again(self, workers: Sequence[str]) -> "SimHost":
        """The next incarnation of this worker, with its counts."""
        name, incarnation = named(self.worker), incarnation_of(self.worker) + 1
        engine = Engine(name, workers, incarnation)
        worker = incarnated(name, incarnation)
        again = SimHost(
            worker,
            engine,
            self.machine,
            self.device.beside(),
            driver=self.driver,
            waiters=self.waiters,
            recorder=self.recorder,
        )
        again.busy_before_ns = self.busy_ns
        return again

    def info(self, ends: Sequence[LinkEnd]) -> dict[str, int | bool]:
        """What it holds now, and what all its incarnations sent and computed so far.

        A worker that crashed holds nothing; what it did before still counts.
        """
        sent = Sent()
        for end in ends:
            sent.messages += end.link.sent
            sent.payload_bytes += end.payload_bytes
            sent.zero_bytes += end.zero_bytes
            sent.resends += end.link.resent
            sent.duplicates += end.link.duplicates
        for lane in {end.route: end.out for end in ends}.values():
            sent.bytes += lane.bytes
            sent.frames += lane.frames
        return info(self, sent, self.busy_ns, lost=self.crashed)


def made_hosts(
    settings: SimSettings,
    chooser: Chooser,
    faults: Faults,
    *,
    driver: host.Driver,
    waiters: Waiters,
    recorder: Recorder,
) -> dict[str, SimHost]:
    """A host for each worker, of the device that it has."""
    workers = tuple(settings.workers)
    return {
        worker: SimHost(
            worker,
            Engine(worker, workers),
            Machine(settings.values),
            Device(worker, model, chooser, faults),
            driver=driver,
            waiters=waiters,
            recorder=recorder,
        )
        for worker, model in models(settings.devices, workers).items()
    }
