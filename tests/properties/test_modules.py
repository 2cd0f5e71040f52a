"""Modules, sparse arrays and containers of users, against plain JAX on one machine."""

import dataclasses
from collections import OrderedDict
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import sparse

import jdag
from jdag.compute import pytrees
from jdag.errors import GraphError, JdagError
from tests.tools.compute_cases import array, assert_same
from tests.tools.error_texts import fails_with
from tests.tools.face_cases import squares, total

X = array(4, 3)


class Affine(eqx.Module):
    w: jax.Array
    b: Any
    act: Any = jnp.tanh
    scale: Any = eqx.field(static=True, default=1)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.act(self.linear(x)) * self.scale

    def linear(self, x: jax.Array) -> jax.Array:
        return x @ self.w + self.b


def affine(**fields: Any) -> Affine:
    return Affine(array(3, 2, seed=1), array(2, seed=2), **fields)


def test_a_module_is_called_as_it_is_and_its_arrays_are_arguments(cluster):
    module = affine()

    def loss(ctx: Any, module: Any, x: Any) -> Any:
        parts = [ctx.call(worker, module, x) for worker in ("b", "c", "d")]
        return ctx.call("b", squares, *parts)

    found = jdag.value_and_grad(loss, cluster)(module, X)
    assert_same(found, jdag.oracle(loss)(module, X))

    def plain(module: Affine) -> jax.Array:
        return squares(*[module(X)] * 3)

    assert_same(found[1], eqx.filter_grad(plain)(module))
    assert found[1].act is None and isinstance(found[1], Affine)


def test_a_module_of_refs_is_called_where_they_are_and_trained_there(cluster):
    module = affine()
    there = cluster.put("b", module)
    assert there.act is jnp.tanh and there.w.worker == "b"
    with cluster.context() as ctx:
        out = ctx.call("b", there, X)
        ctx.backward(ctx.call("c", squares, out))
        gradient = ctx.gradient(there)
        assert gradient.act is None
        cluster.update(lambda w, g: w - 0.1 * g, there, gradient)
    wanted = eqx.filter_grad(lambda m: squares(m(X)))(module)
    moved = jax.tree.map(
        lambda w, g: w - 0.1 * g, eqx.filter(module, eqx.is_array), wanted
    )
    assert_same((there.w.fetch(), there.b.fetch()), (moved.w, moved.b))
    cluster.drop(there)


def test_a_method_of_a_module_and_a_partial_of_jax_hold_refs_as_well(cluster):
    module = cluster.put("b", affine())
    with cluster.context() as ctx:
        one = ctx.call("b", module.linear, X)
        two = ctx.call("c", jax.tree_util.Partial(jnp.multiply, module.b), 3.0)
        three = ctx.call("d", jax.tree_util.Partial(squares, module.w))
        ctx.backward(ctx.call("b", total, one, two, three))
        found = ctx.gradient((module.w, module.b))
        wanted = jax.grad(
            lambda w, b: total(X @ w + b, b * 3.0, squares(w)), argnums=(0, 1)
        )(affine().w, affine().b)
        assert_same(jdag.fetch(found), wanted)


def test_a_module_that_is_a_program_takes_the_context_first(cluster):
    class Deep(eqx.Module):
        layers: list[Affine]

        @jdag.program
        def run(self, ctx: Any, x: Any) -> Any:
            for layer in self.layers:
                x = ctx.call(ctx.here, layer.linear, x)
            return x

    @jdag.program
    def apply(ctx: Any, deep: Any, x: Any) -> Any:
        return deep.run(ctx, x)

    deep = cluster.put("b", Deep([affine(), Affine(array(2, 3, seed=5), X[0])]))
    partial = jax.tree_util.Partial(apply, deep=deep)
    with cluster.context() as ctx:
        direct = ctx.call("c", apply, deep, X)
        curried = ctx.call("c", partial, x=X)
        wanted = Affine(array(2, 3, seed=5), X[0]).linear(affine().linear(X))
        assert_same((direct.fetch(), curried.fetch()), (wanted, wanted))


