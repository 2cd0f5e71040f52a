"""Crashes after which a worker joins again, empty, and how others hear of that."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jdag import simulate
from jdag.errors import ScenarioError, WorkerLost
from jdag.sim import Crash, DeviceModel, LinkModel, Partition
from jdag.sim.faults import Faults
from tests.tools.error_texts import fails_with
from tests.tools.face_cases import ONES, nothing_is_left, total


def cluster_of(*faults: Any, **options: Any) -> Any:
    """A call takes 100 ns, a message 10."""
    return simulate(
        ["a", "b", "c"],
        seed=0,
        network=LinkModel(latency_ns=10),
        devices=DeviceModel(forward_ns=100, backward_ns=100),
        faults=faults,
        **options,
    )


def outlast(cluster: Any, until_ns: int) -> None:
    while cluster.now_ns < until_ns:
        with cluster.context() as ctx:
            ctx.call("a", jnp.sin, ONES).fetch()


def records(cluster: Any, *kinds: str) -> list[Any]:
    found = [r for r in cluster.trace if r.kind in kinds]
    return [(r.time_ns, r.kind, r.worker, *r.detail) for r in found]


def test_who_comes_back_is_empty_and_all_hear_of_it_at_once():
    with cluster_of(Crash("b", detect_ns=50, at_ns=500, restart_ns=1_000)) as cluster:
        cluster.put("b", ONES)
        outlast(cluster, 1_600)
        assert records(cluster, "crash", "lost", "restart", "joined") == [
            (500, "crash", "b", "at_ns"),
            (550, "lost", "a", "b"),
            (550, "lost", "c", "b"),
            (1_500, "restart", "b#1", 1),
            (1_500, "joined", "a", "b#1"),
            (1_500, "joined", "c", "b#1"),
        ]
        held = cluster.info()["b"]
        assert (held["lost"], held["values_held"], held["bytes_held"]) == (False, 0, 0)


@pytest.mark.parametrize("restart_ns", [0, 40])
def test_who_has_not_noticed_the_loss_hears_of_both_at_once(restart_ns: int):
    crash = Crash("b", detect_ns=5_000, at_ns=500, restart_ns=restart_ns)
    with cluster_of(crash) as cluster:
        outlast(cluster, 6_000)
        at_ns = 500 + restart_ns
        assert records(cluster, "lost", "joined") == [
            (at_ns, "lost", "a", "b"),
            (at_ns, "joined", "a", "b#1"),
            (at_ns, "lost", "c", "b"),
            (at_ns, "joined", "c", "b#1"),
        ]


def test_a_leaf_of_a_device_is_lost_with_the_one_that_had_the_device():
    with cluster_of(Crash("b", detect_ns=50, at_ns=500, restart_ns=100)) as cluster:
        leaf = cluster.put("b/cpu:0", ONES)
        outlast(cluster, 2_000)
        with cluster.context() as ctx, fails_with(WorkerLost, "sim.b"):
            ctx.call("c", total, leaf)


def test_what_programs_of_the_next_one_make_has_names_of_its_own():
    """The former one has a leaf on c and an assignment under way there, as it has."""

    def trains(cluster, slow):
        w = cluster.put("c", ONES)
        if slow:
            cluster.update(lambda a, b: a + b, w, 10 * ONES)
        return w

    def first(cluster):
        return trains(cluster, slow=True)

    def second(cluster):
        w = trains(cluster, slow=False)
        cluster.update(lambda a, b: a + b, w, 7 * ONES)
        with cluster.context() as ctx:
            out = ctx.call("c", total, w, w)
            ctx.backward(out)
            assert str(ctx).startswith("Context(context 1#1.1,")
            return w

    crash = Crash("b", detect_ns=5, at_ns=50, restart_ns=20)
    with cluster_of(crash, link=None) as cluster:
        with pytest.raises(WorkerLost):
            cluster.run({"b": first})
        outlast(cluster, 200)
        w = cluster.run({"b": second})["b"]
        assert str(w.leaf) == "leaf 1#1.0 on c"
        np.testing.assert_array_equal(w.fetch(), 8 * ONES)
        nothing_is_left(cluster)


def test_it_may_crash_again_and_of_who_is_down_a_crash_makes_nothing():
    crashes = [
        Crash("b", detect_ns=5, at_ns=at_ns, restart_ns=300)
        for at_ns in (500, 600, 1_000)
    ]
    with cluster_of(*crashes) as cluster:
        outlast(cluster, 2_000)
        assert records(cluster, "crash", "restart") == [
            (500, "crash", "b", "at_ns"),
            (800, "restart", "b#1", 1),
            (1_000, "crash", "b#1", "at_ns"),
            (1_300, "restart", "b#2", 2),
        ]
        w = cluster.put("b", ONES)
        assert repr(w).endswith("leaf 0 on b#2, tracked)")
        np.testing.assert_array_equal(w.fetch(), ONES)


def test_who_joins_hears_who_else_is_lost_and_who_has_joined():
    faults = [
        Crash("b", detect_ns=5, at_ns=500, restart_ns=100),
        Crash("c", detect_ns=5, at_ns=700, restart_ns=300),
        Crash("b", detect_ns=5, at_ns=800, restart_ns=100),
    ]
    with cluster_of(*faults) as cluster:
        outlast(cluster, 1_200)
        told = records(cluster, "lost", "joined")
        assert [(at, *rest) for at, kind, *rest in told if kind == "joined"] == [
            (600, "a", "b#1"),
            (600, "c", "b#1"),
            (900, "a", "b#2"),
            (1_000, "a", "c#1"),
            (1_000, "c#1", "b#2"),
            (1_000, "b#2", "c#1"),
        ]
        assert [(at, peer) for at, kind, who, peer in told if who == "b#2"] == [
            (900, "c"),
            (1_000, "c#1"),
        ]
        assert [peer for _, kind, who, peer in told if who == "c#1"] == [
            *("b", "b#1", "b#2"),
        ]


def test_counts_are_of_all_that_have_had_the_name():
    def counted(*faults):
        with cluster_of(*faults) as cluster:
            w = cluster.put("b", ONES)
            w.fetch()
            outlast(cluster, 2_000)
            if not faults:
                w.fetch()
            else:
                cluster.put("b", ONES).fetch()
            cluster.driver.settle()
            return cluster.info()["b"]

    calm = counted()
    again = counted(Crash("b", detect_ns=5, at_ns=1_000, restart_ns=5))
    assert again["bytes_peak"] >= calm["bytes_peak"] > 0
    # Home's contexts until then are over. A second leaf is acknowledged by a frame.
    assert again["messages_sent"] == calm["messages_sent"] + 1
    assert again["frames_sent"] > calm["frames_sent"]
    assert again["bytes_sent"] > calm["bytes_sent"]


def test_who_joins_where_nothing_passes_is_given_up_by_those_beyond():
    faults = [
        Partition((("a",), ("b",)), from_ns=100),
        Crash("b", detect_ns=5, at_ns=500, restart_ns=100),
    ]
    with cluster_of(*faults) as cluster:
        outlast(cluster, 700)
        cluster.driver.settle()
        told = records(cluster, "lost")
        assert sorted((who, peer) for _, _, who, peer in told) == [
            *(("a", "b"), ("a", "b#1"), ("b#1", "a"), ("c", "b")),
        ]


def test_only_the_last_crash_of_a_worker_may_be_for_good():
    crashes = [Crash("b", 5, at_ns=1), Crash("b", 5, at_ns=9, restart_ns=1)]
    with fails_with(ScenarioError, "sim.a_crash_that_is_final_is_the_last"):
        Faults(crashes, ("a", "b"))
    Faults(crashes[::-1], ("a", "b"))
    with fails_with(ScenarioError, "sim.restart_ns_1_allowed_is"):
        Faults([Crash("b", 5, at_ns=9, restart_ns=-1)], ("a", "b"))
