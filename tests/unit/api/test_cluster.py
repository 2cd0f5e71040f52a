"""Leaves are put, made, updated and dropped where they live, or it is said why not."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdag.api.drivers import simulate
from jdag.context.refs import fetch
from jdag.engine.functions import program
from jdag.errors import ContextError, JdagError, WorkerLost
from jdag.sim import Crash, DeviceModel, LinkModel
from tests.tools.error_texts import fails_with
from tests.tools.face_cases import ONES, nothing_is_left, total


def test_put_gives_the_same_pytree_of_tracked_leaves(cluster):
    numbers = [np.int64(3), np.float64(2.0)]
    tree = {"w": np.ones((2, 2), np.float32), "n": numbers, "b": np.True_}
    tree["z"] = np.complex128(1j)
    refs = cluster.put("c", tree)
    kinds = {"w": "float32", "b": "bool", "z": "complex128"}
    for name, kind in kinds.items():
        assert refs[name].dtype == kind and refs[name].worker == "c", name
    assert [ref.dtype.name for ref in refs["n"]] == ["int64", "float64"]
    tracked = {ref.dtype.name: ref.tracked for ref in jax.tree.leaves(refs)}
    assert [kind for kind, yes in tracked.items() if not yes] == ["bool", "int64"]
    values = fetch(refs)
    np.testing.assert_array_equal(values["w"], tree["w"])
    assert values["z"] == 1j and values["n"][0] == 3


def test_a_value_that_is_put_is_a_copy(cluster):
    mine = np.ones(3)
    ref = cluster.put("a", mine)
    mine[:] = 7
    np.testing.assert_array_equal(ref.fetch(), np.ones(3))


def test_an_array_that_was_made_with_x64_is_as_wide_as_arrays_are_now():
    wide = jnp.ones(3, jnp.float64)
    with jax.enable_x64(False), simulate(["a"], seed=0) as cluster:
        assert cluster.put("a", wide).fetch().dtype == jnp.float32


def test_make_computes_leaves_on_their_worker(cluster):
    w = cluster.put("d", ONES)
    made = cluster.make(
        "d",
        lambda w, n, *, scale: {"x": w * scale, "i": jnp.arange(n.size)},
        w,
        ONES,
        scale=2,
    )
    assert made["x"].worker == "d" and made["x"].tracked and not made["i"].tracked
    np.testing.assert_array_equal(made["x"].fetch(), 2 * ONES)
    with cluster.context() as ctx:
        ctx.backward(ctx.call("a", total, made["x"]))
        np.testing.assert_array_equal(ctx.gradient(made["x"]).fetch(), ONES)
    held = cluster.info()["d"]["values_held"]
    assert held == 3


def test_update_is_leaf_by_leaf_and_keeps_the_refs(cluster):
    refs = {"w": cluster.put("b", ONES), "v": cluster.put("c", jnp.ones(3))}
    steps = {"w": cluster.put("b", 2 * ONES), "v": cluster.put("c", 3 * jnp.ones(3))}
    same = cluster.update(
        lambda leaf, step, scale: leaf + step * scale, refs, steps, 10.0
    )
    assert same["w"] is refs["w"]
    np.testing.assert_array_equal(refs["w"].fetch(), 21 * ONES)
    np.testing.assert_array_equal(refs["v"].fetch(), 31 * jnp.ones(3))
    cluster.driver.settle()
    assert cluster.info()["b"]["values_held"] == 2, "old versions go"


def test_update_takes_gradients_of_an_open_context(cluster):
    w = cluster.put("b", ONES)
    with cluster.context() as ctx:
        ctx.backward(ctx.call("c", lambda a: jnp.sum(a**2), w))
        cluster.update(lambda w, g: w - 0.25 * g, w, ctx.gradient(w))
        np.testing.assert_array_equal(w.fetch(), ONES / 2)
        gradient = ctx.gradient(w)
    with fails_with(ContextError, "api.is_over"):
        cluster.update(lambda w, g: w - g, w, gradient)


@pytest.mark.parametrize(
    ("update", "text"),
    [
        (
            lambda c, w, v: c.update(lambda a: a[0], w),
            r"returned float64\[3\] for leaf 0",
        ),
        (
            lambda c, w, v: c.update(jnp.isnan, w),
            r"returned bool\[3,3\] for leaf 0 on b",
        ),
        (
            lambda c, w, v: c.update(lambda a: (a, a), w),
            "returned 2 arrays for 1 leaves",
        ),
        (
            lambda c, w, v: c.update(jnp.add, w, v),
            r"'b', but an argument.*is on 'c'",
        ),
        (
            lambda c, w, v: c.update(jnp.add, [w], v),
            r"structure must be .*\(\[\*\]\), but is .*\(\*\)",
        ),
        (
            lambda c, w, v: c.update(jnp.add, [w], [1.0, w]),
            r"structure must be .*\(\[\*\]\), but is .*\(\[\*, \*\]\)",
        ),
        (lambda c, w, v: c.update(jnp.sin, [1.0]), r"leaf \[0\] is a float; expected"),
        (
            lambda c, w, v: c.make("c", jnp.sin, w),
            r"leaves on 'c', but an argument.*is on 'b'",
        ),
        (
            lambda c, w, v: c.put("d", w),
            r"cluster.put: a ref \(Ref.* is already on a worker",
        ),
        (lambda c, w, v: c.put("d", {"x": "y"}), "a str is not an array"),
        (
            lambda c, w, v: c.put("d", [jax.ShapeDtypeStruct((), "int32")]),
            r"at \[0\]: a ShapeDtypeStruct stands .*values='abstract'",
        ),
        (lambda c, w, v: c.put("e", 1.0), "no worker 'e'.*'a', 'b', 'c', 'd'"),
        (lambda c, w, v: c.drop(1.0), "expected a ref"),
    ],
)
def test_bad_leaves_are_named_with_what_would_have_been_right(cluster, update, text):
    w, v = cluster.put("b", ONES), cluster.put("c", ONES)
    with pytest.raises(JdagError, match=text):
        update(cluster, w, v)
    np.testing.assert_array_equal(w.fetch(), ONES)
    np.testing.assert_array_equal(cluster.update(lambda a: 2 * a, w).fetch(), 2 * ONES)


def test_dropped_leaves_go_and_are_refused(cluster):
    w, v = cluster.put("b", ONES), cluster.put("b", ONES)
    with cluster.context() as ctx:
        loss = ctx.call("c", total, w)
        ctx.move("c", ONES).fetch()  # All that was sent has arrived.
        cluster.drop([w])
        ctx.backward(loss)
        np.testing.assert_array_equal(fetch(list(ctx.gradients().values())), [])
        for use in (
            lambda: ctx.call("c", total, w),
            w.fetch,
            lambda: cluster.drop(w),
            lambda: cluster.update(jnp.sin, w),
        ):
            with fails_with(ContextError, "api.leaf_0_on_b_was"):
                use()
    nothing_is_left(cluster)
    assert cluster.info()["b"]["values_held"] == 1
    np.testing.assert_array_equal(v.fetch(), ONES)


def test_a_closed_cluster_is_refused(cluster):
    w = cluster.put("b", ONES)
    with cluster.context() as ctx:
        cluster.close()
        with fails_with(ContextError, "api.which_is_closed"):
            ctx.call("b", total, w)
    cluster.close()
    for use in (cluster.context, w.fetch, lambda: cluster.put("b", 1.0)):
        with fails_with(ContextError, "api.which_is_closed"):
            use()


def test_abstract_values_have_shapes_and_no_arrays():
    def layer(w, x):
        return jnp.tanh(x @ w)

    huge = jax.ShapeDtypeStruct((1 << 14, 1 << 14), jnp.float32)
    with simulate(["a", "b", "c"], seed=0, values="abstract") as cluster:
        w = cluster.put("b", {"w": huge})
        v = cluster.make("c", lambda: jnp.ones((1 << 14, 4)))
        with cluster.context() as ctx:
            h = ctx.call("b", layer, w["w"], huge)
            loss = ctx.call("c", lambda v, h: jnp.sum(h @ v), v, h)
            ctx.backward(loss)
            assert loss.fetch() == jax.ShapeDtypeStruct((), jnp.float64)
            assert ctx.gradient(w)["w"].fetch() == huge
        cluster.update(lambda w: w * 2, w)
        assert cluster.info()["b"]["bytes_peak"] > 3 << 30


def with_a_crash(at_ns):
    return simulate(
        ["a", "b", "c"],
        seed=0,
        network=LinkModel(latency_ns=10),
        devices=DeviceModel(forward_ns=100, backward_ns=100),
        faults=[Crash("c", detect_ns=5, at_ns=at_ns)],
    )


def test_what_was_on_a_lost_worker_is_lost_and_the_rest_goes_on():
    with with_a_crash(at_ns=50) as cluster:
        w, v = cluster.put("b", ONES), cluster.put("c", ONES)
        said = "worker 'c' is lost"
        with pytest.raises(WorkerLost, match=said), cluster.context() as ctx:
            ctx.backward(ctx.call("c", total, w, v))
        nothing_is_left(cluster)
        for use in (
            v.fetch,
            lambda: cluster.put("c", ONES),
            lambda: cluster.make("c", lambda: ONES),
            lambda: cluster.update(lambda a, b: a * b, v, ONES),
        ):
            with fails_with(WorkerLost, "api.c"):
                use()
        assert "leaf 1 on c, tracked" in repr(v)
        prog = program(lambda ctx: 1)
        with cluster.context() as ctx:
            for fn in (total, prog):
                with fails_with(WorkerLost, "api.c"):
                    ctx.call("c", fn, *[ONES][: fn is total])
            ctx.backward(ctx.call("a", total, w))
            np.testing.assert_array_equal(ctx.gradient(w).fetch(), ONES)
        nothing_is_left(cluster)
        held = {name: info["values_held"] for name, info in cluster.info().items()}
        assert held == {"a": 0, "b": 1, "c": 0}, "nor was any constant kept"


def test_another_thread_may_not_use_a_simulated_cluster(cluster):
    w = cluster.put("b", ONES)
    ctx = cluster.context().__enter__()
    loss = ctx.call("b", total, w)
    uses = (
        lambda: cluster.put("b", 1.0),
        lambda: cluster.update(lambda w: w, w),
        cluster.context,
        lambda: cluster.run({"b": lambda _: None}),
        cluster.close,
        w.fetch,
        loss.fetch,
        lambda: ctx.call("b", total, w),
        lambda: ctx.backward(loss),
        cluster.driver.settle,
    )
    with ThreadPoolExecutor(3, thread_name_prefix="other") as threads:
        for use in (*uses, *uses):
            with fails_with(JdagError, "api.thread_other_uses_a_cluster"):
                threads.submit(use).result()
    ctx.backward(loss)
    np.testing.assert_array_equal(ctx.gradient(w).fetch(), ONES)
    ctx.__exit__(None, None, None)


@program
def ping(ctx, x):
    return ctx.call("c", pong, x)


@program
def pong(ctx, x):
    return ctx.call("b", ping, x)


def test_programs_that_call_each_other_for_ever_are_named_where_events_end():
    said = r"events_max = 300 .*started last: .*p[io]ng and .*p[io]ng\);"
    with simulate(["a", "b", "c"], seed=0, events_max=300, nesting_max=4000) as cluster:
        ctx = cluster.context().__enter__()
        with pytest.raises(JdagError, match=said):
            ctx.call("b", ping, 1.0).fetch()
