"""Calls and programs do what they say, and their errors name what is wrong."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdag.api.drivers import simulate
from jdag.compute.pytrees import static
from jdag.context.refs import stop_gradient
from jdag.engine.functions import program, unjitted
from jdag.errors import ContextError, JdagError, RemoteError
from tests.tools.error_texts import fails_with
from tests.tools.face_cases import ONES, fails_forward, raises_at_run_time, total


def test_a_move_that_cannot_be_is_refused_as_a_move(cluster):
    w = cluster.put("b", ONES)
    with cluster.context() as ctx:
        trees: tuple[Any, ...] = (w, [])
        for tree in trees:
            with fails_with(JdagError, "context.ctx_move_there_is_no"):
                ctx.move("z", tree)
    with fails_with(ContextError, "context.ctx_move_on_context_0"):
        ctx.move("b", w)


def test_what_is_no_function_is_refused_as_such(cluster):
    with cluster.context() as ctx, fails_with(JdagError, "context.a_function_not_3"):
        ctx.call("b", 3, ONES)


def test_move_is_tracked_and_keeps_the_pytree(cluster):
    w = cluster.put("b", {"x": ONES, "n": jnp.arange(3)})
    with cluster.context() as ctx:
        c = np.float64(2.0)
        there = ctx.move("d", {"w": w, "c": c, "n": 2, "flag": True, "op": jnp.sum})
        assert there.pop("flag") is True and there.pop("op") is jnp.sum
        assert there.pop("n") == 2
        assert ctx.move("d", True) is True and ctx.move("d", 2.0).fetch() == 2.0
        assert there["w"]["x"].worker == "d" and there["w"]["x"].tracked
        assert not there["w"]["n"].tracked and not there["c"].tracked
        loss = ctx.call("d", lambda t: jnp.sum(t["w"]["x"]) * t["c"], there)
        ctx.backward(loss)
        np.testing.assert_array_equal(ctx.gradient(w["x"]).fetch(), 2 * ONES)


def test_the_kinds_of_arguments_are_what_section_4_says(cluster):
    w = cluster.put("b", jnp.arange(6.0).reshape(2, 3))

    def reduce(a, scale, /, *, axis, how, keep=False, op=None, note="none"):
        assert isinstance(axis, int) and note == "a static"
        assert isinstance(scale, jax.Array), "numbers are traced"
        return {how: (op(a, axis=axis, keepdims=keep) * scale, jnp.argmax(a))}

    with cluster.context() as ctx:
        assert ctx.here == "a" and ctx.workers == ("a", "b", "c", "d")
        out = ctx.call(
            "c",
            reduce,
            w,
            2.0,
            axis=static(1),
            how="sum",
            keep=True,
            op=jnp.sum,
            note="a static",
        )
        (doubled, best) = out["sum"]
        assert doubled.shape == (2, 1) and doubled.tracked
        assert best.dtype == np.int64 and not best.tracked
        np.testing.assert_array_equal(doubled.fetch(), [[6], [24]])
        assert best.fetch() == 5


def test_a_program_gets_and_returns_refs_and_plain_data(cluster):
    w = cluster.put("c", ONES)

    @program
    def prog(ctx, ref, array, number, **others):
        assert ref == w and ref.worker == "c" and ref.tracked
        assert isinstance(array, np.ndarray) and type(number) is int
        assert others == {"word": "word", "flag": None, "axis": (0, 1)}
        stopped = stop_gradient(ref)
        assert not stopped.tracked
        return [ref, stopped, array, number + 1, others["word"], None]

    with cluster.context() as ctx:
        out = ctx.call(
            "b", prog, w, np.arange(3), 1, word="word", flag=None, axis=static((0, 1))
        )
        assert out[0] == w and out[0].tracked and not out[1].tracked
        np.testing.assert_array_equal(out[2], np.arange(3))
        assert out[3:] == [2, "word", None]
        ctx.backward(ctx.call("c", total, out[0]))
        np.testing.assert_array_equal(ctx.gradient(out[0]).fetch(), ONES)
    cluster.update(lambda a: a * 2, w)
    np.testing.assert_array_equal(out[0].fetch(), 2 * ONES)


def test_what_a_program_raises_is_raised_where_it_was_called(cluster):
    @program
    def inner(ctx, x):
        raise ValueError("too sad")

    @program
    def outer(ctx, x):
        return ctx.call("c", inner, x)

    with cluster.context() as ctx:
        with pytest.raises(RemoteError) as caught:
            ctx.call("b", outer, ONES)
        said = str(caught.value)
        assert re.search(r"inner failed on 'c', called at .*outer: ", said), said
        assert "ValueError: too sad" in said and 'raise ValueError("too sad")' in said
        assert isinstance(caught.value.__cause__, ValueError)
        assert "jdag/context/context.py" not in said and "greenlet" not in said


def test_an_error_of_jdag_in_a_program_keeps_its_class(cluster):
    @program
    def differentiates(ctx, w):
        ctx.backward(ctx.call("b", total, w))

    @program
    def gradients(ctx, w):
        return ctx.gradients()

    w = cluster.put("b", ONES)
    with cluster.context() as ctx:
        for prog in (differentiates, gradients):
            with fails_with(ContextError, "context.only_the_program_that_opened"):
                ctx.call("b", prog, w)


def test_a_program_that_catches_an_error_has_seen_it(cluster):
    @program
    def careful(ctx):
        bad = ctx.call("c", raises_at_run_time, ONES)
        try:
            bad.fetch()
        except RemoteError:
            return "caught"

    with cluster.context() as ctx:
        assert ctx.call("b", careful) == "caught"


def test_a_program_returns_no_strange_things(cluster):
    @program
    def strange(ctx):
        return {"x": object()}

    said = r"returned an object \(at \['x'\]\)"
    with cluster.context() as ctx, pytest.raises(ContextError, match=said):
        ctx.call("b", strange)


def test_a_context_is_refused_while_its_program_waits(cluster):
    w = cluster.put("b", ONES)
    with cluster.context() as ctx:

        @program
        def captures(inner, w):
            return ctx.call("c", total, w)

        with fails_with(ContextError, "context.waits_for_captures_on_b"):
            ctx.call("b", captures, w)


def test_a_ref_of_a_program_that_has_returned_still_names_its_value(cluster):
    kept = []

    @program
    def keeps(ctx, x):
        kept.append(ctx.call("c", total, x))
        return kept[0]

    with cluster.context() as ctx:
        out = ctx.call("b", keeps, ONES)
        assert out == kept[0] and out.fetch() == 9
        assert ctx.call("c", jnp.add, kept[0], 1.0).fetch() == 10
        with fails_with(ContextError, "context.its_program_has_returned"):
            kept[0].fetch()


def mismatched(a, b):
    return a @ b


def test_a_shape_error_shows_function_worker_call_site_and_the_users_lines(cluster):
    w = cluster.put("b", jnp.ones((2, 3)))
    with cluster.context() as ctx:
        with pytest.raises(RemoteError) as caught:
            ctx.call("c", mismatched, w, w)
        said = str(caught.value)
        assert re.search(
            r"test_program_frame:mismatched failed on 'c', called at \S*\w+.py:\d+ "
            r"in test_a_shape_error\w+: TypeError: dot_general",
            said,
        ), said
        assert "return a @ b" in said
        assert "site-packages" not in said and "jdag/compute" not in said
        assert isinstance(caught.value.__cause__, TypeError)
        assert ctx.call("c", total, w).fetch() == 6, "the context goes on"


def test_an_error_at_run_time_is_a_value_until_somebody_looks(cluster):
    w = cluster.put("b", ONES)
    with cluster.context() as ctx:
        bad = ctx.call("c", fails_forward, w)
        worse = ctx.call("d", total, bad)
        with pytest.raises(RemoteError) as caught:
            worse.fetch()
        said = str(caught.value)
        assert re.search(r"fails_forward failed on 'c', called at .*test_pro", said)
        assert "RuntimeError: no way on" in said
        assert isinstance(caught.value.__cause__, Exception)
        text = r"no way on[^$]*route of workers: a <- d"
        with pytest.raises(RemoteError, match=text):
            ctx.backward(worse)


def test_leaving_raises_an_error_that_nobody_has_seen(cluster):
    said = "raises_at_run_time failed on 'c'"
    with pytest.raises(RemoteError, match=said), cluster.context() as ctx:
        ctx.call("c", raises_at_run_time, ONES)


def test_leaving_keeps_silent_when_another_exception_is_on_its_way(cluster):
    with pytest.raises(KeyError), cluster.context() as ctx:
        ctx.call("c", raises_at_run_time, ONES)
        raise KeyError("first")


def test_leaving_raises_the_first_unseen_error_in_program_order(cluster):
    @unjitted(shapes=lambda a: a)
    def other(a):
        raise RuntimeError("the second")

    with fails_with(RemoteError, "context.the_second"), cluster.context() as ctx:
        first = ctx.call("d", raises_at_run_time, ONES)
        ctx.call("b", other, ONES)
        ctx.call("c", raises_at_run_time, ONES)
        with fails_with(RemoteError, "context.run_time"):
            first.fetch()


@pytest.mark.parametrize("use", ["call", "fetch", "backward", "gradient", "program"])
def test_a_ref_of_another_context_is_refused_naming_both(cluster, use):
    w = cluster.put("b", ONES)
    prog = program(lambda ctx, x: x)
    with cluster.context() as one, cluster.context() as two:
        ref = one.call("c", total, w)
        one.backward(ref, retain_graph=True)
        if use == "fetch":
            assert ref.fetch() == 9
            return
        uses = {
            "call": lambda: two.call("c", total, ref),
            "backward": lambda: two.backward(ref),
            "gradient": lambda: two.call("c", total, one.gradient(w)),
            "program": lambda: two.call("c", prog, ref),
        }
        with fails_with(ContextError, "context.of_context_0_1_and"):
            uses[use]()


def test_a_ref_of_another_cluster_is_refused_naming_both(cluster):
    with simulate(["x", "y"], seed=0) as other:
        theirs = other.put("y", ONES)
        with cluster.context() as ctx:
            pattern = r"the cluster of 'x', 'y' and .* cluster of 'a', 'b', 'c', 'd'"
            for use in (
                lambda: ctx.call("a", total, theirs),
                lambda: ctx.gradient(theirs),
                lambda: cluster.update(jnp.sin, theirs),
            ):
                with pytest.raises(ContextError, match=pattern):
                    use()


def test_a_ref_of_another_cluster_of_the_same_names_is_said_to_be_of_another(cluster):
    with simulate(["a", "b", "c", "d"], seed=0) as other:
        theirs = other.put("b", ONES)
        said = r"is of another cluster of the same names and this is the cluster of 'a'"
        with pytest.raises(
            ContextError, match=f"{said}.*; ref.fetch.. returns the value"
        ):
            cluster.update(jnp.sin, theirs)
    said = "is of another cluster of the same names, which is closed, and this is the"
    refused = pytest.raises(ContextError, match=f"{said}.* refs do not .* cluster$")
    with cluster.context() as ctx, refused:
        ctx.call("b", total, theirs)


def test_a_context_is_used_between_entering_and_leaving(cluster):
    w = cluster.put("b", ONES)
    ctx = cluster.context()
    with fails_with(ContextError, "context.not_entered_yet_write_with"):
        ctx.call("b", total, w)
    with ctx:
        pass
    with fails_with(ContextError, "context.context_0_1_is_over"):
        ctx.call("b", total, w)
    with fails_with(ContextError, "context.entered_before"), ctx:
        pass


TRANSFORMS: dict[str, Any] = {"jit": jax.jit, "vmap": jax.vmap, "grad": jax.grad}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_jdag_under_jit_vmap_and_grad_says_where_to_put_them(cluster, name):
    w = cluster.put("b", ONES)
    with cluster.context() as ctx:
        loss = ctx.call("b", total, w)
        uses = (
            lambda: cluster.put("b", ONES),
            cluster.context,
            lambda: cluster.update(jnp.sin, w),
            lambda: ctx.call("b", total, w),
            lambda: ctx.backward(loss),
            w.fetch,
            loss.fetch,
        )
        for use in uses:

            def under(x, use=use):
                use()
                return x.sum()

            value = jnp.ones(3)
            with fails_with(ContextError, "context.inside_of_jax_jit_vmap"):
                TRANSFORMS[name](under)(value)


def test_jdag_inside_of_a_function_that_is_called_is_refused(cluster):
    w = cluster.put("b", ONES)
    said = r"inside of jax\.jit"
    with cluster.context() as ctx, pytest.raises(ContextError, match=said):
        ctx.call("b", lambda x: x * ctx.call("b", total, w).fetch(), w)
