"""Passes give the right gradients, a context its errors, and nothing stays."""

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jdag.api.refs import stop_gradient
from jdag.engine.functions import program
from jdag.engine.protocol import Owed
from jdag.errors import (
    GraphError,
    JdagError,
    RemoteError,
    UnusedSendError,
)
from tests.face_cases import (
    ONES,
    fails_backward,
    nothing_is_left,
    product,
    total,
)


def test_round_trips_over_three_workers_give_the_peers_numbers(cluster):
    t1, t3, t5 = (cluster.put("a", ONES) for _ in range(3))
    t2, t4 = ONES, ONES
    with cluster.context() as ctx:
        v = ctx.call("b", jnp.add, t1, t2)
        v = ctx.call("c", jnp.multiply, t3, v)
        s1 = ctx.call("b", lambda *a: jnp.stack(a), t4, v)
        s2 = ctx.call("c", lambda *a: jnp.stack(a), t5, v)
        s = ctx.call("b", jnp.matmul, s1, s2)
        m = ctx.call("c", jnp.matmul, s, s)
        loss = ctx.call("a", jnp.sum, m)
        ctx.backward(loss)
        assert loss.fetch() == 4131
        for leaf, wanted in ((t1, 864), (t3, 1728), (t5, 54)):
            np.testing.assert_array_equal(ctx.gradient(leaf).fetch(), wanted * ONES)
    nothing_is_left(cluster)


def test_a_split_of_which_some_parts_are_used_gives_explicit_zeros(cluster):
    rows = cluster.put("a", jnp.ones((10, 2)))
    with cluster.context() as ctx:
        parts = ctx.call("b", lambda a: jnp.split(a, 5), rows)
        assert len(parts) == 5 and parts[2].shape == (2, 2)
        used = ctx.call("b", product, *parts[::2])
        loss = ctx.call("b", lambda a: 4 * jnp.sum(a), used)
        ctx.backward(loss)
        gradient = ctx.gradient(rows).fetch()
    wanted = np.zeros((10, 2))
    wanted[[0, 1, 4, 5, 8, 9]] = 4
    np.testing.assert_array_equal(gradient, wanted)


def test_several_roots_are_the_backward_of_their_sum(cluster):
    t1 = cluster.put("b", jnp.zeros((3, 3)))
    t2 = cluster.put("c", 2 * ONES)
    with cluster.context() as ctx:
        roots = [
            ctx.call(worker, lambda a, b, op: jnp.sum(op(a, b)), t1, t2, op=op)
            for worker, op in (
                ("a", jnp.add),
                ("b", jnp.multiply),
                ("c", lambda a, b: jnp.cos(a)),
                ("d", jnp.divide),
            )
        ]
        ctx.backward(*roots)
        np.testing.assert_array_equal(ctx.gradient(t1).fetch(), 3.5 * ONES)
        np.testing.assert_array_equal(ctx.gradient(t2).fetch(), ONES)


def test_a_root_that_is_given_twice_counts_twice(cluster):
    w = cluster.put("b", ONES)
    with cluster.context() as ctx:
        loss = ctx.call("c", total, w)
        ctx.backward(loss, loss)
        np.testing.assert_array_equal(ctx.gradient(w).fetch(), 2 * ONES)


def test_cotangents_seed_roots_of_any_shape(cluster):
    w = cluster.put("b", ONES)
    with cluster.context() as ctx:
        h = ctx.call("c", jnp.multiply, w, 3.0)
        loss = ctx.call("d", total, h)
        ctx.backward(h, loss, h, cotangents=[2 * ONES, None, np.asarray(ONES)])
        np.testing.assert_array_equal(ctx.gradient(w).fetch(), 12 * ONES)


def test_one_cotangent_alone_will_do_for_one_root(cluster):
    w = cluster.put("b", ONES)
    with cluster.context() as ctx:
        loss = ctx.call("c", total, w)
        ctx.backward(loss, cotangents=2, retain_graph=True)
        ctx.backward(loss, cotangents=np.float64(3))
        np.testing.assert_array_equal(ctx.gradient(w).fetch(), 5 * ONES)


