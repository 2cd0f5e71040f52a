"""A scenario: a TOML file that asks a question, read and checked.

Its first comment is the question, its `[expect]` the answer. `load` turns the file into
settings, or says in one line what is wrong with it.
"""

import inspect
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    StringConstraints,
    ValidationError,
)

from jdag.cluster import Cluster, simulate
from jdag.errors import JdagError, ScenarioError
from jdag.expect import refuse_unknown
from jdag.programs import Case, Player
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

Name = Annotated[str, StringConstraints(min_length=1)]
Probability = Annotated[float, Field(ge=0, le=1)]


class _Table(BaseModel):
    """A table of the file: nothing unknown in it, nothing converted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Link(_Table):
    latency_ns: NonNegativeInt = 0
    bandwidth_bytes_per_s: PositiveInt | None = None
    jitter_ns: NonNegativeInt = 0

    def model(self, *, clean: bool) -> LinkModel:
        jitter_ns = 0 if clean else self.jitter_ns
        return LinkModel(self.latency_ns, self.bandwidth_bytes_per_s, jitter_ns)


class _OneLink(_Link):
    source: Name
    destination: Name


class _Network(_Link):
    links: list[_OneLink] = []

    def network(self, *, clean: bool) -> Network:
        links = {
            (one.source, one.destination): one.model(clean=clean) for one in self.links
        }
        return Network(self.model(clean=clean), links)


class _Device(_Table):
    forward_ns: NonNegativeInt = 0
    backward_ns: NonNegativeInt = 0
    sum_ns: NonNegativeInt = 0
    functions: dict[
        str, Annotated[list[NonNegativeInt], Field(min_length=2, max_length=2)]
    ] = {}


class _Devices(_Device):
    workers: dict[str, _Device] = {}

    def models(self, names: tuple[str, ...]) -> dict[str, DeviceModel]:
        return {
            name: DeviceModel(
                forward_ns=one.forward_ns,
                backward_ns=one.backward_ns,
                sum_ns=one.sum_ns,
                functions={key: (f, b) for key, (f, b) in one.functions.items()},
            )
            for name in names
            for one in (self.workers.get(name, self),)
        }


class _Between(_Table):
    source: Name | None = None
    destination: Name | None = None
    from_ns: NonNegativeInt = 0
    until_ns: NonNegativeInt | None = None


class _Drop(_Between):
    kind: Literal["drop"]
    probability: Probability


class _Delay(_Between):
    kind: Literal["delay"]
    probability: Probability
    delay_min_ns: NonNegativeInt
    delay_max_ns: NonNegativeInt


class _Duplicate(_Between):
    kind: Literal["duplicate"]
    probability: Probability
    delay_max_ns: NonNegativeInt = 0


class _Partition(_Table):
    kind: Literal["partition"]
    groups: list[list[Name]]
    from_ns: NonNegativeInt
    until_ns: NonNegativeInt | None = None


class _Crash(_Table):
    kind: Literal["crash"]
    worker: Name
    at_ns: NonNegativeInt | None = None
    at_index: NonNegativeInt | None = None
    detect_ns: NonNegativeInt = 1_000_000


class _Slow(_Table):
    kind: Literal["slow"]
    worker: Name
    factor: NonNegativeFloat
    from_ns: NonNegativeInt = 0
    until_ns: NonNegativeInt | None = None


_Fault = Annotated[
    _Drop | _Delay | _Duplicate | _Partition | _Crash | _Slow,
    Field(discriminator="kind"),
]


class _Resends(_Table):
    resend_ns: PositiveInt
    resend_max: PositiveInt
    ack_delay_ns: NonNegativeInt


class Settings(_Table):
    """What a scenario's file may say."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]+$")]
    program: Annotated[str, StringConstraints(pattern=r"^[\w.]+:\w+$")]
    workers: Annotated[list[Name], Field(min_length=1)] | PositiveInt
    home: Name | None = None
    seed: NonNegativeInt = 0
    seeds: PositiveInt = 1
    x64: bool = False
    values: Literal["real", "abstract"] = "real"
    policy: Literal["path", "backward_first"] = "path"
    settings: dict[str, Any] = {}
    placement: dict[str, Name] = {}
    network: _Network = _Network()
    link: _Resends | None = None
    devices: _Devices = _Devices()
    faults: list[_Fault] = []
    expect: dict[str, Any]


