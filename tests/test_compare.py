"""The comparison with the peer: what its rows compute, and what its table says."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import jdag
from paper import figures
from paper.compare import costs, ours, plans, rows, run
from paper.compare.bounds import bound


@pytest.fixture
def side():
    workers = [ours.CALLER, *rows.WORKERS]
    with jdag.simulate(workers, seed=0, trace=False) as cluster:
        yield ours.Ours(cluster, "fast")


def always(value: Any) -> Callable[[int], Any]:
    return lambda width: value


class Small(ours.Ours):
    """The same, but what takes long is small."""

    def identity(self, value: Any) -> Any:
        return value if value.size > 100_000 else super().identity(value)

    def retained(self, passes: int) -> rows.Phases:
        return super().retained(passes // 100)

    def memory(self) -> list[int]:
        return [rows.peak_bytes("self")]


class SmallPlans(Small, plans.Plans):
    """The same as plans."""


ONCE = rows.Repeats(1, 1, 1, 1)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The MLP is 8 wide."""
    monkeypatch.setattr(rows, "weights", always(rows.weights(8)))
    monkeypatch.setattr(rows, "batch", always(rows.batch(8)))


@pytest.mark.second
@pytest.mark.usefixtures("narrow")
def test_every_row_has_a_target_and_every_target_a_row(side: ours.Ours):
    small = Small(side.cluster, "smart")
    told = [list(found["rows"]) for found in rows.measure(small, ONCE)]
    names = list(rows.TARGETS)
    assert told[-1] == names and all(names[: len(one)] == one for one in told)
    assert len(told) == len(names) - 4  # A chain, and a fan-out, has two rows.


@pytest.mark.second
@pytest.mark.usefixtures("narrow")
def test_plans_compute_what_calls_one_by_one_do_and_each_row_has_a_target(
    side: ours.Ours,
):
    planned = SmallPlans(side.cluster)
    *_, eager = rows.measure(Small(side.cluster, "fast"), ONCE)
    *_, found = rows.measure(planned, ONCE)
    assert run.difference(eager, found) == ""
    assert set(found["numbers"]) == set(eager["numbers"])
    list(rows.measure_graphs(planned, ONCE, found))
    assert list(found["rows"]) == [*rows.PLANS, *rows.GRAPHS]
    product = np.prod([float(rows.factor(n)[0, 0]) for n in range(10)])
    truth = np.linspace(0.5, 1.5, 9) * product
    assert found["numbers"]["graph: chain of 10"] == pytest.approx(truth, rel=1e-5)


@pytest.mark.second
def test_a_part_that_raises_loses_no_row_before_it(side: ours.Ours):
    told, broken = [], mock.Mock(side_effect=RuntimeError("no such step"))
    small = Small(side.cluster, "fast")
    with mock.patch.object(small, "prepare", broken), pytest.raises(RuntimeError):
        for found in rows.measure(small, ONCE):
            told.append(list(found["rows"]))
    assert told[-1][-1] == "1,000 retained passes"


def test_other_numbers_than_the_peers_do_not_count():
    numbers = {"losses": [0.5, [0.25, 0.125]], "add": [[1.0, 2.0, 3.0]]}
    peer = {"numbers": numbers}

    def said(losses: Any) -> str:
        return run.difference(peer, {"numbers": {**numbers, "losses": losses}})

    assert said([0.5, [0.25, 0.12501]]) == ""
    assert said([0.5, [0.25, 0.126]]).startswith("not counted: losses is [0.5, [0.25,")
    assert said([0.5, [0.25]]).startswith("not counted: losses is [0.5, [0.25]]")
    assert run.difference(peer, {"numbers": {"add": numbers["add"]}}) == ""


# ------------------------------------------------ whatever fails, what there is is kept


def system(name: str) -> dict[str, Any]:
    """What a system prints last: the peer takes twice as long as ours."""
    unit = 2e-3 if name in (run.PEER, run.RAY) else 1e-3
    graphs = {row: unit for row in rows.GRAPHS}
    if name == run.RAY:
        return {"rows": graphs, "numbers": {}, "settings": {"ray": "2.60.0"}}
    more = {**dict.fromkeys(rows.PLANS, unit), **graphs} if name == run.PLAN else {}
    return {
        "rows": more or {row: unit * at for at, row in enumerate(rows.TARGETS, 1)},
        "numbers": {"add": [1.0, 2.0, 3.0]},
        "settings": {"torch": "2.13.0"},
    }