def test_a_second_pass_adds_and_what_was_named_before_stays(cluster):
    w, v = cluster.put("b", ONES), cluster.put("c", ONES)
    with cluster.context() as ctx:
        both = ctx.call("c", lambda a, b: jnp.sum(a * b), w, v)
        one = ctx.call("b", total, w)
        ctx.backward(both, retain_graph=True)
        before = ctx.gradient(w)
        ctx.backward(one, both)
        np.testing.assert_array_equal(before.fetch(), ONES)
        np.testing.assert_array_equal(ctx.gradient(w).fetch(), 3 * ONES)
        np.testing.assert_array_equal(ctx.gradient(v).fetch(), 2 * ONES)
        assert list(ctx.gradients()) == [w, v]


def test_a_gradient_is_that_of_the_versions_that_forward_read(cluster):
    w = cluster.put("b", ONES)
    with cluster.context() as ctx:
        loss = ctx.call("c", lambda a: jnp.sum(a**2), w)
        cluster.update(lambda a: 10 * a, w)
        ctx.backward(loss)
        assert loss.fetch() == 9
        np.testing.assert_array_equal(ctx.gradient(w).fetch(), 2 * ONES)
        np.testing.assert_array_equal(w.fetch(), 10 * ONES)


def test_several_contexts_are_open_at_once_and_mix_nothing(cluster):
    w = cluster.put("b", ONES)
    with cluster.context() as one, cluster.context() as two:
        assert one.id != two.id and one.id >> 48 == 0
        first = one.call("c", total, w)
        second = two.call("c", lambda a: 5 * jnp.sum(a), w)
        two.backward(second)
        one.backward(first)
        np.testing.assert_array_equal(one.gradient(w).fetch(), ONES)
        np.testing.assert_array_equal(two.gradient(w).fetch(), 5 * ONES)


# ---- the graph


def counts(ctx):
    """For each worker how many nodes, sends, recvs and leaves it has."""
    parts = {w: (d.nodes, d.sends, d.recvs, d.leaves) for w, d in ctx.graph().items()}
    return {worker: tuple(map(len, part)) for worker, part in parts.items()}


def test_an_add_elsewhere_whose_result_comes_back_has_the_peers_sends(cluster):
    t1, t2 = cluster.put("a", ONES), cluster.put("a", ONES)
    with cluster.context() as ctx:
        back = ctx.move("a", ctx.call("b", jnp.add, t1, t2))
        ctx.backward(ctx.call("a", total, back), retain_graph=True)
        assert counts(ctx) == {"a": (2, 1, 1, 2), "b": (1, 1, 1, 0)}
        (add,) = ctx.graph()["b"].nodes
        (recv,) = ctx.graph()["b"].recvs
        assert len(add.inputs) == 2 and recv.path == add.path == (1,)


def test_three_hops_have_one_send_at_the_ends_and_two_in_the_middle(cluster):
    @program
    def forward(ctx, x):
        there = {"b": "c", "c": "d", "d": None}[ctx.here]
        x = ctx.call(ctx.here, jnp.add, x, ONES)
        if there is not None:
            x = ctx.call(there, forward, ctx.move(there, x))
            x = ctx.move(ctx.here, x)
        return x

    w = cluster.put("a", ONES)
    with cluster.context() as ctx:
        out = ctx.move("a", ctx.call("b", forward, ctx.move("b", w)))
        ctx.backward(ctx.call("a", total, out), retain_graph=True)
        ends = {w: part[1:3] for w, part in counts(ctx).items()}
        assert ends == {"a": (1, 1), "b": (2, 2), "c": (2, 2), "d": (1, 1)}


def test_a_call_without_tracked_inputs_makes_no_node_and_no_ends(cluster):
    n = cluster.put("b", jnp.arange(3))
    with cluster.context() as ctx:
        ctx.call("c", total, n, ONES).fetch()
        made = {worker: part[:3] for worker, part in counts(ctx).items()}
        assert all(part == (0, 0, 0) for part in made.values()), made
        assert "c" in ctx.graph(), "it belongs to the context all the same"


# ---- errors


def test_a_second_pass_without_retain_graph_says_so(cluster):
    w = cluster.put("b", ONES)
    with cluster.context() as ctx:
        loss = ctx.call("c", total, w)
        ctx.backward(loss)
        with pytest.raises(GraphError, match="retain_graph=True"):
            ctx.backward(loss)
        np.testing.assert_array_equal(ctx.gradient(w).fetch(), ONES)


