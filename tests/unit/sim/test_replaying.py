"""Runs of processes that are repeated from their journals."""

import os
import subprocess
import sys
from pathlib import Path
from threading import Event
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import jdag
from jdag.cli.commands import app
from jdag.errors import JdagError, JournalsEnd, ReplayError, ScenarioError, WorkerLost
from jdag.processes.net.connection import Connection
from jdag.processes.net.large_values import Assembler
from jdag.runtime.journal import Entries, read_journals
from jdag.training.recovery import Recovery
from tests.tools.error_texts import fails_with
from tests.tools.journal_cases import replayed
from tests.tools.pipeline_cases import step
from tests.tools.rpc_nodes import cluster, connect, made, whereabouts
from tests.unit.processes.test_node import W, X, gradient, hidden, total

WORKERS = ("a", "b", "c")
NAME = "program.py"


def recorded(folder: Path, run: Any, bytes_max: int = 1 << 20, **settings: Any) -> Any:
    journal: Any = {"journal": str(folder), "journal_bytes": bytes_max}
    with cluster(WORKERS, **journal, program=NAME, **settings) as c:
        return run(c)


def thrice(c: Any) -> list[bytes]:
    return [np.asarray(gradient(c)).tobytes() for _ in range(3)]


def large(c: Any) -> list[bytes]:
    """Values that follow their messages, which small ones overtake."""
    value = jnp.arange(3_000_000.0)
    with c.context() as ctx:
        there = ctx.move("c", ctx.move("b", value))
        small = ctx.call("c", hidden, W, X)
        return [np.asarray(one.fetch()).tobytes() for one in (small, there)]


def fails(x: Any) -> Any:
    raise ValueError(f"no {x.shape}")


def failing(c: Any) -> str:
    with pytest.raises(JdagError) as caught, c.context() as ctx:
        ctx.call("b", jdag.unjitted(fails), ctx.call("c", hidden, W, X)).fetch()
    return str(caught.value).partition("\n")[0]


GO_ON = Event()


@jdag.program
def held(ctx: Any) -> Any:
    assert GO_ON.wait(60)
    return ctx.call("c", hidden, W, X)


def early(c: Any) -> list[bytes]:
    """A program goes on when its worker has done more; in the replay, at once."""
    (GO_ON.clear if hasattr(c, "nodes") else GO_ON.set)()
    with c.context() as ctx:
        task = ctx.start("b", held)
        between = ctx.call("b", hidden, W, X).fetch()
        GO_ON.set()
        found = task.result().fetch()
    return [np.asarray(one).tobytes() for one in (between, found)]


@pytest.mark.parametrize("run", [thrice, large, failing, early])
def test_a_run_is_repeated_with_its_results_in_the_order_of_its_journals(
    tmp_path: Path, run: Any
):
    wanted = recorded(tmp_path, run)
    journals = read_journals(tmp_path, WORKERS, NAME)
    found, inputs = replayed(journals, run)
    assert found == wanted
    assert inputs == sum(len(one.lines) for one in journals.values())


def test_a_run_under_a_schedule_is_repeated(tmp_path: Path):
    schedule = jdag.schedules.one_f_one_b(stages=3, micro_batches=4, workers=WORKERS)

    def run(c: Any) -> list[bytes]:
        return [np.asarray(one).tobytes() for one in step(c, schedule)]

    wanted = recorded(tmp_path, run, schedule=schedule)
    found, _ = replayed(read_journals(tmp_path, WORKERS, NAME), run, schedule)
    assert found == wanted


def again(c: Any, name: str, incarnation: int) -> bool:
    """Let a new node take the place of a lost one."""
    numbers = {**dict.fromkeys(WORKERS, 0), name: incarnation}
    session = c.nodes["a"]._session
    given: Any = {"incarnations": numbers, "program": session.program}
    given["journal"] = session.settings.journal
    made(name, WORKERS, ("tests",), **given)[1].close()  # An attach that failed.
    _, node = made(name, WORKERS, ("tests",), **given)
    for other in WORKERS:
        if other != name:
            at = c.nodes[other]
            at._session.members.attach(name, incarnation, whereabouts(incarnation, ()))
            node.joined(other, 0)
            connect(at, node)
            at.joined(name, incarnation)
    c.nodes[name] = node
    node.begin()
    return True


