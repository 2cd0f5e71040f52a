"""What may be called: nothing that could change between two calls without notice."""

import dataclasses
import enum
import functools
import operator
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdag
from jdag.compute.callables import called
from jdag.errors import JdagError
from tests.tools.compute_cases import array, assert_same
from tests.tools.error_texts import fails_with

X = array(3)


class Scale:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x: Any) -> Any:
        return x * self.factor

    def apply(self, x: Any) -> Any:
        return self(x)

    @classmethod
    def unit(cls, x: Any) -> Any:
        return cls(1.0)(x)

    @jax.jit
    def jitted(self, x: Any) -> Any:
        return x * self.factor

    @jdag.unjitted
    def plainly(self, x: Any) -> Any:
        return self(x)

    @jdag.program
    def run(self, ctx: Any, x: Any) -> Any:
        return ctx.call("b", jnp.multiply, x, self.factor)


class Wrapping(Scale):
    """A callable object that may change, and says what it wraps."""

    __wrapped__ = abs


class Plain: ...


@dataclasses.dataclass
class Equal(Scale):
    """Equal by value, but without a hash."""

    factor: float


@dataclasses.dataclass(frozen=True)
class Frozen(Scale):
    """Hashable by value, if its factor is."""

    factor: Any


class Hashed(Scale):
    """With a hash, but equal to nothing but itself."""

    def __hash__(self) -> int:
        return 1


class Keyed(Scale):
    """Has a key of its own for caches."""

    @property
    def __jdag_key__(self) -> Any:
        return (Keyed, self.factor)


class Act(enum.Enum):
    DOUBLE = 2

    def __call__(self, x: Any) -> Any:
        return x * self.value


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["factor"], meta_fields=[]
)
@dataclasses.dataclass
class Node(Scale):
    factor: Any


class Module(eqx.Module):
    factor: Any

    def __call__(self, x: Any) -> Any:
        return x * self.factor


@jax.custom_jvp
def twice(x: Any) -> Any:
    return x * 2


REFUSED: list[Callable[[], Any]] = [
    lambda: Scale(2.0),
    lambda: Scale(2.0).apply,
    lambda: Scale(2.0).jitted,
    lambda: functools.partial(functools.partial(Scale(2.0).apply), X),
    lambda: functools.partial(Scale(2.0)),
    lambda: jax.tree_util.Partial(Scale(2.0).apply, X),
    lambda: Equal(2.0),
    lambda: Hashed(2.0).apply,
    lambda: Frozen([2.0]).apply,
    lambda: functools.partial(Node(2.0)),
    lambda: np.ones(3).sum,
    lambda: Wrapping(2.0),
    lambda: jax.jit(Scale(2.0).apply),
    lambda: functools.partial(operator.mul, Scale(2.0)),
    lambda: functools.partial(print, sep=[Plain(), 1]),
    lambda: Frozen((Plain(),)).apply,
    lambda: Frozen(Frozen(Plain())),
]

ALLOWED: list[Any] = [
    Scale.unit,
    Scale.apply,
    Frozen(2.0),
    Frozen(2.0).apply,
    functools.partial(Frozen((2.0, 3.0)).apply),
    Keyed(2.0).apply,
    Act.DOUBLE,
    Node(2.0).apply,
    functools.partial(Module(X)),
    jnp.add,
    np.add,
    abs,
    jax.jit(abs),
    jnp.tanh,
    jax.nn.relu,
    twice,
    functools.lru_cache(twice),
    operator.itemgetter(0),
    X.sum,
    "{}".format,
    functools.partial(Scale(2.0).run),
    Scale(2.0).plainly,
    jax.jit(Frozen(2.0).apply),
    functools.partial(
        operator.mul, X, [2.0, np.ones(3)], **{"a": {"b": (None, Plain)}}
    ),
]


@pytest.mark.parametrize("make", REFUSED)
def test_what_could_change_without_notice_is_no_function_argument_or_static(
    cluster: Any, make: Callable[[], Any]
) -> None:
    refused = "compute.could_change_make_it_a"
    with fails_with(JdagError, refused):
        called(value := make(), (X,))
    if isinstance(value, jax.tree_util.Partial):
        value = {"within": value.func}
    with cluster.context() as ctx, fails_with(JdagError, refused):
        ctx.call("b", jax.jit(lambda fn, x: x), value, X)
    if callable(value):
        with pytest.raises(JdagError, match=r"could change|takes a hashable value"):
            jdag.static(value)


def test_a_transformation_by_methods_of_an_object_is_refused(cluster: Any) -> None:
    class Rate(Plain):
        def init(self, params: Any) -> Any:
            return ()

        def update(self, grads: Any, state: Any, params: Any) -> Any:
            return grads, state

    rate = Rate()
    tx = optax.GradientTransformation(rate.init, rate.update)
    with fails_with(JdagError, "compute.rate_update_reads_a_rate"):
        jdag.Optimizer(tx, cluster.put("b", X))


@pytest.mark.parametrize("fn", ALLOWED)
def test_what_cannot_change_or_runs_as_python_is_called(fn: Any) -> None:
    called(fn, (X,))


def test_a_changed_object_is_refused_by_name_and_gives_no_former_result(
    cluster: Any,
) -> None:
    scale = Scale(2.0)
    said = r"test_callables:Scale.apply reads a Scale, .* pass the values that it reads"

    def loss(ctx: Any, x: Any) -> Any:
        return ctx.call("b", jnp.sum, ctx.call("b", scale.apply, x))

    for make in (jdag.oracle(loss), jdag.value_and_grad(loss, cluster)):
        with pytest.raises(JdagError, match=said):
            make(X)
    with pytest.raises(JdagError, match=said):
        jdag.parallel.parallel_apply([scale.apply], [X])
    with pytest.raises(JdagError, match=said):
        cluster.make("b", scale.apply, X)


@pytest.mark.parametrize("kind", [Node, Keyed, Scale])
def test_what_is_called_after_a_change_has_changed(cluster: Any, kind: Any) -> None:
    scale = kind(2.0)
    with cluster.context() as ctx:
        for factor in (2.0, 5.0, 2.0):
            scale.factor = factor
            python = kind is Scale
            for fn in (scale.plainly, scale.run) if python else (scale, scale.apply):
                assert_same(ctx.call("b", fn, X).fetch(), X * factor)
