"""Simulated runs, in any order and with losses, are repeated from their journals."""

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdag
from jdag.errors import JdagError, ReplayError, WorkerLost
from jdag.runtime.journal import Entries
from jdag.sim import Crash, LinkModel, Network
from jdag.sim.simulation import Simulation
from jdag.sim.untimed import StepChooser
from jdag.training.recovery import Recovery
from tests.tools.hosted_cases import Counter, calls
from tests.tools.journal_cases import in_any_order, journaled, replayed
from tests.tools.pipeline_cases import step
from tests.tools.plan_cases import paired
from tests.tools.tiers import sized

WORKERS = ("a", "b", "c")
SEEDS = range(sized(4, 20))
W, X = np.linspace(-1.0, 1.0, 12).reshape(4, 3), np.linspace(0.0, 2.0, 8).reshape(2, 4)
SCHEDULE = jdag.schedules.one_f_one_b(stages=3, micro_batches=4, workers=WORKERS)


def hidden(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


def total(*parts: Any) -> Any:
    return sum(jnp.sum(part * part) for part in parts)


@jdag.program
def two_hops(ctx: Any, w: Any) -> Any:
    parts = [ctx.call("c", jnp.multiply, w, k) for k in (1.0, 2.0, 3.0)]
    return [ctx.call("b", hidden, part, X) for part in parts]


def bits(*arrays: Any) -> list[bytes]:
    return [np.asarray(array).tobytes() for array in arrays]


def gradient(c: Any, timeout_s: float | None = None) -> list[bytes]:
    w = c.put("b", W)
    with c.context() as ctx:
        out = ctx.call("a", total, *ctx.call("b", two_hops, w))
        ctx.backward(out, timeout_s=timeout_s)
        found = ctx.gradient(w).fetch()
    c.drop(w)
    return bits(found)


def outcome(run: Any, *arguments: Any) -> Any:
    try:
        return run(*arguments)
    except JdagError as error:
        return type(error).__name__


def plain(c: Any) -> Any:
    found = [outcome(gradient, c) for _ in range(4)]
    c.driver.settle()
    held = {
        name: counts["lost"] or (counts["live_contexts"], counts["values_held"])
        for name, counts in c.info().items()
    }
    return found, held, c.driver.incarnations


def timed(c: Any) -> Any:
    limits_s = (1e-9, 1e-6, 1e-5, 1e-4, 1.0)
    return [outcome(gradient, c, limit_s) for limit_s in limits_s]


def collective(c: Any) -> Any:
    def reduced(number: int, cluster: Any) -> Any:
        return cluster.all_reduce(W * number, WORKERS, "ring")

    programs = {name: partial(reduced, n) for n, name in enumerate(WORKERS)}
    return bits(*c.run(programs).values())


def hosted(c: Any) -> Any:
    counters = [c.host(name, Counter, 40) for name in "bc"]
    with c.context() as ctx:
        tasks = [ctx.start("a", calls, one, 3) for one in counters]
        return [task.result() for task in tasks], [one.call("add") for one in counters]


def planned(c: Any) -> Any:
    params = [c.put(worker, W) for worker in ("b", "c", "b")]
    optimizer = jdag.Optimizer(optax.adam(0.1), params)
    train = jdag.compile(paired, c, optimizer=optimizer)
    return [bits(*jdag.fetch(train(params, np.float64(n)))) for n in range(4)]


def pipelined(c: Any) -> Any:
    return bits(*step(c, SCHEDULE))


def recovers(c: Any) -> Any:
    Recovery(c)
    w, found = c.put("c", W), []
    for _ in range(2):
        with pytest.raises(WorkerLost), c.context() as ctx:
            for _ in range(100):
                found += bits(ctx.call("c", hidden, w, X).fetch())
        c.recover()
    with c.context() as ctx:
        ctx.backward(ctx.call("a", total, ctx.call("c", hidden, w, X)))
        return found + bits(ctx.gradient(w).fetch()), c.driver.incarnations


def repeated(run: Any, schedule: Any = None, **settings: Any) -> dict[str, Entries]:
    wanted, journals = journaled(run, workers=WORKERS, schedule=schedule, **settings)
    found, inputs = replayed(journals, run, schedule)
    assert found == wanted
    assert inputs == sum(len(one.lines) for one in journals.values())
    return journals


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("run", [plain, collective, hosted, planned, pipelined])
def test_any_order_of_a_run_is_repeated_from_its_journals(run: Any, seed: int):
    schedule = SCHEDULE if run is pipelined else None
    repeated(run, schedule, chooser=in_any_order(seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_any_order_with_losses_and_returns_is_repeated(seed: int):
    repeated(plain, chooser=in_any_order(seed, crash=2, rejoin=2))


def test_expired_time_limits_are_repeated():
    journals = repeated(timed, network=LinkModel(latency_ns=1_000))
    assert any(line.startswith("p Expired ") for line in journals["a"].lines)


def test_recoveries_are_repeated():
    crashes = [(30_000, 20_000), (150_000, 10_000)]
    faults = [Crash("c", at_ns=at, restart_ns=after) for at, after in crashes]
    journals = repeated(recovers, network=LinkModel(latency_ns=1_000), faults=faults)
    assert [*journals] == [*WORKERS, "c#1", "c#2"]


def ones() -> Any:
    return jnp.ones(3)


def large(c: Any) -> Any:
    with c.context() as one, c.context() as other:
        there = one.move("c", np.arange(3_000.0))
        small = other.call("c", ones)
        return bits(small.fetch(), there.fetch())


def test_a_message_that_overtook_another_one_is_repeated_as_that_one():
    data, control = LinkModel(bandwidth_bytes_per_s=10**7), LinkModel(latency_ns=10)
    journals = repeated(large, network=Network(data, control_lane=control))
    arrived = [line.split() for line in journals["c"].lines if line[0] == "m"]
    numbers = [int(number) for _, sender, number, *_ in arrived if sender == "a"]
    assert numbers != sorted(numbers)


@jdag.program
def asks(ctx: Any, worker: str) -> Any:
    return ctx.call(worker, hidden, W, X)


def late_start(steps: Any) -> int:
    """Let d be lost and return before the program on b starts, after all else."""

    def rank(step: Any) -> int:
        if step.kind in ("crash", "rejoin"):
            return 1 if step.worker == "d" else 3
        return 2 if (step.kind, step.worker) == ("spawn", "b") else 0

    return min(range(len(steps)), key=lambda index: rank(steps[index]))


def test_a_program_on_a_worker_knows_the_losses_that_it_knew_when_it_was_recorded():
    def two(c: Any) -> Any:
        with c.context() as ctx:
            tasks = [ctx.start("b", asks, "d"), ctx.start("c", asks, "b")]
            return bits(*[task.result().fetch() for task in tasks])

    chooser = StepChooser(late_start, {"crash": 1, "rejoin": 1}.items())
    wanted, journals = journaled(two, workers=[*"abcd"], chooser=chooser)
    assert journals["d#1"].lines
    assert replayed(journals, two)[0] == wanted


def test_the_main_program_knows_a_loss_between_two_calls_before_it_makes_the_second():
    def two(c: Any) -> Any:
        with c.context() as ctx:
            first = ctx.call("b", hidden, W, X)
            if type(c.driver) is Simulation:  # As in processes, time passes.
                c.driver.settle()
            return bits(*jdag.fetch([first, ctx.call("c", hidden, W, X)]))

    journals = repeated(two, faults=[Crash("c", at_ns=1_000, restart_ns=1_000)])
    assert journals["c#1"].lines


def test_a_call_on_another_worker_is_told_where_it_is_missed():
    def calls(worker: str, c: Any) -> None:
        with c.context() as ctx:
            ctx.call(worker, hidden, W, X)

    _, journals = journaled(partial(calls, "b"), workers=WORKERS)
    where = "on worker 'b' at event 1: expected 'm a 1 Call"
    with pytest.raises(ReplayError, match=where):
        replayed(journals, partial(calls, "c"))
