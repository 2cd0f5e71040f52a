"""Programs on several workers at once: what each has, reads and leaves behind."""

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdag import Optimizer, program, value_and_grad
from jdag.api.drivers import simulate
from jdag.api.refs import fetch
from jdag.errors import ContextError, JdagError
from jdag.sim import DeviceModel, Drop, Duplicate, LinkModel
from tests.face_cases import ONES, nothing_is_left, total
from tests.tiers import sized

WORKERS = ("main", "ps", "t0", "t1", "t2")
TRAINERS = WORKERS[2:]
ROUGH: dict[str, Any] = {
    "network": LinkModel(latency_ns=500, jitter_ns=5_000),
    "faults": (Drop(0.1), Duplicate(0.1, 1_000)),
    "devices": DeviceModel(forward_ns=700, backward_ns=900),
}


def rough(seed):
    """A cluster where messages are late, lost and doubled."""
    return simulate(WORKERS, seed=seed, **ROUGH)


def weighed(w, x):
    return jnp.sum(w * x)


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


# ------------------------------------------------------------------ what each one has


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


def test_value_and_grad_and_optimizers_work_in_a_program(made):
    w = made.put("ps", ONES)
    shared = Optimizer(optax.sgd(0.5), w)

    def train(x, cluster):
        def model(ctx, w):
            return ctx.call("ps", weighed, w, x)

        value, gradient = value_and_grad(model, cluster)(ONES)
        own = Optimizer(optax.sgd(1.0), w)
        for optimizer in (shared, own):
            with cluster.context() as ctx:
                ctx.backward(model(ctx, w))
                optimizer.step(ctx)
        own.drop()
        return float(value), gradient

    found = made.run({name: partial(train, 2.0**n) for n, name in enumerate(TRAINERS)})
    for n, name in enumerate(TRAINERS):
        value, gradient = found[name]
        assert value == 9 * 2.0**n
        np.testing.assert_array_equal(gradient, 2.0**n * ONES)
    np.testing.assert_array_equal(w.fetch(), (1 - 1.5 * (1 + 2 + 4)) * ONES)


def test_what_a_partial_holds_is_handed_on_and_leaves_come_back(made):
    w = made.put("ps", ONES)

    def uses(tree, cluster, *, scale):
        with cluster.context() as ctx:
            loss = ctx.call("ps", weighed, tree["w"], scale)
            return {
                "loss": loss.fetch(),
                "leaf": tree["w"],
                "new": cluster.put("t1", 4),
            }

    found = made.run({"t0": partial(uses, {"w": w}, scale=2.0)})["t0"]
    assert found["loss"] == 18 and found["leaf"] == w
    assert found["new"].worker == "t1" and found["new"].fetch() == 4
    assert str(found["new"].leaf) == "leaf 2.0 on t1"


# -------------------------------------------------------------------- leaves of all


def test_what_main_has_assigned_is_there_and_what_programs_assign_is_there_after():
    for seed in range(sized(4, 10)):
        with rough(seed) as cluster:
            w = cluster.put("ps", jnp.zeros(3))
            cluster.update(counted, w, 0)

            def add(cluster, w=w):
                before = w.fetch()[0]
                cluster.update(counted, w, 1)
                return float(before)

            assert cluster.run(dict.fromkeys(TRAINERS, add)) == dict.fromkeys(
                TRAINERS, 1.0
            )
            np.testing.assert_array_equal(w.fetch(), [1, 3, 0])


def test_of_the_updates_of_several_programs_none_is_lost_in_whatever_order():
    def doubled(leaf, place):
        return (2 * leaf).at[place].add(1.0)

    orders: dict[Any, Any] = {}
    for seed in range(8):
        with rough(seed) as cluster:
            w = cluster.put("ps", jnp.zeros(3))
            v = cluster.put("t1", jnp.zeros(3))

            def train(place, cluster, w=w, v=v):
                for _ in range(4):
                    cluster.update(doubled, [w, v], place)
                    with cluster.context() as ctx:
                        ctx.call("ps", total, w).fetch()

            cluster.run({name: partial(train, n) for n, name in enumerate(TRAINERS)})
            for leaf in (w, v):
                found = leaf.fetch()
                # Of 12 doublings and additions in a row, each sets a bit of its own.
                assert int(np.sum(found)) == 2**12 - 1, found
                assert [int(one).bit_count() for one in found] == [4, 4, 4]
            orders[tuple(np.asarray(w.fetch()))] = None
            held = [worker["values_held"] for worker in cluster.info().values()]
            assert held == [0, 1, 0, 1, 0]
    assert len(orders) > 1, "the seeds make races"


def test_a_context_reads_one_version_of_a_leaf_until_its_own_program_assigns():
    link = LinkModel(latency_ns=1_000)
    with simulate(WORKERS, seed=0, network=link) as cluster:
        w = cluster.put("ps", ONES)

        def reader(cluster):
            with cluster.context() as ctx:
                losses = [ctx.call(worker, total, w) for worker in ("ps", "t1")]
                fetch(losses)
                while w.fetch()[0, 0] < 3:  # Reads outside of the context.
                    pass
                losses += [ctx.call(worker, total, w) for worker in ("ps", "t1")]
                losses.append(ctx.call("t2", weighed, w, w))
                ctx.backward(*losses)
                gradient = ctx.gradient(w).fetch()
                cluster.update(minus, w, -4.0 * ONES)
                losses += [ctx.call(worker, total, w) for worker in ("ps", "t1")]
                return fetch(losses), gradient

        def writer(cluster):
            for _ in range(20):
                with cluster.context() as ctx:
                    ctx.call("ps", total, w).fetch()
            cluster.update(minus, w, -8.0 * ONES)

        found = cluster.run({"t0": reader, "t1": writer})["t0"]
        assert found[0] == [9, 9, 9, 9, 9, 36, 36]
        np.testing.assert_array_equal(found[1], (4 + 2) * ONES)
        nothing_is_left(cluster)
        assert cluster.info()["ps"]["values_held"] == 1