def test_what_a_module_holds_that_no_call_takes_is_named(cluster):
    with cluster.context() as ctx:
        with fails_with(JdagError, "properties.the_functions_b_is_a"):
            ctx.call("b", Affine(X, {1}), X)
        with fails_with(JdagError, "properties.argument_0_is_a_set"):
            ctx.call("b", affine(), {1})
        with fails_with(JdagError, "properties.the_functions_b_n_1180591"):
            ctx.call("b", Affine(X, {"n": 2**70}), X)


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Numbers have been warned of in this process; empty it to have it once more."""
    texts = ["once"]
    monkeypatch.setattr(pytrees, "_warned", texts)
    return texts


class Dropped(eqx.Module):
    inner: Affine
    rate: Any
    shift: Any

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.inner(x) * (1 - self.rate) + self.shift


def dropped(rate: Any = 0.5) -> Dropped:
    return Dropped(affine(), rate, jnp.asarray(0.25))


def dropped_loss(ctx: Any, module: Any, x: Any) -> Any:
    return ctx.call("c", squares, *[ctx.call("b", module, x) for _ in range(3)])


def trained(module: Dropped) -> Any:
    return eqx.filter(module, eqx.is_array)


def plainly(arrays: Any) -> Any:
    module = eqx.combine(arrays, dropped())
    return squares(*[module(X)] * 3)


def test_a_number_inside_a_pytree_is_no_leaf_and_no_optimizer_moves_it(
    cluster: Any, warned: list[str]
) -> None:
    there = cluster.put("b", dropped())
    assert there.rate == 0.5 and type(there.rate) is float
    stepped = jdag.Optimizer(optax.adamw(0.1, weight_decay=0.1), there)
    tx = optax.adamw(0.1, weight_decay=0.1)
    wanted = trained(dropped())
    state = tx.init(wanted)
    for _ in range(3):
        with cluster.context() as ctx:
            ctx.backward(dropped_loss(ctx, there, X))
            stepped.step(ctx, ctx.gradient(there))
        updates, state = tx.update(jax.grad(plainly)(wanted), state, wanted)
        wanted = optax.apply_updates(wanted, updates)
    assert there.rate == 0.5
    assert_same(trained(jdag.fetch(there)), wanted)


def test_gradients_have_none_for_a_number_inside_a_pytree(
    cluster: Any, warned: list[str]
) -> None:
    for module in (dropped(), cluster.put("d", dropped())):
        value, gradient = jdag.value_and_grad(dropped_loss, cluster)(module, X)
        assert gradient.rate is None and gradient.shift.shape == ()
        assert_same((value, gradient), jdag.oracle(dropped_loss)(module, X))
        vector = dataclasses.replace(gradient, rate=0.5)
        product = jdag.hvp(dropped_loss, cluster)(module, vector, X)
        assert product.rate is None
        at, along = (trained(dropped()),), (trained(gradient),)
        assert_same(trained(product), jax.jvp(jax.grad(plainly), at, along)[1])


def test_a_number_inside_a_pytree_stays_where_the_pytree_goes(
    cluster: Any, warned: list[str]
) -> None:
    there = cluster.put("b", {"w": X, "rate": 0.5, "n": 3})
    with cluster.context() as ctx:
        moved = ctx.move("c", there)
        (copy,) = ctx.replicate(["d"], there)
        summed = ctx.all_reduce({"b": there, "c": moved, "d": copy})["c"]
        stopped = jdag.stop_gradient(there)
        for tree in (moved, copy, summed, stopped):
            assert (tree["rate"], tree["n"]) == (0.5, 3)
        assert_same(summed["w"].fetch(), 3 * X)
    cluster.update(lambda w, other: w + other, there, there)
    assert_same(there["w"].fetch(), 2 * X)
    cluster.drop(there)


def test_a_number_by_itself_is_a_leaf(cluster: Any) -> None:
    def loss(ctx: Any, scale: Any) -> Any:
        return ctx.call("b", lambda s: s * s * s, scale)

    ref = cluster.put("b", 3.0)
    assert ref.tracked and cluster.put("b", True).dtype == bool
    for scale in (3.0, ref):
        assert jdag.value_and_grad(loss, cluster)(scale) == (27.0, 27.0)
        assert jdag.oracle(loss)(scale) == (27.0, 27.0)


@pytest.mark.parametrize("tree", [{"a": 1.5}, [True], (2, None)])
def test_a_pytree_of_nothing_but_numbers_has_nothing_to_put(
    cluster: Any, tree: Any, warned: list[str]
) -> None:
    with fails_with(JdagError, "properties.cluster_put_at_is_a"):
        cluster.put("b", tree)
    with fails_with(JdagError, "properties.argument_0_has_no_arrays"):
        jdag.value_and_grad(dropped_loss, cluster)(tree, X)


@pytest.mark.parametrize("first", ["put", "value_and_grad", "oracle"])
def test_the_first_number_inside_a_pytree_warns(
    cluster: Any, warned: list[str], first: str
) -> None:
    def use() -> Any:
        if first == "put":
            return cluster.put("b", dropped())
        if first == "oracle":
            return jdag.oracle(dropped_loss)(dropped(), X)
        return jdag.value_and_grad(dropped_loss, cluster)(dropped(), X)

    warned.clear()
    where = "cluster.put" if first == "put" else "argument 0"
    said = (
        rf"{where}, at \.rate: 0\.5 is a Python number .*; write jnp\.asarray\(0\.5\)"
    )
    with pytest.warns(UserWarning, match=said) as found:
        use()
    assert [one.filename for one in found] == [__file__]
    use()  # It would raise: warnings are errors here.
    cluster.put("b", [X, 1.0])


def bag() -> sparse.BCOO:
    places = np.array([[0, 1], [0, 4], [1, 1], [2, 5], [2, 1]])
    return sparse.BCOO((array(5, seed=3), jnp.asarray(places)), shape=(3, 6))


def embedded(bag: sparse.BCOO, table: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(bag @ table) ** 2)


def test_an_embedding_bag_has_the_gradients_of_jax(cluster):
    table = array(6, 2, seed=4)
    refs: list[Any] = [cluster.put("c", bag()), cluster.put("b", table)]
    assert refs[0].data.tracked and not refs[0].indices.tracked
    assert isinstance(refs[0], sparse.BCOO)
    with cluster.context() as ctx:
        ctx.backward(ctx.call("b", embedded, *refs))
        found = jdag.fetch(ctx.gradient(refs, allow_int=True))
        with fails_with(GraphError, "properties.not_inexact_int_5_2"):
            ctx.gradient(refs)
    wanted = jax.grad(embedded, argnums=(0, 1), allow_int=True)(bag(), table)
    assert_same((found[0].data, found[1]), (wanted[0].data, wanted[1]))
    assert found[0].indices.dtype == wanted[0].indices.dtype == jax.dtypes.float0
    assert found[0].indices.shape == (5, 2)


def test_value_and_grad_of_sparse_parameters_is_that_of_jax(cluster):
    table = array(6, 2, seed=4)

    def loss(ctx: Any, bag: Any, table: Any) -> Any:
        return ctx.call("b", embedded, ctx.call("c", lambda m: 2.0 * m, bag), table)

    options: Any = {"argnums": (0, 1), "allow_int": True}
    wanted = jax.value_and_grad(lambda m, t: embedded(2.0 * m, t), **options)
    for differentiated in (
        jdag.value_and_grad(loss, cluster, **options),
        jdag.oracle(loss, **options),
    ):
        value, (of_bag, of_table) = differentiated(bag(), table)
        plain, (bag_plain, table_plain) = wanted(bag(), table)
        assert_same(
            (value, of_bag.data, of_table), (plain, bag_plain.data, table_plain)
        )
        assert of_bag.indices.dtype == jax.dtypes.float0
    for refused in (jdag.value_and_grad(loss, cluster), jdag.oracle(loss)):
        with fails_with(JdagError, "properties.argument_0_int_5_2"):
            refused(bag(), table)


def test_sparse_constants_and_results_are_sparse(cluster):
    with cluster.context() as ctx:
        out = ctx.call("b", lambda m, c: m * c, bag(), 3.0)
        assert isinstance(out, sparse.BCOO) and out.shape == (3, 6)
        dense = ctx.call("c", out.todense)
        assert_same(jdag.fetch(out).todense(), 3 * bag().todense())
        assert_same(dense.fetch(), 3 * bag().todense())


class Pair(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Held:
    array: Any
    kind: str = dataclasses.field(metadata={"static": True})


class Own:
    def __init__(self, parts: Any, name: str) -> None:
        self.parts, self.name = parts, name


jax.tree_util.register_pytree_node(
    Own, lambda own: (own.parts, own.name), lambda name, parts: Own(parts, name)
)


def containers(a: Any, b: Any, c: Any) -> Any:
    return {
        "z": Pair(a, [b]),
        "a": OrderedDict([("y", c), ("b", a)]),
        "n": None,
        "e": ((), {}, []),
        "h": Held(b, "kind"),
        "o": Own((a, c), "mine"),
    }


def same_structure(one: Any, other: Any) -> bool:
    return str(jax.tree.structure(one)) == str(jax.tree.structure(other))


def test_containers_of_all_kinds_go_there_and_back_and_have_gradients(cluster):
    tree = containers(array(2, seed=1), array(3, seed=2), array(seed=3))

    def spread(tree: Any, *, also: Any) -> Any:
        assert tree["h"].kind == "kind" and tree["o"].name == "mine"
        assert tree["n"] is None and list(tree["a"]) == ["y", "b"]
        return jax.tree.map(lambda leaf: leaf * also["k"], tree)

    def loss(ctx: Any, tree: Any) -> Any:
        out = ctx.call("b", spread, tree, also={"k": 2.0, "unused": None})
        assert same_structure(out, tree)
        return ctx.call("c", lambda tree: squares(*jax.tree.leaves(tree)), out)

    found = jdag.value_and_grad(loss, cluster)(tree)
    assert_same(found, jdag.oracle(loss)(tree))
    assert same_structure(found[1], tree)
    plain = jax.grad(lambda t: squares(*jax.tree.leaves(spread(t, also={"k": 2.0}))))
    assert_same(found[1], plain(tree))


@pytest.mark.parametrize("empty", [{}, (), [], None, {"a": (None, [])}])
def test_an_empty_container_is_put_moved_and_fetched(cluster, empty):
    assert cluster.put("b", empty) == empty
    with cluster.context() as ctx:
        assert ctx.move("c", empty) == empty and jdag.fetch(empty) == empty
        assert ctx.call("c", lambda: empty) == empty
