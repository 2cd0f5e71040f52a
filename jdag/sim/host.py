"""One simulated worker: its engine, its values, what computes on them, its devices."""

from collections.abc import Mapping, Sequence
from typing import Any

from jdag.compute.machine import Machine
from jdag.engine import Engine
from jdag.engine.vocabulary import Key, ReadingKey, incarnated, incarnation_of, named
from jdag.sim.carriage import End
from jdag.sim.chooser import Chooser
from jdag.sim.devices import Device, DeviceModel
from jdag.sim.faults import Faults


class Host:
    """The state of one worker in one run.

    `alive` is False from the moment in which it crashes (then it is `crashed` as well)
    or is closed. `lost` are the peers that it was told are gone. `made` has the record
    of the trace that made each value that is held here. `device` is the default one;
    each that a call names is one of its own beside it.
    A worker that joins anew has another host: `busy_before_ns` is of those before it.
    """

    __slots__ = (
        "_named",
        "alive",
        "busy_before_ns",
        "crashed",
        "device",
        "engine",
        "lost",
        "machine",
        "made",
        "worker",
    )

    def __init__(
        self, worker: str, engine: Any, machine: Machine, device: Device
    ) -> None:
        self.worker = worker
        self.engine = engine
        self.machine = machine
        self.device = device
        self._named: dict[str, Device] = {}
        self.busy_before_ns = 0
        self.alive = True
        self.crashed = False
        self.lost: dict[str, str] = {}
        self.made: dict[Key, int] = {}

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

    def load(
        self, message: Any, keys: tuple[Key, ...]
    ) -> tuple[Any, tuple[Key, ...], tuple[Any, ...]]:
        """What leaves with a message; see `Machine.load`."""
        return self.machine.load(message, keys, self.worker)

    def drop(self, keys: Sequence[Key]) -> None:
        """Let go of values; a key that is not held is no error."""
        values = self.machine.values
        for key in keys:
            if key in values:
                values.drop(key)
                self.made.pop(key, None)

    def taken(self, found: Sequence[Any]) -> tuple[Any, ...]:
        """What was fetched, values in place of keys; what came only for that goes."""
        values = self.machine.fetched(found, self.worker)
        self.drop([k for k in found if type(k) is ReadingKey])
        return values

    def clear(self) -> None:
        """Let go of everything; what was counted stays."""
        assert not self.alive, self.worker
        self.machine.clear()
        for device in self.devices:
            device.stop()
        self.made.clear()
        self.engine = None

    @property
    def busy_ns(self) -> int:
        """How long its devices have computed."""
        return self.busy_before_ns + sum(device.busy_ns for device in self.devices)

    def again(self, workers: Sequence[str]) -> "Host":
        """The next incarnation of this worker, which was cleared; its counts stay."""
        name, incarnation = named(self.worker), incarnation_of(self.worker) + 1
        engine = Engine(name, workers, incarnation)
        worker = incarnated(name, incarnation)
        host = Host(worker, engine, self.machine, self.device.beside())
        host.busy_before_ns = self.busy_ns
        return host

    def info(self, ends: Sequence[End]) -> dict[str, int | bool]:
        """What it holds now, and what it and those before it sent and computed so far.

        A worker that crashed holds nothing; what it did before still counts.
        """
        values, engine = self.machine.values, self.engine
        lanes = {end.route: end.out for end in ends}.values()
        return {
            "live_contexts": 0 if engine is None else engine.live_contexts,
            "live_passes": 0 if engine is None else engine.live_passes,
            "values_held": values.held,
            "bytes_held": values.bytes_held,
            "bytes_peak": values.bytes_peak,
            "messages_sent": sum(end.link.sent for end in ends),
            "payload_bytes_sent": sum(end.payload_bytes for end in ends),
            "zero_bytes_saved": sum(end.zero_bytes for end in ends),
            "bytes_sent": sum(lane.bytes for lane in lanes),
            "frames_sent": sum(lane.frames for lane in lanes),
            "resends": sum(end.link.resent for end in ends),
            "duplicates": sum(end.link.duplicates for end in ends),
            "busy_ns": self.busy_ns,
            "lost": self.crashed,
        }


def made_hosts(
    kinds: Mapping[str, DeviceModel], values: str, chooser: Chooser, faults: Faults
) -> dict[str, Host]:
    """A host for each worker, of the device that it has."""
    workers = tuple(kinds)
    return {
        worker: Host(
            worker,
            Engine(worker, workers),
            Machine(values),
            Device(worker, model, chooser, faults),
        )
        for worker, model in kinds.items()
    }