def test_an_open_context_of_main_reads_on_what_it_read_before_the_programs(made):
    w = made.put("ps", ONES)

    def double(cluster):
        cluster.update(lambda leaf: 2 * leaf, w)

    with made.context() as ctx:
        before = ctx.call("ps", total, w)
        made.run({"t0": double})
        after = ctx.call("ps", total, w)
        assert (before.fetch(), after.fetch()) == (9, 9)
        ctx.backward(before, after)
        np.testing.assert_array_equal(ctx.gradient(w).fetch(), 2 * ONES)
    np.testing.assert_array_equal(w.fetch(), 2 * ONES)


def test_a_program_reads_a_captured_leaf_from_its_own_worker(made):
    w = made.put("ps", ONES)
    made.driver.settle()

    def reads(cluster):
        before = cluster.info()["main"]["messages_sent"]
        values = [w.fetch() for _ in range(3)]
        assert cluster.info()["main"]["messages_sent"] == before
        return values[2]

    np.testing.assert_array_equal(made.run({"t2": reads})["t2"], ONES)


def test_a_fetch_of_an_own_leaf_has_its_value_whatever_is_assigned_meanwhile():
    for seed in range(sized(4, 12)):
        with simulate(WORKERS, seed=seed) as cluster:
            w = cluster.put("ps", jnp.zeros(3))

            def owner(cluster, w=w):
                with cluster.context() as ctx:
                    for _ in range(10):
                        far = ctx.call("t1", total, ONES)
                        assert fetch((w, far))[1] == 9
                        w.fetch()

            def writer(cluster, w=w):
                for _ in range(10):
                    cluster.update(counted, w, 0)
                    cluster.put("ps", 1.0).fetch()

            cluster.run({"ps": owner, "t0": writer, "t1": writer})
            assert w.fetch()[0] == 20


# ------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("programs", "text"),
    [
        ({}, "with at least one; this is {}"),
        (None, "takes a mapping from names of workers"),
        ([where], "takes a mapping from names of workers"),
        ({"t0": where, "t7": where}, "no worker 't7'; the workers are 'main', 'ps'"),
        ({3: where}, "takes the name of a worker first, not 3"),
        ({"t0": where, "t1": 4}, "to run on 't1' is 4; it takes a function"),
        ({"t0": None}, "to run on 't0' is None; it takes a function"),
        ({"t0": program(lambda ctx: 1)}, "marked by jdag.program, so it takes a cont"),
    ],
)
def test_what_cannot_be_run_is_named_and_nothing_runs(made, programs, text):
    ran = []
    if isinstance(programs, dict) and programs:
        programs = {"main": lambda cluster: ran.append(1), **programs}
    with pytest.raises(JdagError, match=r"^cluster\.run") as caught:
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
            "of a program on 'main'": [
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
            "of a program on 't0'": [partial(in_context, nested)],
            "has no cluster": [partial(in_context, steps)],
            "only the main program runs programs": [lambda c: c.run({"t1": where})],
            "the main program closes it": [lambda c: c.close()],
        }
        for text, refused in uses.items():
            for use in refused:
                assert text in made.run({"t0": partial(bad, use)})["t0"]
    with pytest.raises(ContextError, match="on 't0', which is over"):
        kept[0].put("ps", 1.0)
    assert made.run({"t0": where}) == {"t0": "t0"}


def test_a_result_that_cannot_travel_is_named_by_the_users_program(made):
    with pytest.raises(ContextError, match=r"test_run:\S*<lambda> returned a set"):
        made.run({"t0": lambda cluster: {cluster.here}})


def test_refs_of_a_programs_context_do_not_leave_it(made):
    def returns(cluster):
        with cluster.context() as ctx:
            return ctx.call("ps", total, ONES)

    with pytest.raises(ContextError, match=r"test_run:.*returns failed on 't0'.*leave"):
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
    with pytest.raises(
        ContextError, match=r"leaf 0 on ps was dropped by cluster\.drop"
    ):
        made.run({"t0": partial(train, {"one": [shared]})})


def test_an_optimizer_of_another_cluster_is_refused(cluster):
    with simulate(["a", "b"], seed=0) as other:
        theirs = Optimizer(optax.sgd(0.5), other.put("b", 1.0))
        with pytest.raises(ContextError, match=r"is of the cluster of 'a', 'b' and"):
            cluster.run({"c": partial(with_its_own, theirs)})


def test_an_abstract_trainer_sends_what_a_real_one_does():
    counts = []
    for values in ("real", "abstract"):
        with simulate(["a", "b", "c"], seed=0, values=values) as cluster:
            w = cluster.put("b", 2.0)
            optimizer = Optimizer(optax.adam(0.25), w, clip_norm=1.0)
            cluster.run({"c": partial(with_an_optimizer, w, optimizer)})
            info = cluster.info().values()
            counts.append([(one["messages_sent"], one["bytes_sent"]) for one in info])
    assert counts[0] == counts[1]
