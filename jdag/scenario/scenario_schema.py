"""The tables of a scenario's file, and their conversion to objects of `jdag.sim`.

A table that describes a class of `jdag.sim` has the fields of that class as its keys.
All errors have the form `key = value: expected ...`.
"""

from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from typing import Annotated, Any, TypeVar

from msgspec import Meta, defstruct, field
from msgspec.structs import replace

from jdag.engine.protocol import NAMES, WORKERS_MAX, is_name
from jdag.errors import ScenarioError, ScheduleError, meant, unusable
from jdag.schedules import (
    Schedule,
    dualpipe_v,
    eager_one_f_one_b,
    from_lists,
    gpipe,
    interleaved,
    one_f_one_b,
    zb_h1,
    zb_h2,
    zb_v,
)
from jdag.settings.validation import (
    COUNT,
    NATURAL,
    NESTING,
    NESTING_MAX,
    TABLE,
    TEXT,
    Settings,
    are_different,
    converted,
    one_of,
    part,
    settings_from,
    under,
    where,
)
from jdag.sim import (
    DeviceModel,
    Fault,
    LinkModel,
    LinkSettings,
    LogGP,
    Network,
    presets,
    topologies,
)
from jdag.sim.settings import EVENTS_MAX, POLICY, VALUES

_NAME = "letters, digits, _, - and ., beginning with a letter or a digit"
_WORKERS = (
    "different names; or a number of workers, then named w0, w1, ...; at most "
    f"{WORKERS_MAX:,}; each of {NAMES}"
)


def _are_workers(value: Any) -> bool:
    if isinstance(value, int):
        return 1 <= value <= WORKERS_MAX
    return len(value) >= 1 and all(map(is_name, value)) and are_different(value)


_FILE_NAME = Annotated[
    str, Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9_.-]*\Z", description=_NAME)
]
_REFERENCE = Annotated[
    str,
    Meta(
        pattern=r"\A[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*\Z",
        description="module:function, such as mine:program",
    ),
]
_TABLES = Annotated[tuple[TABLE, ...], Meta(description="a list of tables")]
_TEXTS = Annotated[tuple[str, ...], Meta(description="a list of strings")]
_CONTROL = Meta(description="true, false or a table")

_BUILDERS: dict[str, Callable[..., Schedule]] = {
    **{
        each.__name__: each
        for each in (
            *(gpipe, one_f_one_b, eager_one_f_one_b, interleaved, zb_h1, zb_h2),
            *(zb_v, dualpipe_v),
        )
    },
    "1f1b": one_f_one_b,
    "eager_1f1b": eager_one_f_one_b,
}
_MODELS: Mapping[str, type[LinkModel]] = {"alpha_beta": LinkModel, "loggp": LogGP}
_LINK_KEYS = LinkModel.__struct_fields__
_TOPOLOGIES: dict[str, Callable[..., Network]] = {
    each.__name__: each
    for each in (
        *(topologies.ring, topologies.switch, topologies.fully_connected),
        *(topologies.tree, topologies.torus),
        *(presets.h100_node, presets.ethernet_100g),
    )
}


