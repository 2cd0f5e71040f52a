"""Values that are too large to travel: refused by name, and nobody is lost over it."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdag
from jdag.errors import JdagError

BYTES_MAX = 8_000  # 1,000 float64.
SMALL, FITS, LARGE = jnp.ones(10), jnp.ones(1_000), jnp.ones(1_001)
COUNT = jdag.static(1_001)
NO_MORE = (
    r"float64\[1001\], has 8008 bytes, but values of more than 8000 bytes are not sent"
    r": .*value_bytes_max in jdag\.launch"
)


def scaled(w: jax.Array, x: jax.Array) -> jax.Array:
    return w * x.sum()


def widened(w: jax.Array, count: int) -> jax.Array:
    return jnp.full(count, w.sum())


def total(*parts: Any, **named: Any) -> Any:
    return sum(jnp.sum(part) for part in jax.tree.leaves((parts, named)))


def wide(ctx: Any, w: Any) -> Any:
    return ctx.call("b", widened, w, COUNT)


@jdag.program
def sends(ctx: Any, w: Any) -> Any:
    return ctx.call("c", total, w, ctx.call(ctx.here, widened, w, COUNT))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    names = ["a", "b", "c"]
    with jdag.launch(names, allow=("tests",), value_bytes_max=BYTES_MAX) as made:
        yield made


@pytest.fixture
def w(cluster: Any) -> Iterator[Any]:
    """A leaf on b; after the test a step goes over all workers, who hold no more."""
    leaf = cluster.put("b", SMALL)
    yield leaf
    with cluster.context() as ctx:
        wide = ctx.call("b", scaled, leaf, FITS)
        ctx.backward(ctx.call("c", total, wide, ctx.call("a", scaled, wide, FITS)))
        np.testing.assert_array_equal(ctx.gradient(leaf).fetch(), 1_001_000 * SMALL)
    cluster.drop(leaf)
    cluster.driver.settle()
    for known in cluster.info().values():
        held = (known["values_held"], known["live_contexts"], known["live_passes"])
        assert held == (0, 0, 0)


@pytest.mark.parametrize(
    ("ask", "what"),
    [
        (lambda c, x, w: x.call("b", total, w, [LARGE]), "argument 1.0. of .*total"),
        (lambda c, x, w: x.call("b/cpu:0", total, LARGE), "argument 0 of .*total"),
        (lambda c, x, w: x.call("b", total, x=LARGE), "argument 'x' of .*total"),
        (lambda c, x, w: x.move("b", LARGE), "argument 0 of .*transferred"),
        (lambda c, x, w: c.put("b", [SMALL, LARGE]), r"leaf \d+ on b"),
        (lambda c, x, w: c.put("b/cpu:0", LARGE), "argument 0 of .*transferred"),
        (lambda c, x, w: c.make("b", scaled, LARGE, SMALL), "argument 0 of .*scaled"),
        (lambda c, x, w: c.update(scaled, w, LARGE), "argument 1 of .*scaled"),
        (
            lambda c, x, w: x.backward(wide(x, w), cotangents=LARGE),
            "the cotangent of root 0",
        ),
    ],
)
def test_what_a_program_hands_over_is_refused_where_it_does(
    cluster: Any, w: Any, ask: Callable[[Any, Any, Any], Any], what: str
) -> None:
    refused = pytest.raises(JdagError, match=f"for 'b': {what}, {NO_MORE}")
    with refused, cluster.context() as ctx:
        ask(cluster, ctx, w)


@pytest.mark.parametrize(
    ("ask", "calls"),
    [
        (lambda x, w: wide(x, w).fetch(), False),
        (lambda x, w: x.call("c", total, w, wide(x, w)).fetch(), True),
        (lambda x, w: x.move("c", wide(x, w)), True),
        (lambda x, w: x.move("a", [w, wide(x, w)])[1].fetch(), True),
        (lambda x, w: x.backward(x.call("c", total, w, wide(x, w))), True),
        (lambda x, w: x.backward(x.call("b", sends, w)), True),
    ],
    ids=["fetched", "called", "moved", "moved here", "differentiated", "of a program"],
)
def test_what_a_worker_makes_and_would_send_is_refused_by_it(
    cluster: Any, w: Any, ask: Callable[[Any, Any], Any], calls: bool
) -> None:
    """The call that wants it is named; a move that nobody looks at is told as well."""
    site = r"the call at .*test_sizes\.py:\d+.*: " if calls else "^"
    said = rf"{site}output \(.*\) on b, {NO_MORE}"
    with pytest.raises(JdagError, match=said), cluster.context() as ctx:
        ask(ctx, w)


def test_what_stays_on_its_worker_may_be_larger(cluster: Any, w: Any) -> None:
    large = cluster.make("b", widened, SMALL, COUNT)
    own = cluster.put("a", LARGE)
    with cluster.context() as ctx:
        ctx.backward(ctx.call("b", total, ctx.call("b", scaled, large, w)))
        found = ctx.gradient(large)
        assert found.shape == (1_001,)
        assert ctx.call("b", total, found).fetch() == 10_010
        with pytest.raises(JdagError, match=f"on b, {NO_MORE}"):
            found.fetch()
        with pytest.raises(JdagError, match=rf"leaf \d+ on b, {NO_MORE}"):
            jdag.fetch([w, large])
        assert own.fetch().shape == ctx.call("a", scaled, own, w).fetch().shape
    cluster.drop([large, own])


def squares(h: jax.Array) -> jax.Array:
    return jnp.sum(h**2)


def test_a_value_and_its_tangent_are_two(cluster: Any) -> None:
    def of_two_workers(ctx: Any, w: Any) -> Any:
        return ctx.call("c", squares, ctx.call("b", jnp.multiply, w, 3.0))

    leaf = cluster.put("b", jnp.ones(700))
    product = jdag.hvp(of_two_workers, cluster)(leaf, jnp.ones(700))
    np.testing.assert_array_equal(jdag.fetch(product), np.full(700, 18.0))
    cluster.drop(leaf)
