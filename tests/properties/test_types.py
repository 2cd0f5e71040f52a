"""Types of users over workers, and what is refused: by name, where it is given."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.tree_util import Partial

import jdag
from jdag.errors import ContextError, JdagError, RemoteError
from tests.tools.compute_cases import assert_same, setting
from tests.tools.error_texts import fails_with
from tests.tools.face_cases import squares, total


def test_an_integer_beyond_those_of_jax_is_named_where_it_is_given(cluster):
    huge = 2**70
    with cluster.context() as ctx:
        with fails_with(JdagError, "properties.argument_n_1_1180591_64"):
            ctx.call("b", lambda n: n, n=[1, huge])
        assert ctx.call("b", lambda n: n % 7.0, jdag.static(huge)).fetch() == huge % 7
    with fails_with(JdagError, "properties.cluster_put_1180591_64_bits"):
        cluster.put("b", huge)


def gone(*shape: int) -> jax.Array:
    array = jnp.ones(shape)
    array.delete()
    return array


@jdag.program
def given(ctx: Any, *args: Any, **kwargs: Any) -> Any:
    return None


@jdag.program
def gives_what_is_gone(ctx: Any) -> Any:
    return {"x": gone(3)}


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda c, ctx: ctx.call("b", total, 1.0, gone(3)), r"argument 1: .*\[3\] was"),
        (lambda c, ctx: ctx.call("b", total, w=[gone(3)]), r"argument 'w'\[0\]: float"),
        (lambda c, ctx: ctx.call("b", given, {"x": gone(2)}), r"argument 0\['x'\]: fl"),
        (lambda c, ctx: ctx.call("b", gives_what_is_gone), r"returned .* \(at \['x'\]"),
        (lambda c, ctx: ctx.call("b", Partial(total, w=gone(2))), r"the function's "),
        (lambda c, ctx: ctx.move("b", [gone(3)]), r"argument 0: float64\[3\] was del"),
        (lambda c, ctx: c.put("b", {"w": gone(3)}), r"cluster.put, at \['w'\]: float"),
        (lambda c, ctx: c.make("b", total, gone(3)), r"argument 0: float64\[3\] was"),
        (
            lambda c, ctx: ctx.backward(
                ctx.call("b", jnp.sin, c.put("b", jnp.ones(3))), cotangents=gone(3)
            ),
            r"cotangent 0: float64\[3\] was deleted, or donated",
        ),
    ],
)
def test_an_array_that_was_deleted_is_named_where_it_is_given(cluster, use, said):
    with cluster.context() as ctx, pytest.raises(JdagError, match=said):
        use(cluster, ctx)


@pytest.mark.parametrize("worker", ["a", "b", "c"])
def test_a_leaf_that_was_donated_later_is_named_by_who_uses_it(cluster, worker):
    mine, spare = jnp.ones(3), jnp.ones(3)
    kept, lost = cluster.put("b", [spare, mine])
    cluster.driver.settle()
    mine.delete()
    with fails_with(JdagError, "properties.leaf_1_on_b_float64"):
        lost.fetch()
    with cluster.context() as ctx:
        out = ctx.call(worker, lambda lost, kept: lost + kept, lost, kept=kept)
        with pytest.raises(JdagError, match=r"(leaf 1 on b|argument 0 of .*), float64"):
            ctx.backward(ctx.call("d", total, out, kept))
    with cluster.context() as ctx:
        ctx.backward(ctx.call("d", total, kept))
        assert_same(ctx.gradient(kept).fetch(), jnp.ones(3))


def test_configuration_is_fixed_per_cluster_and_named_when_it_changed(cluster):
    w = cluster.put("b", jnp.ones(3))
    with cluster.context() as ctx:
        out = ctx.call("b", total, w)
        with setting("jax_enable_x64", False):
            said = "jax_enable_x64 is False and was True when it was made"
            for use in (
                lambda: ctx.call("b", total, w),
                lambda: ctx.backward(out),
                lambda: cluster.put("b", 1.0),
                out.fetch,
            ):
                with pytest.raises(JdagError, match=said):
                    use()
        ctx.backward(out)
        assert out.fetch() == 3


def test_the_lines_of_a_user_come_without_what_jax_says_of_its_own(cluster):
    with cluster.context() as ctx, pytest.raises(RemoteError) as raised:
        ctx.call("b", lambda a: a @ jnp.ones(7), jnp.ones(3))
    assert "a @ jnp.ones(7)" in str(raised.value)
    assert "JAX has removed" not in str(raised.value)


def test_a_program_that_is_called_without_a_context_says_how_to_call_it():
    for args in ((), (3,), (3, jnp.ones(2))):
        with fails_with(ContextError, "properties.given_is_a_program_ctx"):
            given(*args)


def test_argnums_name_arguments_that_there_are(cluster):
    def loss(ctx: Any, w: Any, v: Any) -> Any:
        return ctx.call("b", squares, w, v)

    ones = jnp.ones(3)
    for made in (
        lambda n: jdag.value_and_grad(loss, cluster, argnums=n),
        lambda n: jdag.oracle(loss, argnums=n),
    ):
        assert_same(made(-1)(ones, 2 * ones), made(1)(ones, 2 * ones))
        for wrong in (2, -3, (0, 5)):
            with fails_with(JdagError, "properties.argnums_with_2_arguments_2"):
                made(wrong)(ones, ones)
        with fails_with(JdagError, "properties.argnums_w_allowed_are_an"):
            made("w")(ones, ones)
