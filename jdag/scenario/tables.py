"""The tables of a scenario's file: what may be in each, and what is said if it is not.

Whatever is wrong is said in one wording: `key = value: allowed is ...`.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import Field, ValidationError, create_model

from jdag.engine.protocol import WORKERS_MAX
from jdag.errors import ScenarioError, unusable
from jdag.runtime.chooser import POLICIES
from jdag.runtime.tables import (
    COUNT,
    FLAG,
    NESTING,
    NESTING_MAX,
    NS,
    TABLE,
    TEXT,
    Table,
    at_least,
    dotted,
    is_ns,
    is_table,
    number,
    one_of,
    only,
    said,
    up_to,
)
from jdag.sim import (
    Crash,
    Delay,
    DeviceModel,
    Drop,
    Duplicate,
    Fault,
    LinkModel,
    LinkSettings,
    Network,
    Partition,
    Slow,
)
from jdag.sim.settings import DETECT_NS, EVENTS_MAX

_NAME = "letters, digits, _, - and ., beginning with a letter or a digit"
_WORKERS = (
    "names, none empty and none twice; or how many, and they are w0, w1, ...; "
    f"at most {WORKERS_MAX:,}"
)


def _is_name(value: Any) -> bool:
    if not isinstance(value, str) or not value[:1].isalnum() or not value.isascii():
        return False
    return all(sign.isalnum() or sign in "_-." for sign in value)


def _is_reference(value: Any) -> bool:
    module, _, name = value.partition(":") if isinstance(value, str) else ("", "", "")
    return name.isidentifier() and all(p.isidentifier() for p in module.split("."))


def _are_workers(value: Any) -> bool:
    if not isinstance(value, list):
        return at_least(1)(value) and value <= WORKERS_MAX
    named = all(isinstance(name, str) and name for name in value)
    once = named and len(dict.fromkeys(value)) == len(value)
    return once and 1 <= len(value) <= WORKERS_MAX


def _are_groups(value: Any) -> bool:
    groups = value if isinstance(value, list) else [None]
    return all(
        isinstance(group, list) and all(isinstance(name, str) for name in group)
        for group in groups
    )


def _are_costs(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(is_ns, value))


_FILE_NAME = Annotated[str, only(_NAME, _is_name)]
_REFERENCE = Annotated[
    str, only("module:function, such as mine:program", _is_reference)
]
_SEED = Annotated[int, only("an integer >= 0", at_least(0))]
_SEEDS = Annotated[int, only("an integer from 1 to 1,000,000", up_to(10**6))]
_DEVICES = Annotated[int, only("an integer from 1 to 1,024", up_to(1024))]
_NS = Annotated[int, only(NS, is_ns)]
_CHANCE = Annotated[float, only("a number from 0 to 1", number(0, 1))]
_FACTOR = Annotated[float, only("a number from 1 to 1e9", number(1, 1e9))]
_COSTS = Annotated[
    list[int],
    only("two integers >= 0, [forward_ns, backward_ns]", _are_costs),
]
_LIST = only(
    "a list of tables",
    lambda value: isinstance(value, list) and all(map(is_table, value)),
)


class _Link(Table):
    latency_ns: _NS = 0
    bandwidth_bytes_per_s: COUNT | None = None
    jitter_ns: _NS = 0

    def model(self, *, clean: bool) -> LinkModel:
        jitter_ns = 0 if clean else self.jitter_ns
        return LinkModel(self.latency_ns, self.bandwidth_bytes_per_s, jitter_ns)


class _OneLink(_Link):
    source: TEXT
    destination: TEXT


class _Network(_Link):
    links: Annotated[list[_OneLink], _LIST] = Field(default=[])
    port_bandwidth_bytes_per_s: COUNT | None = None

    def network(self, *, clean: bool) -> Network:
        """The network; a clean one has no jitter."""
        links = {
            (one.source, one.destination): one.model(clean=clean) for one in self.links
        }
        return Network(self.model(clean=clean), links, self.port_bandwidth_bytes_per_s)


class _Device(Table):
    forward_ns: _NS = 0
    backward_ns: _NS = 0
    sum_ns: _NS = 0
    functions: Annotated[dict[str, _COSTS], only("a table", is_table)] = Field(
        default={}
    )

    def model(self) -> DeviceModel:
        costs = {name: (cost[0], cost[1]) for name, cost in self.functions.items()}
        return DeviceModel(
            forward_ns=self.forward_ns,
            backward_ns=self.backward_ns,
            sum_ns=self.sum_ns,
            functions=costs,
        )


class _Devices(_Device):
    workers: Annotated[dict[str, _Device], only("a table", is_table)] = Field(
        default={}
    )

    def models(self, names: tuple[str, ...]) -> dict[str, DeviceModel]:
        """The device of each worker: its own, or that of all."""
        return {name: self.workers.get(name, self).model() for name in names}


_KINDS = (Drop, Delay, Duplicate, Partition, Crash, Slow)
_FAULTS: Mapping[str, type[Fault]] = {kind.__name__.lower(): kind for kind in _KINDS}
_GROUPS = Annotated[list[list[str]], only("a list of lists of workers", _are_groups)]
_OF_FAULTS = {
    "probability": _CHANCE,
    "factor": _FACTOR,
    "groups": _GROUPS,
    "worker": TEXT,
    "source": TEXT,
    "destination": TEXT,
}  # All other keys are times.


def _table_of(kind: str) -> Any:
    """Return the table of a fault: its fields, as a file gives them."""
    keys: dict[str, Any] = {"kind": (Literal[kind], ...)}
    for key in fields(_FAULTS[kind]):
        of, default = _OF_FAULTS.get(key.name, _NS), key.default
        if default is MISSING:
            default = DETECT_NS if key.name == "detect_ns" else ...
        keys[key.name] = (of if default is not None else of | None, default)
    return create_model(kind, __base__=Table, **keys)


if TYPE_CHECKING:
    _Fault = Any
else:
    _Fault = Annotated[
        Union[tuple(map(_table_of, _FAULTS))],  # noqa: UP007 - made of a tuple.
        Field(discriminator="kind"),
    ]


class _Resends(Table):
    resend_ns: COUNT
    resend_max: _NS
    ack_delay_ns: _NS


class Settings(Table):
    """What a scenario's file may say."""

    name: _FILE_NAME
    program: _REFERENCE
    workers: Annotated[list[str] | int, only(_WORKERS, _are_workers)]
    expect: TABLE
    home: TEXT | None = None
    seed: _SEED = 0
    seeds: _SEEDS = 1
    x64: FLAG = False
    host_devices: _DEVICES | None = None
    values: Annotated[str, one_of("real", "abstract")] = "real"
    policy: Annotated[str, one_of(*POLICIES)] = "path"
    events_max: COUNT = EVENTS_MAX
    nesting_max: NESTING = NESTING_MAX
    settings: TABLE = Field(default={})
    placement: Annotated[dict[str, TEXT], only("a table", is_table)] = Field(default={})
    network: _Network = _Network()
    link: _Resends | None = None
    devices: _Devices = _Devices()
    faults: Annotated[list[_Fault], _LIST] = Field(default=[])

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the workers."""
        if isinstance(self.workers, int):
            return tuple(f"w{number}" for number in range(self.workers))
        return tuple(self.workers)

    def made_faults(self) -> list[Fault]:
        """What goes wrong."""
        return [_fault(table) for table in self.faults]

    def made_link(self) -> LinkSettings | None:
        """When links wait and resend; None: as suits the latencies."""
        if self.link is None:
            return None
        try:
            return LinkSettings(**self.link.model_dump())
        except ScenarioError as error:
            raise ScenarioError(f"link.{error}") from error


def _fault(table: Any) -> Fault:
    values = table.model_dump(exclude={"kind"})
    if table.kind == "partition":
        values["groups"] = tuple(tuple(group) for group in table.groups)
    return _FAULTS[table.kind](**values)


def checked(table: Mapping[str, Any]) -> Settings:
    """Return what a file says, if it is usable.

    Raises:
        ScenarioError: key, value and what is allowed, of the first thing that is not.
    """
    try:
        return Settings.model_validate(table)
    except ValidationError as error:
        raise ScenarioError(_said(error)) from None


def _said(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    place = list(first["loc"])
    if place[:1] == ["faults"] and len(place) > 2:
        del place[2]  # The kind of the fault, which is no key.
    kinds = f"one of {', '.join(_FAULTS)}"
    match first["type"]:
        case "union_tag_not_found":
            return f"{dotted([*place, 'kind'])} is missing: allowed is {kinds}"
        case "union_tag_invalid":
            return unusable(dotted([*place, "kind"]), first["input"]["kind"], kinds)
        case _:
            return said(error, place)
