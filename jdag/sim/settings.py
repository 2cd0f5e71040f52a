"""Settings of a simulated run, checked before it begins."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from msgspec import Meta
from msgspec.structs import asdict

from jdag.errors import unusable
from jdag.runtime.chooser import POLICIES, Chooser
from jdag.settings.session_settings import RunSettings
from jdag.settings.validation import COUNT, NATURAL, NS, one_of
from jdag.sim.devices import Devices, models
from jdag.sim.faults import DETECT_NS, Crash, Fault
from jdag.sim.network import FREE_LINK, LinkModel, Network
from jdag.sim.reliable_link import LinkSettings

EVENTS_MAX = 100_000_000
_FAULTS = Meta(description="a list of jdag.sim's faults, such as [jdag.sim.Drop(0.1)]")
_NETWORK = Meta(description="a Network or a LinkModel")
_LINK = Meta(description="a LinkSettings, or None")
POLICY = Annotated[str, one_of(*POLICIES)]
VALUES = Annotated[str, one_of("real", "abstract")]


class SimSettings(RunSettings, frozen=True, kw_only=True):
    """The settings that, with the programs, determine a run. See `jdag.simulate`."""

    seed: NATURAL  # `Random(-1)` and `Random(1)` give the same sequence.
    home: str | None = None
    network: Annotated[Network | LinkModel | None, _NETWORK] = None
    faults: Annotated[Sequence[Fault], _FAULTS] = ()
    devices: Devices = None
    values: VALUES = "real"
    policy: POLICY = "path"
    link: Annotated[LinkSettings | None, _LINK] = None
    detect_ns: NS = DETECT_NS
    events_max: COUNT = EVENTS_MAX
    trace: bool = True
    chooser: Chooser | None = None

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        home = self.main
        if home not in self.workers:
            yield unusable("home", home, f"one of {', '.join(self.workers)}")
        for index, fault in enumerate(self.faults):
            if not isinstance(fault, Crash):
                continue
            key = f"faults[{index}]"
            if fault.worker == home:
                allowed = "a worker other than home, where the main program runs"
                yield unusable(f"{key}.worker", home, allowed)
            elif fault.at_index is not None and not self.trace:
                allowed = "at_ns in its place, since no trace is recorded"
                yield unusable(f"{key}.at_index", fault.at_index, allowed)

    @property
    def main(self) -> str:
        return self.workers[0] if self.home is None else self.home

    def described(self) -> dict[str, Any]:
        """Return the settings that `jdag.retime` reads from a trace, as JSON data."""
        network = self.all_links
        control = network.control_lane
        device_models = models(self.devices, self.workers)
        return {
            "schedule": self.schedule is not None,
            "policy": self.policy,
            "faults": len(self.faults),
            "call_ns": max([model.call_ns for model in device_models.values()]),
            "default": _described(network.default),
            "links": [
                [*pair, _described(link)] for pair, link in network.links.items()
            ],
            "port_bandwidth_bytes_per_s": network.port_bandwidth_bytes_per_s,
            "control_lane": None if control is None else _described(control),
            "routed": network.route is not None,
        }

    @property
    def all_links(self) -> Network:
        if isinstance(self.network, Network):
            return self.network
        return Network(self.network or FREE_LINK)


def _described(model: Any) -> dict[str, Any]:
    return {"kind": type(model).__name__, **asdict(model)}