def recovers(c: Any) -> tuple[list[bytes], Any]:
    """A worker is lost twice; its third incarnation has what was put there."""
    Recovery(c)
    w, v = c.put("c", W), c.put("b", W)
    found = []
    for incarnation in (1, 2):
        if hasattr(c, "nodes"):
            c.driver.rejoined = lambda *_, to=incarnation: again(c, "c", to)
            c.nodes["c"].close()
        with pytest.raises(WorkerLost), c.context() as ctx:
            ctx.call("c", hidden, w, X).fetch()
        c.recover()
    with c.context() as ctx:
        kept = ctx.call("c", hidden, w, X)
        both = ctx.call("a", jnp.add, kept, ctx.call("b", hidden, v, X))
        ctx.backward(ctx.call("a", total, both))
        found += [ctx.gradient(w).fetch(), ctx.gradient(v).fetch()]
    return [np.asarray(one).tobytes() for one in found], c.driver.incarnations


def test_the_return_of_a_lost_worker_is_repeated(tmp_path: Path):
    (wanted, now) = recorded(tmp_path, recovers)
    assert now == {"c": 2}
    journals = read_journals(tmp_path, WORKERS, NAME)
    assert [*journals] == [*WORKERS, "c#1", "c#2"]
    found, inputs = replayed(journals, recovers)
    assert found == (wanted, now)
    assert inputs == sum(len(one.lines) for one in journals.values())
    (tmp_path / "c#1.journal").unlink()
    with fails_with(ScenarioError, "sim.c_1_journal_no_such"):
        read_journals(tmp_path, WORKERS, NAME)


def test_a_journal_is_written_before_what_its_inputs_led_to_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    unwritten: list[int] = []
    flushed = Connection.flush

    def run(c: Any) -> None:
        journals = {id(node._loop): node._journal for node in c.nodes.values()}

        def flush(peer: Connection) -> None:
            unwritten.append(len(journals[id(peer._loop)]._noted))
            flushed(peer)

        with monkeypatch.context() as patched:
            patched.setattr(Connection, "flush", flush)
            thrice(c)

    recorded(tmp_path, run)
    assert unwritten and not any(unwritten)


def test_a_full_journal_replays_as_far_as_it_goes(tmp_path: Path):
    recorded(tmp_path, thrice, bytes_max=1_500)
    journals = read_journals(tmp_path, WORKERS, NAME)
    assert "full" in [one.end for one in journals.values()]
    said = r"the journals end here, at journal_bytes: \d+ events were repeated"
    with pytest.raises(JournalsEnd, match=said):
        replayed(journals, thrice)


def test_the_length_of_a_journal_is_refused_without_its_folder():
    said = "journal_bytes = 1000: expected a number together with journal=, which"
    with pytest.raises(ScenarioError, match=said):
        jdag.launch([*"ab"], journal_bytes=1000)


def test_a_folder_that_has_journals_is_refused_before_anything_starts(tmp_path: Path):
    (tmp_path / "b.journal").touch()
    said = "journal = .*: expected a new or an empty folder; this one contains jour"
    with pytest.raises(ScenarioError, match=said):
        jdag.launch([*"ab"], journal=tmp_path)


def other(c: Any) -> None:
    gradient(c)
    with c.context() as ctx:
        ctx.backward(ctx.call("a", total, ctx.call("c", hidden, c.put("c", W), X)))


@pytest.fixture(scope="module")
def journals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Entries]:
    folder = tmp_path_factory.mktemp("journals")
    recorded(folder, thrice)
    return read_journals(folder, WORKERS, NAME)


def test_a_program_that_does_something_else_is_told_where(journals: Any):
    said = r"on worker 'a' at event \d+: expected 'p .*', found 'p "
    with pytest.raises(JdagError, match=said):
        replayed(journals, other)


def test_a_program_that_does_less_is_told_what_is_expected(journals: Any):
    with fails_with(JdagError, "sim.expected_p_found_nothing_that"):
        replayed(journals, gradient)


@pytest.mark.parametrize(
    ("kind", "name", "changed", "said"),
    [
        ("j", "ok", "ValueError", r"'j \d+ ValueError', found 'j \d+ ok"),
        ("m", "Run", "Call", "'m .*Call.*', found 'm .*Run"),
    ],
)
def test_an_input_that_is_another_is_told(
    journals: Any, kind: str, name: str, changed: str, said: str
):
    lines = [*journals["b"].lines]
    index = next(n for n, one in enumerate(lines) if one[0] == kind and name in one)
    lines[index] = lines[index].replace(name, changed)
    replaced = {**journals, "b": Entries("b", lines, "end")}
    text = rf"worker 'b' at event {index + 1}: expected {said}"
    with pytest.raises(JdagError, match=text):
        replayed(replaced, thrice)


def test_a_run_that_has_deviated_is_not_said_to_be_repeated(journals: Any):
    def does_more(c: Any) -> None:
        thrice(c)
        with pytest.raises(ReplayError):
            gradient(c)

    with fails_with(ReplayError, "sim.expected_no_more_found_p"):
        replayed(journals, does_more)


