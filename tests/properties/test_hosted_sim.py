"""Objects on workers in virtual time: the order by seed, crashes, and what is left."""

import gc
import random
import weakref
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jdag
from jdag import sim
from jdag.api.oracle import oracle
from jdag.errors import ContextError, JdagError, RemoteError, WorkerLost
from tests.tools.error_texts import fails_with
from tests.tools.hosted_cases import Counter, Relay, bump, calls, handed, trains
from tests.tools.tiers import sized

WORKERS = ("a", "b", "c", "d")


def simulated(seed: int = 0, **settings: Any) -> jdag.Cluster:
    return jdag.simulate(WORKERS, seed=seed, **settings)


def crashing(victim: str, **settings: Any) -> jdag.Cluster:
    crash = sim.Crash(victim, 1_000, at_ns=50_000, **settings)
    return simulated(network=sim.LinkModel(latency_ns=1_000), faults=[crash])


class Log:
    def __init__(self) -> None:
        self.names: list[str] = []

    def note(self, name: str) -> None:
        self.names.append(name)

    def read(self) -> list[str]:
        return self.names


def order(seed: int) -> tuple[list[str], str]:
    link = sim.LinkModel(latency_ns=1_000, jitter_ns=900)
    with simulated(seed, network=link) as cluster:
        log = cluster.host("b", Log)
        cluster.run(
            {
                name: lambda cluster: jdag.wait(
                    [log.start("note", cluster.here) for _ in range(3)]
                )
                for name in ("c", "d")
            }
        )
        return log.call("read"), cluster.trace.digest


def test_the_seed_decides_which_of_two_calls_comes_first() -> None:
    found = [order(seed) for seed in range(8)]
    assert {"c", "d"} == {names[0] for names, _ in found}
    for seed in (0, 5):
        assert order(seed) == found[seed]
    for names, _ in found:
        assert sorted(names) == ["c"] * 3 + ["d"] * 3


def test_a_factory_may_be_any_callable_here() -> None:
    seen = [1, 2, 3]
    with simulated() as cluster:
        box = cluster.host("b", lambda more: {"seen": seen, "more": more}, 4)
        assert box.call("__getitem__", "seen") == [1, 2, 3]
        assert repr(box) == "Hosted(dict 0.1/1 on 'b')"
        for wrong in (3, None, "Counter"):
            with fails_with(JdagError, "properties.cluster_host_takes_a_worker"):
                cluster.host("b", wrong)  # type: ignore[arg-type]
        with fails_with(JdagError, "properties.got_b_cpu_0_and"):
            cluster.host("b/cpu:0", Counter)
        with fails_with(JdagError, "properties.cluster_host_there_is_no"):
            cluster.host("x", Counter)


def test_functions_and_oracles_take_no_handles_and_say_who_does() -> None:
    with simulated() as cluster:
        counter = cluster.host("b", Counter)
        takes = (
            r"argument 0 is a Hosted, .* programs \(marked by jdag.program\) take ha"
        )
        with cluster.context() as ctx, pytest.raises(JdagError, match=takes):
            ctx.call("b", jnp.sin, counter)
        with fails_with(JdagError, "properties.a_hosted"):
            cluster.put("b", counter)

        def loss(ctx: Any, w: Any) -> Any:
            ctx.call("b", handed, counter)
            return ctx.call("b", jnp.sum, w)

        with pytest.raises(JdagError, match=takes):
            oracle(loss)(jnp.ones(3))


def test_nothing_of_it_is_in_the_users_graph_or_context() -> None:
    def graph(*, uses: bool) -> tuple[Any, bytes]:
        with simulated() as cluster:
            w = cluster.put("b", jnp.arange(3.0))
            counter = cluster.host("b", Counter) if uses else None
            with cluster.context() as ctx:
                if counter is not None:
                    counter.call("add")
                loss = ctx.call("c", jnp.sum, ctx.call("b", jnp.sin, w))
                unread = counter and [counter.start("add_slowly", w)]
                ctx.backward(loss)
                counts = ctx.graph().counts()
                found = ctx.gradient(w).fetch().tobytes()
                for task in unread or []:
                    with pytest.raises(RemoteError):
                        task.result()
            return counts, found

    assert graph(uses=True) == graph(uses=False)


def test_one_context_a_worker_is_open_until_the_cluster_is_closed() -> None:
    with simulated() as cluster:
        counters = [cluster.host(name, Counter) for name in ("b", "b", "c")]
        for counter in counters * 3:
            counter.call("add")
        cluster.driver.settle()
        live = {name: one["live_contexts"] for name, one in cluster.info().items()}
        assert live == {"a": 2, "b": 1, "c": 1, "d": 0}
        with cluster.context() as ctx:
            assert ctx.call("d", calls, counters[0], 2) == ("Hosted", [4, 5])
    assert not any(one["live_contexts"] for one in cluster.info().values())


def test_a_dropped_object_and_one_of_a_crashed_worker_are_not_referenced() -> None:
    kept: list[Any] = []

    class Noted(Counter):
        def __init__(self) -> None:
            super().__init__()
            kept.append(weakref.ref(self))

    with crashing("c") as cluster:
        dropped, lost, held = (cluster.host(name, Noted) for name in ("b", "c", "d"))
        cluster.drop(dropped)
        gc.collect()
        assert [ref() is None for ref in kept] == [True, False, False]
        with pytest.raises(WorkerLost):
            while True:
                lost.call("add")
        gc.collect()
        assert [ref() is None for ref in kept] == [True, True, False]
        assert held.call("add") == 1
    gc.collect()
    assert [ref() is None for ref in kept] == [True, True, True]


