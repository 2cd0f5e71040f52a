"""Commands and files that the documents show work as shown."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jdag.scenario import load
from jdag.scenario.run_scenario import run_scenario
from tests import ROOT
from tests.tools.documents import block, documents
from tests.tools.two_hosts import Hosts, two_hosts

HOSTS = "docs/howto/several-hosts.md"
CALLS = "docs/reference/calls.md"
# Programs that print the same on processes: a page, and a word of the block.
PROGRAMS = [
    *((CALLS, word) for word in ("def halve", "def train(", "ring", "on_cotangent")),
    ("docs/tutorials/training.md", "cluster.save"),
    ("docs/howto/hosted-objects.md", "env.start"),
]


def printed_by(text: str, folder: Path) -> str:
    script = folder / "script.py"
    script.write_text(text)
    command = [sys.executable, "-X", "dev", "-W", "error::UserWarning", str(script)]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


SIMULATED = 'jdag.simulate(["trainer", "ps0", "ps1"], seed=0)'
# What a program of two hosts may be.
TRAIN = """
import jax.numpy as jnp, jdag

def loss(w, x, y):
    return jnp.mean((jnp.tanh(x @ w["in"]) @ w["out"] - y) ** 2)

def descend(w, gradient):
    return w - 0.1 * gradient

x, y = jnp.linspace(0.0, 1.0, 32).reshape(4, 8), jnp.ones((4, 1))
with jdag.simulate(["trainer", "ps0", "ps1"], seed=0) as cluster:
    w = {"in": cluster.put("ps0", 0.1 * jnp.ones((8, 16)))}
    w["out"] = cluster.put("ps0", 0.1 * jnp.ones((16, 1)))
    for _ in range(20):
        with cluster.context() as ctx:
            error = ctx.call("ps0", loss, w, x, y)
            ctx.backward(error)
            cluster.update(descend, w, ctx.gradient(w))
            print(error.fetch())
"""


@pytest.mark.second
@pytest.mark.parametrize(("page", "word"), PROGRAMS)
def test_programs_print_the_same_on_real_workers(page: str, word: str, tmp_path: Path):
    script = block(page, "python", word)
    simulated = printed_by(script, tmp_path)
    launched = re.sub(r"simulate\((.*), seed=\d\)", r"launch(\1, logs='logs')", script)
    printed = printed_by(launched, tmp_path)
    printed += (tmp_path / "logs" / "ps0.log").read_text() if "ps0" in script else ""
    assert launched != script and printed == simulated


@pytest.mark.second
def test_two_hosts_work_as_printed(tmp_path: Path):
    with two_hosts(tmp_path) as hosts:
        file = hosts.here(block(HOSTS, "toml", "[tls]"))
        (tmp_path / "cluster.toml").write_text(file)
        certify = hosts.here(block(HOSTS, "sh", "openssl"))
        subprocess.run(["sh", "-e"], input=certify, text=True, check=True, cwd=tmp_path)
        commands = block(HOSTS, "sh", "jdag up")
        up, worker = re.findall(r"^(jdag \w+ .*?) +#", commands, re.M)
        if not hosts.are_apart:  # All workers are on this host then, the trainer too.
            up += " --except trainer"
        page = (ROOT / HOSTS).read_text(encoding="utf-8")
        (joined,) = re.findall("^with (.*) as cluster:", page, re.M)
        (hosts.place(0) / "train.py").write_text(TRAIN.replace(SIMULATED, joined))
        losses = trained(hosts, up)
        assert len(losses) == 20 and losses == sorted(losses, reverse=True)
        assert losses == [float(one) for one in printed_by(TRAIN, tmp_path).split()]

        with hosts.running(1, worker) as process:
            said_by(process, "worker ps0: at ")
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0


def trained(hosts: Hosts, up: str) -> list[float]:
    with hosts.running(1, up) as workers:
        said_by(workers, "press Ctrl-C to stop the workers")
        with hosts.running(0, "python train.py") as trainer:
            said, _ = trainer.communicate(timeout=200)
            assert trainer.returncode == 0, said
        workers.send_signal(signal.SIGINT)
        assert workers.wait(60) == 0
    return [float(line) for line in said.splitlines()]


def said_by(process: subprocess.Popen[str], wanted: str) -> None:
    assert process.stdout is not None
    heard = []
    for line in process.stdout:
        heard.append(line)
        if line.startswith(wanted):
            return
    raise AssertionError(f"it has never said {wanted!r}: {''.join(heard)}")


def test_the_scenario_is_met_with_the_program_beside_it(tmp_path: Path):
    (tmp_path / "lossy.toml").write_text(
        block("docs/tutorials/what-if.md", "toml", "[expect]")
    )
    shapes = (ROOT / "scenarios" / "shapes.py").read_text()
    (tmp_path / "shapes.py").write_text(shapes)
    answer = run_scenario(
        load(tmp_path / "lossy.toml"), lambda done, total, numbers: None
    )
    assert answer.met, answer.judged
    assert answer.figures["resends"], answer.figures


@pytest.mark.second
def test_the_sweep_runs_as_printed(tmp_path: Path):
    (tmp_path / "scenarios").symlink_to(ROOT / "scenarios")
    command = block("docs/howto/sweeps.md", "sh", "jdag sweep").replace(
        "jdag", '"$0" -m jdag', 1
    )
    done = subprocess.run(
        ["sh", "-c", command, sys.executable],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    folder = tmp_path / "runs" / "which_schedule-sweep"
    head, *rows = [
        line.split(",") for line in (folder / "sweep.csv").read_text().splitlines()
    ]
    places = [head.index(name) for name in ("schedule", "makespan_ns")]
    first = {row[places[0]]: int(row[places[1]]) for row in rows[:3]}
    assert len(rows) == 9 and first["zb_h1"] < first["gpipe"] <= first["1f1b"]
    assert (folder / "makespan_ns.png").stat().st_size > 10_000


def test_what_readme_links_to_exists():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (ROOT / target).exists(), f"{page.name}: {target}"


def test_what_is_read_first_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 120
    assert len(documents()) > 30