def test_double_backward_is_refused_by_name(cluster):
    w = cluster.put("b", ONES)
    with cluster.context() as ctx:
        ctx.backward(ctx.call("b", lambda a: jnp.sum(a**3), w))
        gradient = ctx.gradient(w)
        norm = ctx.call("b", lambda g, w: jnp.sum(g * w), gradient, w)
        for root in (gradient, norm):
            with pytest.raises(GraphError, match=r"double backward: root 0, .*leaf 0"):
                ctx.backward(root)
        stopped = stop_gradient(gradient)
        ctx.backward(ctx.call("b", lambda g, w: jnp.sum(g * w), stopped, w))
        np.testing.assert_array_equal(ctx.gradient(w).fetch(), 6 * ONES)


def test_double_backward_is_refused_through_programs_too(cluster):
    w = cluster.put("b", ONES)
    prog = program(lambda ctx, g, w: ctx.call("c", lambda g, w: jnp.sum(g * w), g, w))
    with cluster.context() as ctx:
        ctx.backward(ctx.call("c", total, w))
        root = ctx.call("d", prog, ctx.gradient(w), w)
        with pytest.raises(GraphError, match="double backward"):
            ctx.backward(root)


def test_a_stuck_pass_names_send_function_and_call_site(cluster):
    w = cluster.put("b", ONES)
    with cluster.context() as ctx:
        h = ctx.call("b", jnp.sin, w)
        loss = ctx.call("c", total, h)
        ctx.call("d", mean_for_the_log, h)
        with pytest.raises(UnusedSendError) as caught:
            ctx.backward(loss, mode="fast")
        said = str(caught.value)
        assert re.search(
            r"call 3: b -> d, sent for \S*test_context:mean_for_the_log, called at "
            r"\S*test_context.py:\d+ in test_a_stuck_pass",
            said,
        ), said
        (send,) = caught.value.sends
        assert isinstance(send, Owed)
        assert (send.worker, send.destination, send.path) == ("b", "d", (3,))
    nothing_is_left(cluster)


def mean_for_the_log(h):
    return jnp.mean(h)


def test_the_mode_is_one_that_there_is(cluster):
    w = cluster.put("b", ONES)
    with cluster.context() as ctx:
        loss = ctx.call("c", total, w)
        with pytest.raises(
            JdagError, match="mode='slow': allowed is 'smart' or 'fast'"
        ):
            ctx.backward(loss, mode="slow")


# ---- gradients


def test_gradients_come_back_in_the_structure_of_the_leaves(cluster):
    p = cluster.put("b", {"w": ONES, "b": [jnp.ones(3)]})
    with cluster.context() as ctx:
        loss = ctx.call("c", lambda p: jnp.sum(ONES @ p["w"] + p["b"][0]), p)
        ctx.backward(loss)
        g = ctx.gradient(p)
        assert g["w"].worker == "b" and not g["w"].tracked and g["w"].shape == (3, 3)
        np.testing.assert_array_equal(g["b"][0].fetch(), 3 * jnp.ones(3))
        found = ctx.gradients()
        assert list(found) == [p["b"][0], p["w"]] and found[p["w"]] == g["w"]


def test_a_leaf_never_reached_has_no_gradient_and_says_so(cluster):
    w, v = cluster.put("b", ONES), cluster.put("c", ONES)
    n = cluster.put("c", jnp.arange(3))
    with cluster.context() as ctx:
        with pytest.raises(GraphError, match="reached by no pass, of 0"):
            ctx.gradient(w)
        h = ctx.call("c", total, w)
        ctx.call("c", total, v)
        ctx.backward(h)
        assert list(ctx.gradients()) == [w]
        with pytest.raises(
            GraphError, match=r"leaf 1 on c was reached by no pass, of 1"
        ):
            ctx.gradient([w, v])
        with pytest.raises(GraphError, match="leaf 2 on c is not inexact"):
            ctx.gradient(n)
        with pytest.raises(GraphError, match=r"output 0 of call 1 .*is no leaf"):
            ctx.gradient(h)
        with pytest.raises(JdagError, match=r"leaf \['x'\] is an int; it takes a ref"):
            ctx.gradient({"x": 1})


