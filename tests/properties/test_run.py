"""Programs on several workers at once: what each has, how they end, what is left."""

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdag import Optimizer, program
from jdag.api.drivers import simulate
from jdag.context.refs import fetch
from jdag.errors import ContextError, JdagError, RemoteError, WorkerLost
from jdag.sim import Crash, DeviceModel, LinkModel
from tests.tools.error_texts import fails_with
from tests.tools.face_cases import ONES, nothing_is_left, raises_at_run_time, total
from tests.tools.plan_cases import weigh

WORKERS = ("main", "ps", "t0", "t1", "t2")
TRAINERS = WORKERS[2:]


def counted(leaf, place):
    return leaf.at[place].add(1.0)


def minus(leaf, gradient):
    return leaf - 0.25 * gradient


def where(cluster):
    return cluster.here


@pytest.fixture
def made():
    with simulate(WORKERS, seed=0, network=LinkModel(latency_ns=1_000)) as cluster:
        yield cluster


def test_each_program_has_a_cluster_on_its_worker_and_results_are_in_their_order(made):
    programs = {"t1": where, "main": where, "t0": where}
    assert list(made.run(programs).items()) == [(name, name) for name in programs]


def test_a_cluster_says_whose_it_is(made):
    assert repr(made) == "Cluster('main', 'ps', 't0', 't1', 't2')"
    on = made.run({"t1": repr})["t1"]
    assert on == "Cluster('main', 'ps', 't0', 't1', 't2', on 't1')"


def test_all_of_a_cluster_works_in_a_program(made):
    def all_of_it(cluster):
        before = cluster.now_ns
        w = cluster.put("ps", ONES)
        v = cluster.make("ps", lambda w: 2 * w, w)
        cluster.update(minus, [w, v], 4.0)
        with cluster.context() as ctx:
            moved = ctx.move(cluster.here, {"w": w})["w"]
            graph = ctx.graph()
            assert moved.worker == cluster.here and len(graph["ps"].sends) == 1
        assert cluster.now_ns > before and cluster.workers == WORKERS
        assert cluster.info()["ps"]["values_held"] == 2
        assert len(cluster.trace) > 0
        found = fetch([w, v])
        cluster.drop([w, v])
        return found

    w, v = made.run({"t0": all_of_it})["t0"]
    np.testing.assert_array_equal(w, 0 * ONES)
    np.testing.assert_array_equal(v, ONES)
    nothing_is_left(made)
    assert made.info()["ps"]["values_held"] == 0


def test_what_a_partial_holds_is_handed_on_and_leaves_come_back(made):
    w = made.put("ps", ONES)

    def uses(tree, cluster, *, scale):
        with cluster.context() as ctx:
            loss = ctx.call("ps", weigh, tree["w"], scale)
            return {
                "loss": loss.fetch(),
                "leaf": tree["w"],
                "new": cluster.put("t1", 4),
            }

    found = made.run({"t0": partial(uses, {"w": w}, scale=2.0)})["t0"]
    assert found["loss"] == 18 and found["leaf"] == w
    assert found["new"].worker == "t1" and found["new"].fetch() == 4
    assert str(found["new"].leaf) == "leaf 2.0 on t1"


def test_a_program_reads_a_captured_leaf_from_its_own_worker(made):
    w = made.put("ps", ONES)
    made.driver.settle()

    def reads(cluster):
        before = cluster.info()["main"]["messages_sent"]
        values = [w.fetch() for _ in range(3)]
        assert cluster.info()["main"]["messages_sent"] == before
        return values[2]

    np.testing.assert_array_equal(made.run({"t2": reads})["t2"], ONES)


@pytest.mark.parametrize(
    ("programs", "text"),
    [
        ({}, "with at least one, not {}"),
        (None, "takes a mapping from names of workers"),
        ([where], "takes a mapping from names of workers"),
        ({"t0": where, "t7": where}, "no worker 't7'; the workers are 'main', 'ps'"),
        ({3: where}, "takes the name of a worker first, not 3"),
        ({"t0": where, "t1": 4}, "for 't1' is 4; expected a function"),
        ({"t0": None}, "for 't0' is None; expected a function"),
        ({"t0": program(lambda ctx: 1)}, "marked by jdag.program, so it takes a cont"),
    ],
)
def test_what_cannot_be_run_is_named_and_nothing_runs(made, programs, text):
    ran = []
    if isinstance(programs, dict) and programs:
        programs = {"main": lambda cluster: ran.append(1), **programs}
    with fails_with(JdagError, "properties.cluster_run") as caught:
        made.run(programs)
    assert text in str(caught.value) and not ran
    assert made.info()["main"]["messages_sent"] == 0


