"""Worker processes: started, joined, watched, stopped, and nothing left behind."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from jdag.errors import JoinError, ScenarioError
from jdag.processes.launch import launch as launch_module
from jdag.processes.launch.launch import Launch
from jdag.processes.launch.main_session import Session
from jdag.processes.launch.parent_watch import received_from
from jdag.processes.net import background
from jdag.processes.session.control import ControlClient
from jdag.processes.session.requests import Info
from tests import ROOT
from tests.tools import failing_cases
from tests.tools.rpc_cases import TOKEN, lives, options_of, plain, plan_of
from tests.tools.stream_cases import soon

LONG_S = 60.0


@pytest.fixture(scope="module")
def idle() -> Iterator[Launch]:
    """Two workers that outlive sessions."""
    with Launch(options_of("a", "b", once=False)) as made:
        yield made


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    made = tmp_path / "temporary"
    made.mkdir()
    monkeypatch.setenv("TMPDIR", str(made))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield made


def litter(place: Path) -> list[Path]:
    return [*place.iterdir(), *Path("/dev/shm").glob("*jdag*")]


# ------------------------------------------------------------------- with two workers


def test_a_worker_has_the_settings_of_its_launcher(idle: Launch):
    client = ControlClient("worker 'a'", idle.addresses["a"])
    info = client.ask(Info(token=TOKEN))
    client.close()
    assert info["pid"] == idle.pids["a"]
    handshake = info["handshake"]
    assert handshake["configuration"]["jax_enable_x64"] is True  # Of tests/conftest.py.
    assert handshake["cores"] == len(os.sched_getaffinity(0))


# -------------------------------------------------------------------------- one by one


def test_sigterm_drains_a_worker_in_the_middle_of_a_session():
    with Launch(options_of("a", once=False)) as launch:
        deaths: dict[str, str] = {}
        launch.on_death(deaths.__setitem__)
        with Session(plan_of(launch.addresses)) as session:
            plain(session).ask("a", b"x")
            os.kill(launch.pids["a"], signal.SIGTERM)
            soon(lambda: "a" in deaths)
            why = deaths["a"]
            assert f"it ended with exit code 0 (process {launch.pids['a']})" in why
            assert "drained" in why
            plain(session).wait(lambda: "a" not in plain(session).streams)


def test_a_worker_that_is_stopped_is_woken_to_end_by_itself():
    with Launch(options_of("a", once=False)) as launch:
        os.kill(launch.pids["a"], signal.SIGSTOP)
    assert launch._children["a"].process.returncode == 0


def test_a_process_that_dies_at_its_start_says_why(place: Path):
    options = options_of("a", node="tests.tools.rpc_cases:make_broken")
    with pytest.raises(JoinError) as caught:
        Launch(options)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("worker 'a' did not start: it ended with exit code 3 (")
    assert lines[1] == "the end of its output:"
    assert [line.strip() for line in lines[2:]] == [f"line {n}" for n in range(90, 100)]
    assert not litter(place)


def test_a_worker_collects_garbage_but_not_among_imported_modules():
    options = options_of("a", node="tests.tools.rpc_cases:make_collecting")
    with pytest.raises(JoinError) as caught:
        Launch(options)
    assert str(caught.value).split()[-3:] == ["collector", "True", "True"]


def test_a_port_in_use_is_what_the_worker_says(idle: Launch):
    taken = idle.addresses["a"]
    with pytest.raises(JoinError) as caught:
        Launch(options_of("c", control=str(taken)))
    assert str(caught.value) == (
        f"worker 'c' did not start: cannot listen at {taken}: Address already in use"
    )


@pytest.mark.parametrize(
    ("node", "ready_s", "said"),
    [
        ("plain", 0.05, r"is not ready within ready_s=0\.05; "),
        ("odd", LONG_S, r"""did not start: malformed message: b'{"ready": 5}'"""),
    ],
)
def test_one_that_says_nothing_or_odd_things_is_named_and_stopped(
    place: Path, node: str, ready_s: float, said: str
):
    options = options_of("a", node=f"tests.tools.rpc_cases:make_{node}")
    with pytest.raises(JoinError, match=f"worker 'a' {said}"):
        Launch(options, ready_s=ready_s)
    assert not litter(place)


def test_those_that_are_starting_when_the_caller_is_interrupted_are_killed(
    place: Path, monkeypatch: pytest.MonkeyPatch
):
    launches: list[Launch] = []
    begin = Launch._begin

    async def begun(self: Launch, *arguments: Any) -> None:
        launches.append(self)
        await begin(self, *arguments)

    def interrupted(coroutine: Any) -> Any:
        monkeypatch.setattr(launch_module, "wait_for", background.wait_for)
        running = asyncio.run_coroutine_threadsafe(coroutine, background.loop())
        soon(lambda: bool(launches) and len(launches[0].pids) == 2)
        running.cancel()
        raise KeyboardInterrupt

    monkeypatch.setattr(Launch, "_begin", begun)
    monkeypatch.setattr(launch_module, "wait_for", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Launch(options_of("a", "b"))
    (launch,) = launches
    ends = [child.process.returncode for child in launch._children.values()]
    assert (ends, launch.alive) == ([-signal.SIGKILL] * 2, ())
    assert not litter(place)


def test_who_fails_when_told_of_a_death_is_told_of_the_next_and_all_end(tmp_path: Path):
    told = {}

    def fails(worker: str, why: str) -> None:
        told[worker] = why
        raise ValueError(worker)

    log = tmp_path / "a.log"
    log.write_text("of a run before\n")  # None of the lines of this process.
    with Launch(options_of("a", "b"), logs=tmp_path) as launch:
        launch.on_death(fails)
        for worker in "ab":
            os.kill(launch.pids[worker], signal.SIGKILL)
        launch.wait()
    assert sorted(told) == ["a", "b"]
    assert told["a"].endswith("; it has printed nothing")
    assert log.read_text() == "of a run before\n"


def test_a_parent_that_died_before_it_read_all_is_gone():
    ours, theirs = socket.socketpair()
    with ours:
        theirs.sendall(b"stop\n")
        assert received_from(ours) == b"stop\n"
        ours.sendall(b"ready")
        theirs.close()
        assert received_from(ours) == b""


def test_logs_that_cannot_be_written_are_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    allowed = "expected the path of a writable folder"
    for name, why in (
        ("file", "File exists"),
        ("file/x", "Not a directory"),
        ("a\0b", "no file can have this name"),
    ):
        place = tmp_path / name
        with pytest.raises(ScenarioError) as caught:
            Launch(options_of("a"), logs=place)
        said = f"logs = {str(place)!r}: {allowed}; {why}"
        assert str(caught.value).startswith(said)
    with pytest.raises(ScenarioError, match=f"logs = '/proc': {allowed}"):
        Launch(options_of("a"), logs="/proc")


# ------------------------------------------------------- whatever becomes of the caller


IDLE = """
import json, os, signal, sys, threading
from jdag.processes.launch.launch import Launch
from jdag.processes.launch.main_session import Session
from tests.tools.rpc_cases import options_of, plan_of

