"""The network in virtual time: when bytes that leave now will arrive.

`Network` is the description, which many runs may share; `Traffic` is the state of one
run. Each pair of workers has two directed links, each a lane of its own:

- frames leave one after another, in the order of `transmit` (FIFO): each occupies the
  lane for size / bandwidth, rounded up to whole nanoseconds;
- then it flies for the latency, and any number fly at once;
- where workers have ports, it passes that of its sender as it leaves, and that of its
  receiver as it arrives, which it shares with the frames of all other links there
  (`jdag.sim.ports`);
- jitter adds up to `jitter_ns`, which the chooser picks for each frame, and so may
  reorder them, which is for the link above to repair;
- between workers of a topology (`jdag.sim.topologies`) it passes physical links, which
  it shares with the frames of other pairs, in the same way as ports.

Inputs:  `transmit(size_bytes, now_ns, chooser)` of a lane, for each frame that leaves,
         in order of time. Frames that a fault drops have left all the same.
Outputs: the arrival's time; per lane, what passed (`bytes`, `frames`, `busy_ns`) and
         the last transfer's start and end (`start_ns`, `busy_until_ns`).

Invariants: a lane, and a port, carries one frame at a time; `busy_ns` never exceeds the
time until `busy_until_ns`; messages of a worker to itself are not transmitted.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr

from jdag.errors import ScenarioError, unusable
from jdag.runtime.chooser import Chooser
from jdag.settings.validation import NS, Settings
from jdag.sim.ports import NetworkPort

_SECOND_NS = 1_000_000_000
_CONTROL = Meta(description="a LinkModel, True for one that is free, or None for none")
_LINKS = Meta(
    description='LinkModels by source and destination: {("a", "b"): LinkModel()}'
)
_PAIR = Annotated[
    tuple[str, str], Meta(description='source and destination, ("a", "b")')
]
_NO_LIMIT = "an integer >= 1, or none given for no limit"
_RATE = Annotated[int, Meta(ge=1, description=_NO_LIMIT)]


class LinkModel(Settings, frozen=True):
    """One directed link: latency and jitter in ns, bandwidth in bytes per second.

    `bandwidth_bytes_per_s` None is infinite. A frame of n bytes occupies the link for
    n / bandwidth and arrives `latency_ns` plus 0 to `jitter_ns` later: the alpha-beta
    model, with alpha = `latency_ns` and beta = 1 / bandwidth (Hockney 1994).

    Raises:
        ScenarioError: a value that is not an int or too small.
    """

    latency_ns: NS = 0
    bandwidth_bytes_per_s: _RATE | None = None
    jitter_ns: NS = 0

    def transfer_ns(self, size_bytes: int) -> int:
        """How long `size_bytes` occupy the link."""
        rate = self.bandwidth_bytes_per_s
        return 0 if rate is None else -(-size_bytes * _SECOND_NS // rate)

    @property
    def flight_ns(self) -> int:
        """From when a frame has left until it arrives, without jitter."""
        return self.latency_ns

    @property
    def pause_ns(self) -> int:
        """From when a frame has left until the next may begin to leave."""
        return 0


FREE_LINK = LinkModel()


class LogGP(LinkModel, frozen=True):
    """One directed link of the LogGP model; times in ns.

    L is `latency_ns`; o, of the sender and again of the receiver, `overhead_ns`; g, the
    least time between two messages, `gap_ns`; G, the time of each further byte, is
    1 / `bandwidth_bytes_per_s`, and (k-1)G is rounded up. A message of k bytes takes
    o + L + (k-1)G + o; the next may begin max(o, g) + (k-1)G after it. The overheads
    occupy the link, not the workers' devices.

    Source: Alexandrov, Ionescu, Schauser, Scheiman, "LogGP: Incorporating Long Messages
    into the LogP Model", SPAA 1995.

    Raises:
        ScenarioError: a value that is not an int or too small.
    """

    overhead_ns: NS = 0
    gap_ns: NS = 0

    def transfer_ns(self, size_bytes: int) -> int:
        """How long `size_bytes` take to leave: o + (k-1)G."""
        further = max(size_bytes - 1, 0)
        return self.overhead_ns + LinkModel.transfer_ns(self, further)

    @property
    def flight_ns(self) -> int:
        """From when a message has left until it is received: L + o."""
        return self.latency_ns + self.overhead_ns

    @property
    def pause_ns(self) -> int:
        """What is left of g after o, until the next message."""
        return max(self.gap_ns - self.overhead_ns, 0)


class PathLink(NamedTuple):
    """One physical link of a path, between workers or switches, and its model."""

    source: str
    destination: str
    model: LinkModel


class Network(Settings, frozen=True):
    """The network of a run: one model for all directed links, and the exceptions.

    `links` maps (source, destination) to that direction's model; the other direction
    has its own entry or the default. `port_bandwidth_bytes_per_s` is what each worker
    can send over all of its links together, and take; None: as much as they carry.

    `control_lane` gives each directed link a second lane, with this model and without
    ports, for all but values; True: free and immediate; None or False: no such lane.
    Messages without values then never occupy, nor wait for, the link's data lane. A
    message with values has its values' bytes on the data lane and the rest on the
    control lane; it is delivered when both have arrived. Until then later messages
    overtake it, except those that depend on it: of the same context, and updates and
    drops of leaves, as between processes (`jdag.wire.order`).

    Messages between two workers in `routed` take the physical links that `route`
    returns, and share them with other paths; `cut_through`: without waiting at each
    node for the whole message. `jdag.sim.topologies` has builders.

    Raises:
        ScenarioError: a value is not a LinkModel, a key is not a pair of workers, the
            bandwidth of ports is not an int or too small or given with a route, or the
            control lane is neither a LinkModel nor a bool.
    """

    default: LinkModel
    links: Annotated[Mapping[_PAIR, LinkModel], _LINKS] = msgspec.field(
        default_factory=dict
    )
    port_bandwidth_bytes_per_s: _RATE | None = None
    control_lane: Annotated[LinkModel | bool | None, _CONTROL] = None
    routed: tuple[str, ...] = ()
    route: Callable[[str, str], Sequence[PathLink]] | None = None
    cut_through: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.control_lane, bool):
            lane = LinkModel() if self.control_lane else None
            force_setattr(self, "control_lane", lane)

    def contradictions(self) -> Iterator[str]:
        """Ports and a topology."""
        key, rate = "port_bandwidth_bytes_per_s", self.port_bandwidth_bytes_per_s
        if self.route is not None and rate is not None:
            allowed = "none with a topology, whose links are shared themselves"
            yield unusable(key, rate, allowed)

    def model(self, source: str, destination: str) -> LinkModel:
        """The model of one directed link; of a path its latencies and jitters."""
        if hops := self.path(source, destination):
            latency_ns = sum([hop.model.latency_ns for hop in hops])
            jitter_ns = sum([hop.model.jitter_ns for hop in hops])
            return LinkModel(latency_ns, None, jitter_ns)
        return self.links.get((source, destination), self.default)

    def path(self, source: str, destination: str) -> tuple[PathLink, ...]:
        """The physical links between two workers; none if they have their own."""
        routed = self.routed
        if self.route is None or source not in routed or destination not in routed:
            return ()
        return tuple(self.route(source, destination))


@dataclass(slots=True, eq=False)
class Lane:
    """One directed link of one run: its model, and what it carries and has carried.

    `out` and `into` are the ports of its two workers, None where they have none, and
    `port` the model of a port; `held` tells whether the last frame had to wait for the
    latter.
    """

    model: LinkModel
    out: NetworkPort | None
    into: NetworkPort | None
    port: LinkModel = FREE_LINK
    held: bool = False
    bytes: int = 0
    frames: int = 0
    busy_ns: int = 0
    start_ns: int = 0
    busy_until_ns: int = 0
    arrived_ns: int = 0
    record: int = -1
    flight_ns: int = field(init=False)
    pause_ns: int = field(init=False)

    def __post_init__(self) -> None:
        self.flight_ns, self.pause_ns = self.model.flight_ns, self.model.pause_ns

    def transmit(self, size_bytes: int, now_ns: int, chooser: Chooser) -> int:
        """Send a frame that is ready to leave now; return its time of arrival.

        It starts to leave at `start_ns`; the next may do so at `busy_until_ns`.
        """
        model = self.model
        start_ns = max(self.busy_until_ns, now_ns)
        transfer_ns = 0 if model is FREE_LINK else model.transfer_ns(size_bytes)
        if self.out is not None:
            passing_ns = self.port.transfer_ns(size_bytes)
            start_ns = self.out.reserve(start_ns, passing_ns, now_ns)
            transfer_ns = max(transfer_ns, passing_ns)
        self.start_ns = start_ns
        left_ns = start_ns + transfer_ns
        self.busy_until_ns = left_ns + self.pause_ns
        self.busy_ns += transfer_ns
        self.bytes += size_bytes
        self.frames += 1
        arrival_ns = left_ns + self.flight_ns
        if model.jitter_ns:
            arrival_ns += chooser.amount(0, model.jitter_ns)
        if self.into is not None:  # It passes while it arrives.
            passing_ns = self.port.transfer_ns(size_bytes)
            begun_ns = self.into.reserve(arrival_ns - passing_ns, passing_ns, now_ns)
            self.held = begun_ns + passing_ns > arrival_ns
            arrival_ns = begun_ns + passing_ns
            self.arrived_ns = max(self.arrived_ns, arrival_ns)
        return arrival_ns

    def passed(self, record: int) -> None:
        """Note the trace record of the last frame, here and at both ports."""
        self.record = record
        if self.out is not None and self.into is not None:
            self.out.record = self.into.record = record

    def before(self, now_ns: int, last: int) -> list[int]:
        """Return the records that the last frame waited for; `last` is its link's."""
        found = []
        if self.start_ns > now_ns:
            found.append(last if self.out is None else self.out.record)
        if self.held and self.into is not None:
            found.append(self.into.record)
        return [record for record in dict.fromkeys(found) if record >= 0]

    @property
    def drained_ns(self) -> int:
        """When all that was transmitted so far has arrived, jitter at its worst."""
        latest_ns = self.busy_until_ns + self.flight_ns + self.model.jitter_ns
        return max(latest_ns, self.arrived_ns)


