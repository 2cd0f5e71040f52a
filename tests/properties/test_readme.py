"""What the README prints runs as printed."""

import inspect
import re
import signal
import subprocess
import sys
from functools import reduce
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jdag
from jdag.scenario import load
from jdag.scenario.run_scenario import run_scenario
from jdag.sim.settings import SimSettings
from tests import ROOT
from tests.tools.two_hosts import Hosts, two_hosts

README = ROOT / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)


def block(language: str, *words: str) -> str:
    (found,) = [
        block for block in blocks(language) if all(word in block for word in words)
    ]
    return found


def test_the_examples_run_as_printed(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    space: dict[str, object] = {"__name__": "__main__"}

    def printed(*words: str) -> str:
        exec(compile(block("python", *words), "README.md", "exec"), space)
        return capsys.readouterr().out

    assert printed("jdag.simulate", "(w0)).shape").endswith(" (8, 16)\n")
    assert printed("halve") == "0.8125 ps1 0.0625\n"
    assert printed("ctx.replicate(").startswith("[")
    assert printed("cluster.run", "trainer1") == "[ 1. -2.  3.]\n"
    assert printed("cluster.all_reduce") == "[1.0, -2.0, 3.0]\n"
    assert printed("cluster.host") == "False [True]\n"
    assert printed("cluster.save").endswith(" True\n120\n")
    assert printed("cluster.replicate_leaves") == "True\n"
    of: Any = space.__getitem__
    x = jnp.linspace(-1.0, 1.0, 24, dtype="float32").reshape(8, 3)
    assert not printed("def eqx_loss")
    loss, rest, found, stats = map(of, ("eqx_loss", "rest", "found", "stats"))
    assert loss(rest, found, (stats, jax.random.key(2)), x)[0] < 0.3
    assert not printed("def nnx_loss")
    net = of("net")
    net.eval()
    assert jnp.mean((net(x) - x) ** 2) < 0.3
    assert printed("data_parallel") == "(3, 4)\n"
    assert printed("on_cotangent") == "w0 gained 2.0 on ps0\n"


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
# What a program of the README's two hosts may be.
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
def test_real_workers_print_the_same_as_simulated_ones(tmp_path: Path):
    ten = block("python", "ctx.gradient(w0)).shape)", "jdag.simulate")
    real = block("python", "jdag.launch(").partition("\n")[0]
    simulated = printed_by(ten, tmp_path)
    assert simulated.endswith(" (8, 16)\n")
    launched = ten.replace(f"with {SIMULATED} as cluster:", real)
    assert launched != ten and printed_by(launched, tmp_path) == simulated
    assert (tmp_path / "logs" / "ps0.log").read_text() == ""


@pytest.mark.second
@pytest.mark.parametrize(
    "words",
    [
        *("def halve", "trainer1", "cluster.save", "on_cotangent", "cluster.host"),
        "trainer1 cluster.all_reduce",
    ],
)
def test_programs_of_a_script_print_the_same_on_real_workers(
    words: str, tmp_path: Path
):
    blocks = [block("python", word) for word in re.findall(r"def \w+|\S+", words)]
    script = "import jax.numpy as jnp, jdag\n" + "\n".join(blocks)
    simulated = printed_by(script, tmp_path)
    launched = re.sub(r"simulate\((.*), seed=\d\)", r"launch(\1, logs='logs')", script)
    printed = printed_by(launched, tmp_path)
    printed += (tmp_path / "logs" / "ps0.log").read_text() if "ps0" in script else ""
    assert launched != script and printed == simulated


@pytest.mark.second
def test_two_hosts_work_as_printed(tmp_path: Path):
    with two_hosts(tmp_path) as hosts:
        (tmp_path / "cluster.toml").write_text(hosts.here(block("toml", "[tls]")))
        certify = hosts.here(block("sh", "openssl"))
        subprocess.run(["sh", "-e"], input=certify, text=True, check=True, cwd=tmp_path)
        (up,) = re.findall("`(jdag up .*?)`", README.read_text())
        if not hosts.are_apart:  # All workers are on this host then, the trainer too.
            up += " --except trainer"
        (joined,) = re.findall("`with (.*) as cluster:`", README.read_text())
        (hosts.place(0) / "train.py").write_text(TRAIN.replace(SIMULATED, joined))
        losses = trained(hosts, up)
        assert len(losses) == 20 and losses == sorted(losses, reverse=True)
        assert losses == [float(one) for one in printed_by(TRAIN, tmp_path).split()]

        (worker,) = re.findall("`(jdag worker .*?)`", README.read_text())
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
    (tmp_path / "lossy.toml").write_text(block("toml", "[expect]"))
    shapes = (README.parent / "scenarios" / "shapes.py").read_text()
    (tmp_path / "shapes.py").write_text(shapes)
    answer = run_scenario(
        load(tmp_path / "lossy.toml"), lambda done, total, numbers: None
    )
    assert answer.met, answer.judged
    assert answer.figures["resends"], answer.figures


@pytest.mark.second
def test_the_sweep_runs_as_printed(tmp_path: Path):
    (tmp_path / "scenarios").symlink_to(README.parent / "scenarios")
    command = block("sh", "jdag sweep").replace("jdag", '"$0" -m jdag', 1)
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


def test_what_it_links_to_is_there():
    for target in re.findall(r"\]\(([^)#]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target


# What the README's short names are.
KNOWN: dict[str, Any] = {
    "jdag": jdag,
    "cluster": jdag.Cluster,
    "ctx": jdag.Context,
    "ref": jdag.Ref,
    "optimizer": jdag.Optimizer,
}


def rows() -> list[list[str]]:
    section = README.read_text().partition("## Coming from PyTorch")[2]
    section = section.partition("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def code(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def missing(text: str) -> list[str]:
    lacking = []
    for span in code(text):
        for name, given in re.findall(r"((?<![\w.])\w+(?:\.\w+)+)(?=(\(.*\))?)", span):
            first, *rest = name.split(".")
            try:
                called = reduce(attribute, rest, KNOWN.get(first))
                if given and called is not None:
                    check_keywords(called, re.findall(r"(\w+)=", given))
            except AttributeError as error:
                lacking.append(f"{span}: {error}")
    return lacking


def attribute(owner: Any, name: str) -> Any:
    """An attribute; None where no class has its value, or of what is not ours."""
    if owner is None or name in getattr(owner, "__annotations__", ()):
        return None
    return getattr(owner, name)


def check_keywords(called: Any, keywords: list[str]) -> None:
    """Raise AttributeError where it does not take one of the keywords."""
    taken = dict(inspect.signature(called).parameters)
    if called is jdag.simulate:  # It hands its settings on to the driver.
        del taken["settings"]
        taken.update(inspect.signature(SimSettings).parameters)
    if any(each.kind is each.VAR_KEYWORD for each in taken.values()):
        return
    for keyword in keywords:
        if keyword not in taken:
            raise AttributeError(f"{called} takes no {keyword}")


def test_each_of_our_names_for_those_of_pytorch_exists():
    assert len(rows()) > 20
    spans = [span for _, ours, differs in rows() for span in code(ours + differs)]
    named = [span for span in spans if span.lstrip("@").split(".")[0] in KNOWN]
    assert len(named) > 20
    for theirs, ours, differs in rows():
        assert not missing(ours + differs), theirs


@pytest.mark.parametrize(
    "text",
    [
        "`cluster.putt(worker)`",
        "`ctx.backward(loss, retain=True)`",
        "`@jdag.programme`",
        "`jdag.Optimizer(tx, leaves, clip=1.0)`",
        "`ctx.call(ref.owned, fn)`",
    ],
)
def test_a_name_that_does_not_exist_is_noticed(text: str):
    assert missing(text)