class Faulty:
    """Runs of systems in place of processes; one of the later ones meets a fault."""

    def __init__(self, name: str, fault: Callable[[Any, dict[str, Any]], int]) -> None:
        self.name = name
        self.fault = fault
        self.runs = 0

    def __call__(self, command: Any, *, stdout: Any, stderr: Any, **given: Any) -> int:
        name = command[0]
        self.runs += 1
        found = system(name) if name != "costs" else made_up_costs()
        if self.runs <= len(run.SYSTEMS) or name != self.name:
            stdout.write(f"to be ignored\n{json.dumps(found)}\n")
            return 0
        stderr.write("Traceback\nRuntimeError: it is broken\n")
        return self.fault(stdout, found)


def stops_after_some_rows(stdout: Any, found: dict[str, Any]) -> int:
    some = {key: found["rows"][key] for key in list(found["rows"])[:7]}
    stdout.write(f"{json.dumps({**found, 'rows': some})}\n{{cut off")
    return 1


def prints_nothing(stdout: Any, found: dict[str, Any]) -> int:
    return 0


def hangs(stdout: Any, found: dict[str, Any]) -> int:
    stops_after_some_rows(stdout, found)
    raise subprocess.TimeoutExpired("it", 900)


def computes_something_else(stdout: Any, found: dict[str, Any]) -> int:
    stdout.write(json.dumps({**found, "numbers": {"add": [1.0, 2.0, 4.0]}}))
    return 0


def is_interrupted(stdout: Any, found: dict[str, Any]) -> int:
    stops_after_some_rows(stdout, found)
    raise KeyboardInterrupt


def is_no_system(stdout: Any, found: dict[str, Any]) -> int:
    raise OSError("no such program")