def test_a_worker_that_joins_again_has_none_of_its_former_objects() -> None:
    with crashing("b", restart_ns=100_000) as cluster:
        counter, other = cluster.host("b", Counter), cluster.host("c", Counter)
        relay = cluster.host("c", Relay, counter)
        with fails_with(WorkerLost, "properties.worker_b_is_lost"):
            while True:
                counter.call("add")
        while cluster.now_ns < 200_000:
            other.call("add")
        for use in (partial(counter.call, "add"), partial(relay.call, "ask", "add")):
            with fails_with(WorkerLost, "properties.counter_add_worker_b_is"):
                use()
        assert relay.call("hold") == "Hosted"  # That error was the method's alone.
        again = cluster.host("b", Counter, 5)
        assert again.worker == "b" and repr(again).endswith("on 'b#1')")
        assert again.call("add") == 6


def test_the_crash_of_a_worker_that_one_object_used_leaves_the_other_objects() -> None:
    with crashing("c") as cluster:
        far = cluster.host("c", Counter)
        relay, counter = cluster.host("b", Relay, far), cluster.host("b", Counter)
        with pytest.raises(WorkerLost):
            while True:
                relay.call("ask", "add")
        assert [counter.call("add") for _ in range(3)] == [1, 2, 3]
        assert relay.call("hold") == "Hosted"


def test_a_caller_that_crashes_frees_what_its_calls_held_or_waited_for() -> None:
    with crashing("c") as cluster:
        counter, leaf = cluster.host("b", Counter), cluster.put("d", jnp.int32(1))

        def endless(cluster: jdag.Cluster) -> None:
            while True:
                jdag.wait([counter.start("add_slowly", leaf) for _ in range(3)])

        with pytest.raises(WorkerLost):
            cluster.run({"c": endless})
        before = counter.call("add", 0)
        assert counter.call("add_slowly", leaf) == before + 1
        with cluster.context() as ctx:
            assert ctx.call("b", bump, counter, leaf) == ("b", "Counter")
        assert counter.call("add", 0) == before + 2


def test_an_object_of_another_cluster_is_refused() -> None:
    with simulated() as one, simulated() as other:
        counter, here = one.host("b", Counter), other.host("b", Counter)
        foreign = r"Hosted\(Counter .*\) is of another cluster of the same na"
        with pytest.raises(ContextError, match=foreign):
            here.call("kind_of", counter)
        with pytest.raises(ContextError, match=foreign):
            other.run({"b": partial(lambda given, cluster: None, counter)})
        with pytest.raises(ContextError):
            other.drop(counter)
        assert counter.call("add") == 1


def test_a_cluster_that_is_left_by_an_exception_waits_for_no_call() -> None:
    with pytest.raises(KeyError), simulated() as cluster:
        counter = cluster.host("b", Counter)
        counter.start("raises")
        raise KeyError
    with fails_with(ContextError, "properties.counter_add_on_the_cluster"):
        counter.call("add")


class Interrupted:
    def step(self) -> None:
        raise KeyboardInterrupt


def test_an_interrupt_that_the_caller_has_caught_is_not_raised_again() -> None:
    with simulated() as cluster:
        env, counter = cluster.host("b", Interrupted), cluster.host("b", Counter)
        with pytest.raises(KeyboardInterrupt):
            env.call("step")
        counter.call("add", 2)
        assert counter.call("add", 3) == 5


def test_abstract_clusters_run_methods_as_they_are() -> None:
    with simulated(values="abstract") as cluster:
        counter = cluster.host("b", Counter, 3)
        assert counter.call("add", 4) == 7
        assert counter.call("kind_of", np.ones(3)) == "ndarray"


def workout(cluster: jdag.Cluster, log: list[str]) -> None:
    try:
        leaf = cluster.put("d", jnp.int32(1))
        counter, other = cluster.host("b", Counter), cluster.host("c", Counter)
        relay = cluster.host("c", Relay, counter)
        tasks = [counter.start("add_slowly", leaf) for _ in range(3)]
        tasks += [relay.start("ask", "add_slowly", leaf) for _ in range(2)]
        with cluster.context() as ctx:
            tasks += [
                ctx.start("b", bump, counter, leaf),
                ctx.start("c", calls, counter, 2),
            ]
            jdag.wait(tasks)
        cluster.run({name: partial(trains, other, leaf) for name in ("b", "d")})
        assert counter.call("add", 0) == 8 and other.call("add", 0) == 10
        cluster.drop([counter, other])
        log.append("finished")
    except WorkerLost as error:
        log.append(str(error))


@pytest.mark.parametrize("victim", ["b", "c", "d"])
def test_a_crash_at_any_moment_is_a_lost_worker_and_the_others_go_on(
    victim: str,
) -> None:
    link = sim.LinkModel(latency_ns=1_000, jitter_ns=500)
    log: list[str] = []
    with simulated(3, network=link) as cluster:
        workout(cluster, log)
        assert log == ["finished"]
        records = len(cluster.trace)
    rng = random.Random(victim)
    for index in sorted(rng.sample(range(records), sized(20, 120))):
        crash = sim.Crash(victim, 2_000, at_index=index)
        with simulated(3, network=link, faults=[crash]) as cluster:
            workout(cluster, log)
            if log[-1] != "finished":
                assert f"'{victim}'" in log[-1]
            for name in [name for name in WORKERS if name != victim]:
                survivor = cluster.host(name, Counter, 5)
                assert survivor.call("add") == 6
            cluster.driver.settle()
            held = cluster.info()
            assert held[victim]["live_contexts"] == 0 or log[-1] == "finished"
        assert not any(one["live_contexts"] for one in cluster.info().values())
    assert len(log) - log.count("finished") >= len(log) // 2
