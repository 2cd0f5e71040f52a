"""Recovery in virtual time: the bits of a quiet run, wherever a worker is lost."""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdag
from jdag.errors import GraphError, PassTimeout, RecoveryError, WorkerLost
from jdag.sim import Crash, LinkModel
from tests.recovery_cases import (
    WORKERS,
    Patient,
    added,
    bits,
    drawn,
    inner,
    layer,
    live,
    mean_square,
    train,
)
from tests.tiers import FIRST


def crash(victim: str, index: int, **settings: Any) -> Crash:
    return Crash(victim, 50, at_index=index, restart_ns=100, **settings)


def simulated(faults: Sequence[Crash] = (), **settings: Any) -> Any:
    return jdag.simulate(WORKERS, seed=0, recover=True, faults=faults, **settings)


def lived(faults: Sequence[Crash], every: int, to: str | None) -> tuple[Any, int, int]:
    """The bits of the live program, the records of its trace, and its losses."""
    with simulated(faults) as cluster:
        patient = Patient(cluster, cluster.recover)
        found = live(cluster, patient, every, to)
        return found, len(cluster.trace), patient.losses


def trained(faults: Sequence[Crash] = ()) -> tuple[Any, int, int]:
    with simulated(faults) as cluster:
        patient = Patient(cluster, cluster.recover)
        found, losses = train(cluster, 2, patient=patient)
        return found, len(cluster.trace), losses + patient.losses


def test_a_training_has_the_same_bits_whatever_event_a_worker_crashes_at():
    quiet, records, _ = trained()
    losses = 0
    for index in range(0, records, 41 if FIRST else 11):
        found, _, lost = trained([crash("bcd"[index % 3], index)])
        assert found == quiet, index
        losses += lost
    assert losses > 5


def test_workers_may_be_lost_again_and_while_others_recover():
    with simulated() as cluster:
        quiet = live(cluster, Patient(cluster, cluster.recover), 1, "a")
        trace = cluster.trace
    begin, step = len(trace) // 3, 97 if FIRST else 53
    last = max(one.index for one in trace if (one.kind, one.worker) == ("send", "b"))
    for index in (*range(begin, last, step), last, last + 1):
        faults = [crash("b", index), crash("c", index + 20), crash("b", index + 160)]
        found, _, lost = lived(faults, 1, "a")
        # After its last answer nothing waits for b: the program ends without a loss.
        assert found == quiet and (lost > 0) == (index <= last), index


def two_leaves(cluster: Any) -> list[jdag.Ref]:
    return [cluster.put(worker, drawn(n)) for n, worker in enumerate("bc")]


def lose(cluster: Any, victim: str) -> None:
    """Crash a worker, and wait until all have learned of it."""
    driver = cluster.driver
    driver._outages.crash(Crash(victim, 0, at_ns=driver.now_ns, restart_ns=1_000))
    assert driver.until(lambda: victim in cluster.state.recovery.gone, 1)


def test_a_leaf_without_a_copy_is_named():
    with simulated() as cluster:
        w, v = two_leaves(cluster)
        cluster.update(jnp.add, [w, v], 1.0)
        lose(cluster, "b")
        with pytest.raises(RecoveryError, match="leaf 0 on b is lost with worker 'b'"):
            cluster.recover("b")
        np.testing.assert_array_equal(v.fetch(), drawn(1) + 1)


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
        w, gone = cluster.put("b", drawn(1)), cluster.put("d", drawn(2))
        lose(cluster, "c")  # It would keep the copy of w.
        with pytest.raises(WorkerLost):
            cluster.replicate_leaves()
        cluster.recover()
        cluster.drop(gone)
        with cluster.context():
            pass  # Now the log begins anew, without what was dropped.
        lose(cluster, "b")
        cluster.recover()
        assert bits(w.fetch()) == bits(drawn(1))


def test_both_copies_of_a_leaf_may_be_lost_one_after_the_other():
    with simulated() as cluster:
        w, v = two_leaves(cluster)
        cluster.update(jnp.add, [w, v], 1.0)
        cluster.replicate_leaves()
        for victim in "bcdbc":
            lose(cluster, victim)
            cluster.recover(victim)
            assert bits(jdag.fetch([w, v])) == bits([drawn(0) + 1, drawn(1) + 1])


def test_leaves_of_the_worker_that_keeps_all_copies_have_theirs_on_the_next():
    with simulated() as cluster:
        w, v = two_leaves(cluster)
        cluster.replicate_leaves(to=w.worker)
        cluster.update(jnp.add, [w, v], 1.0)
        for victim in (w.worker, v.worker):
            lose(cluster, victim)
            cluster.recover(victim)
            assert bits(jdag.fetch([w, v])) == bits([drawn(0) + 1, drawn(1) + 1])


