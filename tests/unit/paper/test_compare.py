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
from paper.compare import costs, ours, pinning, plans, rows, run
from tests.tools.compare_cases import made_up_costs, system
from tests.tools.error_texts import fails_with


@pytest.fixture
def side():
    workers = [pinning.CALLER, *rows.WORKERS]
    with jdag.simulate(workers, seed=0, trace=False) as cluster:
        yield ours.Ours(cluster, "fast")


def factors(count: int) -> list[np.ndarray]:
    return [rows.factor(number).astype(np.float64) for number in range(count)]


def losses_by_numpy(width: int, steps: int) -> tuple[list[float], list[np.ndarray]]:
    """The losses of some steps, and the gradients of the weights before the first."""
    stages = [
        (w.astype(np.float64), b.astype(np.float64)) for w, b in rows.weights(width)
    ]
    x, y = (array.astype(np.float64) for array in rows.batch(width))
    losses: list[float] = []
    first: list[np.ndarray] = []
    for _ in range(steps):
        values = [x]
        for w, b in stages:
            values.append(np.tanh(values[-1] @ w + b))
        losses.append(float(np.mean((values[-1] - y) ** 2)))
        cotangent = 2 * (values[-1] - y) / y.size
        found = []
        for (w, _), out, into in zip(
            stages[::-1], values[:0:-1], values[-2::-1], strict=True
        ):
            cotangent = cotangent * (1 - out**2)
            found.append((into.T @ cotangent, cotangent.sum(axis=0)))
            cotangent = cotangent @ w.T
        found.reverse()
        first = first or [gradient for gradient, _ in found]
        stages = [
            (w - rows.LEARNING_RATE * dw, b - rows.LEARNING_RATE * db)
            for (w, b), (dw, db) in zip(stages, found, strict=True)
        ]
    return losses, first


def test_a_chain_and_its_gradient_are_the_product_of_its_factors(side: ours.Ours):
    _, loss, gradient = side.chain(5)
    product = np.prod(factors(5), axis=0)
    assert loss == pytest.approx(np.sum(rows.leaf() * product))
    assert np.asarray(gradient) == pytest.approx(product)


def test_a_fan_out_and_its_gradient_are_the_sum_of_its_factors(side: ours.Ours):
    _, loss, gradient = side.fan_out(5)
    total = np.sum(factors(5), axis=0)
    assert loss == pytest.approx(np.sum(rows.leaf() * total))
    assert np.asarray(gradient) == pytest.approx(total)


def test_each_retained_pass_adds_its_gradient(side: ours.Ours):
    _, gradient = side.retained(3)
    assert np.asarray(gradient) == pytest.approx(3 * factors(1)[0])


def test_steps_lose_what_numpy_says(side: ours.Ours):
    losses, gradients = losses_by_numpy(8, 4)
    side.prepare(8)
    for found, truth in zip(side.gradients(8), gradients, strict=True):
        assert found == pytest.approx(truth, rel=1e-3, abs=1e-6)
    assert [side.step(8) for _ in range(4)] == pytest.approx(losses, rel=1e-5)
    assert losses[0] > losses[1] > losses[2] > losses[3]


def always(value: Any) -> Callable[[int], Any]:
    return lambda width: value


class Small(ours.Ours):
    def identity(self, value: Any) -> Any:
        return value if value.size > 100_000 else super().identity(value)

    def memory(self) -> list[int]:
        return [rows.peak_bytes("self")]

    def cores(self) -> dict[str, list[int]]:
        return {}


class SmallPlans(Small, plans.Plans):
    """The same as plans."""


ONCE = rows.Repeats(1, 1, 1, 1)
LONG = [row for row in rows.TARGETS if "MLP" in row or row == rows.MEMORY]


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "PASSES", 10)
    monkeypatch.setattr(rows, "weights", always(rows.weights(8)))
    monkeypatch.setattr(rows, "batch", always(rows.batch(8)))


@pytest.mark.usefixtures("narrow")
def test_every_row_has_a_target_and_every_target_a_row(side: ours.Ours):
    small, names = Small(side.cluster, "smart"), rows.of(rows.JUDGED)
    told = [list(found["rows"]) for found in rows.measure(small, ONCE, names)]
    assert told[-1] == names and all(names[: len(one)] == one for one in told)
    assert len(told) == len(names) - 8 + 1  # Phases of a row at once; the cores alone.
    assert {*names, *rows.of(rows.PLAN), *rows.of(rows.RAY)} == set(rows.TARGETS)


