"""Programs on several workers at once: how they end, and what is left of them."""

from functools import partial
from typing import Any

import jax.numpy as jnp
import pytest

from jdag import program
from jdag.api.drivers import simulate
from jdag.errors import RemoteError, RootError, WorkerLost
from jdag.sim import Crash, DeviceModel, LinkModel
from tests.properties.test_run import TRAINERS, WORKERS, counted, where
from tests.tools.error_texts import fails_with
from tests.tools.face_cases import ONES, nothing_is_left, raises_at_run_time, total


def raises(cluster, text="boom"):
    raise ValueError(text)


@pytest.fixture
def made():
    with simulate(WORKERS, seed=0, network=LinkModel(latency_ns=1_000)) as cluster:
        yield cluster


# -------------------------------------------------------------------------- failures


def test_the_first_that_raised_is_raised_when_all_others_have_ended(made):
    ended = []
    w = made.put("ps", ONES)

    def long(cluster):
        with cluster.context() as ctx:
            for _ in range(20):
                ctx.call("ps", total, w).fetch()
        ended.append(cluster.here)

    programs = {"t0": long, "t2": partial(raises, text="late"), "t1": raises}
    with pytest.raises(RemoteError) as caught:
        made.run(programs)
    said = str(caught.value)
    assert "test_run_ends:raises failed on 't2', called at test_run_ends.py" in said
    assert "ValueError: late" in said and "in raises" in said
    (note,) = caught.value.__notes__
    assert "raises on 't1' failed too" in note and "ValueError: boom" in note
    assert isinstance(caught.value.__cause__, ValueError)
    assert ended == ["t0"]
    nothing_is_left(made)


def test_an_error_of_jdag_keeps_its_class(made):
    def no_root(cluster):
        with cluster.context() as ctx:
            ctx.backward(3.0)

    with fails_with(RootError, "properties.no_root_failed_on_t1"):
        made.run({"t1": no_root})


def test_contexts_that_a_program_left_open_are_left(made):
    w = made.put("ps", ONES)

    def opens(cluster):
        for _ in range(3):
            ctx = cluster.context().__enter__()
            ctx.backward(ctx.call("ps", total, w))
        return 1

    def opens_and_raises(cluster):
        opens(cluster)
        raise ValueError("after all")

    assert made.run({"t0": opens}) == {"t0": 1}
    nothing_is_left(made)
    with fails_with(RemoteError, "properties.after_all"):
        made.run({"t0": opens_and_raises, "t1": opens})
    nothing_is_left(made)
    assert made.info()["ps"]["values_held"] == 1


def test_an_error_that_nobody_saw_is_raised_when_a_context_is_left_for_its_program(
    made,
):
    def opens(cluster):
        ctx = cluster.context().__enter__()
        ctx.call("t1", raises_at_run_time, 1.0)

    with pytest.raises(RemoteError, match=r"opens failed on 't0'(.|\n)*at run time"):
        made.run({"t0": opens})
    nothing_is_left(made)


def crashing(at_ns, worker="t1"):
    return simulate(
        WORKERS,
        seed=0,
        network=LinkModel(latency_ns=1_000),
        devices=DeviceModel(forward_ns=500, backward_ns=500),
        faults=[Crash(worker, 3_000, at_ns=at_ns)],
    )


@pytest.mark.parametrize("at_ns", range(3_000, 54_000, 4_700))
def test_a_worker_that_crashes_under_its_program_is_named_and_its_contexts_expire(
    at_ns,
):
    with crashing(at_ns) as cluster:
        w = cluster.put("ps", jnp.zeros(3))

        @program
        def nested(ctx, w):
            return ctx.call("t2", total, ctx.call(ctx.here, jnp.add, w, 1.0))

        def train(place, cluster):
            done = 0
            for _ in range(3):
                with cluster.context() as ctx:
                    ctx.backward(ctx.call("ps", nested, w))
                    cluster.update(counted, w, place)
                    done += ctx.gradient(w).fetch()[0]
            return float(done)

        programs: dict[str, Any] = {
            name: partial(train, n) for n, name in enumerate(TRAINERS)
        }
        ended = []
        programs["main"] = lambda cluster: ended.append(train(0, cluster))
        with fails_with(WorkerLost, "properties.worker_t1_is_lost") as caught:
            cluster.run(programs)
        assert not hasattr(caught.value, "__notes__"), caught.value.__notes__
        assert ended == [3.0]
        nothing_is_left(cluster)
        held = {name: one["values_held"] for name, one in cluster.info().items()}
        assert held == {"main": 0, "ps": 1, "t0": 0, "t1": 0, "t2": 0}
        places = [int(one) for one in w.fetch()]
        assert places[0] == 6 and places[2] == 3 and places[1] <= 3
        with fails_with(WorkerLost, "properties.no_program_can_run_on"):
            cluster.run({"t0": where, "t1": where})
        assert cluster.run({"t0": where}) == {"t0": "t0"}


def test_a_program_that_meets_the_loss_of_another_worker_raises_it():
    with crashing(20_000, "ps") as cluster:
        w = cluster.put("ps", ONES)

        def uses(cluster):
            for _ in range(30):
                with cluster.context() as ctx:
                    ctx.backward(ctx.call("ps", total, w))

        with pytest.raises(WorkerLost, match=r"uses failed on 't0'(.|\n)*'ps' is lost"):
            cluster.run({"t0": uses, "t1": where, "t2": uses})
        nothing_is_left(cluster)


# ----------------------------------------------------------------- what is left after
