"""The simulated network: arrival times of frames.

`Network` is the description, which many runs may share; `Traffic` is the state of one
run. Each pair of workers has two directed links. A lane is the state of one link:

- frames are sent one after another, in the order of `transmit` (FIFO); each occupies
  the lane for size / bandwidth, rounded up to whole nanoseconds;
- a frame then travels for the latency; any number of frames travel at once;
- where workers have ports (`jdag.sim.ports`), a frame passes its sender's port as it
  is sent and its receiver's port as it arrives; all links of a worker share its ports;
- jitter adds up to `jitter_ns`, which the chooser draws for each frame, so frames may
  be reordered; the link layer above restores their order;
- between workers of a topology (`jdag.sim.topologies`) a frame passes physical links,
  which it shares with the frames of other pairs, in the same way as ports.

Inputs:  calls of a lane's `transmit(size_bytes, now_ns, chooser)`, for each frame that
         is sent, in order of time. Frames that a fault drops are included.
Outputs: the arrival time; for each lane, the totals (`bytes`, `frames`, `busy_ns`) and
         the start and end of the last transfer (`start_ns`, `busy_until_ns`).

Invariants: a lane or a port carries one frame at a time; `busy_ns` never exceeds
`busy_until_ns`; messages of a worker to itself are not transmitted.
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
_CONTROL = Meta(description="a LinkModel, True for a lane without delay, or None")
_LINKS = Meta(
    description='LinkModels by source and destination: {("a", "b"): LinkModel()}'
)
_PAIR = Annotated[
    tuple[str, str], Meta(description='source and destination, ("a", "b")')
]
_NO_LIMIT = "an integer >= 1, or None for no limit"
_RATE = Annotated[int, Meta(ge=1, description=_NO_LIMIT)]


class LinkModel(Settings, frozen=True):
    """One directed link: latency and jitter in ns, bandwidth in bytes per second.

    A frame of n bytes occupies the link for n / bandwidth and arrives `latency_ns` plus
    0 to `jitter_ns` later. This is the alpha-beta model: alpha is `latency_ns`, beta is
    1 / bandwidth (Hockney 1994). A bandwidth of None is infinite.

    Raises:
        ScenarioError: a value is not an integer or too small.
    """

    latency_ns: NS = 0
    bandwidth_bytes_per_s: _RATE | None = None
    jitter_ns: NS = 0

    def transfer_ns(self, size_bytes: int) -> int:
        """Return the time in ns for which a frame of `size_bytes` occupies the link."""
        rate = self.bandwidth_bytes_per_s
        return 0 if rate is None else -(-size_bytes * _SECOND_NS // rate)

    @property
    def flight_ns(self) -> int:
        """Time in ns from a frame's departure to its arrival, without jitter."""
        return self.latency_ns

    @property
    def pause_ns(self) -> int:
        """Time in ns from a frame's departure until the next frame may be sent."""
        return 0


FREE_LINK = LinkModel()


class LogGP(LinkModel, frozen=True):
    """One directed link of the LogGP model; times in ns.

    L is `latency_ns`; o, at the sender and again at the receiver, is `overhead_ns`; g,
    the least time between two messages, is `gap_ns`; G, the time of each further byte,
    is 1 / `bandwidth_bytes_per_s`. A message of k bytes takes o + L + (k-1)G + o, where
    (k-1)G is rounded up; the next may start max(o, g) + (k-1)G after it. The overheads
    occupy the link, not the workers' devices.

    Source: Alexandrov, Ionescu, Schauser, Scheiman, "LogGP: Incorporating Long Messages
    into the LogP Model", SPAA 1995.

    Raises:
        ScenarioError: a value is not an integer or too small.
    """

    overhead_ns: NS = 0
    gap_ns: NS = 0

    def transfer_ns(self, size_bytes: int) -> int:
        """Return the time in ns to send a message of k = `size_bytes`: o + (k-1)G."""
        return self.overhead_ns + LinkModel.transfer_ns(self, max(size_bytes - 1, 0))

    @property
    def flight_ns(self) -> int:
        """Time in ns from a message's departure to its reception: L + o."""
        return self.latency_ns + self.overhead_ns

    @property
    def pause_ns(self) -> int:
        """The part of the gap g that exceeds the overhead o, in ns."""
        return max(self.gap_ns - self.overhead_ns, 0)


