"""The settings of a simulated run, checked before it begins."""

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
    """The settings that, with its programs, determine a simulated run.

    `jdag.simulate` describes them.

    Raises:
        ScenarioError: names a setting that is unusable, its value and what is allowed.
    """

    seed: NATURAL  # Of -1 and 1 the same is drawn.
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
        """Home is a worker, and does not crash; a crash by the trace needs a trace."""
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
                allowed = "at_ns in its place, as no trace is kept"
                yield unusable(f"{key}.at_index", fault.at_index, allowed)

    @property
    def main(self) -> str:
        """The worker where the main program runs."""
        return self.workers[0] if self.home is None else self.home

    def described(self) -> dict[str, Any]:
        """What a trace says of it, for `jdag.retime`: data of JSON."""
        network = self.all_links
        control = network.control_lane
        known = models(self.devices, self.workers)
        return {
            "schedule": self.schedule is not None,
            "policy": self.policy,
            "faults": len(self.faults),
            "call_ns": max([one.call_ns for one in known.values()]),
            "default": _described(network.default),
            "links": [[*pair, _described(of)] for pair, of in network.links.items()],
            "port_bandwidth_bytes_per_s": network.port_bandwidth_bytes_per_s,
            "control_lane": None if control is None else _described(control),
            "routed": network.route is not None,
        }

    @property
    def all_links(self) -> Network:
        """The network; a single model, or None, applies to all links."""
        if isinstance(self.network, Network):
            return self.network
        return Network(self.network or FREE_LINK)


def _described(model: Any) -> dict[str, Any]:
    return {"kind": type(model).__name__, **asdict(model)}
