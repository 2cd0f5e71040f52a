"""The graph of a context: counts, plain data, DOT, and what a pass made of it.

Programs of three workers: what the roots need, what they do not, what is owed.
"""

import json

import jax.numpy as jnp
import pytest
from msgspec import convert, to_builtins
from msgspec.structs import replace

import jdag
from jdag.context.graph import DRAWN_WORKERS_MAX, Graph, graph_of, labelled
from jdag.errors import UnusedSendError
from shapes import add_all, pipeline, product, scale, total

WORKERS = ("home", "other", "third")
STAGES = ("stage0", "stage1", "stage2", "stage3")


@pytest.fixture(scope="module")
def piped():
    case = pipeline(STAGES)
    with jdag.simulate(STAGES, seed=0) as cluster:
        refs = case.put(cluster)
        with cluster.context() as ctx:
            case.backward(ctx, case.roots(ctx, refs))
            return ctx.graph()


def drawn(mode, *, passes=1):
    with jdag.simulate(WORKERS, seed=0) as cluster:
        w, y = cluster.put("home", jnp.ones(3)), cluster.put("other", jnp.ones(3))
        with cluster.context() as ctx:
            first = ctx.call("home", scale, w, w)
            kept = ctx.call("other", product, first, y)
            ctx.call("third", product, first, kept)  # Nobody uses what it returns.
            loss = ctx.call("home", add_all, *(total_of(ctx, v) for v in (first, kept)))
            for _ in range(passes):
                try:
                    ctx.backward(loss, mode=mode, retain_graph=True)
                except UnusedSendError as stuck:
                    assert mode == "fast" and len(stuck.sends) == 3
            return ctx.graph()


def total_of(ctx, value):
    return ctx.call(value.worker, total, value)


def test_a_graph_counts_what_each_worker_has():
    graph = drawn("smart")
    assert list(graph) == list(WORKERS)
    assert graph.counts() == {
        "home": {"nodes": 3, "sends": 2, "recvs": 1, "leaves": 1, "edges": 7},
        "other": {"nodes": 2, "sends": 2, "recvs": 1, "leaves": 1, "edges": 5},
        "third": {"nodes": 1, "sends": 0, "recvs": 2, "leaves": 0, "edges": 2},
    }
    assert "'third': {'nodes': 1" in repr(graph)


def test_a_graph_before_any_pass_awaits_nothing():
    graph = drawn("smart", passes=0)
    assert all(drawing.last is None for drawing in graph.values())
    vertices = graph_of(graph).vertices
    assert {vertex.awaited for vertex in vertices} == {0}
    assert {vertex.need for vertex in vertices} == {""}


def test_smart_tells_the_sends_that_it_needs_from_those_that_it_does_not():
    needs = {v.id: v.need for v in graph_of(drawn("smart")).vertices if v.need}
    assert needs == {
        "home/send 2": "needed",
        "home/send 3": "unneeded",
        "other/send 3": "unneeded",
        "other/send 6": "needed",
    }


def test_fast_is_owed_for_the_sends_that_smart_does_not_need():
    graph = graph_of(drawn("fast"))
    needs = {v.id: v.need for v in graph.vertices if v.need}
    # What other was sent it cannot answer, since it is owed itself.
    assert needs.pop("other/send 6") == "needed"
    assert needs == dict.fromkeys(
        ("home/send 2", "home/send 3", "other/send 3"), "owed"
    )


def test_each_vertex_says_how_many_cotangents_the_last_pass_awaited():
    awaited = {v.id: v.awaited for v in graph_of(drawn("smart")).vertices}
    assert awaited == {
        "home/leaf 0": 2,  # As w and as x of one call.
        "home/node 1": 2,  # From the send to other, and from its own total.
        "home/send 2": 1,
        "home/send 3": 0,
        "home/node 4": 1,
        "home/recv 6 from other": 1,
        "home/node 6": 1,
        "other/leaf 1": 1,
        "other/recv 2 from home": 1,
        "other/node 2": 1,
        "other/send 3": 0,
        "other/node 5": 1,
        "other/send 6": 1,
        "third/recv 3 from home": 0,
        "third/recv 3 from other": 0,
        "third/node 3": 0,
    }


def test_a_graph_knows_the_last_pass_that_came_by():
    graph = drawn("smart", passes=2)
    said = {worker: drawing.last for worker, drawing in graph.items()}
    assert (said["home"].number, said["home"].mode.value) == (2, "smart")
    assert said["home"].outcome.value == "finished"
    assert said["third"] is None


def test_a_graph_joins_the_fragments_by_their_transfers(piped):
    graph = graph_of(piped)
    kinds = [vertex.kind for vertex in graph.vertices]
    assert {kind: kinds.count(kind) for kind in ("node", "send", "recv", "leaf")} == {
        "node": 32,
        "send": 24,
        "recv": 24,
        "leaf": 4,
    }
    worker = {vertex.id: vertex.worker for vertex in graph.vertices}
    assert len(worker) == len(graph.vertices)
    across = [e for e in graph.edges if worker[e.source] != worker[e.target]]
    assert len(across) == 24
    for one in across:
        assert "/send " in one.source
        assert "/recv " in one.target


def test_a_graph_comes_back_from_json(piped):
    graph = graph_of(piped)
    assert convert(json.loads(json.dumps(to_builtins(graph))), Graph) == graph


def test_a_graph_of_many_workers_says_how_many_it_leaves_out(piped):
    one = piped["stage0"]
    graph = graph_of({f"w{number}": one for number in range(DRAWN_WORKERS_MAX + 3)})
    assert len(graph.workers) == DRAWN_WORKERS_MAX
    assert graph.left_out == 3


def test_the_dot_of_a_context_leaves_no_worker_out():
    names = [f"w{number}" for number in range(DRAWN_WORKERS_MAX + 3)]
    with jdag.simulate(names, seed=0) as cluster:
        leaves = [cluster.put(name, jnp.ones(3)) for name in names]
        with cluster.context() as ctx:
            for leaf in leaves:
                total_of(ctx, leaf)
            dot = ctx.graph().dot("many")
    assert dot.count("subgraph cluster_") == DRAWN_WORKERS_MAX + 3


def test_owed_sends_are_red_and_unneeded_ones_grey():
    dot = drawn("fast").dot()
    red = [line.strip() for line in dot.splitlines() if "color=red" in line]
    assert [line.split(" [")[0] for line in red] == [
        '"home/send 2"',
        '"home/send 3"',
        '"other/send 3"',
    ]
    assert all(", owed" in line for line in red)
    grey = [line for line in drawn("smart").dot().splitlines() if "gray" in line]
    assert [line.strip().split(" [")[0] for line in grey] == [
        '"home/send 3"',
        '"other/send 3"',
    ]


def test_a_label_has_what_is_awaited_in_brackets(piped):
    vertex = graph_of(piped).vertices[0]
    assert labelled(vertex) == f"{vertex.label} [{vertex.awaited}]"
    assert labelled(replace(vertex, awaited=0)) == vertex.label


def test_dot_has_a_cluster_a_worker_and_each_vertex_and_edge_once(piped):
    graph = graph_of(piped)
    dot = graph.dot('a "quoted" name')
    assert dot.startswith('digraph "a \\"quoted\\" name" {')
    assert dot.count("{") == dot.count("}") == 1 + len(STAGES)
    assert dot.count("subgraph cluster_") == len(STAGES)
    assert dot.count(" -> ") == len(graph.edges)
    for vertex in graph.vertices:
        assert dot.count(f'    "{vertex.id}" [') == 1
