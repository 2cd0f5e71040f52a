"""Which transformations act leaf by leaf, and that they do what optax does to all."""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdag.compute.avals import aval_of
from jdag.compute.fingerprint import key_of
from jdag.compute.pytrees import Form
from jdag.context.refs import fetch
from jdag.engine.arrays import HOLE
from jdag.errors import JdagError
from jdag.training.leafwise import Leafwise, Whole, leafwise
from jdag.training.optimizer import Optimizer
from tests.tools.error_texts import fails_with
from tests.tools.face_cases import ONES, total


def through_a_state():
    def update(updates, state, params=None):
        mean = sum(jnp.mean(leaf) for leaf in jax.tree.leaves(updates))
        return jax.tree.map(lambda leaf: leaf - state, updates), mean

    return optax.GradientTransformation(lambda params: jnp.zeros(()), update)


def test_the_leaves_that_are_mixed_are_named(cluster):
    def update(updates, state, params=None):
        mixed = updates["b"] + jnp.sum(params["c"]).astype("float32")
        return {**updates, "b": mixed}, state

    tx = optax.GradientTransformation(lambda _: optax.EmptyState(), update)
    refs = {
        "a": cluster.put("b", jnp.ones((2, 2))),
        "b": cluster.put("c", jnp.ones(3, "float32")),
        "c": cluster.put("d", jnp.ones((), "float16")),
    }
    with fails_with(JdagError, "training.of_b_depends_on_value"):
        Optimizer(tx, refs)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (through_a_state, r"mixes leaves.*clip_norm="),
        (
            lambda: optax.MultiSteps(
                optax.sgd(0.1), 2, should_skip_update_fn=optax.skip_not_finite
            ).gradient_transformation(),
            "mixes leaves.*skip_not_finite=True in place of apply_if_finite",
        ),
        (
            lambda: optax.masked(
                optax.clip_by_global_norm(1.0), {"w": True, "b": True}
            ),
            "mixes leaves",
        ),
        (lambda: optax.masked(optax.sgd(0.1), {"w": True}), "are not supported"),
    ],
    ids=["through a state", "skipping", "masked norm", "mask of another tree"],
)
def test_what_is_refused_says_why(cluster, make, text):
    refs = {"w": cluster.put("b", ONES), "b": cluster.put("c", jnp.ones(3, "float32"))}
    with pytest.raises(JdagError, match=text):
        Optimizer(make(), refs)


def by_name(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key, params)


def matrices(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


MASK = [{"w": True, "b": False}, {"w": False, "b": True}]
TWO = {"w": optax.adam(0.1), "b": optax.sgd(0.3, momentum=0.9)}


def by_rates(rates):
    def update(updates, state, params=None):
        return jax.tree.map(jnp.multiply, updates, rates), state

    return optax.chain(
        optax.GradientTransformation(lambda _: optax.EmptyState(), update),
        optax.scale(-1.0),
    )


def by_rank(updates, params=None):
    leaves, treedef = jax.tree.flatten(updates)
    scaled = [-leaf / (2 + rank) for rank, leaf in enumerate(leaves)]
    return jax.tree.unflatten(treedef, scaled)


def jitted(tx):
    return optax.GradientTransformation(tx.init, jax.jit(tx.update))


PLACED = {
    "rates": lambda: by_rates([{"w": 0.1, "b": 0.2}, {"w": 0.3, "b": 0.4}]),
    "rank": lambda: optax.chain(optax.stateless(by_rank), optax.trace(0.9)),
    "noise": lambda: optax.chain(
        optax.add_noise(0.1, 0.5, key=jax.random.key(1)), optax.adam(0.1)
    ),
    "jitted": lambda: jitted(optax.adamw(0.1, mask=MASK)),
    "branches": lambda: optax.MultiSteps(
        optax.masked(optax.novograd(0.1), MASK), 2
    ).gradient_transformation(),
    "masked": lambda: optax.masked(optax.adam(0.1), MASK),
    "masked by a function": lambda: optax.masked(optax.adam(0.1), matrices),
    "decay by a function": lambda: optax.adamw(0.1, weight_decay=0.5, mask=matrices),
    "labels": lambda: optax.multi_transform(
        TWO, [{"w": "w", "b": "b"}, {"w": "b", "b": "w"}]
    ),
    "labels by name": lambda: optax.multi_transform(TWO, by_name),
    "frozen": lambda: optax.multi_transform(
        {"w": optax.adam(0.1), "b": optax.set_to_zero()}, by_name
    ),
}


@pytest.mark.parametrize("name", PLACED)
def test_what_acts_by_place_acts_as_optax_does_on_all_leaves(cluster, name):
    tx = PLACED[name]()
    params = [
        {"w": jnp.linspace(-1, 1, 6).reshape(2, 3), "b": jnp.ones(3, "float32")},
        {"w": jnp.linspace(-2, 1, 6).reshape(2, 3), "b": jnp.linspace(0.5, 1, 3)},
    ]
    refs = [cluster.put("b", params[0]), cluster.put("c", params[1])]
    optimizer = Optimizer(tx, refs)
    state = tx.init(params)
    for _ in range(4):
        with cluster.context() as ctx:
            flat = jax.tree.leaves(refs)
            parts = [ctx.call(ref.worker, lambda x: jnp.sum(x**2), ref) for ref in flat]
            ctx.backward(ctx.call("d", total, *parts))
            optimizer.step(ctx)
        updates, state = tx.update(jax.tree.map(lambda x: 2 * x, params), state, params)
        params = optax.apply_updates(params, updates)
    for got, wanted in zip(
        jax.tree.leaves(fetch(refs)), jax.tree.leaves(params), strict=True
    ):
        assert got.dtype == wanted.dtype
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-7)