_FAULTS: Mapping[type, Callable[..., Fault]] = {
    _Drop: Drop,
    _Delay: Delay,
    _Duplicate: Duplicate,
    _Crash: Crash,
    _Slow: Slow,
}


def _fault(table: Any) -> Fault:
    values = table.model_dump(exclude={"kind"})
    if isinstance(table, _Partition):
        groups = tuple(tuple(group) for group in table.groups)
        return Partition(groups, table.from_ns, table.until_ns)
    return _FAULTS[type(table)](**values)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A scenario that can be played."""

    path: Path
    question: str
    settings: Settings
    player: Player
    workers: tuple[str, ...]


# ------------------------------------------------------------------------- reading


def load(path: Path, *, seed: int | None = None) -> Scenario:
    """Read and check a scenario.

    Args:
        path: the TOML file.
        seed: in place of the one in the file.

    Raises:
        ScenarioError: one line: file, key, value, and what is allowed.
    """
    text, table = _read(path)
    settings = _checked(path, table)
    if seed is not None:
        settings = settings.model_copy(update={"seed": seed})
    workers = _workers(settings)
    with wrong(path):
        _check_workers(settings, workers)
        with configured(settings):
            player = _player(path, settings, workers)
            refuse_unknown(settings.expect, player.figures)
            make_cluster(settings, workers, settings.seed, clean=False).close()
    return Scenario(path, _question(path, text), settings, player, workers)


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ScenarioError(
            f"{path}: {why}; name a scenario's TOML file, such as scenarios/chain.toml"
        ) from error
    try:
        return text, tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ScenarioError(f"{path}: this is not TOML: {error}") from error


def _question(path: Path, text: str) -> str:
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# ").rstrip())
    if not lines:
        raise ScenarioError(
            f"{path}: the first line is no comment; it has to be one, and say which "
            "question the scenario asks"
        )
    return " ".join(lines)


def _checked(path: Path, table: dict[str, Any]) -> Settings:
    try:
        return Settings.model_validate(table)
    except ValidationError as error:
        raise ScenarioError(f"{path}: {_first(error)}") from None


def _first(error: ValidationError) -> str:
    """The first complaint as one line: key, value, what is allowed."""
    first = error.errors()[0]
    place = [
        str(part) for part in first["loc"] if not str(part).startswith("function-")
    ]
    key = ".".join(place)
    if first["type"] == "missing":
        return f"{key}: it is missing and has to be there"
    if first["type"] == "extra_forbidden":
        allowed = ", ".join(_known(place[:-1])) or "nothing more"
        return f"{key}: there is no such key; allowed here: {allowed}"
    return (
        f"{key} = {first['input']!r}: {first['msg'].replace('Input should', 'should')}"
    )


def _known(place: list[str]) -> list[str]:
    """The keys that a table of the file may have."""
    table: Any = Settings
    for part in place:
        if part in ("links",):
            table = _OneLink
        elif part in _KINDS:
            table = _KINDS[part]
        elif part in _TABLES:
            table = _TABLES[part]
    return list(table.model_fields)


_TABLES: Mapping[str, type[_Table]] = {
    "network": _Network,
    "devices": _Devices,
    "link": _Resends,
    "workers": _Device,
}
_KINDS: Mapping[str, type[_Table]] = {
    "drop": _Drop,
    "delay": _Delay,
    "duplicate": _Duplicate,
    "partition": _Partition,
    "crash": _Crash,
    "slow": _Slow,
}


def _workers(settings: Settings) -> tuple[str, ...]:
    if isinstance(settings.workers, int):
        return tuple(f"w{number}" for number in range(settings.workers))
    return tuple(settings.workers)


def _check_workers(settings: Settings, workers: tuple[str, ...]) -> None:
    named = [("home", settings.home)] if settings.home is not None else []
    named += [(f"placement.{key}", name) for key, name in settings.placement.items()]
    named += [(f"devices.workers.{name}", name) for name in settings.devices.workers]
    for number, link in enumerate(settings.network.links):
        named.append((f"network.links.{number}.source", link.source))
        named.append((f"network.links.{number}.destination", link.destination))
    for key, name in named:
        if name not in workers:
            raise ScenarioError(
                f"{key} = {name!r}: there is no such worker; there are "
                f"{', '.join(workers)}"
            )


def _player(path: Path, settings: Settings, workers: tuple[str, ...]) -> Player:
    """Import the program and hand it its settings."""
    module_name, _, name = settings.program.partition(":")
    for folder in (str(Path.cwd()), str(path.resolve().parent)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    try:
        function = getattr(import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ScenarioError(
            f"program = {settings.program!r}: {error}; it has to be module:function, "
            f"the module in {path.parent} or installed"
        ) from error
    except Exception as error:
        raise ScenarioError(
            f"program = {settings.program!r}: importing it raised "
            f"{type(error).__name__}: {error}"
        ) from error
    given = _given(path, settings, function)
    try:
        player = function(workers, **given)
    except JdagError:
        raise
    except Exception as error:
        raise ScenarioError(
            f"settings = {settings.settings!r}: {settings.program} raised "
            f"{type(error).__name__}: {error}"
        ) from error
    if not (hasattr(player, "figures") and hasattr(player, "play")):
        raise ScenarioError(
            f"program = {settings.program!r}: it returned {player!r}; it has to return "
            "a jdag.programs.Case, or an object with figures and play(run)"
        )
    return _placed(settings, player)


def _given(path: Path, settings: Settings, function: Any) -> dict[str, Any]:
    """The settings of the file, if the program takes them."""
    taken = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    open_ended = any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD
        for parameter in inspect.signature(function).parameters.values()
    )
    given = dict(settings.settings)
    for key, value in given.items():
        if key not in taken and not open_ended:
            allowed = ", ".join(name for name in taken if name != "folder")
            raise ScenarioError(
                f"settings.{key} = {value!r}: {settings.program} takes no such key; "
                f"it takes {allowed or 'none'}"
            )
    if "folder" in taken:
        given["folder"] = path.resolve().parent
    return given


def _placed(settings: Settings, player: Any) -> Player:
    """Put parameters where the file wants them."""
    checked: Player = player
    if not settings.placement:
        return checked
    if not isinstance(player, Case):
        raise ScenarioError(
            f"placement = {settings.placement!r}: {settings.program} places its "
            "parameters itself; only a Case's can be placed here"
        )
    for key, worker in settings.placement.items():
        if key not in player.params:
            raise ScenarioError(
                f"placement.{key} = {worker!r}: {settings.program} has no such "
                f"parameter; it has {', '.join(player.params)}"
            )
    placement = {**player.placement, **settings.placement}
    return Case(player.program, player.params, placement, player.passes)


@contextmanager
def wrong(path: Path) -> Iterator[None]:
    """What is wrong with a scenario is said with its file."""
    try:
        yield
    except ScenarioError as error:
        text = str(error)
        prefix = "" if text.startswith(f"{path}: ") else f"{path}: "
        raise ScenarioError(f"{prefix}{text}") from error


@contextmanager
def configured(settings: Settings) -> Iterator[None]:
    """JAX as the scenario wants it."""
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", settings.x64)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def make_cluster(
    settings: Settings, workers: tuple[str, ...], seed: int, *, clean: bool
) -> Cluster:
    """The cluster that the file describes."""
    link = settings.link
    return simulate(
        workers,
        seed=seed,
        home=settings.home,
        values=settings.values,
        network=settings.network.network(clean=clean),
        devices=settings.devices.models(workers),
        faults=[] if clean else [_fault(table) for table in settings.faults],
        policy=settings.policy,
        link=None if link is None else LinkSettings(**link.model_dump()),
    )