def main():
    launch = Launch(options_of("a"))
    session = Session(plan_of(launch.addresses))
    print(json.dumps([launch.pids, str(launch.logs)]), flush=True)
    {end}

main()
"""
# b computes for half a minute; large arrays lie in segments and are on their way.
BUSY = """
import json, signal, threading
from pathlib import Path
import numpy as np
import jdag
from tests.tools import failing_cases as cases

def main():
    with jdag.launch(["a", "b", "c"], allow=["tests.tools.failing_cases"]) as cluster:
        launch = cluster.driver.launch
        large = cluster.put("b", np.ones(1 << 20))
        with cluster.context() as ctx:
            there = ctx.call("c", cases.scaled, large, 2.0)
            back = there.fetch()
            waiting = ctx.call("b", cases.waits, there)
            while not (Path("{here}") / str(launch.pids["b"])).exists():
                threading.Event().wait(0.02)
            more = [ctx.call("c", cases.scaled, back, float(k)) for k in range(20)]
            print(json.dumps([launch.pids, str(launch.logs)]), flush=True)
            {end}

main()
"""
# A signal that comes as a wait without an end begins wakes nobody in Python.
WAITS = "while True: threading.Event().wait(0.1)"
WAYS = {
    "kill": (WAITS, signal.SIGKILL, -signal.SIGKILL),
    "terminate": (WAITS, signal.SIGTERM, -signal.SIGTERM),
    "interrupt": (WAITS, signal.SIGINT, -signal.SIGINT),
    "exception": ("raise ValueError", None, 1),
}
SCRIPTS = {"idle": IDLE, "busy": BUSY}


@pytest.mark.parametrize(
    ("way", "script"),
    [
        ("kill", "busy"),
        *[
            pytest.param(*each, marks=pytest.mark.second)
            for each in product(WAYS, SCRIPTS)
            if each != ("kill", "busy")
        ],
    ],
)
def test_whatever_becomes_of_the_caller_nothing_is_left(
    place: Path, tmp_path: Path, way: str, script: str
):
    end, number, code = WAYS[way]
    script = SCRIPTS[script].replace("{end}", end).replace("{here}", str(tmp_path))
    caller = subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT), failing_cases.HERE: str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    try:
        assert caller.stdout is not None
        pids, logs = json.loads(caller.stdout.readline())
        assert Path(logs) in litter(place)
        if number is not None:
            # As a terminal does, to all of the group; workers are in none of it.
            os.killpg(caller.pid, number)
        if way in ("interrupt", "exception"):
            # Who leaves a context waits for what runs in it: b may have done now.
            tmp_path.joinpath(str(pids.get("b"))).unlink(missing_ok=True)
        caller.communicate(timeout=LONG_S)
        assert caller.returncode == code
        soon(lambda: not any(map(lives, pids.values())))
        soon(lambda: not litter(place))
    finally:
        caller.kill()
        caller.communicate()


FORKS = """
import gc, os, signal, sys, warnings
from contextlib import ExitStack
import jax.numpy as jnp
import optax
import jdag