def test_an_unused_argument_gets_an_explicit_zero(cluster):
    w, v = cluster.put("b", ONES), cluster.put("c", ONES)
    with cluster.context() as ctx:
        ctx.backward(ctx.call("d", lambda a, b: jnp.sum(a), w, v))
        np.testing.assert_array_equal(ctx.gradient(v).fetch(), 0 * ONES)


def test_a_failed_pass_leaves_no_gradient_and_the_next_is_right(cluster):
    w = cluster.put("b", ONES)
    with cluster.context() as ctx:
        good = ctx.call("c", total, w)
        bad = ctx.call("d", lambda a: jnp.sum(fails_backward(a)), w)
        for _ in range(3):
            with pytest.raises(RemoteError, match="no way back"):
                ctx.backward(good, bad, retain_graph=True)
        with pytest.raises(GraphError, match="reached by no pass"):
            ctx.gradient(w)
    with cluster.context() as ctx:
        ctx.backward(ctx.call("c", total, w))
        np.testing.assert_array_equal(ctx.gradient(w).fetch(), ONES)
    nothing_is_left(cluster)


def test_a_context_may_be_entered_after_a_later_one_has_been_left(cluster: Any):
    w = cluster.put("b", 3.0)
    early = cluster.context()
    with cluster.context() as later:
        later.backward(later.call("b", jnp.square, w))
    with early:
        early.backward(early.call("b", jnp.square, w))
        assert float(early.gradient(w).fetch()) == 6.0
    assert early.id != later.id


def test_the_graph_has_in_it_what_was_called_just_now(cluster: Any):
    w = cluster.put("a", 3.0)
    with cluster.context() as ctx:
        ctx.call("b", jnp.square, w)
        drawn = ctx.graph()
    assert [len(drawn[name].sends) for name in ("a", "b")] == [1, 0]
    assert [len(drawn[name].recvs) for name in ("a", "b")] == [0, 1]


def test_the_gradient_of_a_leaf_that_was_dropped_says_so(cluster: Any):
    w = cluster.put("b", 3.0)
    with cluster.context() as ctx:
        loss = ctx.call("b", jnp.square, w)
        cluster.drop(w)
        ctx.backward(loss)
        with pytest.raises(GraphError, match=r"was dropped by cluster\.drop"):
            ctx.gradient(w)


def test_a_pass_says_which_leaves_were_updated_since_forward_read_them(cluster):
    """And the gradient is that of the versions that it read."""
    cubed, squared, twice = (
        cluster.put(worker, jnp.array([1.0, 2.0, 3.0])) for worker in "bca"
    )

    def loss_of(x, y, z):
        return jnp.sum(x**3 + y**2 + 2 * z)

    with cluster.context() as ctx:
        loss = ctx.call("d", loss_of, cubed, squared, twice)
        report = ctx.backward(loss, retain_graph=True)
        assert (report.number, report.stale) == (1, {})
        for _ in range(3):
            cluster.update(jnp.add, squared, 1.0)
        cluster.update(jnp.multiply, cubed, 2.0)
        report = ctx.backward(loss, retain_graph=True)
        assert report.number == 2
        assert list(report.stale.items()) == [(cubed, 1), (squared, 3)]
        np.testing.assert_array_equal(ctx.gradient(cubed).fetch(), [6, 24, 54])
        np.testing.assert_array_equal(ctx.gradient(squared).fetch(), [4, 8, 12])
        newer = ctx.call("d", loss_of, cubed, squared, twice)
        report = ctx.backward(loss, newer)  # Both versions of each.
        assert report.stale == {squared: 3, cubed: 1}
        np.testing.assert_array_equal(ctx.gradient(squared).fetch(), [14, 22, 30])
        with pytest.raises(AttributeError):
            report.number = 4
    nothing_is_left(cluster)


def test_a_leaf_that_was_dropped_is_not_reported_as_stale(cluster):
    leaf, other = (cluster.put("b", ONES) for _ in range(2))
    with cluster.context() as ctx:
        loss = ctx.call("b", lambda *a: sum(map(jnp.sum, a)), leaf, other)
        cluster.update(jnp.add, [leaf, other], 1.0)
        cluster.drop(leaf)
        assert ctx.backward(loss).stale == {other: 1}
    nothing_is_left(cluster)