def test_an_update_that_loses_an_owner_is_made_on_none():
    with simulated() as cluster:
        refs = two_leaves(cluster)
        cluster.replicate_leaves()
        lose(cluster, "b")
        with pytest.raises(WorkerLost):
            cluster.update(jnp.add, refs, 1.0)
        cluster.recover()
        assert bits(jdag.fetch(refs)) == bits([drawn(0), drawn(1)])
        cluster.update(jnp.add, refs, 1.0)
        assert bits(jdag.fetch(refs)) == bits([drawn(0) + 1, drawn(1) + 1])


def test_another_worker_takes_the_place_of_one_under_its_name():
    def played(to: str | None) -> Any:
        with simulated() as cluster:
            w, v = two_leaves(cluster)
            cluster.replicate_leaves()
            with cluster.context() as ctx:
                y = ctx.call("b", layer, w, drawn(3))
                if to is not None:
                    lose(cluster, "b")
                    cluster.recover("b", to=to)
                z = ctx.call("c", layer, v, y)
                ctx.backward(ctx.call("b", mean_square, ctx.call("b", added, z, y, z)))
                assert w.worker == y.worker == "b"
                found = bits(jdag.fetch([z, *ctx.gradient([w, v])]))
            if to is not None:  # What is there now has copies, too.
                lose(cluster, to)
                cluster.recover()
            return found, bits(jdag.fetch([w, v]))

    assert played("d") == played(None)


def test_programs_of_run_are_none_that_are_replayed_and_all_that_they_update_is_kept():
    def more(ref: Any, cluster: Any) -> Any:
        cluster.update(jnp.add, ref, 1.0)
        return cluster.here

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


def test_steps_of_plans_are_kept_and_a_plan_is_made_anew():
    def loss(ctx: Any, refs: Any, x: Any) -> Any:
        for ref in refs:
            x = ctx.call(ref.worker, layer, ref, x)
        return ctx.call("d", mean_square, x)

    def played(*victims: str) -> Any:
        with simulated() as cluster:
            refs = two_leaves(cluster)
            optimizer = jdag.Optimizer(optax.sgd(0.1, momentum=0.9), refs)
            cluster.replicate_leaves()
            step = jdag.compile(loss, cluster, optimizer=optimizer)
            losses = {}
            while (number := optimizer.steps) < 4:
                if number < len(victims) and number not in losses:
                    losses[number] = 0.0
                    lose(cluster, victims[number])
                try:
                    losses[number] = step(refs, drawn(5 + number))
                except WorkerLost:
                    cluster.recover()
            return bits([list(losses.values()), jdag.fetch(refs)])

    assert played("b", "d", "c") == played()


def test_nothing_is_kept_of_contexts_that_are_over_and_of_old_copies():
    with simulated() as cluster:
        refs = two_leaves(cluster)
        cluster.replicate_leaves()
        held = []
        for _ in range(3):
            cluster.update(jnp.add, refs, 1.0)
            with cluster.context() as ctx:
                ctx.call("b", layer, refs[0], drawn(3)).fetch()
            cluster.driver.settle()
            log = cluster.state.recovery._log
            held.append(([w["values_held"] for w in cluster.info().values()], len(log)))
        assert held[1:] == held[:-1] and held[0][1] == 0


def test_without_recover_no_port_passes_through_anything_else():
    with jdag.simulate(["a", "b"], seed=0) as cluster:
        assert cluster._port.via is None


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (
            lambda c: c.recover("x"),
            "worker = 'x': allowed is one of 'a', 'b', 'c', 'd'",
        ),
        (lambda c: c.recover("a"), "worker = 'a' is the caller's own, not lost"),
        (lambda c: c.recover("b", timeout_s=1e-3), "worker 'b' is not lost"),
        (lambda c: c.recover(timeout_s=1e-3), "no worker is lost"),
        (lambda c: c.recover("b", to="b"), "to = 'b': allowed is another worker"),
        (lambda c: c.recover("b", to="e"), "to = 'e': allowed is one of"),
        (lambda c: c.recover("b", timeout_s=0), "timeout_s=0: allowed is"),
        (lambda c: c.replicate_leaves(every=0), "every = 0: allowed is a whole"),
        (lambda c: c.replicate_leaves(to="x"), "to = 'x': allowed is one of"),
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
            with pytest.raises(jdag.errors.JdagError, match=r"recover=True"):
                ask()
    with pytest.raises(jdag.errors.ScenarioError, match="recover = 1"):
        jdag.simulate(["a", "b"], seed=0, recover=cast("bool", 1))


def test_a_worker_that_does_not_join_again_in_time_is_named():
    with simulated([Crash("b", 0, at_ns=0)]) as cluster:
        cluster.driver.settle()
        said = "worker 'b' has not joined again within timeout_s=0.5: it crashed"
        with pytest.raises(RecoveryError, match=said):
            cluster.recover(timeout_s=0.5)


class Counter:
    """An object whose calls change it."""

    def __init__(self, begin: Any) -> None:
        self.number = float(begin)

    def add(self, more: float) -> float:
        self.number += more
        return self.number


