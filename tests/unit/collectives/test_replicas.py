"""Replicas over workers: values, gradients, their order and bytes, and bad input."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdag
import replicas as program
from jdag import sim
from jdag.collectives.routes import HOW
from jdag.errors import ContextError, JdagError, ScenarioError, WorkerLost
from jdag.scenario import load
from tests.tools import rpc_nodes
from tests.tools.error_texts import fails_with
from tests.tools.replica_cases import (
    NAMES,
    REPLICAS,
    SHAPES,
    WORKERS,
    bits,
    expected,
    factors,
    fit,
    one_part,
    sent,
    total,
    weighed,
    zeros,
)
from tests.tools.scenario_cases import JITTER, RealStage, Stage, written

HOMES = ("m", "c")  # One that has no replica, and one that has.


@pytest.fixture
def cluster():
    with jdag.simulate(WORKERS, seed=0) as made:
        yield made


def losses_of(ctx, workers, replicas):
    return [
        ctx.call(worker, weighed, replicas[number], factors(number, SHAPES))
        for number, worker in enumerate(workers)
    ]


def gradient_of(cluster, home, how):
    params = cluster.put(home, zeros())
    with cluster.context() as ctx:
        replicas = ctx.replicate(REPLICAS, params, how)
        ctx.backward(*losses_of(ctx, REPLICAS, replicas))
        return jdag.fetch(ctx.gradient(params))


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("how", HOW)
def test_gradients_add_up_in_the_order_that_is_told(cluster, how, home):
    trees = [factors(number, SHAPES) for number in range(len(REPLICAS))]
    source = REPLICAS.index(home) if home in REPLICAS else None
    right = expected(how, trees, NAMES, among=False, source=source)
    other = expected(how, trees[::-1], NAMES, among=False, source=source)
    assert bits(right) != bits(other)
    got = gradient_of(cluster, home, how)
    assert bits(one_part(got, NAMES)) == bits(right)


FITTED = {"w": jnp.linspace(0.0, 1.0, 6).reshape(3, 2), "b": jnp.full(2, 0.5)}


def fitting(count, how):
    x = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)

    def program(ctx, params):
        replicas = ctx.replicate(REPLICAS[:count], params, how)
        losses = [
            ctx.call(worker, fit, replicas[number], x * (number + 1), 0.1 * number)
            for number, worker in enumerate(REPLICAS[:count])
        ]
        return ctx.call("m", total, *losses)

    return program


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("count", [1, 3])
def test_the_gradient_is_that_of_the_oracle(cluster, how, count, home):
    program, params = fitting(count, how), FITTED
    value, gradients = jdag.oracle(program)(params)
    refs = cluster.put(home, params)
    got, found = jdag.value_and_grad(program, cluster)(refs)
    got, found = jdag.fetch((got, found))
    np.testing.assert_allclose(got, value, rtol=1e-13)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(found[name], gradient, rtol=1e-13)


@pytest.mark.parametrize("how", HOW)
def test_a_product_with_the_hessian_is_that_of_jax(cluster, how):
    program, params = fitting(len(REPLICAS), how), FITTED
    tangent = jax.tree.map(jnp.cos, params)

    def gradient(params):
        return jdag.oracle(program)(params)[1]

    right = jax.jvp(gradient, (params,), (tangent,))[1]
    got = jdag.fetch(jdag.hvp(program, cluster)(params, tangent))
    for name in params:
        np.testing.assert_allclose(got[name], right[name], rtol=1e-12)


def test_leaves_of_several_owners_have_their_gradients_there(cluster):
    trees = [factors(number, SHAPES) for number in range(4)]
    params = {"b": cluster.put("a", zeros()["b"]), "w": cluster.put("m", zeros()["w"])}
    with cluster.context() as ctx:
        replicas = ctx.replicate(REPLICAS, params)
        ctx.backward(*losses_of(ctx, REPLICAS, replicas))
        gradient = ctx.gradient(params)
        assert (gradient["b"].worker, gradient["w"].worker) == ("a", "m")
        got = one_part(jdag.fetch(gradient), NAMES)
    assert bits(got) == bits(expected("owner", trees, NAMES, among=False))


def test_a_replica_whose_loss_is_left_out_adds_nothing(cluster):
    params = cluster.put("m", zeros())
    with cluster.context() as ctx:
        replicas = ctx.replicate(REPLICAS, params, "tree")
        losses = losses_of(ctx, REPLICAS, replicas)
        ctx.backward(losses[0], losses[1], losses[3])
        got = jdag.fetch(ctx.gradient(params))
    used = [factors(number, SHAPES) for number in (0, 1, 3)]
    right = sum(one_part(tree, NAMES).astype(np.float64) for tree in used)
    np.testing.assert_allclose(one_part(got, NAMES), right, rtol=1e-5, atol=1e-6)


def only_w(params):
    return jnp.sum(params["w"])


def test_a_leaf_that_no_replica_uses_costs_no_bytes_on_the_way_back(cluster):
    params = cluster.put("m", zeros())
    with cluster.context() as ctx:
        replicas = ctx.replicate(REPLICAS, params)
        pairs = zip(REPLICAS, replicas, strict=True)
        ctx.backward(*[ctx.call(to, only_w, replica) for to, replica in pairs])
        got = jdag.fetch(ctx.gradient(params))
        back = sent(cluster)["Cotangent"]
    assert back == dict.fromkeys([(worker, "m") for worker in REPLICAS], 180)
    assert got["w"].tolist() == [[4.0] * 5] * 9
    assert got["b"].tolist() == [0.0] * 3


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("how", HOW)
def test_each_replica_is_where_it_was_asked_for_and_what_the_original_is(
    cluster, how, home
):
    tree = {
        "floats": jnp.linspace(0.0, 1.0, 7),
        "halves": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3),
        "number": jnp.float32(2.5),
        "whole": jnp.arange(5),
        "flags": jnp.array([True, False, True]),
        "none": jnp.zeros((0, 3)),
        "static": None,
        "key": jax.random.key(3),
    }
    places = ("d", "b", "c/cpu:0", "a", "c")
    refs = cluster.put(home, tree)
    with cluster.context() as ctx:
        replicas = ctx.replicate(places, refs, how)
        assert len(replicas) == len(places)
        for place, replica in zip(places, replicas, strict=True):
            found = jax.tree.leaves(replica, is_leaf=lambda ref: ref is None)
            assert {ref.place for ref in found if ref is not None} == {place}
            got = jdag.fetch(replica)
            assert got["static"] is None
            assert bits(jax.random.key_data(got.pop("key"))) == bits(
                jax.random.key_data(tree["key"])
            )
            for name, value in got.items():
                assert replica[name] is None or replica[name].tracked == (
                    name in ("floats", "halves", "number", "none")
                )
                if value is not None:
                    np.testing.assert_array_equal(value, tree[name])
                    assert value.dtype == tree[name].dtype


def test_reduce_add_is_one_node_of_the_owner_for_all_leaves(cluster):
    params = cluster.put("m", zeros())
    with cluster.context() as ctx:
        replicas = ctx.replicate(REPLICAS, params)
        graph = ctx.graph()
        functions = [node.function for node in graph["m"].nodes]
        assert functions == ["jdag.collectives.parts:copies"]
        assert [end.peer for end in graph["m"].sends] == list(REPLICAS)
        for worker in REPLICAS:
            assert len(graph[worker].recvs) == 1
            functions = [node.function for node in graph[worker].nodes]
            assert functions == ["jdag.engine.functions:transferred"]
        assert len(replicas) == 4


@pytest.mark.parametrize("how", HOW)
def test_nothing_is_left_when_the_context_is(cluster, how):
    for _ in range(2):
        gradient_of(cluster, "m", how)
    cluster.driver.settle()
    info = cluster.info()
    held = {worker: info[worker]["values_held"] for worker in WORKERS}
    assert held == {**dict.fromkeys(REPLICAS, 0), "m": 4}


@pytest.mark.parametrize("how", HOW)
def test_a_replica_that_dies_is_named_and_nothing_is_left_on_the_others(how):
    network = sim.LinkModel(latency_ns=1_000)
    faults = [sim.Crash("c", 1_000, at_ns=4_000)]
    with jdag.simulate(WORKERS, seed=0, network=network, faults=faults) as cluster:
        with fails_with(WorkerLost, "collectives.c"):
            gradient_of(cluster, "m", how)
        cluster.driver.settle()
        info = cluster.info()
        for worker in ("m", "a", "b", "d"):
            assert info[worker]["live_contexts"] == info[worker]["live_passes"] == 0
        assert [info[worker]["values_held"] for worker in ("m", "a")] == [2, 0]


@jdag.program
def replicated_there(ctx, params, how):
    replicas = ctx.replicate(("a", "b", "c"), params, how)
    return losses_of(ctx, "abc", replicas)


@pytest.mark.parametrize("how", HOW)
def test_a_program_on_a_worker_replicates_too(cluster, how):
    params = cluster.put("m", zeros())
    with cluster.context() as ctx:
        ctx.backward(*ctx.call("d", replicated_there, params, how))
        got = one_part(jdag.fetch(ctx.gradient(params)), NAMES)
    trees = [factors(number, SHAPES) for number in range(3)]
    assert bits(got) == bits(expected(how, trees, NAMES, among=False))


@pytest.mark.parametrize("how", HOW)
def test_shapes_alone_are_replicated_and_reduced(how):
    shape = {name: jax.ShapeDtypeStruct(of, jnp.float32) for name, of in SHAPES.items()}
    with jdag.simulate(WORKERS, seed=0, values="abstract") as cluster:
        params = cluster.put("m", shape)
        with cluster.context() as ctx:
            replicas = ctx.replicate(REPLICAS, params, how)
            sums = ctx.all_reduce(dict(zip(REPLICAS, replicas, strict=True)), how)
            losses = [ctx.call(worker, only_w, sums[worker]) for worker in REPLICAS]
            ctx.backward(*losses)
            assert ctx.gradient(params)["w"].shape == SHAPES["w"]


BAD_PLACES: dict[str, tuple[Any, str]] = {
    "none": ([], r"ctx\.replicate takes at least one worker, not \[\]"),
    "a name": (
        "a",
        r"ctx\.replicate takes a list of workers: expected \['a'\], not 'a'",
    ),
    "a set": ({"d", "b", "c"}, r"in the order .* as \['b', 'c', 'd'\], not a set"),
    "a number": (3, r"ctx.replicate takes the names of workers, not .*int"),
    "twice": (["a", "b", "a"], r"takes each worker once, but 'a' occurs twice"),
    "unknown": (["a", "e"], r"ctx.replicate: there is no worker 'e'.* 'd'"),
    "no device": (["a/cpu:99"], r"worker 'a' has no device 'cpu:99'"),
    "no name": (["a", 3], r"ctx.replicate takes the name of a worker first, not 3"),
}


@pytest.mark.parametrize("case", BAD_PLACES)
def test_places_that_cannot_be_are_refused_before_anything_is_called(cluster, case):
    workers, why = BAD_PLACES[case]
    w = cluster.put("m", jnp.ones(3))
    with cluster.context() as ctx:
        with pytest.raises(JdagError, match=why):
            ctx.replicate(workers, w)
        assert all(not drawn.nodes for drawn in ctx.graph().values())


def test_refs_that_are_none_are_refused(cluster):
    with cluster.context() as ctx:
        with fails_with(JdagError, "collectives.pytree_of_refs_and_there"):
            ctx.replicate(["a"], {})
        with fails_with(JdagError, "collectives.leaf_w_is_it_takes"):
            ctx.replicate(["a"], {"w": jnp.ones(3)})
        with fails_with(JdagError, "collectives.pytree_of_refs_and_there_is"):
            ctx.all_reduce({"a": None})


def test_a_context_that_is_over_replicates_no_more(cluster):
    w = cluster.put("m", jnp.ones(3))
    with cluster.context() as ctx:
        pass
    with fails_with(ContextError, "collectives.ctx_replicate_on_context"):
        ctx.replicate(["a"], w)
    with fails_with(ContextError, "collectives.ctx_all_reduce_on_context"):
        ctx.all_reduce({"a": w})


def test_the_ready_program_plays_each_way_and_is_right():
    stage = Stage(["owner", "r0", "r1", "r2", "r3"], network=JITTER, seeds=(0, 1))
    figures = program.replicas(stage.workers, width=5).play(stage)
    assert {*figures, "wall_time_ns"} == set(program.FIGURES)
    assert list(figures["virtual_time_ns"]) == list(HOW)
    assert max(figures["gradient_difference"].values()) <= 1e-12
    assert figures["bit_patterns"] == dict.fromkeys(HOW, 1)
    assert figures["link_bytes"]["ring"] < figures["link_bytes"]["owner"]
    assert figures["same_bits_as_clean"] == dict.fromkeys(HOW, True)
    assert len(set(figures["gradient_bits"].values())) > 1  # Each way has its order.
    assert figures["values_left"] == dict.fromkeys(HOW, 0)


def test_the_ready_program_has_the_same_bits_on_nodes_of_the_real_driver():
    workers = ("owner", "r0", "r1", "r2")
    right = program.replicas(workers, width=5).play(Stage(workers))
    with rpc_nodes.cluster(workers, allow=("replicas",)) as cluster:
        stage = RealStage(cluster)
        figures = program.replicas(workers, width=5).play(stage)
    assert "link_bytes" not in figures and "virtual_time_ns" not in figures
    assert figures["gradient_bits"] == right["gradient_bits"]
    assert figures["payload_bytes"] == right["payload_bytes"]
    assert figures["busiest_bytes"] == right["busiest_bytes"]


def test_a_ready_program_without_replicas_or_with_an_unknown_way_is_refused(tmp_path):
    with fails_with(ScenarioError, "collectives.a_replicas_needs_an_owner"):
        program.replicas(["a"])
    path = written(
        tmp_path,
        '[settings]\nhow = ["tree", "star"]',
        program='program = "replicas:replicas"',
    )
    with fails_with(ScenarioError, "collectives.how_1_star_allowed_is"):
        load(path)
