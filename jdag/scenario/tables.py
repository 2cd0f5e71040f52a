"""The tables of a scenario's file, and what they describe in `jdag.sim`.

The keys of a table that describes a class of `jdag.sim` are the fields of that class,
which checks their values. All errors have one wording: `key = value: allowed is ...`.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields, replace
from inspect import signature
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BeforeValidator, Field, create_model

from jdag.engine.protocol import NAMES, WORKERS_MAX, is_name
from jdag.errors import ScenarioError, ScheduleError, meant, unusable
from jdag.runtime.chooser import POLICIES
from jdag.runtime.tables import (
    COUNT,
    FLAG,
    NESTING,
    NESTING_MAX,
    TABLE,
    TEXT,
    Table,
    at_least,
    checked,
    is_listed,
    is_ns,
    is_table,
    one_of,
    only,
    up_to,
)
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
from jdag.sim import (
    DeviceModel,
    Fault,
    LinkModel,
    LinkSettings,
    LogGP,
    Network,
    Roofline,
    presets,
    topologies,
)
from jdag.sim.settings import DETECT_NS, EVENTS_MAX

_NAME = "letters, digits, _, - and ., beginning with a letter or a digit"
_WORKERS = (
    "names, none twice; or how many, and they are w0, w1, ...; at most "
    f"{WORKERS_MAX:,}; each of {NAMES}"
)
_FAULTS: Mapping[str, type[Fault]] = {
    kind.__name__.lower(): kind for kind in get_args(Fault)
}


def _matches(pattern: str) -> Callable[[Any], bool]:
    made = re.compile(pattern)
    return lambda value: isinstance(value, str) and made.fullmatch(value) is not None


def _are_workers(value: Any) -> bool:
    if not isinstance(value, list):
        return up_to(WORKERS_MAX)(value)
    named = all(map(is_name, value))
    return named and 1 <= len(value) <= WORKERS_MAX and len(set(value)) == len(value)


def _are_costs(value: Any) -> bool:
    return isinstance(value, list) and len(value) in (2, 3) and all(map(is_ns, value))


_FILE_NAME = Annotated[str, only(_NAME, _matches(r"[A-Za-z0-9][A-Za-z0-9_.-]*"))]
_REFERENCE = Annotated[
    str,
    only(
        "module:function, such as mine:program",
        _matches(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*"),
    ),
]
_SEED = Annotated[int, only("an integer >= 0", at_least(0))]
_SEEDS = Annotated[int, only("an integer from 1 to 1,000,000", up_to(10**6))]
_DEVICES = Annotated[int, only("an integer from 1 to 1,024", up_to(1024))]
_COSTS = Annotated[
    tuple[int, int] | tuple[int, int, int],
    only(
        "two integers >= 0, [forward_ns, backward_ns], or three, [forward_ns, "
        "input_grad_ns, weight_grad_ns]",
        _are_costs,
    ),
]
_LIST = Annotated[
    list[dict[str, Any]],
    only("a list of tables", lambda v: isinstance(v, list) and all(map(is_table, v))),
]
_NAMED = only("a table", is_table)
_TEXTS = Annotated[
    list[str],
    only(
        "a list of texts", lambda v: is_listed(v) and all(isinstance(t, str) for t in v)
    ),
]

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
_MODEL = Annotated[str, one_of(*_MODELS)]
_CONTROL = only("true, false or a table", lambda v: isinstance(v, bool | dict))
_LINK_KEYS = tuple(field.name for field in fields(LinkModel))
_TOPOLOGIES: dict[str, Callable[..., Network]] = {
    each.__name__: each
    for each in (
        *(topologies.ring, topologies.switch, topologies.fully_connected),
        *(topologies.tree, topologies.torus),
        *(presets.h100_node, presets.ethernet_100g),
    )
}


class Settings(Table):
    """The keys of a scenario's file."""

    name: _FILE_NAME
    program: _REFERENCE
    workers: Annotated[list[str] | int, only(_WORKERS, _are_workers)]
    expect: TABLE
    costs: TEXT | None = None
    home: TEXT | None = None
    seed: _SEED = 0
    seeds: _SEEDS = 1
    x64: FLAG = False
    compile: FLAG = False
    host_devices: _DEVICES | None = None
    values: Annotated[str, one_of("real", "abstract")] = "real"
    policy: Annotated[str, one_of(*POLICIES)] = "path"
    events_max: COUNT = EVENTS_MAX
    nesting_max: NESTING = NESTING_MAX
    settings: TABLE = Field(default={})
    placement: Annotated[dict[str, TEXT], _NAMED] = Field(default={})
    network: TABLE = Field(default={})
    link: TABLE | None = None
    devices: TABLE = Field(default={})
    schedule: TABLE | None = None
    faults: _LIST = Field(default=[])

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the workers."""
        if isinstance(self.workers, int):
            return tuple(f"w{number}" for number in range(self.workers))
        return tuple(self.workers)

    def check_worker(self, key: str, name: str) -> None:
        """Raise ScenarioError if the value of this key names no worker."""
        if name not in self.names:
            workers = ", ".join(self.names)
            allowed = f"one of the workers {workers}{meant(name, self.names)}"
            raise ScenarioError(unusable(key, name, allowed))

    def refused(self, allowed: str) -> ScenarioError:
        """Return the error of a program that is not as it has to be."""
        return ScenarioError(unusable("program", self.program, allowed))


Made = TypeVar("Made")


def _made(
    kind: type[Made], key: str, table: Mapping[str, Any], /, **own: Any
) -> tuple[Made, Any]:
    """Return what a table describes, and the table.

    Args:
        kind: a class of `jdag.sim`.
        key: the key of the table in the file.
        table: the content of the file.
        own: keys that are not fields of the class, or with checks of their own.
    """
    keys = {
        field.name: (Any, ... if field.default is MISSING else field.default)
        for field in fields(kind)  # type: ignore[arg-type]
    }
    model = create_model(kind.__name__, __base__=Table, **{**keys, **own})
    try:
        found = checked(model, table)
        return kind(**{name: getattr(found, name) for name in keys}), found
    except ScenarioError as error:
        raise ScenarioError(f"{key}.{error}") from error


@contextmanager
def _under(key: str) -> Iterator[None]:
    """Prefix the key that an error names with that of its table."""
    try:
        yield
    except ScenarioError as error:
        raise ScenarioError(f"{key}.{error}") from error


def network_of(settings: Settings, *, clean: bool) -> Network:
    """Return the network; a clean one has no jitter."""
    port = "port_bandwidth_bytes_per_s"
    own: dict[str, Any] = {
        "control_lane": (Annotated[Any, _CONTROL], None),
        "topology": (TABLE | None, None),
        "links": (_LIST, []),
        port: (COUNT | None, None),
    }
    default, table = _link("network", settings.network, clean, **own)
    network = Network(default)
    if table.topology is not None:
        with _under("network.topology"):
            network = _topology(settings, table.topology, clean)
    control = table.control_lane
    if isinstance(control, dict):
        control, _ = _link("network.control_lane", control, clean)
    links = _links_of(settings, table.links, network.routed, clean)
    rate = getattr(table, port)
    with _under("network"):
        more: Any = {"control_lane": control, port: rate}
        return replace(network, default=default, links=links, **more)


def _link(
    key: str, table: Mapping[str, Any], clean: bool, **own: Any
) -> tuple[LinkModel, Any]:
    """Return the link that a table describes, by the model it names, and the table."""
    name = table.get("model")
    kind = _MODELS.get(name, LinkModel) if isinstance(name, str) else LinkModel
    made, given = _made(kind, key, table, model=(_MODEL, "alpha_beta"), **own)
    return (replace(made, jitter_ns=0) if clean else made), given


def _links_of(
    settings: Settings, tables: list[Any], routed: Sequence[str], clean: bool
) -> dict[tuple[str, str], LinkModel]:
    """Return the links that are not as the others."""
    ends = {"source": (TEXT, ...), "destination": (TEXT, ...)}
    links: dict[tuple[str, str], LinkModel] = {}
    for number, one in enumerate(tables):
        key = f"network.links[{number}]"
        model, given = _link(key, one, clean, **ends)
        source, destination = given.source, given.destination
        settings.check_worker(f"{key}.source", source)
        settings.check_worker(f"{key}.destination", destination)
        allowed = None
        if source == destination:
            allowed = f"a worker other than the source, {source}"
        elif (source, destination) in links:
            allowed = f"one link from {source} to {destination}, and this is the second"
        elif source in routed and destination in routed:
            allowed = f"a worker that is not in the topology, as {source} is"
        if allowed is not None:
            raise ScenarioError(unusable(f"{key}.destination", destination, allowed))
        links[source, destination] = model
    return links


class _Topology(Table):
    kind: Annotated[str, one_of(*_TOPOLOGIES)] | None = None
    workers: _TEXTS | None = None
    dimensions: _LIST | None = None
    cut_through: FLAG | None = None
    arity: COUNT | None = None
    shape: Any = None
    latency_ns: Any = None
    bandwidth_bytes_per_s: Any = None
    jitter_ns: Any = None


def _topology(settings: Settings, table: Mapping[str, Any], clean: bool) -> Network:
    """Return a topology, of all workers if none are named; links as in the table."""
    given = checked(_Topology, table)
    found = {key: value for key, value in vars(given).items() if value is not None}
    kind, dimensions = found.pop("kind", None), found.get("dimensions")
    if (kind is None) == (dimensions is None):
        allowed = f"one of {', '.join(_TOPOLOGIES)}, or dimensions in its place"
        raise ScenarioError(unusable("kind", kind, allowed))
    found.setdefault("workers", list(settings.names))
    for name in found["workers"]:
        settings.check_worker("workers", name)
    build = topologies.topology if kind is None else _TOPOLOGIES[kind]
    takes = dict.fromkeys(signature(build).parameters)
    has_link = "link" in takes
    for own in ("default", "control_lane", "link"):  # Other tables have these.
        takes.pop(own, None)
    keys = [*takes, *(_LINK_KEYS if has_link else ())]
    for key, value in found.items():
        if key not in keys:
            raise ScenarioError(unusable(key, value, ", ".join(["kind", *keys])))
    if "shape" in takes and "shape" not in found:
        raise ScenarioError("shape is missing: allowed is a list of integers >= 1")
    if has_link:
        link = {key: found.pop(key) for key in _LINK_KEYS if key in found}
        found["link"] = LinkModel(**{**link, **({"jitter_ns": 0} if clean else {})})
    if dimensions is not None:
        found["dimensions"] = [
            _dimension(f"dimensions[{number}]", one, clean)
            for number, one in enumerate(dimensions)
        ]
    return build(**found)


def _dimension(key: str, table: Mapping[str, Any], clean: bool) -> topologies.Dimension:
    own: dict[str, Any] = {"kind": (Any, ...), "size": (Any, ...), "arity": (Any, 2)}
    link, given = _made(LinkModel, key, table, **own)
    if clean:
        link = replace(link, jitter_ns=0)
    with _under(key):
        return topologies.Dimension(given.kind, given.size, link, given.arity)


def has_jitter(table: Any) -> bool:
    """Whether the table of a network, or one inside it, has jitter."""
    if isinstance(table, dict):
        return bool(table.get("jitter_ns")) or has_jitter([*table.values()])
    return isinstance(table, list) and any(map(has_jitter, table))


def _roofline(table: Mapping[str, Any]) -> Roofline:
    return _made(Roofline, "roofline", table)[0]


def devices_of(settings: Settings) -> dict[str, DeviceModel]:
    """Return the device of each worker: its own, or that of all."""
    own: dict[str, Any] = {
        "functions": (Annotated[dict[str, _COSTS], _NAMED], {}),
        "roofline": (Annotated[Any, BeforeValidator(_roofline), _NAMED], None),
    }
    workers: Any = (Annotated[dict[str, TABLE], _NAMED], Field(default={}))
    default, table = _made(
        DeviceModel, "devices", settings.devices, **own, workers=workers
    )
    found = dict.fromkeys(settings.names, default)
    for name, one in table.workers.items():
        key = f"devices.workers.{name}"
        settings.check_worker(key, name)
        found[name], _ = _made(DeviceModel, key, one, **own)
    return found


class _Schedule(Table):
    kind: Annotated[str, one_of(*_BUILDERS)] | None = None
    stages: COUNT | None = None
    micro_batches: COUNT | None = None
    chunks: COUNT | None = None
    workers: _TEXTS | None = None
    lists: _TEXTS | None = None


def schedule_of(settings: Settings) -> Schedule | None:
    """Return the schedule; its workers are all of the run if none are named."""
    if settings.schedule is None:
        return None
    try:
        given = checked(_Schedule, settings.schedule)
        found = {key: value for key, value in vars(given).items() if value is not None}
        kind, lists = found.pop("kind", None), found.pop("lists", None)
        if (kind is None) == (lists is None):
            allowed = f"one of {', '.join(_BUILDERS)}, or lists of actions in its place"
            raise ScenarioError(unusable("kind", kind, allowed))
        found.setdefault("workers", list(settings.names))
        for name in found["workers"]:
            settings.check_worker("workers", name)
        build: Any = from_lists if kind is None else _BUILDERS[kind]
        takes = signature(build).parameters
        for key, value in found.items():
            if key not in takes:
                keys = ", ".join([each for each in takes if each != "lists"])
                raise ScenarioError(unusable(key, value, keys))
        if lists is not None:
            return from_lists([each.split() for each in lists], **found)
        for key in takes:
            if key not in found:
                raise ScenarioError(f"{key} is missing: allowed is an integer >= 1")
        made: Schedule = build(**found)
        return made
    except ScheduleError as error:
        raise ScenarioError(f"schedule: {error}") from error
    except ScenarioError as error:
        raise ScenarioError(f"schedule.{error}") from error


def link_of(settings: Settings) -> LinkSettings | None:
    """Return the settings of links; None: chosen by the latencies."""
    if settings.link is None:
        return None
    return _made(LinkSettings, "link", settings.link)[0]


def faults_of(settings: Settings) -> list[Fault]:
    """Return the faults; their values are checked where the cluster is made."""
    return [_fault(f"faults[{n}]", one) for n, one in enumerate(settings.faults)]


def _fault(key: str, table: Mapping[str, Any]) -> Fault:
    kinds = f"one of {', '.join(_FAULTS)}"
    if "kind" not in table:
        raise ScenarioError(f"{key}.kind is missing: allowed is {kinds}")
    kind = table["kind"]
    if not isinstance(kind, str) or kind not in _FAULTS:
        raise ScenarioError(unusable(f"{key}.kind", kind, kinds))
    own: dict[str, Any] = {"kind": (str, ...)}
    if kind == "crash":
        own["detect_ns"] = (Any, DETECT_NS)
    return _made(_FAULTS[kind], key, table, **own)[0]