@jdag.program
def counted(ctx: Any, counter: Any, x: Any) -> Any:
    """On the worker of the object it is that itself."""
    return ctx.call(ctx.here, layer, x, np.full((3, 3), counter.number, np.float32))


def test_objects_are_made_anew_under_the_same_handles():
    with simulated() as cluster:
        kept, dropped = cluster.host("b", Counter, 5.0), cluster.host("b", Counter, 6.0)
        other = cluster.host("c", Counter, 7.0)
        cluster.drop(dropped)
        assert [kept.call("add", 1.0), other.call("add", 1.0)] == [6.0, 8.0]
        with cluster.context() as ctx:
            for _ in range(2):
                lose(cluster, "b")
                with pytest.raises(WorkerLost):
                    kept.call("add", 1.0)
                cluster.recover()
                assert [kept.call("add", 1.0), other.call("add", 0.0)] == [6.0, 8.0]
            assert ctx.call("b", counted, kept, drawn(1)).worker == "b"
            assert len(cluster.driver._env.newest("b").objects) == 1


def test_a_leaf_that_an_open_context_has_read_may_be_dropped():
    with simulated() as cluster:
        w, _ = two_leaves(cluster)
        cluster.replicate_leaves()
        with cluster.context() as ctx:
            y = ctx.call("b", layer, w, drawn(3))
            cluster.drop(w)
            lose(cluster, "c")
            cluster.recover()
            assert bits(y.fetch()) == bits(jax.jit(layer)(drawn(0), drawn(3)))
        cluster.drop([])  # Copies go when the cluster is used.
        cluster.driver.settle()
        held = [one["values_held"] for one in cluster.info().values()]
        assert held == [0, 0, 2, 1], held  # v, a copy beside it, and one on d.


@pytest.mark.parametrize("timeout_s", [5e-8, 1.5e-7, 3.5e-7])
@pytest.mark.parametrize("retain", [True, False])
def test_a_pass_that_took_too_long_does_so_again_in_the_replay(
    retain: bool, timeout_s: float
):
    def played(*victims: str) -> Any:
        with simulated(network=LinkModel(latency_ns=100)) as cluster:
            w, v = two_leaves(cluster)
            with cluster.context() as ctx:
                y = ctx.call("b", layer, w, drawn(3))
                old = ctx.call("c", mean_square, ctx.call("c", layer, v, y))
                ctx.backward(old, retain_graph=True)
                with pytest.raises(PassTimeout):  # Before it has begun, or after.
                    ctx.backward(old, retain_graph=retain, timeout_s=timeout_s)
                new = ctx.call("c", mean_square, ctx.call("b", layer, w, drawn(4)))
                for victim in victims:
                    lose(cluster, victim)
                    cluster.recover()
                ctx.backward(*[old] * retain, new, retain_graph=True)
                if not retain:  # What had been called before the pass is spent.
                    with pytest.raises(GraphError):
                        ctx.backward(old)
                return bits(jdag.fetch(ctx.gradient([w, v])))

    assert played("b", "c", "d") == played()


@pytest.mark.parametrize("seed", range(4))
def test_programs_may_end_in_another_order_in_the_replay(seed: int):
    network = LinkModel(latency_ns=100, jitter_ns=1_000)
    with jdag.simulate(WORKERS, seed=seed, recover=True, network=network) as cluster:
        _, v = two_leaves(cluster)
        with cluster.context() as ctx:
            first = ctx.start("c", inner, v, drawn(3))
            second = ctx.start("d", inner, v, drawn(4))
            found = first.result()
            lose(cluster, "b")
            cluster.recover()
            both = bits(jdag.fetch([found, second.result()]))
            again = [ctx.call("a", inner, v, drawn(n)) for n in (3, 4)]
            assert both == bits(jdag.fetch(again))


def test_state_that_is_kept_from_step_to_step_is_as_before_a_step_that_is_lost():
    def played(victims: dict[int, str]) -> Any:
        with simulated() as cluster:
            (w, _), h = two_leaves(cluster), cluster.put("c", drawn(3), tracked=False)
            cluster.replicate_leaves()
            for step in range(4):
                while True:
                    try:
                        with cluster.context() as ctx:
                            y = ctx.call("c", layer, h, ctx.move("c", w))
                            if step in victims:
                                crashing(cluster, victims.pop(step))
                            new = cluster.keep(y)
                        break
                    except WorkerLost:
                        cluster.recover()
                h = new
            return bits(h.fetch())

    def crashing(cluster: Any, victim: str) -> None:
        now_ns = cluster.driver.now_ns
        crash = Crash(victim, 10, at_ns=now_ns, restart_ns=1_000)
        cluster.driver._outages.crash(crash)

    assert played({1: "d", 2: "c", 3: "d"}) == played({})


def test_shapes_alone_are_recovered_too():
    with simulated([crash("b", 400)], values="abstract") as cluster:
        patient = Patient(cluster, cluster.recover)
        live(cluster, patient, 1, None)
        assert patient.losses