@dataclass(slots=True, eq=False)
class PathLane(Lane):
    """The path between two workers over shared physical links; `model` is its summary.

    Each link passes one frame at a time, which takes the first long enough gap after
    its arrival there. `start_ns` and `busy_until_ns` are those of the first link;
    `waited` are the records of what the last frame waited for.
    """

    passages: tuple[tuple[NetworkPort, LinkModel], ...] = ()
    cut_through: bool = False
    waited: tuple[int, ...] = ()

    def transmit(self, size_bytes: int, now_ns: int, chooser: Chooser) -> int:
        """Send a frame that is ready to leave now; return its time of arrival."""
        at_ns, left_ns, takes_ns = now_ns, now_ns, 0
        waited: list[int] = []
        self.held = False
        for index, (port, model) in enumerate(self.passages):
            own_ns = model.transfer_ns(size_bytes)
            takes_ns = max(own_ns, takes_ns) if self.cut_through else own_ns
            start_ns = port.reserve(at_ns, takes_ns, now_ns)
            if start_ns > at_ns:
                self.held = True
                waited.append(port.record)
            left_ns = start_ns + takes_ns
            if index == 0:
                self.start_ns = start_ns
                self.busy_until_ns = max(self.busy_until_ns, left_ns)
                self.busy_ns += takes_ns
            arrival_ns = left_ns + model.flight_ns
            at_ns = (start_ns if self.cut_through else left_ns) + model.flight_ns
        self.waited = tuple(waited)
        self.bytes += size_bytes
        self.frames += 1
        if self.model.jitter_ns:
            arrival_ns += chooser.amount(0, self.model.jitter_ns)
        self.arrived_ns = max(self.arrived_ns, arrival_ns)
        return arrival_ns

    def before(self, now_ns: int, last: int) -> list[int]:
        """Return the records that the last frame waited for."""
        return [record for record in dict.fromkeys(self.waited) if record >= 0]

    def passed(self, record: int) -> None:
        """Note the trace record of the last frame at each physical link."""
        self.record = record
        for port, _ in self.passages:
            port.record = record

    @property
    def drained_ns(self) -> int:
        """When all that was transmitted so far has arrived."""
        return self.arrived_ns


