"""A wait without end raises on both drivers, with worker, line and reason."""

import os
import re
import signal
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jdag
from jdag import schedules
from jdag.errors import JdagError, PassTimeout
from jdag.processes.stuck import Waits
from tests.properties.test_scheduled_plans import await_file, awaits
from tests.tools.pipeline_cases import layer, square
from tests.tools.stream_cases import soon

SCHEDULE = schedules.one_f_one_b(stages=2, micro_batches=3)
LIST = (
    "the schedule cannot go on: worker w0 waits for 0B0, which is next in its list; "
    "ready later in the list: 0F2; worker w1 waits for 1B0, which is next in its list; "
    "ready later in the list: 1F1"
)
SUM = (
    "if the root of the pass is a sum of losses, which waits for all of them, pass the "
    "losses as roots: ctx.backward(*losses)"
)


@pytest.fixture(scope="module")
def launched() -> Iterator[Any]:
    with jdag.launch(SCHEDULE.workers, schedule=SCHEDULE, allow=["tests"]) as cluster:
        yield cluster


@pytest.fixture(params=["simulate", "launch"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "launch":
        yield request.getfixturevalue("launched")
        return
    with jdag.simulate(SCHEDULE.workers, seed=0, schedule=SCHEDULE) as simulated:
        yield simulated


def total(*losses: Any) -> Any:
    return sum(losses)


def losses_of(cluster: Any, ctx: Any) -> Any:
    params = [cluster.put(worker, np.eye(3, dtype="f4")) for worker in ("w0", "w1")]
    batches = [np.ones((2, 3), "f4")] * 3
    return jdag.pipeline([layer] * 2, square)(ctx, params, batches, batches)


def in_a_pass(cluster: Any) -> None:
    with cluster.context() as ctx:
        ctx.backward(ctx.call("w1", total, *losses_of(cluster, ctx)))


def test_a_pass_that_a_list_holds_up_is_told_with_action_worker_and_line(cluster: Any):
    for _ in range(2):  # The cluster can be used on.
        with pytest.raises(JdagError) as caught:
            in_a_pass(cluster)
        said = str(caught.value)
        assert said.endswith(f"{LIST}; {SUM}"), said
        assert "programs still wait: 'w0' for a backward pass at test_stuck.py:" in said
        assert "in in_a_pass; the schedule" in said


class Friend:
    """It is held while it calls another one."""

    def visit(self, other: Any, path: str) -> str:
        """Call another one, once that one is held too."""
        Path(path).touch()
        while len([*Path(path).parent.iterdir()]) < 2:
            threading.Event().wait(0.01)
        return str(other.call("name"))

    def name(self) -> str:
        return "a friend"


def visited(cluster: Any, folder: Path) -> None:
    a, b = [cluster.host(worker, Friend) for worker in ("w0", "w1")]
    visits = ((a, b, "a"), (b, a, "b"))
    jdag.wait([x.start("visit", y, str(folder / name)) for x, y, name in visits])


def test_objects_that_wait_for_each_other_are_told(tmp_path: Path):
    with (
        pytest.raises(JdagError) as caught,
        jdag.launch(SCHEDULE.workers, allow=["tests"]) as cluster,
    ):
        visited(cluster, tmp_path)
    said = str(caught.value)
    assert said.startswith("nothing is left to happen, and these programs still wait: ")
    for worker, place in (("w0", "visited"), ("w0", "visit"), ("w1", "visit")):
        line = rf"'{worker}' for programs that it called at test_stuck.py:\d+ in \S*"
        assert re.search(rf"{line}{place}[,;]", said), said


def later_first(cluster: Any, ctx: Any) -> Any:
    """A micro-batch takes what a later one made: the list has them in another order."""
    w, made = cluster.put("w0", np.eye(3, dtype="f4")), np.ones((2, 3), "f4")
    for m in (2, 0):
        with ctx.tag(stage=0, micro_batch=m):
            made = ctx.call("w0", layer, w, made)
    return made


def in_a_fetch(cluster: Any) -> None:
    with cluster.context() as ctx:
        later_first(cluster, ctx).fetch()


@jdag.program
def fetches(ctx: Any, made: Any) -> float:
    return float(made.fetch()[0, 0])


def in_a_task(cluster: Any) -> None:
    with cluster.context() as ctx:
        ctx.start("w1", fetches, later_first(cluster, ctx)).result()


@pytest.mark.parametrize(
    ("wait", "said"),
    [
        (in_a_fetch, "'w0' for values that it fetches at test_stuck.py:"),
        (in_a_task, "'w0' for programs that it called at test_stuck.py:"),
    ],
)
def test_a_wait_that_a_list_holds_up_is_told_wherever_it_is(
    cluster: Any, wait: Any, said: str
):
    with pytest.raises(JdagError) as caught:
        wait(cluster)
    told = str(caught.value)
    assert said in told, told
    assert "w0 waits for 0F0, which is next" in told
    assert "in its list; ready later in the list: 0F2" in told
    assert wait is in_a_fetch or "'w1' for values that it fetches at test_" in told
    assert SUM not in told


@pytest.mark.second
def test_a_wait_without_end_is_told_after_a_loss():
    with jdag.launch(
        [*SCHEDULE.workers, "z"], schedule=SCHEDULE, allow=["tests"]
    ) as cluster:
        os.kill(cluster.driver.launch.pids["z"], signal.SIGKILL)
        soon(lambda: cluster.info()["z"]["lost"])
        with pytest.raises(JdagError, match=re.escape(LIST)):
            in_a_pass(cluster)


def test_a_context_that_is_left_while_a_list_waits_ends(cluster: Any):
    with cluster.context() as ctx:
        later_first(cluster, ctx)


@jdag.program
def runs_on(ctx: Any, path: str) -> int:
    await_file(path, 0)
    return 1


def a_program(ctx: Any, path: str) -> Any:
    return ctx.call("w1", runs_on, path)


def a_job(ctx: Any, path: str) -> Any:
    return ctx.call("w1", awaits, jdag.static(path), np.float32(1)).fetch()


@pytest.mark.parametrize("wait", [a_program, a_job])
def test_what_takes_long_is_not_taken_for_stuck(
    launched: Any, wait: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    looks, look = count(), Waits.look

    def counted(self: Waits) -> None:
        look(self)
        if next(looks) == 9:
            (tmp_path / "go").touch()

    monkeypatch.setattr(Waits, "look", counted)
    with launched.context() as ctx:
        assert wait(ctx, str(tmp_path / "go")) == 1


def test_a_wait_with_an_alarm_is_not_taken_for_stuck_and_its_actions_are_known(
    cluster: Any,
):
    waits = LIST.removeprefix("the schedule cannot go on: ")
    with cluster.context() as ctx:
        total_loss = ctx.call("w1", total, *losses_of(cluster, ctx))
        with pytest.raises(
            PassTimeout, match=re.escape(f"timeout_s=1; {waits}; {SUM}")
        ):
            ctx.backward(total_loss, timeout_s=1)
    assert waits.startswith(cluster.info()["w0"]["waits_for"] + "; worker w1")
