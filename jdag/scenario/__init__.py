"""A scenario: a TOML file that asks a question, checked and ready to be played.

Its first comment is the question, its `[expect]` the answer. `load` turns the file into
settings and a program, or says in one line what is wrong: file, key, value, and what is
allowed.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jdag.errors import ScenarioError, meant, unusable
from jdag.runtime.tables import read, wrong
from jdag.scenario.case import Case, Figures, Player, Run
from jdag.scenario.driving import Driver, Virtual, driver_of
from jdag.scenario.expectations import refuse_unknown
from jdag.scenario.program import player_of, raised
from jdag.scenario.tables import Settings, checked

__all__ = [
    "Case",
    "Driver",
    "Figures",
    "Player",
    "Run",
    "Scenario",
    "Settings",
    "configured",
    "driver_of",
    "load",
    "raised",
    "wrong",
]

_FILE = "a scenario's TOML file, such as scenarios/chain.toml"


@dataclass(frozen=True, slots=True)
class Scenario:
    """A scenario that can be played."""

    path: Path
    question: str
    settings: Settings
    player: Player
    workers: tuple[str, ...]


def load(path: Path, *, seed: int | None = None) -> Scenario:
    """Read and check a scenario.

    Args:
        path: the TOML file.
        seed: in place of the one in the file.

    Raises:
        ScenarioError: one line: file, key, value, and what is allowed.
    """
    with wrong(path):
        text, table = read(path, _FILE)
        settings = checked(table)
        if seed is not None:
            settings = settings.model_copy(update={"seed": seed})
        question = _question(text)
        _check_workers(settings)
        with configured(settings):
            # A network, or faults, that cannot be are found out by making it once.
            Virtual(settings).cluster(settings.seed, clean=False).close()
            player = player_of(settings, path.resolve().parent)
            refuse_unknown(settings.expect, player.figures)
    return Scenario(path, question, settings, player, settings.names)


def _question(text: str) -> str:
    """The first comment, if the file begins with one."""
    lines = []
    for line in text.lstrip().splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# ").rstrip())
    return " ".join(lines)


def _check_workers(settings: Settings) -> None:
    """See that every worker that is named is there."""
    named = [("home", settings.home)] if settings.home is not None else []
    named += [(f"placement.{key}", name) for key, name in settings.placement.items()]
    named += [(f"devices.workers.{name}", name) for name in settings.devices.workers]
    for number, link in enumerate(settings.network.links):
        named.append((f"network.links[{number}].source", link.source))
        named.append((f"network.links[{number}].destination", link.destination))
    for key, name in named:
        if name not in settings.names:
            workers = ", ".join(settings.names)
            allowed = f"one of the workers {workers}{meant(name, settings.names)}"
            raise ScenarioError(unusable(key, name, allowed))
    _check_links(settings)


def _check_links(settings: Settings) -> None:
    """See that each link joins two workers, and is there once."""
    ends = [(link.source, link.destination) for link in settings.network.links]
    for number, (source, destination) in enumerate(ends):
        key = f"network.links[{number}].destination"
        if source == destination:
            allowed = f"a worker other than the source, {source}"
            raise ScenarioError(unusable(key, destination, allowed))
        if (source, destination) in ends[:number]:
            allowed = f"one link from {source} to {destination}, and this is the second"
            raise ScenarioError(unusable(key, destination, allowed))


@contextmanager
def configured(settings: Settings) -> Iterator[None]:
    """JAX as the scenario wants it; the number of its CPU's devices stays.

    Raises:
        ScenarioError: this process has begun with fewer devices.
    """
    _use_host_devices(settings.host_devices)
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", settings.x64)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def _use_host_devices(count: int | None) -> None:
    """Have JAX make so many devices of the CPU, if it has not begun yet."""
    if count is None:
        return
    config: Any = jax.config
    if config.jax_num_cpu_devices < count:
        with suppress(RuntimeError):  # Too late for that; perhaps XLA_FLAGS did it.
            config.update("jax_num_cpu_devices", count)
    found = len(jax.devices("cpu"))
    if found < count:
        said = f"at most {found}, with which JAX has begun in this process"
        raise ScenarioError(unusable("host_devices", count, said))
