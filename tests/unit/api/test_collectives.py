"""Collectives between the programs of cluster.run, in virtual time."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdag
from jdag import sim
from jdag.errors import ContextError
from tests.tools.collective_programs import HOW, bits, said, sums, trains
from tests.tools.error_texts import fails_with
from tests.tools.face_cases import nothing_is_left
from tests.tools.replica_cases import SHAPES, factors

WORKERS = ("main", "t0", "t1", "t2", "t3")
TRAINERS = WORKERS[1:]


def simulated(seed=0, **settings):
    return jdag.simulate(WORKERS, seed=seed, **settings)


@pytest.fixture
def made():
    with simulated(network=sim.LinkModel(latency_ns=1_000)) as cluster:
        yield cluster
        nothing_is_left(cluster)


def together(cluster, program, among=TRAINERS):
    return cluster.run(dict.fromkeys(among, program))


@pytest.mark.parametrize("how", HOW)
def test_a_sum_has_the_bits_of_that_in_a_context(made, how):
    trees = {name: factors(WORKERS.index(name), SHAPES) for name in TRAINERS}
    leaves = {name: made.put(name, tree) for name, tree in trees.items()}
    with made.context() as ctx:
        right = jdag.fetch(ctx.all_reduce(leaves, how))
    made.drop(leaves)
    found = together(
        made, lambda cluster: cluster.all_reduce(trees[cluster.here], how=how)
    )
    for name in TRAINERS:
        assert bits(found[name]) == bits(right[name])


def test_refs_numbers_and_leaves_are_fetched_and_names_stay_what_they_are(made):
    w = made.put("main", jnp.arange(3.0))

    def program(cluster):
        n = TRAINERS.index(cluster.here)
        with cluster.context() as ctx:
            square = ctx.call("t3", jnp.square, w)
            tree = {"w": w, "square": square, "n": n, "x": 0.5, "of": "all", "no": None}
            found = cluster.all_reduce(tree)
        assert found.pop("of") == "all" and found.pop("no") is None
        assert found["n"].dtype == jnp.result_type(int) and not found["x"].weak_type
        return {name: np.asarray(one).tolist() for name, one in found.items()}

    right = {"w": [0.0, 4.0, 8.0], "square": [0.0, 4.0, 16.0], "n": 6, "x": 2.0}
    assert together(made, program) == dict.fromkeys(TRAINERS, right)
    made.drop(w)


def test_all_kinds_of_arrays_are_gathered_and_broadcast(made):
    def program(cluster):
        n = TRAINERS.index(cluster.here)
        tree = {"flag": jnp.array([n == 1]), "key": jax.random.key(n), "none": None}
        gathered = cluster.all_gather(tree)
        given = cluster.broadcast(tree, root="t1")
        keys = [int(jax.random.key_data(one["key"])[1]) for one in (*gathered, given)]
        return [bool(one["flag"][0]) for one in gathered], keys

    right = ([False, True, False, False], [0, 1, 2, 3, 1])
    assert together(made, program) == dict.fromkeys(TRAINERS, right)


def test_groups_may_overlap_and_a_sum_of_one_is_what_it_has(made):
    def program(cluster):
        n = TRAINERS.index(cluster.here)
        pair = TRAINERS[:2] if n < 2 else TRAINERS[2:]
        row = float(cluster.all_reduce(10.0**n, pair))
        column = float(
            cluster.all_reduce(10.0**n, [TRAINERS[n % 2], TRAINERS[n % 2 + 2]])
        )
        return row, column, float(cluster.all_reduce(10.0**n, [cluster.here]))

    found = together(made, program)
    assert found == {
        "t0": (11, 101, 1), "t1": (11, 1010, 10),
        "t2": (1100, 101, 100), "t3": (1100, 1010, 1000),
    }  # fmt: skip


def test_in_abstract_mode_collectives_give_shapes():
    def program(cluster):
        tree = {"w": jax.ShapeDtypeStruct((3, 2), jnp.float32), "n": 1}
        cluster.barrier()
        found = cluster.all_reduce(tree), *cluster.all_gather(tree, how="ring")
        return all(
            one["w"].shape == (3, 2) and one["n"].dtype == jnp.result_type(int)
            for one in (*found, cluster.broadcast(tree, "t0", how="tree"))
        )

    with simulated(values="abstract") as cluster:
        assert together(cluster, program) == dict.fromkeys(TRAINERS, True)


def test_the_main_programs_worker_may_be_a_member(made):
    found = together(made, partial(trains, 2, "ring"), WORKERS)
    assert len({tuple(each) for each in found.values()}) == 1


def test_a_barrier_takes_the_time_of_its_messages(made):
    def program(cluster):
        n = TRAINERS.index(cluster.here)
        for _ in range(n):
            cluster.barrier([cluster.here])  # There and back: 2,000 ns.
        came = cluster.now_ns
        cluster.barrier()
        return came, cluster.now_ns

    times = together(made, program).values()
    last = max(came for came, _ in times)
    assert last == min(came for came, _ in times) + 3 * 2_000
    assert [left for _, left in times] == [last + 2_000] * 4


def test_a_loop_of_collectives_holds_no_more_at_its_end(made):
    held = []

    def program(cluster):
        for step in range(34):
            x = jnp.full(40, float(step))
            cluster.all_reduce({"x": x, "n": step}, how=HOW[step % 3])
            cluster.all_gather(x, how=HOW[step % 3])
            cluster.broadcast(x, root="t1")
            if cluster.here == "t2":
                each = cluster.info().values()
                held.append([(one["values_held"], one["bytes_held"]) for one in each])
        cluster.barrier()

    together(made, program, TRAINERS[:3])
    assert len(held) == 34
    assert held[:-1] == [held[0]] * 33, held  # After the last one others end.


DISAGREE = {
    "the call": (lambda c: c.barrier(), lambda c: c.all_gather(1.0)),
    "how": (lambda c: c.all_reduce(1.0), lambda c: c.all_reduce(1.0, how="tree")),
    "root": (lambda c: c.broadcast(1, "t0"), lambda c: c.broadcast(1, "t1")),
    "the structure": (lambda c: c.all_reduce({"a": 1}), lambda c: c.all_reduce([1])),
    "the array": (lambda c: c.all_gather(1), lambda c: c.all_gather(1.0)),
}


@pytest.mark.parametrize("what", DISAGREE)
def test_what_members_disagree_about_is_named(made, what):
    one, other = DISAGREE[what]
    programs = {"t0": one, "t1": other, "t2": one}
    found = made.run({name: partial(said, call) for name, call in programs.items()})
    for text in found.values():
        assert f"cannot be completed: {what} is " in text
        assert "test_collectives.py" in text and "in 't1'" in text


WRONG: dict[str, Any] = {
    "there is no worker 'x'": {"among": ["t0", "x"]},
    "'t3' is not among programs of this": {"among": ["t0", "t1", "t3"]},
    "'t0' is not among the members: \\['t1', 't2'\\]": {"among": ["t1", "t2"]},
    "how='star'": {"how": "star"},
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_argument_is_an_error_of_its_caller_and_no_call(made, text):
    def program(cluster):
        wrong = said(cluster.all_reduce, 1.0, **WRONG[text])
        return wrong, float(cluster.all_reduce(1.0))

    found = made.run({"t0": program, "t1": sums, "t2": sums})
    wrong, total = found["t0"]
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(wrong)
    assert [total, found["t1"], found["t2"]] == [3.0] * 3


def test_what_cannot_be_added_or_is_no_array_is_refused(made):
    def program(cluster):
        return (
            said(cluster.all_reduce, jnp.array([True])),
            said(cluster.all_gather, {"name": "t0"}),
            said(cluster.broadcast, 1.0, "t3"),
            said(cluster.broadcast, 1.0, 0),
            float(cluster.all_reduce(1.0)),
        )

    found = together(made, program, TRAINERS[:3])
    for flags, names, root, rank, total in found.values():
        assert "adds numbers, and the ref of 't0' is bool[1]" in flags
        assert "'t2' waits in cluster.all_reduce, called at" in flags
        assert names.startswith("cluster.all_gather takes a pytree of arrays, not")
        assert "'t3' is not among the members: ['t0', 't1', 't2']" in root
        assert "0 is not among the members: ['t0', 't1', 't2']" in rank
        assert total == 3


def test_outside_of_cluster_run_collectives_say_where_they_belong(made):
    with fails_with(ContextError, "api.cluster_barrier_in_the_main"):
        made.barrier()
    with fails_with(ContextError, "api.cluster_all_reduce_in_the"):
        made.all_reduce(jnp.ones(3))

    @jdag.program
    def inner(ctx):
        with pytest.raises(ContextError) as caught:
            made.all_reduce(1.0)
        return str(caught.value)

    with made.context() as ctx:
        text = ctx.call("t0", inner)
    assert "cluster.all_reduce on Cluster(" in text
    assert "in a program on 't0': it belongs to a program on 'main'" in text