JUDGED = run.JUDGED


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where `run` writes now; its systems are those of `Faulty`."""
    started = {key: [key] for key in run.SYSTEMS}
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    monkeypatch.setattr(run, "check", lambda option, python: None)
    monkeypatch.setattr(run, "commands", lambda peer, ray, more: started)
    monkeypatch.setattr(run, "COSTS", ["costs"])
    return tmp_path


@pytest.mark.parametrize(
    ("fault", "code", "said", "judged"),
    [
        ((JUDGED, stops_after_some_rows), 1, "RuntimeError: it is broken", [18, 7, 7]),
        ((JUDGED, hangs), 1, "not done within 900 s", [18, 7, 7]),
        ((JUDGED, prints_nothing), 1, "it printed no figures", [18, 0, 0]),
        ((JUDGED, computes_something_else), 1, "not counted: add is", [18, 0, 0]),
        ((JUDGED, is_interrupted), 130, "the rest: it was interrupted", [18, 7]),
        ((JUDGED, is_no_system), None, "the rest: OSError: no such program", [18, 0]),
        ((run.PEER, prints_nothing), 1, "it printed no figures", [18, 18, 18]),
        ((run.PLAN, stops_after_some_rows), 1, "2, plan: exit code 1", [18, 18, 18]),
        ((run.RAY, prints_nothing), 1, "2, Ray: it printed no", [18, 18, 18]),
        (("costs", stops_after_some_rows), 1, "costs: exit code 1", [18, 18, 18]),
        (("costs", is_interrupted), 130, "the rest: it was interrupted", [18, 18, 18]),
    ],
)
def test_whatever_fails_all_that_was_measured_is_written_and_the_rest_is_named(
    results: Path, fault: Any, code: int, said: str, judged: list[int]
):
    systems = mock.patch.object(subprocess, "call", Faulty(*fault))
    with systems, pytest.raises((SystemExit, OSError)) as ended:
        run.main(["--peer", "python", "--rounds", "3"])
    assert getattr(ended.value, "code", None) == code
    written = json.loads((results / "compare.json").read_text())
    each = [len(one.get(JUDGED, {}).get("rows", ())) for one in written["each"]]
    assert each == judged
    assert any(said in one for one in written["missing"])
    text = (results / "compare.md").read_text()
    assert "## What is missing" in text and said in text
    assert "| **0.50** (0.50 to 0.50) |" in text  # From the rounds that have both.
    assert len(list(results.iterdir())) == 2  # No file that is half written.


def test_a_round_that_was_measured_is_written_before_the_next_one_begins(
    results: Path,
):
    seen = []

    def looks(stdout: Any, found: dict[str, Any]) -> int:
        seen.append(json.loads((results / "compare.json").read_text()))
        return stops_after_some_rows(stdout, found)

    systems = mock.patch.object(subprocess, "call", Faulty(run.PEER, looks))
    with systems, pytest.raises(SystemExit):
        run.main(["--peer", "python", "--rounds", "3"])
    assert [one["rounds"] for one in seen] == [1, 2]
    assert "rounds: 1 of 3 were begun" in seen[0]["missing"]


def test_what_a_process_printed_before_it_failed_is_found():
    lines = 'print("{\\"rows\\": {\\"add\\": 1.5}}", flush=True); raise KeyError("add")'
    found: dict[str, Any] = {}
    why = run.taken([sys.executable, "-c", lines], 2, found)
    assert (found, why) == ({"rows": {"add": 1.5}}, "exit code 1: KeyError: 'add'")


def test_threads_that_end_while_they_are_counted_are_no_error(
    monkeypatch: pytest.MonkeyPatch,
):
    listed = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda self: [self / "0", *listed(self)])
    found = costs.switches(os.getpid())
    assert str(os.getpid()) in found and "0" not in found


def test_switches_are_those_of_the_threads_that_are_still_there():
    assert costs.grown({"1": 5, "2": 40}, {"1": 7, "3": 4}) == 2 + 4


def test_the_time_of_a_process_is_that_of_all_its_threads_also_those_that_ended():
    spun: list[int] = []

    def spins() -> None:
        sum(range(1_000_000))
        said = Path("/proc/thread-self/schedstat").read_text()
        spun.append(int(said.split()[0]))

    before = costs.ran_ns(os.getpid())
    threads = [threading.Thread(target=spins) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert costs.ran_ns(os.getpid()) - before >= sum(spun)


def one_round(peer: float, mine: float) -> dict[str, Any]:
    missed = {"1,000 retained passes": 0.8 * mine}
    return {
        "load": 0.0,
        run.PEER: {"rows": dict.fromkeys(rows.TARGETS, peer) | missed},
        **{name: {"rows": dict.fromkeys(rows.TARGETS, mine)} for name in run.OURS},
        run.PLAN: {"rows": dict.fromkeys([*rows.PLANS, *rows.GRAPHS], 0.2 * mine)},
        run.RAY: {"rows": dict.fromkeys(rows.GRAPHS, peer)},
    }


def made_up_costs() -> dict[str, Any]:
    """As `costs` prints them: of all that rows are made of."""
    shares = {**dict.fromkeys(costs.PARTS, 0.1), "engine": 0.3, "the rest": 0.1}
    one = {**dict.fromkeys(costs.COLUMNS, 1234.0), "shares": shares}
    names = ["add", "retained pass", "round trip of a chain of 100, both ways"]
    names += ["call of a fan-out of 64, both ways"]
    names += [f"identity {size}" for size in rows.BYTES]
    names += [f"step of MLP {width} wide" for width in rows.WIDTHS]
    held = {"peak": 1150e6, "start": 250e6, "values": 671e6, "shared": 96e6}
    return {"rows": dict.fromkeys(names, one), "memory": held}


def test_what_bounds_a_row_is_said_with_what_was_measured_of_it():
    found = made_up_costs()
    said = [bound(row, found) for row in rows.TARGETS]
    assert all("1,234 calls of Python" in one for one in said[:-1])
    assert "engine 30%" in said[0] and "add: 1,234 us" in said[0]
    assert "Of 1150 MB" in said[-1] and "values took at most 671," in said[-1]
    assert "| add | 1,234 us |" in costs.table(found["rows"])
    assert bound("identity 64 KiB", {}).endswith("again. Its costs were not measured.")
    assert bound("peak memory of a worker", {}).endswith("Its costs were not measured.")


@pytest.mark.second
def test_a_profile_tells_the_parts_of_the_callers_time_apart(side: ours.Ours):
    one, other = side.array(rows.leaf()), side.array(rows.factor(1))
    names = costs.works(side)
    assert next(iter(names)) == "add" and set(names) <= set(made_up_costs()["rows"])
    found = costs.profiled(partial(costs.repeated, partial(side.add, one, other), 20))
    assert found["calls"] > 100
    assert list(found["shares"]) == [*costs.PARTS, "the rest"]
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert min(found["shares"][part] for part in ("engine", "face", "values")) > 0.01


@pytest.mark.second
def test_the_memory_is_that_of_the_worker_that_had_most():
    starts = {name: number for number, name in enumerate(rows.WORKERS, 1)}
    with jdag.launch([ours.CALLER, *rows.WORKERS]) as cluster:
        leaf = cluster.put(rows.WORKERS[1], np.ones(1 << 24))
        assert leaf.fetch().nbytes == 1 << 27
        found = costs.memory(cluster, starts)
    assert found["start"] == starts[rows.WORKERS[1]]
    assert found["values"] == 1 << 27 < found["peak"] < 1 << 32
    assert 0 <= found["shared"] < found["peak"]


def test_the_ratio_is_the_median_of_those_of_the_rounds():
    rounds = [one_round(1e-3, 1e-4), one_round(2e-3, 1e-3), one_round(4e-3, 1.2e-3)]
    found = {row["row"]: row for row in run.summary(rounds)}
    row = found["chain of 100, forward"]
    judged = row[run.JUDGED]
    assert (judged["ratio_min"], judged["ratio_max"]) == pytest.approx((0.1, 0.5))
    assert judged["ratio"] == pytest.approx(0.3)
    assert row["met"] and not found["1,000 retained passes"]["met"]
    assert (row[run.PEER], judged["median"]) == (2e-3, 1e-3)
    missed = run.misses(list(found.values()), made_up_costs())
    assert "1,000 retained passes" in missed and "chain of 100" not in missed
    lines = run.table(list(found.values())).splitlines()
    assert "| **0.30** (0.10 to 0.50) | 1.0 | yes | - | - | - | - |" in lines[11]
    # A plan does both ways, which the peer's are added up for, and is not judged.
    assert "| 1.0 | yes | 200 us | **0.03** (0.01 to 0.05) | 0.3 | yes |" in lines[12]
    assert "| 200 us | **0.06** (0.02 to 0.10) | - | - |" in lines[4]  # No target.
    row = found["1,000 retained passes"]
    assert (row["met"], row[run.PLAN]["met"]) == (False, True)
    (_, _, *graphs) = run.table_of_graphs(run.beside_ray(rounds)).splitlines()
    assert len(graphs) == len(rows.GRAPHS)
    assert "| 2 ms | 200 us | **0.06** (0.02 to 0.10) | 0.5 | yes |" in graphs[0]


@pytest.mark.second
def test_a_step_is_timed_call_by_call_and_as_a_plan_beside_one_jit(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(figures, "REPEATS", 1)
    found = figures.step_of(4, 3, 2, 3)
    ratio = found["plan_arithmetic_s"] / found["jax_s"]
    assert found["plan_arithmetic_ratio"] == pytest.approx(ratio) and ratio > 0
    assert {"eager_ratio", "plan_ratio"} < set(found)
    for peaks in found["peak_bytes"].values():
        assert min(peaks.values()) >= 4 * 4 * 4  # A worker's weight.


@pytest.mark.parametrize("option", ["peer", "ray"])
def test_without_the_peer_or_ray_one_line_says_what_to_install(
    option: str, tmp_path: Path
):
    bare = tmp_path / "python"  # It sees no packages.
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o700)
    for given in (None, sys.executable + "-that-is-not-there", str(bare)):
        with pytest.raises(SystemExit) as refused:
            run.check(option, given)
        (line,) = str(refused.value).splitlines()
        assert f"pip install {run.PACKAGES[option]} numpy; then --{option} " in line
