"""The tables of a scenario's file: what may be in each, and what is said if it is not.

Whatever is wrong is said in one wording: `key = value: allowed is ...`.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from jdag.errors import ScenarioError
from jdag.expect import meant
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
from jdag.sim.chooser import POLICIES
from jdag.sim.network import unusable

WORKERS_MAX = 1 << 16  # A context's id has 16 bits for the worker.
_NAME = "letters, digits, _, - and ., beginning with a letter or a digit"
_WORKERS = (
    "names, none empty and none twice; or how many, and they are w0, w1, ...; "
    f"at most {WORKERS_MAX:,}"
)


def _only(allowed: str, usable: Callable[[Any], bool]) -> BeforeValidator:
    """A check whose error says what is allowed."""

    def check(value: Any) -> Any:
        if not usable(value):
            raise PydanticCustomError("unusable", "{allowed}", {"allowed": allowed})
        return value

    return BeforeValidator(check)


def _at_least(least: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and value >= least


def _number(least: float, most: float) -> Callable[[Any], bool]:
    return lambda value: type(value) in (int, float) and least <= value <= most


def _one_of(*names: str) -> BeforeValidator:
    return _only("one of " + ", ".join(names), lambda value: value in names)


def _is_name(value: Any) -> bool:
    if not isinstance(value, str) or not value[:1].isalnum() or not value.isascii():
        return False
    return all(sign.isalnum() or sign in "_-." for sign in value)


def _is_reference(value: Any) -> bool:
    module, _, name = value.partition(":") if isinstance(value, str) else ("", "", "")
    return name.isidentifier() and all(p.isidentifier() for p in module.split("."))


def _are_workers(value: Any) -> bool:
    if not isinstance(value, list):
        return _at_least(1)(value) and value <= WORKERS_MAX
    named = all(isinstance(name, str) and name for name in value)
    once = named and len(dict.fromkeys(value)) == len(value)
    return once and 1 <= len(value) <= WORKERS_MAX


def _are_groups(value: Any) -> bool:
    groups = value if isinstance(value, list) else [None]
    return all(
        isinstance(group, list) and all(isinstance(name, str) for name in group)
        for group in groups
    )


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _are_costs(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_at_least(0), value))


_FILE_NAME = Annotated[str, _only(_NAME, _is_name)]
_REFERENCE = Annotated[
    str, _only("module:function, such as mine:program", _is_reference)
]
_TEXT = Annotated[str, _only("a text", lambda v: isinstance(v, str) and bool(v))]
_FLAG = Annotated[bool, _only("true or false", lambda value: type(value) is bool)]
_NS = Annotated[int, _only("an integer >= 0", _at_least(0))]
_COUNT = Annotated[int, _only("an integer >= 1", _at_least(1))]
_CHANCE = Annotated[float, _only("a number from 0 to 1", _number(0, 1))]
_FACTOR = Annotated[float, _only("a finite number >= 1", _number(1, 1e300))]
_TABLE = Annotated[dict[str, Any], _only("a table", _is_table)]
_COSTS = Annotated[
    list[int],
    _only("two integers >= 0, [forward_ns, backward_ns]", _are_costs),
]
_LIST = _only(
    "a list of tables",
    lambda value: isinstance(value, list) and all(map(_is_table, value)),
)


class _Table(BaseModel):
    """A table of the file: nothing unknown or missing, and nothing is converted."""

    model_config = ConfigDict(frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, table: Any) -> Any:
        if not isinstance(table, dict):
            raise PydanticCustomError("unusable", "{allowed}", {"allowed": "a table"})
        for key in table:
            if key not in cls.model_fields:
                keys = ", ".join(cls.model_fields)
                allowed = f"one of the keys {keys}{meant(key, cls.model_fields)}"
                context = {"key": key, "allowed": allowed}
                raise PydanticCustomError("unknown", "{allowed}", context)
        for key, field in cls.model_fields.items():
            if field.is_required() and key not in table:
                raise PydanticCustomError("missing_key", "{key}", {"key": key})
        return table


class _Link(_Table):
    latency_ns: _NS = 0
    bandwidth_bytes_per_s: _COUNT | None = None
    jitter_ns: _NS = 0

    def model(self, *, clean: bool) -> LinkModel:
        jitter_ns = 0 if clean else self.jitter_ns
        return LinkModel(self.latency_ns, self.bandwidth_bytes_per_s, jitter_ns)


class _OneLink(_Link):
    source: _TEXT
    destination: _TEXT


class _Network(_Link):
    links: Annotated[list[_OneLink], _LIST] = []

    def network(self, *, clean: bool) -> Network:
        """The network; a clean one has no jitter."""
        links = {
            (one.source, one.destination): one.model(clean=clean) for one in self.links
        }
        return Network(self.model(clean=clean), links)


class _Device(_Table):
    forward_ns: _NS = 0
    backward_ns: _NS = 0
    sum_ns: _NS = 0
    functions: Annotated[dict[str, _COSTS], _only("a table", _is_table)] = {}

    def model(self) -> DeviceModel:
        costs = {name: (cost[0], cost[1]) for name, cost in self.functions.items()}
        return DeviceModel(
            forward_ns=self.forward_ns,
            backward_ns=self.backward_ns,
            sum_ns=self.sum_ns,
            functions=costs,
        )


class _Devices(_Device):
    workers: Annotated[dict[str, _Device], _only("a table", _is_table)] = {}

    def models(self, names: tuple[str, ...]) -> dict[str, DeviceModel]:
        """The device of each worker: its own, or that of all."""
        return {name: self.workers.get(name, self).model() for name in names}


class _Between(_Table):
    source: _TEXT | None = None
    destination: _TEXT | None = None
    from_ns: _NS = 0
    until_ns: _NS | None = None


class _Drop(_Between):
    kind: Literal["drop"]
    probability: _CHANCE


class _Delay(_Between):
    kind: Literal["delay"]
    probability: _CHANCE
    delay_min_ns: _NS
    delay_max_ns: _NS


class _Duplicate(_Between):
    kind: Literal["duplicate"]
    probability: _CHANCE
    delay_max_ns: _NS = 0


class _Partition(_Table):
    kind: Literal["partition"]
    groups: Annotated[list[list[str]], _only("a list of lists of workers", _are_groups)]
    from_ns: _NS = 0
    until_ns: _NS | None = None


class _Crash(_Table):
    kind: Literal["crash"]
    worker: _TEXT
    at_ns: _NS | None = None
    at_index: _NS | None = None
    detect_ns: _NS = 1_000_000
    restart_ns: _NS | None = None


class _Slow(_Table):
    kind: Literal["slow"]
    worker: _TEXT
    factor: _FACTOR
    from_ns: _NS = 0
    until_ns: _NS | None = None


_Fault = Annotated[
    _Drop | _Delay | _Duplicate | _Partition | _Crash | _Slow,
    Field(discriminator="kind"),
]
_FAULTS: Mapping[str, Callable[..., Fault]] = {
    "drop": Drop,
    "delay": Delay,
    "duplicate": Duplicate,
    "partition": Partition,
    "crash": Crash,
    "slow": Slow,
}


class _Resends(_Table):
    resend_ns: _COUNT
    resend_max: _NS
    ack_delay_ns: _NS


class Settings(_Table):
    """What a scenario's file may say."""

    name: _FILE_NAME
    program: _REFERENCE
    workers: Annotated[list[str] | int, _only(_WORKERS, _are_workers)]
    expect: _TABLE
    home: _TEXT | None = None
    seed: _NS = 0
    seeds: _COUNT = 1
    x64: _FLAG = False
    values: Annotated[str, _one_of("real", "abstract")] = "real"
    policy: Annotated[str, _one_of(*POLICIES)] = "path"
    settings: _TABLE = {}
    placement: Annotated[dict[str, _TEXT], _only("a table", _is_table)] = {}
    network: _Network = _Network()
    link: _Resends | None = None
    devices: _Devices = _Devices()
    faults: Annotated[list[_Fault], _LIST] = []

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
    context = first.get("ctx", {})
    kinds = f"one of {', '.join(_FAULTS)}"
    match first["type"]:
        case "missing_key":
            place.append(context["key"])
            return f"{_dotted(place)} is missing; it has to be there"
        case "unknown":
            value = first["input"][context["key"]]
            place.append(context["key"])
        case "union_tag_not_found":
            return f"{_dotted([*place, 'kind'])} is missing: allowed is {kinds}"
        case "union_tag_invalid":
            return unusable(_dotted([*place, "kind"]), first["input"]["kind"], kinds)
        case _:
            value = first["input"]
    allowed = context.get("allowed", first["msg"])
    return unusable(_dotted(place), value, allowed)


def _dotted(place: list[Any]) -> str:
    """A place in the file as it is written: faults[0].probability."""
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".")