warnings.simplefilter("ignore")  # JAX warns of forks.

def forked(use):
    # A child that hangs ends by SIGALRM, so that its status says so.
    gc.collect()
    copy = os.fork()
    if not copy:
        signal.alarm(60)
        try:
            use()
        except jdag.JdagError as error:
            os._exit(f"process {os.getpid()} was forked from process" in str(error))
        os._exit(2)
    return os.WEXITSTATUS(os.waitpid(copy, 0)[1])

def drops_all():
    global y, ctx, w, cluster
    session, launch = cluster.driver.session, cluster.driver.launch
    session._leave_at_exit()  # As at its exit; that of JAX may hang.
    launch.close()
    del y, ctx, w, cluster, session, launch
    gc.collect()

def leaves_by_an_exit():
    try:
        with ExitStack() as stack:
            stack.push(cluster)
            stack.push(ctx)
            sys.exit(7)
    except SystemExit as error:
        os._exit(error.code)

with jdag.launch(["a", "b"]) as cluster:
    w = cluster.put("b", jnp.arange(1.0, 4.0))
    optimizer = jdag.Optimizer(optax.sgd(1.0), w)
    with cluster.context() as ctx:
        y = ctx.call("b", jnp.sum, w)
        ctx.backward(y, retain_graph=True)
        uses = [
            lambda: cluster.put("b", 1.0),
            lambda: cluster.update(jnp.negative, w),
            lambda: ctx.call("b", jnp.sum, w),
            lambda: ctx.backward(y),
            lambda: ctx.gradient(w),
            lambda: w.fetch(),
            lambda: y.fetch(),
            lambda: optimizer.step(ctx),
            lambda: cluster.info(),
            lambda: cluster.context().__enter__(),
            lambda: ctx.__exit__(None, None, None),
            cluster.close,
            lambda: cluster.__exit__(None, None, None),
        ]
        print(*map(forked, uses), forked(drops_all), forked(leaves_by_an_exit))
        ctx.backward(y)  # Its gradient is added to that of the first pass.
        optimizer.step(ctx)
    print(w.fetch())
"""


@pytest.mark.second
def test_a_forked_child_cannot_use_the_cluster_and_harms_its_parent_in_no_way():
    command = [sys.executable, "-c", FORKS]
    # It starts a process that imports JAX, and then ends by itself.
    said = subprocess.check_output(command, text=True, timeout=4 * LONG_S, cwd=ROOT)
    assert said == f"{'1 ' * 11}2 2 2 7\n[-1.  0.  1.]\n"