class Traffic:
    """The lanes of one run over a `Network`, created on first use.

    Raises:
        ScenarioError: the network names an unknown worker, or a link from a worker to
            itself.
    """

    __slots__ = ("_controls", "_lanes", "_links", "_network", "_ports")

    def __init__(self, network: Network, workers: Sequence[str]) -> None:
        named = [("topology: worker", worker) for worker in network.routed]
        for source, destination in network.links:
            key = f"links: {source} -> {destination}"
            named += [(key, source), (key, destination)]
        for key, worker in named:
            if worker not in workers:
                allowed = "one of " + ", ".join(workers)
                raise ScenarioError(unusable(key, worker, allowed))
        for source, destination in network.links:
            if source == destination:
                allowed = "two workers: one reaches itself without a link"
                raise ScenarioError(unusable("links", (source, destination), allowed))
        self._network = network
        self._lanes: dict[tuple[str, str], Lane] = {}
        self._controls: dict[tuple[str, str], Lane] = {}
        self._links: dict[tuple[str, str], NetworkPort] = {}
        self._ports: dict[tuple[str, str], NetworkPort] = {}

    def lane(self, source: str, destination: str) -> Lane:
        """The directed link from `source` to `destination`."""
        lane = self._lanes.get((source, destination))
        if lane is None:
            assert source != destination, source
            model = self._network.model(source, destination)
            if hops := self._network.path(source, destination):
                lane = PathLane(model, None, None, passages=self._passages(hops))
                lane.cut_through = self._network.cut_through
            else:
                ports = self._port(source, "out"), self._port(destination, "into")
                rate = self._network.port_bandwidth_bytes_per_s
                lane = Lane(model, *ports, LinkModel(0, rate))
            self._lanes[source, destination] = lane
        return lane

    def _passages(
        self, hops: Sequence[PathLink]
    ) -> tuple[tuple[NetworkPort, LinkModel], ...]:
        pairs = [(hop.source, hop.destination) for hop in hops]
        ports = [self._links.setdefault(pair, NetworkPort()) for pair in pairs]
        models = [hop.model for hop in hops]
        return tuple(zip(ports, models, strict=True))

    def control(self, source: str, destination: str) -> Lane:
        """The control lane from `source` to `destination`; the network has one."""
        lane = self._controls.get((source, destination))
        if lane is None:
            model = self._network.control_lane
            assert isinstance(model, LinkModel), model
            lane = self._controls[source, destination] = Lane(model, None, None)
        return lane

    def _port(self, worker: str, direction: str) -> NetworkPort | None:
        if self._network.port_bandwidth_bytes_per_s is None:
            return None
        return self._ports.setdefault((worker, direction), NetworkPort())