class ScenarioTable(Settings, frozen=True, kw_only=True):
    name: _FILE_NAME
    program: _REFERENCE
    workers: Annotated[tuple[Any, ...] | int, where(_are_workers, _WORKERS)]
    expect: TABLE
    costs: TEXT | None = None
    home: TEXT | None = None
    seed: NATURAL = 0
    seeds: Annotated[int, Meta(ge=1, le=10**6)] = 1
    x64: bool = False
    compile: bool = False
    host_devices: Annotated[int, Meta(ge=1, le=1024)] | None = None
    values: VALUES = "real"
    policy: POLICY = "path"
    events_max: COUNT = EVENTS_MAX
    nesting_max: NESTING = NESTING_MAX
    settings: TABLE = field(default_factory=dict)
    placement: dict[str, TEXT] = field(default_factory=dict)
    network: TABLE = field(default_factory=dict)
    link: LinkSettings | None = None
    devices: TABLE = field(default_factory=dict)
    schedule: TABLE | None = None
    faults: tuple[Fault, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        if isinstance(self.workers, int):
            return tuple(f"w{number}" for number in range(self.workers))
        return tuple(self.workers)

    def check_worker(self, key: str, name: str) -> None:
        if name not in self.names:
            workers = ", ".join(self.names)
            allowed = f"one of the workers {workers}{meant(name, self.names)}"
            raise ScenarioError(unusable(key, name, allowed))

    def refused(self, allowed: str) -> ScenarioError:
        return ScenarioError(unusable("program", self.program, allowed))


_Described = TypeVar("_Described", bound=Settings)


def _described(
    kind: type[_Described], key: str, table: Mapping[str, Any], /, **more: Any
) -> tuple[_Described, Any]:
    """Return the object of class `kind` that a table describes, and the valid table.

    `more` has (type,) or (type, default) of keys that are not fields of the class.
    """
    wider: type[Any] = defstruct(
        kind.__name__,
        [(name, *each) for name, each in more.items()],
        bases=(kind,),
        frozen=True,
        kw_only=True,
    )
    validated: Any = settings_from(wider, table, key)
    return part(kind, validated), validated


def network_of(settings: ScenarioTable, *, clean: bool) -> Network:
    default, keys = _link(
        "network",
        _without_jitter(settings.network) if clean else settings.network,
        control_lane=(Annotated[bool | TABLE | None, _CONTROL], None),
        topology=(TABLE | None, None),
        links=(_TABLES, ()),
        port_bandwidth_bytes_per_s=(COUNT | None, None),
    )
    network, control = Network(default), keys.control_lane
    if keys.topology is not None:
        with under("network.topology"):
            network = _topology(settings, keys.topology)
    if isinstance(control, dict):
        control, _ = _link("network.control_lane", control)
    links = _links_of(settings, keys.links, network.routed)
    with under("network"):
        return replace(
            network,
            default=default,
            links=links,
            control_lane=control,
            port_bandwidth_bytes_per_s=keys.port_bandwidth_bytes_per_s,
        )


def _link(key: str, table: Mapping[str, Any], **more: Any) -> tuple[LinkModel, Any]:
    name = table.get("model", "alpha_beta")
    kind = _MODELS.get(name, LinkModel) if isinstance(name, str) else LinkModel
    model = (Annotated[str, one_of(*_MODELS)], "alpha_beta")
    return _described(kind, key, table, model=model, **more)


def _links_of(
    settings: ScenarioTable, tables: tuple[TABLE, ...], routed: tuple[str, ...]
) -> dict[tuple[str, str], LinkModel]:
    """Return the links that the tables describe, by (source, destination)."""
    links: dict[tuple[str, str], LinkModel] = {}
    for number, table in enumerate(tables):
        key = f"network.links[{number}]"
        model, ends = _link(key, table, source=(TEXT,), destination=(TEXT,))
        source, destination = ends.source, ends.destination
        settings.check_worker(f"{key}.source", source)
        settings.check_worker(f"{key}.destination", destination)
        allowed = None
        if source == destination:
            allowed = f"a worker other than the source, {source}"
        elif (source, destination) in links:
            allowed = f"at most one link from {source} to {destination}"
        elif source in routed and destination in routed:
            allowed = f"a worker outside of the topology, since {source} is inside"
        if allowed is not None:
            raise ScenarioError(unusable(f"{key}.destination", destination, allowed))
        links[source, destination] = model
    return links


class _TopologyTable(Settings, frozen=True):
    kind: Annotated[str, one_of(*_TOPOLOGIES)] | None = None
    workers: _TEXTS | None = None
    dimensions: _TABLES | None = None
    cut_through: bool | None = None
    arity: COUNT | None = None
    shape: Any = None
    latency_ns: Any = None
    bandwidth_bytes_per_s: Any = None
    jitter_ns: Any = None


def _kind_of(
    settings: ScenarioTable,
    keys: dict[str, Any],
    kinds: Iterable[str],
    alternative: object,
    description: str,
) -> str | None:
    """Remove `kind` from a table's keys and return it.

    A table has either a kind or the alternative, which errors call `description`. If
    the table has no `workers`, they become all workers.
    """
    kind: str | None = keys.pop("kind", None)
    if (kind is None) == (alternative is None):
        allowed = f"one of {', '.join(kinds)}, or {description} in its place"
        raise ScenarioError(unusable("kind", kind, allowed))
    keys.setdefault("workers", settings.names)
    for name in keys["workers"]:
        settings.check_worker("workers", name)
    return kind


def _topology(settings: ScenarioTable, table: Mapping[str, Any]) -> Network:
    values = _present(settings_from(_TopologyTable, table))
    dimensions = values.get("dimensions")
    kind = _kind_of(settings, values, _TOPOLOGIES, dimensions, "dimensions")
    build = topologies.topology if kind is None else _TOPOLOGIES[kind]
    takes = dict.fromkeys(signature(build).parameters)
    has_link = "link" in takes
    for name in ("default", "control_lane", "link"):  # Set by other tables of the file.
        takes.pop(name, None)
    keys = [*takes, *(_LINK_KEYS if has_link else ())]
    for key, value in values.items():
        if key not in keys:
            raise ScenarioError(unusable(key, value, ", ".join(["kind", *keys])))
    if "shape" in takes and "shape" not in values:
        raise ScenarioError("shape is missing: expected a list of integers >= 1")
    if has_link:
        link = {key: values.pop(key) for key in _LINK_KEYS if key in values}
        values["link"] = LinkModel(**link)
    if dimensions is not None:
        values["dimensions"] = [
            _dimension(f"dimensions[{number}]", dimension)
            for number, dimension in enumerate(dimensions)
        ]
    return build(**values)


def _present(table: Settings) -> dict[str, Any]:
    values = {key: getattr(table, key) for key in table.__struct_fields__}
    return {key: value for key, value in values.items() if value is not None}


def _dimension(key: str, table: Mapping[str, Any]) -> topologies.Dimension:
    more: Any = {"kind": (Any,), "size": (Any,), "arity": (Any, 2)}
    link, keys = _described(LinkModel, key, table, **more)
    with under(key):
        return topologies.Dimension(keys.kind, keys.size, link, keys.arity)


def _without_jitter(table: Any) -> Any:
    if isinstance(table, dict):
        values = {key: _without_jitter(value) for key, value in table.items()}
        return {**values, "jitter_ns": 0} if "jitter_ns" in values else values
    return [*map(_without_jitter, table)] if isinstance(table, list) else table


def has_jitter(table: Any) -> bool:
    if isinstance(table, dict):
        return bool(table.get("jitter_ns")) or has_jitter([*table.values()])
    return isinstance(table, list) and any(map(has_jitter, table))


def devices_of(settings: ScenarioTable) -> dict[str, DeviceModel]:
    default = dict(settings.devices)
    tables = converted(dict[str, TABLE], default.pop("workers", {}), "devices.workers")
    device = settings_from(DeviceModel, default, "devices")
    devices = dict.fromkeys(settings.names, device)
    for name, table in tables.items():
        key = f"devices.workers.{name}"
        settings.check_worker(key, name)
        devices[name] = settings_from(DeviceModel, table, key)
    return devices


class _ScheduleTable(Settings, frozen=True):
    kind: Annotated[str, one_of(*_BUILDERS)] | None = None
    stages: COUNT | None = None
    micro_batches: COUNT | None = None
    chunks: COUNT | None = None
    workers: _TEXTS | None = None
    lists: _TEXTS | None = None


def schedule_of(settings: ScenarioTable) -> Schedule | None:
    if settings.schedule is None:
        return None
    try:
        with under("schedule"):
            return _schedule(settings, settings_from(_ScheduleTable, settings.schedule))
    except ScheduleError as error:
        raise ScenarioError(f"schedule: {error}") from error


def _schedule(settings: ScenarioTable, table: Settings) -> Schedule:
    values = _present(table)
    lists = values.pop("lists", None)
    kind = _kind_of(settings, values, _BUILDERS, lists, "lists of actions")
    build: Any = from_lists if kind is None else _BUILDERS[kind]
    takes = signature(build).parameters
    for key, value in values.items():
        if key not in takes:
            keys = ", ".join([each for each in takes if each != "lists"])
            raise ScenarioError(unusable(key, value, keys))
    if lists is not None:
        return from_lists([each.split() for each in lists], **values)
    for key in takes:
        if key not in values:
            raise ScenarioError(f"{key} is missing: expected an integer >= 1")
    schedule: Schedule = build(**values)
    return schedule
