"""The settings of a simulated run, checked before it begins."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jdag.engine.protocol import NAMES, WORKERS_MAX, is_name
from jdag.errors import ScenarioError, unusable
from jdag.runtime.chooser import Chooser
from jdag.runtime.tables import NS, is_listed, is_ns
from jdag.schedules import Schedule
from jdag.schedules.schedule import check_for
from jdag.sim.devices import Devices, models
from jdag.sim.faults import Crash, Fault
from jdag.sim.network import FREE, LinkModel, Network
from jdag.wire.link import LinkSettings

DETECT_NS = 1_000_000
EVENTS_MAX = 100_000_000
WORKERS = (
    f"a list of one name or more, none twice, at most {WORKERS_MAX:,}; each of {NAMES}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimSettings:
    """The settings that, with its programs, determine a simulated run.

    Attributes:
        workers: their names; their order numbers them.
        seed: of all jitter and faults.
        home: the worker where the main program runs.
        network: None: free and immediate.
        faults: home cannot crash.
        devices: the costs of jobs, for all workers or by worker; None: free.
        values: "real" or "abstract".
        policy: the name of the order in which ready jobs run.
        link: the timeouts of links; None: derived from each pair's latencies.
        detect_ns: the delay until a worker learns that a peer has given it up.
        events_max: the limit for events of the whole run.
        trace: whether a trace is kept.
        schedule: the order of the work of a pipeline; its workers are some of these.
        chooser: makes all choices; None: a `Chooser` of this seed and policy.

    Raises:
        ScenarioError: names a setting that is unusable, its value and what is allowed.
    """

    workers: Sequence[str]
    seed: int
    home: str
    network: Network | LinkModel | None = None
    faults: Sequence[Fault] = ()
    devices: Devices = None
    values: str = "real"
    policy: str = "path"
    link: LinkSettings | None = None
    detect_ns: int = DETECT_NS
    events_max: int = EVENTS_MAX
    trace: bool = True
    schedule: Schedule | None = None
    chooser: Chooser | None = None

    def __post_init__(self) -> None:
        names = tuple(self.workers) if is_listed(self.workers) else ()
        usable = 1 <= len(names) <= WORKERS_MAX and all(map(is_name, names))
        if not usable or len(dict.fromkeys(names)) != len(names):
            raise ScenarioError(unusable("workers", self.workers, WORKERS))
        seed, home, events_max = self.seed, self.home, self.events_max
        faults = "a list of jdag.sim's faults, such as [jdag.sim.Drop(0.1)]"
        network = isinstance(self.network, Network | LinkModel | None)
        link = isinstance(self.link, LinkSettings | None)
        most = type(events_max) is int and events_max >= 1
        there = f"one of {', '.join(names)}"
        for key, is_usable, allowed in (
            ("home", isinstance(home, str) and home in names, there),
            # Of -1 and 1 the same is drawn.
            ("seed", type(seed) is int and seed >= 0, "an integer >= 0"),
            ("faults", is_listed(self.faults), faults),
            ("network", network, "a Network or a LinkModel"),
            ("link", link, "a LinkSettings, or None"),
            ("events_max", most, "an integer >= 1"),
            ("values", self.values in ("real", "abstract"), "'real' or 'abstract'"),
            ("trace", type(self.trace) is bool, "True or False"),
            ("detect_ns", is_ns(self.detect_ns), NS),
        ):
            if not is_usable:
                raise ScenarioError(unusable(key, getattr(self, key), allowed))
        check_for(self.schedule, names)
        self._check_crashes()

    def _check_crashes(self) -> None:
        for index, fault in enumerate(self.faults):
            if not isinstance(fault, Crash):
                continue
            key = f"faults[{index}]"
            if fault.worker == self.home:
                allowed = "a worker other than home, where the main program runs"
                raise ScenarioError(unusable(f"{key}.worker", self.home, allowed))
            if fault.at_index is not None and not self.trace:
                key, allowed = (
                    f"{key}.at_index",
                    "at_ns in its place, as no trace is kept",
                )
                raise ScenarioError(unusable(key, fault.at_index, allowed))

    def described(self) -> dict[str, Any]:
        """What a trace says of it, for `jdag.retime`: data of JSON."""
        network = self.all_links
        control = network.control_lane
        known = models(self.devices, tuple(self.workers))
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
        return Network(self.network or FREE)


def _described(model: Any) -> dict[str, Any]:
    return {"kind": type(model).__name__, **asdict(model)}