def test_on_one_core_rows_have_names_of_their_own_and_arithmetic_has_none(
    side: ours.Ours,
):
    small, wanted = Small(side.cluster, "fast"), ["add 3x3, reply fetched", *LONG]
    *_, found = rows.measure(small, ONCE, wanted, pinning.ONE)
    assert list(found["rows"]) == ["add 3x3, reply fetched, one core"]
    assert list(found["numbers"]) == ["add, one core"]
    assert list(found["cores"]) == ["one"]
    both = rows.of_both()
    assert both[:2] == ["add 3x3, reply fetched", "add 3x3, reply fetched, one core"]
    assert len(both) == 2 * len(rows.TARGETS) - len(LONG)


def test_both_ways_take_as_long_as_forward_and_backward_of_the_same_run():
    clock = mock.Mock(**{"perf_counter_ns.return_value": 0})
    runs = iter([(9, 9), (9, 9), (5, 0), (0, 7), (4, 4)])  # Two do not count.

    def takes() -> rows.Phases:
        yield None
        for seconds in next(runs):
            clock.perf_counter_ns.return_value += int(seconds * 1e9)
            yield seconds

    with mock.patch.object(rows, "time", clock):
        assert rows.timed_phases(takes, 3) == ([4, 4, 7], [None, 4, 4])


@pytest.mark.usefixtures("narrow")
def test_plans_compute_what_calls_one_by_one_do(side: ours.Ours):
    planned, wanted = SmallPlans(side.cluster), rows.of(rows.PLAN)
    eager = Small(side.cluster, "fast")
    *_, truth = rows.measure(eager, ONCE, rows.of(rows.JUDGED))
    *_, found = rows.measure(planned, ONCE, wanted)
    assert run.difference(truth, found) == ""
    assert set(found["numbers"]) ^ set(truth["numbers"]) == {
        rows.RETAINED,
        *rows.GRAPHS,
    }
    assert sorted(found["rows"]) == sorted(wanted)
    product = np.prod([factor[0, 0] for factor in factors(10)])
    expected = np.linspace(0.5, 1.5, 9) * product
    assert found["numbers"]["graph: chain of 10"] == pytest.approx(expected, rel=1e-5)


def test_a_plans_peer_goes_forward_and_backward_as_the_plan_does(side: ours.Ours):
    for each in (side, plans.Plans(side.cluster)):
        started = mock.patch.object(each, "chain", wraps=each.chain)
        with started as chain:
            _, total = rows.repeated(each, 3)
        assert chain.mock_calls == [mock.call(1)] * 3
        assert total == pytest.approx(3 * factors(1)[0])
    assert rows.RETAINED not in rows.of(rows.PLAN)
    assert not any(row.endswith("ward") for row in rows.of(rows.PLAN))


@pytest.mark.usefixtures("narrow")
def test_a_part_that_raises_loses_no_row_before_it(side: ours.Ours):
    told, broken = [], mock.Mock(side_effect=RuntimeError("no such step"))
    small = Small(side.cluster, "fast")
    with mock.patch.object(small, "prepare", broken), pytest.raises(RuntimeError):
        for found in rows.measure(small, ONCE, rows.of(rows.JUDGED)):
            told.append(list(found["rows"]))
    assert told[-1][-1] == rows.REPEATED


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


class Faulty:
    def __init__(self, name: str, fault: Callable[[Any, dict[str, Any]], int]) -> None:
        self.name = name
        self.fault = fault
        self.runs = 0

    def __call__(self, command: Any, *, stdout: Any, stderr: Any, **given: Any) -> int:
        name = command[0]
        self.runs += 1
        found = system(name, command[-1]) if name != "costs" else made_up_costs()
        begins = self.runs <= 2 * len(rows.SYSTEMS) or command[-1] == pinning.ONE
        if begins or name != self.name:
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


def runs_elsewhere(stdout: Any, found: dict[str, Any]) -> int:
    found["cores"]["apart"]["w1"] = [0, 1]
    stdout.write(json.dumps(found))
    return 0


