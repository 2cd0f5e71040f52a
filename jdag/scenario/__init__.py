"""Scenarios: TOML files that describe a run and the results expected of it.

The first comment of a file is the question that the run answers; `[expect]` holds the
expected answer. `load` reads and validates a file.
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
from jdag.scenario.case import Case
from jdag.scenario.changes import changed
from jdag.scenario.costs import with_costs
from jdag.scenario.driving import Virtual
from jdag.scenario.expectations import refuse_unknown
from jdag.scenario.player import Figures, Player, Run
from jdag.scenario.program import player_of
from jdag.scenario.scenario_schema import ScenarioTable
from jdag.scenario.training import Training
from jdag.settings.toml_files import read_toml, wrong
from jdag.settings.validation import settings_from

__all__ = [
    "Case", "Figures", "Player", "Run", "Scenario", "Training", "configured", "load",
]  # fmt: skip

_NO_PLANS = (
    "false for this program, which opens contexts; a program that calls jdag.compile "
    "where run.compile is true sets the attribute `compiles = True`"
)
_FILE = "a scenario's TOML file, such as scenarios/chain.toml"


@dataclass(frozen=True, slots=True)
class Scenario:
    """A validated scenario: its file, question, settings and program."""

    path: Path
    question: str
    settings: ScenarioTable
    player: Player

    @property
    def case(self) -> Case:
        if isinstance(self.player, Case):
            return self.player
        raise self.settings.refused("a program that returns a jdag.scenario.Case")


def load(
    path: Path, *, seed: int | None = None, changes: Mapping[str, Any] | None = None
) -> Scenario:
    """Read and validate a scenario.

    `seed` and `changes` override the file; `changes` has values by dotted key, such as
    `network.latency_ns`. The text of a ScenarioError is one line with the file, the
    key, the value and what is allowed.
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
            # Making a cluster once validates the network and the faults.
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
    """Configure JAX for a scenario, and restore its configuration at exit.

    The number of CPU devices is not restored: JAX reads it only once. `exact` sets the
    matmul precision to "highest", for runs that check gradients, since by default a GPU
    may round float32 to TF32. Raises ScenarioError if JAX has already been initialized
    with too few CPU devices.
    """
    count = settings.host_devices
    config: Any = jax.config
    if count is not None:
        if config.jax_num_cpu_devices < count:
            # JAX raises if it is initialized; XLA_FLAGS may have set enough devices.
            with suppress(RuntimeError):
                config.update("jax_num_cpu_devices", count)
        if (actual := len(jax.devices("cpu"))) < count:
            allowed = f"at most {actual}, the CPU devices of JAX in this process"
            raise ScenarioError(unusable("host_devices", count, allowed))
    options: dict[str, Any] = {"jax_enable_x64": settings.x64}
    if exact:
        options["jax_default_matmul_precision"] = "highest"
    before = {name: getattr(config, name) for name in options}
    try:
        for name, value in options.items():
            config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            config.update(name, value)
