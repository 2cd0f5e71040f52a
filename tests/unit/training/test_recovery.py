"""Recovery in virtual time: the bits of a quiet run, wherever a worker is lost."""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest

import jdag
from jdag.errors import RecoveryError, WorkerLost
from jdag.sim import Crash, LinkModel
from tests.tools.error_texts import fails_with
from tests.tools.recovery_cases import (
    WORKERS,
    Patient,
    bits,
    chained,
    drawn,
    layer,
    mean_square,
    more,
    train,
)
from tests.tools.tiers import FIRST


def crash(victim: str, index: int, **settings: Any) -> Crash:
    return Crash(victim, 50, at_index=index, restart_ns=100, **settings)


def simulated(faults: Sequence[Crash] = (), **settings: Any) -> Any:
    return jdag.simulate(WORKERS, seed=0, recover=True, faults=faults, **settings)


def trained(faults: Sequence[Crash], **settings: Any) -> tuple[Any, int, int]:
    with simulated(faults) as cluster:
        patient = Patient(cluster.recover)
        found = train(cluster, patient, **settings)
        return found, len(cluster.trace), patient.losses


def test_a_training_has_the_same_bits_whatever_event_a_worker_crashes_at():
    quiet, records, _ = trained([], steps=3)
    losses = 0
    for index in range(0, records, 41 if FIRST else 11):
        found, _, lost = trained([crash("bcd"[index % 3], index)], steps=3)
        assert found == quiet, index
        losses += lost
    assert losses > 5