class PathLink(NamedTuple):
    """A physical link on a path: its ends, each a worker or a switch, and its model."""

    source: str
    destination: str
    model: LinkModel


class Network(Settings, frozen=True):
    """The network of a run: a default model for all directed links, and exceptions.

    Attributes:
        default: model of links without an entry in `links`.
        links: model by (source, destination), for that direction only.
        port_bandwidth_bytes_per_s: the bandwidth at which each worker can send, and
            also receive, over all of its links together; None: no limit.
        control_lane: model of a second lane of each directed link, without ports, for
            all bytes other than values. True: a lane without delay. None or False: all
            bytes take the same lane.
        routed: workers whose messages to each other take shared physical links.
        route: function from two workers to the links of their path.
        cut_through: whether nodes on a path forward a message before all of it has
            arrived. `jdag.sim.topologies` has builders for the last three.

    With a control lane, messages without values neither occupy the data lane nor wait
    for it. The bytes of a message's values take the data lane and its other bytes the
    control lane; the message is delivered when all of its bytes have arrived. Until
    then later messages may overtake it, except messages of the same context and updates
    and drops of leaves, which may depend on it. The same order holds between processes
    (`jdag.wire.order`).

    Raises:
        ScenarioError: a value is not a LinkModel, a key is not a pair of workers, the
            bandwidth of ports is not an integer >= 1 or is combined with a route, or
            the control lane is neither a LinkModel nor a bool.
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
        """Yield an error if ports are combined with a topology."""
        key, rate = "port_bandwidth_bytes_per_s", self.port_bandwidth_bytes_per_s
        if self.route is not None and rate is not None:
            allowed = "None with a topology, whose workers already share links"
            yield unusable(key, rate, allowed)

    def model(self, source: str, destination: str) -> LinkModel:
        """Return the model of a directed link: for a path, total latency and jitter."""
        if hops := self.path(source, destination):
            latency_ns = sum([hop.model.latency_ns for hop in hops])
            jitter_ns = sum([hop.model.jitter_ns for hop in hops])
            return LinkModel(latency_ns, None, jitter_ns)
        return self.links.get((source, destination), self.default)

    def path(self, source: str, destination: str) -> tuple[PathLink, ...]:
        """Return the physical links between two workers, or () for a direct link."""
        routed = self.routed
        if self.route is None or source not in routed or destination not in routed:
            return ()
        return tuple(self.route(source, destination))


@dataclass(slots=True, eq=False)
class Lane:
    """One directed link of one run: its model, state and totals.

    `out` and `into` are the ports of its two workers, or None in a network without
    ports, and `port` is the model of a port. `held` is whether the last frame had to
    wait for the receiver's port. `record` is the trace record of the last frame, or -1.
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
    ports: tuple[NetworkPort, ...] = field(init=False)  # That frames pass.

    def __post_init__(self) -> None:
        ports = self.out, self.into
        self.ports = tuple([port for port in ports if port is not None])
        self.flight_ns, self.pause_ns = self.model.flight_ns, self.model.pause_ns

    def transmit(self, size_bytes: int, now_ns: int, chooser: Chooser) -> int:
        """Send a frame now. Return the frame's arrival time in ns."""
        start_ns = max(self.busy_until_ns, now_ns)
        model = self.model
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
        if self.into is not None:  # The frame passes the port while it arrives.
            passing_ns = self.port.transfer_ns(size_bytes)
            begun_ns = self.into.reserve(arrival_ns - passing_ns, passing_ns, now_ns)
            self.held = begun_ns + passing_ns > arrival_ns
            arrival_ns = begun_ns + passing_ns
            self.arrived_ns = max(self.arrived_ns, arrival_ns)
        return arrival_ns

    def passed(self, record: int) -> None:
        """Save the trace record of the last frame, in the lane and in its ports."""
        self.record = record
        for port in self.ports:
            port.record = record

    def before(self, now_ns: int, last: int) -> list[int]:
        """Return the trace records of the frames for which the last frame waited."""
        records = []
        if self.start_ns > now_ns:
            records.append(last if self.out is None else self.out.record)
        if self.held and self.into is not None:
            records.append(self.into.record)
        return [record for record in dict.fromkeys(records) if record >= 0]

    @property
    def drained_ns(self) -> int:
        """Latest possible arrival time in ns of all frames so far."""
        latest_ns = self.busy_until_ns + self.flight_ns + self.model.jitter_ns
        return max(latest_ns, self.arrived_ns)