def is_interrupted(stdout: Any, found: dict[str, Any]) -> int:
    stops_after_some_rows(stdout, found)
    raise KeyboardInterrupt


def is_no_system(stdout: Any, found: dict[str, Any]) -> int:
    raise OSError("no such program")


JUDGED = rows.JUDGED


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    started = {key: [key] for key in rows.SYSTEMS}
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    monkeypatch.setattr(run, "draw", lambda written: b"a picture")  # It takes a second.
    monkeypatch.setattr(run, "check", lambda option, python: None)
    monkeypatch.setattr(run, "commands", lambda peer, ray, more: started)
    monkeypatch.setattr(run, "COSTS", ["costs"])
    return tmp_path


@pytest.mark.parametrize(
    ("fault", "code", "said", "judged"),
    [
        (
            (JUDGED, stops_after_some_rows),
            1,
            "RuntimeError: it is broken",
            [44, 27, 27],
        ),
        ((JUDGED, hangs), 1, "FAST, apart: not finished within 900 s", [44, 27, 27]),
        ((JUDGED, prints_nothing), 1, "it printed no results", [44, 20, 20]),
        ((JUDGED, computes_something_else), 1, "not counted: add is", [44, 0, 0]),
        ((JUDGED, runs_elsewhere), 1, "apart, w1 ran on cores [0, 1], not", [44, 0, 0]),
        ((JUDGED, is_interrupted), 130, "the rest: it was interrupted", [44, 7]),
        ((JUDGED, is_no_system), None, "the rest: OSError: no such program", [44, 0]),
        ((rows.PEER, prints_nothing), 1, "it printed no results", [44, 44, 44]),
        ((rows.PLAN, stops_after_some_rows), 1, "2, plan, apart: exit", [44, 44, 44]),
        ((rows.RAY, prints_nothing), 1, "2, Ray, apart: it printed no", [44, 44, 44]),
        (("costs", stops_after_some_rows), 1, "costs: exit code 1", [44, 44, 44]),
        (("costs", is_interrupted), 130, "the rest: it was interrupted", [44, 44, 44]),
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
    assert "![The ratios of the rows apart.](compare.png)" in text
    assert (results / "compare.png").read_bytes() == b"a picture"
    assert len(list(results.iterdir())) == 3  # No file that is half written.


def test_a_round_that_was_measured_is_written_before_the_next_one_begins(
    results: Path,
):
    seen = []

    def looks(stdout: Any, found: dict[str, Any]) -> int:
        seen.append(json.loads((results / "compare.json").read_text()))
        return stops_after_some_rows(stdout, found)

    systems = mock.patch.object(subprocess, "call", Faulty(rows.PEER, looks))
    with systems, pytest.raises(SystemExit):
        run.main(["--peer", "python", "--rounds", "3"])
    assert [one["rounds"] for one in seen] == [1, 2]
    assert "rounds: 1 of 3 were begun" in seen[0]["missing"]


def test_a_run_without_any_figure_leaves_former_results_as_they_are(results: Path):
    made = run.Comparison({"machine": {}, "settings": {}}, 3)
    made.rounds.append({"load": 0.0, rows.PEER: {}})
    made.write()
    assert list(results.iterdir()) == []


def test_figures_are_written_before_the_page_is_made(results: Path):
    systems = mock.patch.object(subprocess, "call", Faulty("", prints_nothing))
    no_page = mock.patch.object(run, "page", side_effect=KeyError("a row"))
    with systems, no_page, fails_with(KeyError, "paper.row_is_missing"):
        run.main(["--peer", "python", "--rounds", "3"])
    written = json.loads((results / "compare.json").read_text())
    assert written["missing"][0] == "the rest: KeyError: 'a row'"
    assert all(one[rows.JUDGED]["ratio"] == 0.5 for one in written["rows"][:39])


def test_what_a_process_printed_before_it_failed_is_found():
    lines = 'print("{\\"rows\\": {\\"add\\": 1.5}}", flush=True); raise KeyError("add")'
    found: dict[str, Any] = {}
    why = run.taken([sys.executable, "-c", lines], found)
    assert (found, why) == ({"rows": {"add": 1.5}}, "exit code 1: KeyError: 'add'")


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