def test_workers_may_be_lost_again_and_while_others_recover():
    quiet, records, _ = trained([])
    losses = 0
    for index in range(records // 3, records, 97 if FIRST else 53):
        faults = [crash("b", index), crash("c", index + 20), crash("b", index + 160)]
        found, _, lost = trained(faults, to="a")
        assert found == quiet, index
        losses += lost
    assert losses > 5


def test_while_workers_recover_any_of_them_may_be_lost_again():
    losses = 0
    for after_ns in range(1_000, 2_600, 100 if FIRST else 25):
        faults = [
            Crash(worker, 50, at_ns=10_000 + ns, restart_ns=1_000)
            for worker, ns in [("b", 0), ("c", 0), ("c", after_ns)]
        ]
        with simulated(faults, network=LinkModel(latency_ns=100)) as cluster:
            refs = two_leaves(cluster)
            cluster.replicate_leaves(to="d")
            cluster.update(jnp.add, refs, 1.0)
            recovery = cluster.state.recovery
            assert cluster.driver.until(
                lambda of=recovery: of.lost_workers == ["b", "c"], 10**6
            )
            cluster.recover()
            losses += cluster.driver.incarnations["c"] == 2
            patient = Patient(cluster.recover)
            assert bits(patient(jdag.fetch, refs)) == bits([drawn(0) + 1, drawn(1) + 1])
    assert losses > 3


def two_leaves(cluster: Any) -> list[jdag.Ref]:
    return [cluster.put(worker, drawn(n)) for n, worker in enumerate("bc")]


def lose(cluster: Any, victim: str) -> None:
    driver = cluster.driver
    driver._outages.crash(Crash(victim, 0, at_ns=driver.now_ns, restart_ns=1_000))
    assert driver.until(lambda: victim in cluster.state.recovery.lost_workers, 1)


def test_a_leaf_without_a_copy_is_named_and_may_be_dropped_or_loaded(tmp_path: Any):
    with simulated() as cluster:
        w, v = two_leaves(cluster)
        u, put = cluster.put("b", drawn(5)), drawn(4)
        other = cluster.put("b", put)
        put[:] = 0.0
        cluster.save(tmp_path / "saved", u=u)
        cluster.update(jnp.add, [w, v, u], 1.0)
        lose(cluster, "b")
        load = partial(cluster.load, tmp_path / "saved", u=u)
        for leaf, without in ((w, partial(cluster.drop, w)), (u, load)):
            name = leaf.described.removesuffix(" on b").removesuffix(" on b#1")
            with pytest.raises(RecoveryError, match=f"{name} is lost with worker 'b'"):
                cluster.recover("b")
            assert bits(v.fetch()) == bits(drawn(1) + 1)
            without()
        cluster.recover("b")
        found = jdag.fetch([other, u, v])
        assert bits(found) == bits([drawn(4), drawn(5), drawn(1) + 1])


def test_what_was_put_and_not_changed_since_comes_from_the_caller():
    with simulated() as cluster:
        w, v = two_leaves(cluster)
        gone, changed = cluster.put("b", drawn(7)), cluster.put("c", drawn(8))
        cluster.drop(gone)
        cluster.update(jnp.add, changed, 1.0)
        for _ in range(2):
            lose(cluster, "b")
            cluster.recover("b")
            assert bits([w.fetch(), v.fetch()]) == bits([drawn(0), drawn(1)])


def test_where_first_copies_fail_the_caller_still_knows_what_it_has_put():
    with simulated() as cluster:
        w, v = cluster.put("b", drawn(1)), cluster.put("d", drawn(2))
        lose(cluster, "c")  # It would keep the copy of w.
        with pytest.raises(WorkerLost):
            cluster.replicate_leaves()
        cluster.update(jnp.add, v, 1.0)
        cluster.recover()
        lose(cluster, "b")
        cluster.recover()
        assert bits(w.fetch()) == bits(drawn(1))


@pytest.mark.parametrize("to", [None, "b"])  # The copies of its own are elsewhere.
def test_both_copies_of_a_leaf_may_be_lost_one_after_the_other(to: str | None):
    with simulated() as cluster:
        w, v = two_leaves(cluster)
        cluster.update(jnp.add, [w, v], 1.0)
        cluster.replicate_leaves(to=to)
        for victim in "bcdbc":
            lose(cluster, victim)
            cluster.recover(victim)
            assert bits(jdag.fetch([w, v])) == bits([drawn(0) + 1, drawn(1) + 1])


def test_an_update_that_loses_an_owner_or_a_peer_is_made_on_none():
    with simulated() as cluster:
        refs = two_leaves(cluster)
        cluster.replicate_leaves()
        lose(cluster, "b")
        with pytest.raises(WorkerLost):
            cluster.update(jnp.add, refs, 1.0)
        cluster.recover()
        assert bits(jdag.fetch(refs)) == bits([drawn(0), drawn(1)])
        lose(cluster, "d")  # The peer of c.
        make = partial(cluster.make, "c", jnp.negative)
        for change in (partial(cluster.update, jnp.add, refs), make):
            with fails_with(WorkerLost, "training.cluster_recover_then_repeat"):
                change(1.0)
        cluster.recover()
        assert bits(jdag.fetch(refs)) == bits([drawn(0), drawn(1)])
        cluster.driver.settle()
        held = [one["values_held"] for one in cluster.info().values()]
        assert held == [0, 2, 3, 1]  # Two leaves, each with two copies.
        cluster.update(jnp.add, refs, 1.0)
        assert bits(jdag.fetch(refs)) == bits([drawn(0) + 1, drawn(1) + 1])


# The worker that takes the place has the copies of b, or not; its own are on b.
@pytest.mark.parametrize(("to", "peer"), [("c", None), ("d", None), ("c", "b")])
def test_another_worker_takes_the_place_of_one(to: str, peer: str | None):
    def played(to: str | None) -> Any:
        with simulated() as cluster:
            w, v = two_leaves(cluster)
            counter = cluster.host("b", Counter, 5.0)
            cluster.replicate_leaves(to=peer)
            plan = jdag.compile(chained, cluster, exact=True)
            before = plan([w, v], drawn(6))
            if to is not None:
                lose(cluster, "b")
                cluster.recover("b", to=to)
                assert w.worker == counter.worker == to
            for _ in range(2):
                with cluster.context() as ctx:
                    y = ctx.call("b", layer, w, drawn(3))
                    ctx.backward(ctx.call("b", mean_square, ctx.call("c", layer, v, y)))
                    found = bits(jdag.fetch([y, *ctx.gradient([w, v])]))
                if to is not None:  # What is there now has copies on another one.
                    lose(cluster, to)
                    cluster.recover()
            assert plan([w, v], drawn(6)) == before
            return found, bits(jdag.fetch([w, v])), counter.call("add", 1.0)

    assert played(to) == played(None)


def test_what_programs_of_run_update_counts_once_all_have_ended():
    with simulated() as cluster:
        refs = two_leaves(cluster)
        cluster.replicate_leaves()
        ran = {"b": partial(more, refs[0]), "c": partial(more, refs[1])}
        assert cluster.run(ran) == {"b": "b", "c": "c"}
        lose(cluster, "b")
        with pytest.raises(WorkerLost):
            cluster.run(ran)
        cluster.recover()
        assert bits(jdag.fetch(refs)) == bits([drawn(0) + 1, drawn(1) + 1])
        assert cluster.run(ran) == {"b": "b", "c": "c"}
        assert bits(jdag.fetch(refs)) == bits([drawn(0) + 1 + 1, drawn(1) + 1 + 1])


def test_old_copies_are_dropped_and_copies_of_what_is_dropped():
    with simulated() as cluster:
        refs = two_leaves(cluster)
        cluster.replicate_leaves()
        held = []
        for _ in range(3):
            cluster.update(jnp.add, refs, 1.0)
            lose(cluster, "b")
            cluster.recover()
            kept = cluster.keep(refs)
            lose(cluster, "c")
            cluster.recover()
            del kept  # Its leaves have other names now.
            cluster.update(jnp.add, refs, 1.0)
            cluster.driver.settle()
            held.append([one["values_held"] for one in cluster.info().values()])
        assert held == [[0, 2, 3, 1]] * 3  # Two leaves, each with two copies.
        cluster.drop(refs)
        cluster.driver.settle()
        assert not any([one["values_held"] for one in cluster.info().values()])


def test_contexts_of_a_lost_worker_are_over_and_others_go_on():
    def played(*victims: str) -> Any:
        with simulated() as cluster:
            _, v = two_leaves(cluster)
            cluster.replicate_leaves()
            gone = cluster.context().__enter__()
            with cluster.context() as ctx:
                y = ctx.call("c", layer, v, drawn(3))
                kept = gone.call("b", layer, v, drawn(3))
                for victim in victims:
                    lose(cluster, victim)
                    cluster.recover()
                ctx.backward(ctx.call("c", mean_square, y))
                found = bits(jdag.fetch([y, ctx.gradient(v)]))
                for use in (partial(gone.call, "c", layer, v), partial(gone.move, "c")):
                    if victims:
                        with fails_with(WorkerLost, "training.worker_b_is_lost"):
                            use(kept)
            gone.__exit__(None, None, None)
            return found

    assert played("b", "d") == played()


def test_until_it_is_recovered_a_worker_that_joined_again_is_lost():
    with simulated() as cluster:
        w, _ = two_leaves(cluster)
        cluster.replicate_leaves()
        lose(cluster, "b")
        assert cluster.driver.until(
            lambda: cluster.driver.incarnations == {"b": 1}, 10**6
        )
        for use in (w.fetch, partial(cluster.put, "b", 1.0)):
            with fails_with(WorkerLost, "training.b_1_which_joined_since"):
                use()
        cluster.recover()
        assert bits(w.fetch()) == bits(drawn(0))


def test_what_is_made_and_what_is_loaded_are_recovered(tmp_path: Any):
    with simulated() as cluster:
        w, v = two_leaves(cluster)
        cluster.save(tmp_path / "saved", w=w)
        cluster.replicate_leaves()
        made = cluster.make("b", layer, w, drawn(5))
        cluster.update(jnp.add, [w, v, made], 1.0)
        cluster.load(tmp_path / "saved", w=w)
        names = {w: "w", made: "made"}
        found = bits(jdag.fetch([w, v, made]))
        lose(cluster, "b")
        cluster.recover()
        assert bits(jdag.fetch([w, v, made])) == found
        assert found[0] == bits(drawn(0))[0]
        assert (names[w], names[made]) == ("w", "made")


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda c: c.recover("x"), "worker = 'x': expected one of 'a', 'b', 'c', 'd'"),
        (lambda c: c.recover("a"), "'a': expected a lost worker, not the caller's own"),
        (lambda c: c.recover("b", timeout_s=1e-3), "worker 'b' is not lost"),
        (lambda c: c.recover(timeout_s=1e-3), "no worker is lost"),
        (lambda c: c.recover("b", to="b"), "to = 'b': expected another worker"),
        (lambda c: c.recover("b", to="e"), "to = 'e': expected one of"),
        (lambda c: c.recover("b", timeout_s=0), "timeout_s = 0: expected"),
        (lambda c: c.replicate_leaves(to="x"), "to = 'x': expected one of"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_in_a_line(ask: Any, said: str):
    with simulated() as cluster:
        with pytest.raises(jdag.errors.JdagError) as raised:
            ask(cluster)
        assert said in str(raised.value) and "\n" not in str(raised.value)


def test_recovery_has_to_be_asked_for_when_the_cluster_is_made():
    with jdag.simulate(["a", "b"], seed=0) as cluster:
        for ask in (cluster.recover, cluster.replicate_leaves):
            with fails_with(jdag.errors.JdagError, "training.recover_true"):
                ask()
    with fails_with(jdag.errors.ScenarioError, "training.recover_1"):
        jdag.simulate(["a", "b"], seed=0, recover=cast("bool", 1))


def test_a_worker_that_does_not_join_again_in_time_is_named():
    with simulated([Crash("b", 0, at_ns=0)]) as cluster:
        cluster.driver.settle()
        said = "worker 'b' has not joined again within timeout_s=0.5: it crashed"
        with pytest.raises(RecoveryError, match=said):
            cluster.recover(timeout_s=0.5)


class Counter:
    def __init__(self, begin: Any) -> None:
        self.number = float(begin)

    def add(self, more: float) -> float:
        self.number += more
        return self.number


def test_objects_are_made_anew_under_the_same_handles():
    with simulated() as cluster:
        begin = np.full((), 5.0)
        kept, dropped = (
            cluster.host("b", Counter, begin),
            cluster.host("b", Counter, 6.0),
        )
        other = cluster.host("c", Counter, 7.0)
        begin[...] = 0.0
        cluster.drop(dropped)
        assert [kept.call("add", 1.0), other.call("add", 1.0)] == [6.0, 8.0]
        for _ in range(2):
            lose(cluster, "b")
            with pytest.raises(WorkerLost):
                kept.call("add", 1.0)
            cluster.recover()
            assert [kept.call("add", 1.0), other.call("add", 0.0)] == [6.0, 8.0]
        assert len(cluster.driver._env.newest("b").objects) == 1


def test_shapes_alone_are_recovered_too():
    with simulated([crash("b", 400)], values="abstract") as cluster:
        patient = Patient(cluster.recover)
        train(cluster, patient)
        assert patient.losses