def test_a_program_uses_what_it_is_handed_and_nothing_of_others(made):
    kept: list[Any] = []
    w = made.put("ps", ONES)

    @program
    def nested(ctx):
        return kept[0].put("ps", 1.0)

    @program
    def steps(ctx):
        return Optimizer(optax.sgd(1.0), w).states

    def bad(use, cluster):
        kept[:] = [cluster]
        with pytest.raises(ContextError) as caught:
            use(cluster)
        return str(caught.value)

    def in_context(fn, cluster):
        with cluster.context() as ctx:
            ctx.call("ps", fn)

    with made.context() as open_one:
        unopened = made.context()
        uses: dict[str, list[Any]] = {
            "to a program on 'main'": [
                lambda cluster: made.put("ps", 1.0),
                lambda cluster: made.make("ps", lambda: ONES),
                lambda cluster: made.update(minus, w, ONES),
                lambda cluster: made.drop(w),
                lambda cluster: made.context(),
                lambda cluster: made.run({"t1": where}),
                lambda cluster: made.close(),
                lambda cluster: open_one.call("ps", total, w),
                lambda cluster: unopened.__enter__(),
            ],
            "to a program on 't0'": [partial(in_context, nested)],
            "has no cluster": [partial(in_context, steps)],
            "only the main program may call it": [lambda c: c.run({"t1": where})],
            "the main program closes it": [lambda c: c.close()],
        }
        for text, refused in uses.items():
            for use in refused:
                assert text in made.run({"t0": partial(bad, use)})["t0"]
    with fails_with(ContextError, "properties.on_t0_which_is_over"):
        kept[0].put("ps", 1.0)
    assert made.run({"t0": where}) == {"t0": "t0"}


def test_a_result_that_cannot_travel_is_named_by_the_users_program(made):
    with fails_with(ContextError, "properties.test_run_lambda_returned_a"):
        made.run({"t0": lambda cluster: {cluster.here}})


def test_refs_of_a_programs_context_do_not_leave_it(made):
    def returns(cluster):
        with cluster.context() as ctx:
            return ctx.call("ps", total, ONES)

    with fails_with(ContextError, "properties.test_run_returns_failed_on"):
        made.run({"t0": returns})


def with_an_optimizer(w, optimizer, cluster):
    with cluster.context() as ctx:
        ctx.backward(ctx.call("b", lambda w: jnp.sum(w * w), w))
        optimizer.step(ctx)


def with_its_own(w, cluster):
    with_an_optimizer(w, Optimizer(optax.sgd(0.25), w), cluster)


def test_a_handed_optimizer_counts_its_own_steps_and_names_leaves_that_were_dropped(
    made,
):
    w = {"w": made.put("ps", ONES)}
    shared = Optimizer(optax.sgd(0.5), w, clip_norm=1.0)

    def train(given, cluster):
        (optimizer,) = given["one"]
        assert optimizer is not shared and repr(optimizer) == repr(shared)
        with cluster.context() as ctx:
            ctx.backward(ctx.call("ps", total, w["w"]))
            optimizer.step(ctx)
        cluster.drop(w)
        with cluster.context() as ctx, pytest.raises(ContextError) as caught:
            optimizer.step(ctx, w)
        return str(caught.value)

    said = made.run({"t0": partial(train, {"one": [shared]})})["t0"]
    assert "was dropped by cluster.drop" in said and "stepped by step 2" in said
    with fails_with(ContextError, "properties.leaf_0_on_ps_was"):
        made.run({"t0": partial(train, {"one": [shared]})})


def test_an_optimizer_of_another_cluster_is_refused(cluster):
    with simulate(["a", "b"], seed=0) as other:
        theirs = Optimizer(optax.sgd(0.5), other.put("b", 1.0))
        with fails_with(ContextError, "properties.is_of_the_cluster_of"):
            cluster.run({"c": partial(with_its_own, theirs)})


def raises(cluster, text="boom"):
    raise ValueError(text)


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
    assert "test_run:raises failed on 't2', called at test_run.py" in said
    assert "ValueError: late" in said and "in raises" in said
    (note,) = caught.value.__notes__
    assert "raises on 't1' also failed" in note and "ValueError: boom" in note
    assert isinstance(caught.value.__cause__, ValueError)
    assert ended == ["t0"]
    nothing_is_left(made)


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
