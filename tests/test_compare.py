"""The comparison with the peer: what its rows compute, and what its table says."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import jdag
from paper.compare import costs, ours, rows, run
from paper.compare.bounds import bound

pytestmark = pytest.mark.once


@pytest.fixture
def side():
    workers = [ours.CALLER, *rows.WORKERS]
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
    """The same, but what takes long is small."""

    def identity(self, value: Any) -> Any:
        return value if value.size > 100_000 else super().identity(value)

    def retained(self, passes: int) -> rows.Phases:
        return super().retained(passes // 100)

    def memory(self) -> list[int]:
        return [rows.peak_bytes("self")]


def test_every_row_has_a_target_and_every_target_a_row(
    side: ours.Ours, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rows, "weights", always(rows.weights(8)))
    monkeypatch.setattr(rows, "batch", always(rows.batch(8)))
    small = Small(side.cluster, "smart")
    found = rows.measure(small, rows.Repeats(1, 1, 1, 1))
    assert list(found["rows"]) == list(rows.TARGETS)
    assert all(value > 0 for value in found["rows"].values())


def test_other_numbers_than_the_peers_are_refused():
    peer = {"losses": [0.5, [0.25, 0.125]], "add": [[1.0, 2.0, 3.0]]}
    run.check_same(
        "socket", peer, {"losses": [0.5, [0.25, 0.12501]], "add": peer["add"]}
    )
    for losses in ([0.5, [0.25, 0.126]], [0.5, [0.25]]):
        with pytest.raises(SystemExit, match="losses: socket has"):
            run.check_same("socket", peer, {**peer, "losses": losses})


def one_round(peer: float, mine: float) -> dict[str, Any]:
    return {
        "load": 0.0,
        run.PEER: {"rows": dict.fromkeys(rows.TARGETS, peer)},
        **{name: {"rows": dict.fromkeys(rows.TARGETS, mine)} for name in run.OURS},
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


def test_a_profile_tells_the_parts_of_the_callers_time_apart(side: ours.Ours):
    one, other = side.array(rows.leaf()), side.array(rows.factor(1))
    names = costs.works(side)
    assert next(iter(names)) == "add" and set(names) <= set(made_up_costs()["rows"])
    found = costs.profiled(partial(costs.repeated, partial(side.add, one, other), 20))
    assert found["calls"] > 100
    assert list(found["shares"]) == [*costs.PARTS, "the rest"]
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert min(found["shares"][part] for part in ("engine", "face", "values")) > 0.01


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
    assert row["met"] and not found["fan-out of 64, forward"]["met"]
    assert (row[run.PEER], judged["median"]) == (2e-3, 1e-3)
    missed = run.misses(list(found.values()), made_up_costs())
    assert "fan-out of 64, forward" in missed and "chain of 100" not in missed
    lines = run.table(list(found.values())).splitlines()
    assert "| **0.30** (0.10 to 0.50) | 0.4 | yes |" in lines[12]


def test_without_the_peer_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.delenv("JDAG_PEER", raising=False)
    for given in ([], ["--peer", sys.executable + "-that-is-not-there"]):
        with pytest.raises(SystemExit) as refused:
            run.main(["--quick", *given])
        (line,) = str(refused.value).splitlines()
        assert "pip install torch" in line
