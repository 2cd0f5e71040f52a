"""Scenarios on real processes: refused, or the bits that they have in virtual time."""

import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from typer.testing import CliRunner

from jdag.api.cluster import Cluster
from jdag.cli.commands import app
from jdag.errors import ScenarioError
from jdag.scenario import Scenario, configured, load
from jdag.scenario.driving import BY_WORKER, Real, Virtual, driver_of
from jdag.scenario.program import player_of
from jdag.scenario.run_scenario import ScenarioResult, run_scenario
from tests.tools.rpc_workers import NAMES, kept
from tests.unit.scenarios.test_scenarios import SCENARIOS, SINGLE

WORKERS = NAMES
# What makes a long one short; the rest is short.
SHORT: Mapping[str, Mapping[str, Any]] = {
    "cartpole": {"episodes": 2, "steps": 8},
    "ddp_with_rpc": {"steps": 3},
    "digits": {"epochs": 1, "checks": 2},
    "fan_out_24": {"calls": 8},
    "parameter_server": {"steps": 3},
    "remote_embedding": {"windows": 4, "check_every": 2},
    "shared_digits": {"steps": 3, "check_every": 1},
    "sixty_contexts": {"contexts": 3},
    "two_shards": {"steps": 2, "check_every": 2},
}
# Figures that these settings, or `small`, change.
CHANGED = (
    *("gradient_checks", "owed_workers", "rows", "updates"),
    *("accuracy", "test_accuracy", "final_loss", "final_reward"),
)
REAL = [path for path in SINGLE if load(path).settings.values == "real"]
# The others' calls are those of the conformance suite, which runs on processes too.
FIRST = (
    "chain",
    "dropped_reply",
    "several_roots",
    "pipeline",
    "cartpole",
    "shared_digits",
)
OF_TIERS = [
    pytest.param(path, marks=() if path.stem in FIRST else pytest.mark.second)
    for path in REAL
]


def small(path: Path) -> Scenario:
    """A shipped scenario on workers that all can share, once, without its faults."""
    scenario = load(path)
    settings = structs.replace(
        scenario.settings,
        workers=list(WORKERS[: max(2, min(4, len(scenario.settings.names)))]),
        seeds=1,
        home=None,
        placement={},
        x64=True,
        faults=(),
        network={},
        devices={},
        settings={**scenario.settings.settings, **SHORT.get(path.stem, {})},
    )
    with configured(settings):
        player = player_of(settings, path.parent)
    return replace(scenario, settings=settings, player=player)


EXACT = {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}  # As `run_scenario` has it.


class Shared(Real):
    def __init__(self, settings: Any, cluster: Cluster) -> None:
        super().__init__(settings, device="cpu")
        self._cluster = cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    settings = load(SCENARIOS / "chain.toml").settings  # With x64, as in `small`.
    exact = configured(settings, exact=True)  # Its workers have this setting, too.
    with exact, kept(**EXACT).connect() as made:
        yield made


def silent(*_: Any) -> None: ...


@cache
def in_virtual_time(path: Path) -> tuple[Scenario, Mapping[str, Any]]:
    scenario = small(path)
    with closing(Virtual(scenario.settings)) as driver:
        return scenario, run_scenario(scenario, silent, driver).figures


def missed(answer: ScenarioResult) -> list[str]:
    """The figures that miss their expectation, without those that `small` changes."""
    names = [each.figure for each in answer.judged if not each.met]
    return [name for name in names if name not in CHANGED]


@pytest.mark.parametrize("path", OF_TIERS, ids=lambda path: path.stem)
def test_a_shipped_scenario_has_the_same_gradients_on_processes(
    path: Path, cluster: Cluster
):
    scenario, wanted = in_virtual_time(path)
    answer = run_scenario(scenario, silent, Shared(scenario.settings, cluster))
    got = answer.figures
    for name in ("outcome", "error", "gradient_bits", "gradient_difference", "loss"):
        assert got.get(name) == wanted.get(name), name
    assert (got["gradient_bits"] is None) == (got["outcome"] != "finished")
    assert got["outcome"] == ("stuck" if path.stem == "dropped_reply" else "finished")
    assert missed(answer) == [] or load(path).settings.faults, missed(answer)
    assert "digest" not in got and "virtual_time_ns" not in got
    assert set(got) <= {*scenario.player.figures, *BY_WORKER} and "wall_time_ns" in got
    for name in ("live_contexts", "live_passes"):  # Of replicas, by the way they go.
        found = got[name]
        counts = found.values() if isinstance(found, dict) else [found]
        assert set(counts) == {0}, (name, found)


@pytest.mark.parametrize(
    ("name", "changes", "device", "message"),
    [
        ("crash", {}, None, "faults[0].kind = 'crash': expected no faults with --dr"),
        (
            "chain",
            {"values": "abstract"},
            None,
            "values = 'abstract': expected",
        ),
        ("chain", {"home": "b"}, None, "home = 'b': expected the first worker, a"),
        ("chain", {}, "tpu", "--device = 'tpu': expected cpu, gpu"),
    ],
)
def test_what_processes_do_not_have_is_refused_by_its_key(
    name: str, changes: dict[str, Any], device: str | None, message: str
):
    settings = load(SCENARIOS / f"{name}.toml", changes=changes).settings
    with pytest.raises(ScenarioError) as raised:
        driver_of(settings, "rpc", device=device)
    assert str(raised.value).startswith(message)


def test_the_command_runs_it_on_processes_and_says_what_they_held_and_sent(
    tmp_path: Path,
):
    out = tmp_path / "out"
    command = ["run", str(SCENARIOS / "chain.toml"), "--driver", "rpc"]
    done = CliRunner().invoke(app, [*command, "--device", "cpu", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "seed 0" in done.stdout and "met outcome: finished" in done.stdout
    assert "ran on processes" in done.stdout and "digest" not in done.stdout
    result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    figures = result["figures"]
    assert (result["driver"], result["digest"]) == ("rpc", None)
    assert sorted(figures["sent_bytes"]) == ["a", "b", "c"]
    assert min(figures["peak_bytes"].values()) > 0
    assert result["meaning"]["sent_messages"].startswith("protocol messages")
    files = sorted(path.name for path in out.glob("[!.]*"))
    assert files == ["graph.dot", "graph.json", "graph.png", *files[3:]]
    assert "timeline.png" in files and "trace.jsonl" in files
    formats = [f"--trace-format={name}" for name in ("perfetto", "chakra", "goal")]
    again = CliRunner().invoke(app, ["report", str(out), *formats])
    assert again.exit_code == 0, again.output
    assert (out / "trace.pftrace").exists() and (out / "trace.goal").exists()
    page = (out / "index.html").read_text(encoding="utf-8")
    assert "The clocks of two workers differ by at most" in page
    assert "virtual time" not in page