def test_a_state_with_the_name_of_a_leaf_is_that_of_all_leaves_that_need_it(cluster):
    def update(updates, state, params=None):
        count = state["count"] + 1
        return jax.tree.map(lambda leaf: leaf / count, updates), {"count": count}

    def init(params):
        return {"count": jnp.zeros(())}

    names = ["count", "v", "w"]
    refs = {name: cluster.put("bcb"[n], 4.0) for n, name in enumerate(names)}
    optimizer = Optimizer(optax.GradientTransformation(init, update), refs)
    for _ in range(3):
        with cluster.context() as ctx:
            ctx.backward(ctx.call("d", total, *refs.values()))
            optimizer.step(ctx)
    np.testing.assert_allclose(list(fetch(refs).values()), 4 + 1 + 1 / 2 + 1 / 3)


def test_leaves_of_one_shape_share_what_is_compiled(cluster):
    refs = [cluster.put("b", {"w": ONES + n, "b": ONES}) for n in range(5)]
    plain = Optimizer(optax.adam(0.1), refs)
    assert len(set(plain._tx.values())) == 1
    named = Optimizer(optax.multi_transform(TWO, by_name), refs)
    assert len(set(named._tx.values())) == 2


def calls_of_python(make):
    count = 0

    def note(_, event, __):
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        make()
    finally:
        sys.setprofile(None)
    return count


LINEAR = {
    "alone": lambda names: optax.adam(0.1),
    "masked": lambda names: optax.adamw(0.1, mask={n: n[-1] < "5" for n in names}),
    "branches": lambda names: optax.novograd(0.1),
}


@pytest.mark.parametrize("name", LINEAR)
def test_the_work_to_take_a_transformation_apart_is_linear_in_its_leaves(name):
    counts = []
    for many in (1, 50, 100, 200):
        names = [f"p{n}" for n in range(100, 100 + many)]
        tx = LINEAR[name](names)
        form = Form(jax.tree.structure(dict.fromkeys(names, 0)), [HOLE] * many)
        each = partial(leafwise, tx, form, [aval_of(jnp.ones(3))] * many, names)
        counts.append(calls_of_python(each))
    assert counts[3] - counts[2] < 2.1 * (counts[2] - counts[1]), counts


def test_the_rate_of_injected_hyperparameters_can_be_set_for_each_leaf(cluster):
    p, q = cluster.put("b", 10.0), cluster.put("c", 10.0)
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=1.0)
    optimizer = Optimizer(tx, [p, q])
    rate = optimizer.states[1].hyperparams["learning_rate"]
    cluster.update(lambda _: jnp.asarray(0.25, rate.dtype), rate)
    with cluster.context() as ctx:
        ctx.backward(ctx.call("d", total, p, q))
        optimizer.step(ctx)
    assert fetch([p, q]) == [9.0, 9.75]


def test_the_key_of_a_transformation_is_found_once_and_tells_others_apart() -> None:
    one = Leafwise(optax.sgd(0.1))
    assert key_of(one) is key_of(one)
    assert key_of(one) == key_of(Leafwise(optax.sgd(0.1)))
    assert key_of(one) != key_of(Leafwise(optax.sgd(0.2)))
    form, avals = Form(jax.tree.structure([0, 0]), [HOLE] * 2), [aval_of(ONES)] * 2
    whole = [Whole(optax.sgd(0.1), form, avals) for _ in range(2)]
    placed = [Leafwise(one.tx, part, 1) for part in whole]
    assert key_of(placed[0]) == key_of(placed[1])
    for other in (one, Leafwise(one.tx, whole[0], 0)):
        assert key_of(placed[0]) != key_of(other), other