def test_a_journal_without_its_last_lines_is_named(journals: Any):
    lines = journals["b"].lines[:9]
    with fails_with(ReplayError, "sim.of_worker_b_has_no"):
        replayed({**journals, "b": Entries("b", lines, "")}, thrice)


def test_a_journal_without_its_end_is_refused_though_others_saw_that_worker_leave(
    tmp_path: Path,
):
    recorded(tmp_path, thrice)
    path, other = tmp_path / "b.journal", tmp_path / "c.journal"
    path.write_text(path.read_text().removesuffix("end\n"))
    left = '["l","b"]\n'  # If c was the one that ended later.
    other.write_text(other.read_text().replace(left, "").removesuffix("end\n"))
    with other.open("a") as file:
        file.write(f"{left}end\n")
    with fails_with(ScenarioError, "sim.b_journal_is_truncated_during"):
        read_journals(tmp_path, WORKERS, NAME)


def overtaken(c: Any) -> tuple[bytes, str]:
    """A small message overtakes a large one, whose values never come; then a loss."""
    with c.context() as one, c.context() as other:
        there = one.move("c", jnp.arange(3_000_000.0))
        small = other.call("c", hidden, W, X).fetch()
        if hasattr(c, "nodes"):
            c.nodes["c"].close()
        with pytest.raises(WorkerLost) as caught:
            there.fetch()
    return np.asarray(small).tobytes(), type(caught.value).__name__


def test_a_worker_that_is_lost_before_a_large_value_has_come_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Assembler, "received", lambda *_: ())
    wanted = recorded(tmp_path, overtaken)
    journals = read_journals(tmp_path, WORKERS, NAME)
    found, _ = replayed(journals, overtaken)
    assert found == wanted


SCRIPT = """
import sys
import jax.numpy as jnp
import jdag

def double(x):
    return 2.0 * x

@jdag.program
def twice(ctx, x):
    return ctx.call("c", double, ctx.call("b", double, x))

if __name__ == "__main__":
    with jdag.launch(["a", "b", "c"], device="cpu", journal=sys.argv[1]) as cluster:
        with cluster.context() as ctx:
            w = cluster.put("b", jnp.ones(3))
            loss = ctx.call("a", jnp.sum, ctx.call("b", twice, w))
            ctx.backward(loss)
            print(type(cluster.driver).__name__, ctx.gradient(w).fetch())
"""


@pytest.mark.second
def test_a_script_is_run_again_by_the_command(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    script, folder = tmp_path / "script.py", tmp_path / "journals"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(folder)]
    path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path}
    subprocess.run(command, check=True, env=env)
    assert capfd.readouterr().out == "Node [4. 4. 4.]\n"

    def replay(*words: object) -> tuple[int, str, Any]:
        done = CliRunner(env=env).invoke(app, ["replay", *map(str, words)])
        return done.exit_code, done.output, capfd.readouterr()

    code, output, printed = replay(folder, "--", *command)
    assert (code, printed.out) == (0, "Replaying [4. 4. 4.]\n"), output
    assert f"as in {folder}: " in printed.err and " events of 3 workers" in printed.err
    other, twice = tmp_path / "other.py", tmp_path / "more" / "script.py"
    other.write_text(SCRIPT)
    twice.parent.mkdir()
    twice.write_text(SCRIPT.replace('"c", double', '"b", double'))
    for expected, file, error in (
        (2, other, "a.journal has program = 'script.py'; the replay needs "),
        (1, twice, "the run deviates from its journal on worker 'c' at event 1: expe"),
    ):
        command[1] = str(file)
        code, _, (_, line) = replay(folder, "--", *command)
        assert code == expected
        assert line.startswith("jdag: ") and line.count("\n") == 1, line
        assert error in line
    journal = folder / "a.journal"
    journal.write_text("".join(journal.read_text().splitlines(True)[:12]) + "full\n")
    command[1] = str(script)
    code, output, (_, line) = replay(folder, "--", *command)
    assert (code, output) == (0, "")
    assert line.endswith(" of 3 workers; the journals end here, at journal_bytes\n")
    assert line.count("\n") == 1
    for words, error in (
        (
            (folder, "--", "true"),
            "COMMAND = 'true': expected a command that launches",
        ),
        (
            ("--trace", "t", folder, "--", *command),
            "--trace = 't': expected no trace file, since a replay",
        ),
        (("none", "--", *command), "jdag: none: No such file or directory\n"),
    ):
        code, output, _ = replay(*words)
        assert code == 2 and error in output
    (folder / "b.journal").unlink()
    code, output, _ = replay(folder, "--", *command)
    assert code == 2 and "b.journal: No such file" in output
