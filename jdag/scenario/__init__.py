"""A scenario: a TOML file that asks a question, checked and ready to be played.

Its first comment is the question, its `[expect]` the answer. `load` turns the file into
settings and a program, or raises an error of one line: file, key, value, and what is
allowed.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import jax
from msgspec.structs import replace

from jdag.errors import ScenarioError, unusable
from jdag.scenario.case import Case, Figures, Player, Run
from jdag.scenario.changes import changed
from jdag.scenario.costs import with_costs
from jdag.scenario.driving import Virtual
from jdag.scenario.expectations import refuse_unknown
from jdag.scenario.program import player_of
from jdag.scenario.scenario_schema import ScenarioTable
from jdag.scenario.training import Training
from jdag.settings.toml_files import read_toml, wrong
from jdag.settings.validation import settings_from

__all__ = [
    "Case", "Figures", "Player", "Run", "Scenario", "Training", "configured", "load",
]  # fmt: skip

_NO_PLANS = (
    "false for this program, which opens contexts; one that makes its steps by "
    "jdag.compile where run.compile is set has an attribute `compiles = True`"
)
_FILE = "a scenario's TOML file, such as scenarios/chain.toml"


@dataclass(frozen=True, slots=True)
class Scenario:
    """A scenario that can be played."""

    path: Path
    question: str
    settings: ScenarioTable
    player: Player

    @property
    def case(self) -> Case:
        """What its program returned; ScenarioError if that is no `Case`."""
        if isinstance(self.player, Case):
            return self.player
        allowed = "one that returns a jdag.scenario.Case, of one context"
        raise self.settings.refused(allowed)


def load(
    path: Path, *, seed: int | None = None, changes: Mapping[str, Any] | None = None
) -> Scenario:
    """Read and check a scenario.

    Args:
        path: the TOML file.
        seed: in place of the one in the file.
        changes: values in place of those in the file, by their dotted keys.

    Raises:
        ScenarioError: one line: file, key, value, and what is allowed.
    """
    with wrong(path):
        text, table = read_toml(path, _FILE)
        table = with_costs(changed(table, changes or {}), path.parent)
        settings = settings_from(ScenarioTable, table)
        if seed is not None:
            settings = replace(settings, seed=seed)
        if settings.home is not None:
            settings.check_worker("home", settings.home)
        with configured(settings):
            # A network, or faults, that cannot be are found out by making it once.
            Virtual(settings).cluster(settings.seed, clean=False).close()
            player = player_of(settings, path.resolve().parent)
            refuse_unknown(settings.expect, player.figures)
            if settings.compile and not getattr(player, "compiles", False):
                raise ScenarioError(unusable("compile", True, _NO_PLANS))
    return Scenario(path, _question(text), settings, player)


def _question(text: str) -> str:
    lines = takewhile(lambda line: line.startswith("#"), text.lstrip().splitlines())
    return " ".join([line.lstrip("# ").rstrip() for line in lines])


@contextmanager
def configured(settings: ScenarioTable, *, exact: bool = False) -> Iterator[None]:
    """Configure JAX for a scenario; the number of CPU devices stays afterwards.

    Args:
        settings: of the scenario.
        exact: whether products of matrices have the highest precision, as they need
            where gradients are checked; else a GPU may round float32 to TF32.

    Raises:
        ScenarioError: this process has begun with fewer devices.
    """
    count = settings.host_devices
    config: Any = jax.config
    if count is not None:
        if config.jax_num_cpu_devices < count:
            with suppress(RuntimeError):  # Too late for that; perhaps XLA_FLAGS did it.
                config.update("jax_num_cpu_devices", count)
        if (found := len(jax.devices("cpu"))) < count:
            said = f"at most {found}, with which JAX has begun in this process"
            raise ScenarioError(unusable("host_devices", count, said))
    wanted: dict[str, Any] = {"jax_enable_x64": settings.x64}
    if exact:
        wanted["jax_default_matmul_precision"] = "highest"
    before = {name: getattr(config, name) for name in wanted}
    try:
        for name, value in wanted.items():
            config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            config.update(name, value)