@dataclass(slots=True, eq=False)
class PathLane(Lane):
    """The path between two workers over shared physical links.

    `model` has the path's total latency and jitter. Each link passes one frame at a
    time: a frame takes the first gap after its arrival that is long enough. `start_ns`
    and `busy_until_ns` refer to the first link. `waited` has the trace records of the
    frames for which the last frame waited.
    """

    passages: tuple[tuple[NetworkPort, LinkModel], ...] = ()
    cut_through: bool = False
    waited: tuple[int, ...] = ()

    def transmit(self, size_bytes: int, now_ns: int, chooser: Chooser) -> int:
        reached_ns, left_ns, takes_ns = now_ns, now_ns, 0
        waited: list[int] = []
        self.held = False
        for index, (port, model) in enumerate(self.passages):
            transfer_ns = model.transfer_ns(size_bytes)
            takes_ns = max(transfer_ns, takes_ns) if self.cut_through else transfer_ns
            start_ns = port.reserve(reached_ns, takes_ns, now_ns)
            if start_ns > reached_ns:
                self.held = True
                waited.append(port.record)
            left_ns = start_ns + takes_ns
            if index == 0:
                self.start_ns = start_ns
                self.busy_until_ns = max(self.busy_until_ns, left_ns)
                self.busy_ns += takes_ns
            arrival_ns = left_ns + model.flight_ns
            reached_ns = (start_ns if self.cut_through else left_ns) + model.flight_ns
        self.waited = tuple(waited)
        self.bytes += size_bytes
        self.frames += 1
        if self.model.jitter_ns:
            arrival_ns += chooser.amount(0, self.model.jitter_ns)
        self.arrived_ns = max(self.arrived_ns, arrival_ns)
        return arrival_ns

    def before(self, now_ns: int, last: int) -> list[int]:
        return [record for record in dict.fromkeys(self.waited) if record >= 0]

    @property
    def drained_ns(self) -> int:
        return self.arrived_ns


class Traffic:
    """All lanes of one run. Each link must join two different, known workers."""

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
                allowed = "two different workers"
                raise ScenarioError(unusable("links", (source, destination), allowed))
        self._network = network
        self._lanes: dict[tuple[str, str], Lane] = {}
        self._controls: dict[tuple[str, str], Lane] = {}
        self._links: dict[tuple[str, str], NetworkPort] = {}
        self._ports: dict[tuple[str, str], NetworkPort] = {}

    def lane(self, source: str, destination: str) -> Lane:
        lane = self._lanes.get((source, destination))
        if lane is None:
            assert source != destination, source
            model = self._network.model(source, destination)
            if hops := self._network.path(source, destination):
                ports = [self._links.setdefault(hop[:2], NetworkPort()) for hop in hops]
                passages = tuple(zip(ports, [hop.model for hop in hops], strict=True))
                lane = PathLane(model, None, None, passages=passages)
                lane.cut_through, lane.ports = self._network.cut_through, tuple(ports)
            else:
                out, into = self._port(source, "out"), self._port(destination, "into")
                rate = self._network.port_bandwidth_bytes_per_s
                port = FREE_LINK if rate is None else LinkModel(0, rate)
                lane = Lane(model, out, into, port)
            self._lanes[source, destination] = lane
        return lane

    def control(self, source: str, destination: str) -> Lane:
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
