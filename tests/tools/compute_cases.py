"""What the tests of pairs share: calls whose arguments are marked as leaves."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdag.compute.avals import aval_of
from jdag.compute.pairs import Pair, pair
from jdag.compute.pytrees import split
from jdag.compute.tracing import Residuals


class Leaf:
    def __init__(self, value: Any) -> None:
        self.value = value


class Call:
    """One call: `Leaf`s are tracked where inexact, all else as `split` has it."""

    def __init__(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        parts = split(args, kwargs, lambda leaf: isinstance(leaf, Leaf))
        positions = {place: ref.value for place, ref in parts.refs}
        positions.update(dict(parts.constants))
        self.args = [positions[place] for place in range(parts.size)]
        avals = tuple(map(aval_of, self.args))
        leaves = dict(parts.refs)
        self.tracked = tuple(
            place in leaves and aval.inexact for place, aval in enumerate(avals)
        )
        self.pair: Pair = pair(fn, parts.template, avals, self.tracked)
        self.outputs, residuals = self.pair.forward(self.args)
        self.kept = residuals

    @property
    def residuals(self) -> Residuals:
        assert self.kept is not None, self.pair
        return self.kept

    def vjp(self, *cotangents: list[Any]) -> tuple[Any, ...]:
        return self.pair.vjp(self.residuals, cotangents)


def pair_of(fn: Any, *args: Any, tracked: tuple[bool, ...] | None = None) -> Any:
    """The pair of a function of arrays and statics; what is inexact is tracked."""
    parts = split(args, {}, lambda _: False)
    avals = tuple([aval_of(value) for _, value in parts.constants])
    if tracked is None:
        tracked = tuple([aval.inexact for aval in avals])
    return pair(fn, parts.template, avals, tracked)


def array(*shape: int, seed: int = 0, dtype: Any = np.float64) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(values, dtype)


def summed(addends: Sequence[Any]) -> Any:
    while len(addends) > 8:
        groups = [addends[start : start + 8] for start in range(0, len(addends), 8)]
        addends = list(map(summed, groups))
    total = addends[0]
    for addend in addends[1:]:
        total = total + addend
    return total


def assert_same(found: Any, expected: Any) -> None:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for one, other in pairs:
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


@contextmanager
def setting(name: str, value: Any) -> Iterator[None]:
    before = getattr(jax.config, name, jax.config.values[name])
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


@contextmanager
def no_new_arrays() -> Iterator[None]:
    """Assert that each array there is at the end was there before.

    Others may go meanwhile: what earlier tests left is collected at any time.
    """
    before = jax.live_arrays()  # Held here, so that none goes and its id comes again.
    known = {id(one) for one in before}
    yield
    assert [one.aval for one in jax.live_arrays() if id(one) not in known] == []
