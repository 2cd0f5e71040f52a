"""Hessian-vector products over a cluster are `jax.jvp` of the oracle's gradients."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdag.api.drivers import simulate
from jdag.api.hvp import hvp
from jdag.api.oracle import oracle
from jdag.context.refs import fetch, stop_gradient
from jdag.engine.functions import program
from jdag.errors import JdagError, RemoteError, RootError
from tests.tools.error_texts import fails_with
from tests.tools.face_cases import nothing_is_left
from tests.tools.recovery_cases import bits
from tests.unit.compute.test_duals import calls_itself, picks, thrice

X = jnp.linspace(-0.5, 1, 12).reshape(4, 3)
WORKERS = ("a", "b", "c", "d")


def layer(w, x):
    return jnp.tanh(x @ w)


def last(v, *hidden):
    return jnp.sum(jnp.sin(v * sum(hidden)))


def bent(a):
    return jnp.sin(a) + 0.1 * a * a


def chain(ctx, params, x):
    h = ctx.call("b", layer, params["w"], x)
    h = ctx.call("c", layer, params["u"][0], h)
    h = ctx.call("d", layer, params["w"], h)
    return ctx.call("b", last, params["v"], h)


def fans(ctx, params, x):
    h = ctx.call("b", layer, params["w"], x)
    wide = [ctx.call(WORKERS[k % 4], bent, h) for k in range(11)]
    wide.append(ctx.move("d", ctx.call("c", layer, params["u"][0], h)))
    return ctx.call("c", last, params["v"], *wide)


@program
def block(ctx, w, h, depth):
    h = ctx.call(ctx.here, layer, w, h)
    if depth == 0 or fetch(ctx.call(ctx.here, jnp.max, h)) < -3:
        return h
    return ctx.call("c" if ctx.here == "b" else "b", block, w, h, depth - 1)


def nested(ctx, params, x):
    h = ctx.call("b", block, params["w"], x, 3)
    scaled = ctx.call("d", jnp.multiply, h, float(fetch(h)[0, 1]))
    return ctx.call("a", last, params["v"], scaled, ctx.call("c", bent, h))


def integers(ctx, params, x):
    largest = ctx.call("b", jnp.argmax, params["v"])
    column = ctx.call("c", lambda w, i: jnp.sin(w[i]), params["w"], largest)
    few = ctx.call("d", picks, params["w"], params["u"][0])
    few = ctx.call("d", lambda few: jnp.sum(few * few), few)
    return ctx.call("a", last, params["v"], column, few)


def stopped(ctx, params, x):
    h = ctx.call("b", layer, params["w"], x)
    target = ctx.move("c", stop_gradient(ctx.call("b", bent, h)))
    other = ctx.call("c", last, stop_gradient(params["v"]), h, target)
    return ctx.call("d", lambda o, v: o * jnp.sum(v * v * v), other, params["v"])


def own_rules(ctx, params, x):
    h = ctx.call("b", layer, params["w"], x)
    return ctx.call("c", last, params["v"], ctx.call("d", thrice, h))


def weak(ctx, params, x):
    gate = ctx.call("b", lambda w, s: jnp.where(w > s, 1.0, 0.5), params["w"], 0.1)
    h = ctx.call("c", lambda g, w, k: (g * w) ** k, gate, params["w"], 3)
    return ctx.call("d", last, params["v"], h)


PROGRAMS = [chain, fans, nested, integers, stopped, own_rules, weak]


def parameters(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    shapes = {"w": (3, 3), "u": [(3, 3)], "v": (3,), "unused": (2,)}
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape)),
        shapes,
        is_leaf=lambda shape: isinstance(shape, tuple),
    )


PARAMS, V, U = parameters(0), parameters(1), parameters(2)


def placed(cluster: Any, params: Any = PARAMS) -> Any:
    return {
        "w": cluster.put("c", params["w"]),
        "u": cluster.put("b", params["u"]),
        "v": cluster.put("d", params["v"]),
        "unused": cluster.put("b", params["unused"]),
    }


def truth(fn: Any, params: Any, vector: Any, *rest: Any, **options: Any) -> Any:
    def gradient(p: Any) -> Any:
        return oracle(fn, **options)(p, *rest)[1]

    return jax.jvp(gradient, (params,), (vector,))[1]


def assert_close(got: Any, wanted: Any, relative_max: float = 1e-10) -> None:
    structures: Any = (jax.tree.structure(got), jax.tree.structure(wanted))
    assert structures[0] == structures[1]
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        off = np.max(np.abs(ours - theirs), initial=0)
        assert off <= relative_max * np.max(np.abs(theirs), initial=0), (ours, theirs)


@pytest.mark.parametrize("fn", PROGRAMS)
def test_it_is_the_jvp_of_the_oracles_gradient(cluster, fn):
    got = hvp(fn, cluster)(PARAMS, V, X)
    assert_close(got, truth(fn, PARAMS, V, X))
    np.testing.assert_array_equal(got["unused"], np.zeros(2))
    nothing_is_left(cluster)
    assert not any(info["values_held"] for info in cluster.info().values())


def test_leaves_on_workers_give_the_same_bits_and_stay(cluster):
    refs, vectors = placed(cluster), placed(cluster, V)
    got = hvp(chain, cluster)(refs, V, X)
    assert_close(got, truth(chain, PARAMS, V, X))
    assert bits(hvp(chain, cluster)(refs, vectors, X)) == bits(got)
    assert bits(fetch((refs, vectors))) == bits((PARAMS, V))
    nothing_is_left(cluster)
    held = [info["values_held"] for info in cluster.info().values()]
    assert held == [0, 4, 2, 2], "two of each leaf: parameters and vectors"


def test_complex_parameters_follow_jaxs_convention(cluster):
    def wave(ctx, z):
        turned = ctx.call("b", lambda z: jnp.exp(1j * z) * z, z)
        return ctx.call("c", lambda t, z: jnp.sum(jnp.abs(t + z) ** 3), turned, z)

    z = jnp.array([0.3 + 0.2j, -0.5j, 1.1 + 0j])
    vector = jnp.array([1.0 - 0.4j, 0.7 + 0.1j, -0.2 + 0.9j])
    assert_close(hvp(wave, cluster)(z, vector), truth(wave, z, vector))


def test_argnums_and_aux_are_as_in_value_and_grad(cluster):
    def with_aux(ctx, w, x, v):
        h = ctx.call("b", layer, w, x)
        return ctx.call("c", last, v, h), {"h": h, "n": 3}

    w, v = PARAMS["w"], PARAMS["v"]
    product = hvp(with_aux, cluster, argnums=(2, 0), has_aux=True)
    (by_v, by_w), aux = product(w, (V["v"], V["w"]), X, v)

    def gradient(v, w):
        return oracle(with_aux, argnums=(2, 0), has_aux=True)(w, X, v)[1]

    wanted = jax.jvp(gradient, (v, w), (V["v"], V["w"]))[1]
    assert_close((by_v, by_w), wanted)
    np.testing.assert_allclose(aux["h"], layer(w, X), rtol=1e-14)
    assert aux["n"] == 3 and isinstance(aux["h"], jax.Array)
    alone, _ = hvp(with_aux, cluster, argnums=-1, has_aux=True)(w, V["v"], X, v)
    assert_close(alone, jax.jvp(lambda v: gradient(v, w)[0], (v,), (V["v"],))[1])


def test_statics_and_integers_have_none(cluster):
    def indexed(ctx, params, x):
        rows = ctx.call("b", lambda w, i: w[i], params["table"], params["index"])
        return ctx.call("c", lambda f, r: jnp.sum(f(r)), params["act"], rows)

    params = {"table": PARAMS["w"], "index": jnp.array([2, 0]), "act": jnp.sin}
    vector = {"table": V["w"], "index": None, "act": None}
    got = hvp(indexed, cluster, allow_int=True)(params, vector, X)
    wanted = jax.jvp(
        jax.grad(lambda w: jnp.sum(jnp.sin(w[np.array([2, 0])]))),
        (PARAMS["w"],),
        (V["w"],),
    )[1]
    assert_close(got["table"], wanted)
    assert got["index"].dtype == jax.dtypes.float0 and got["act"] is None
    again = hvp(indexed, cluster, allow_int=True)(params, got, X)
    assert again["table"].shape == (3, 3), "a product is a vector again"


def test_a_leaf_that_is_there_twice_is_two_variables(cluster):
    def product(ctx, params):
        return ctx.call("c", lambda a, b: jnp.sum(a * a * b), *params)

    w = cluster.put("b", PARAMS["v"])
    got = hvp(product, cluster)((w, w), (V["v"], U["v"]))
    values = (PARAMS["v"], PARAMS["v"])
    assert_close(got, truth(product, values, (V["v"], U["v"])))


def test_a_linear_loss_and_one_of_nothing_have_zero_products(cluster):
    def linear(ctx, params, x):
        return ctx.call("b", jnp.sum, params["w"])

    def constant(ctx, params, x):
        return ctx.call("b", jnp.sum, x)

    for fn in (linear, constant):
        got = hvp(fn, cluster)(PARAMS, V, X)
        assert_close(got, jax.tree.map(jnp.zeros_like, PARAMS))


def test_the_gradient_is_of_the_version_that_was_read(cluster):
    refs = placed(cluster)

    def updating(ctx, params, x):
        loss = chain(ctx, params, x)
        cluster.update(lambda w: 0 * w, refs["w"])
        return loss

    assert_close(hvp(updating, cluster)(refs, V, X), truth(chain, PARAMS, V, X))


def sent(made: Any, since: int) -> Counter[str]:
    # A program sends Discard sooner or later, when a ref is collected.
    kinds = [r.detail[1] for r in list(made.trace)[since:] if r.kind == "send"]
    return Counter([kind for kind in kinds if kind != "Discard"])


def payload(made: Any) -> int:
    return sum(info["payload_bytes_sent"] for info in made.info().values())


def cost(run: Any, made: Any) -> tuple[Counter[str], int]:
    made.driver.settle()
    records, before = len(made.trace), payload(made)
    run()
    made.driver.settle()
    return sent(made, records), payload(made) - before


def all_bent(ctx, params):
    h = ctx.call("b", layer, params["w"], params["u"][0])
    h = ctx.call("c", layer, params["w"], h)
    return ctx.call("d", lambda v, h: jnp.prod(jnp.sin(v * h)), params["v"], h)


def test_messages_are_a_gradients_and_two_an_owner_and_payload_doubles(cluster):
    refs, vectors = placed(cluster), placed(cluster, V)
    plain, plain_bytes = cost(lambda: gradients_only(cluster, refs), cluster)
    dual, dual_bytes = cost(lambda: hvp(all_bent, cluster)(refs, vectors), cluster)
    owners = Counter({"Assign": 3, "Forget": 3})
    assert dual - plain == owners and not plain - dual
    assert dual_bytes == 2 * plain_bytes


def gradients_only(made: Any, refs: Any) -> None:
    with made.context() as ctx:
        ctx.backward(all_bent(ctx, refs))
        fetch(list(ctx.gradients().values()))


def test_constants_and_cotangents_of_a_sum_travel_once(cluster):
    def summed(ctx, w):
        h = ctx.call("b", bent, w)
        return ctx.call("c", lambda h, x: jnp.sum(h) + jnp.sum(x), h, X)

    w = cluster.put("b", PARAMS["w"])
    vector = cluster.put("b", V["w"])
    _, found = cost(lambda: hvp(summed, cluster)(w, vector), cluster)
    h, x = PARAMS["w"].nbytes, X.nbytes
    assert found == 2 * h + x + h + 2 * h, "h twice, x, its cotangent, the product"


@pytest.mark.parametrize(
    ("vector", "said"),
    [
        (
            {**V, "v": jnp.ones(4)},
            r"vector\['v'\] is float64\[4\], but argument 0\['v'",
        ),
        ({**V, "v": jnp.ones(3, "float32")}, r"vector\['v'\] is float32\[3\].*float64"),
        ({**V, "v": 1.0}, r"vector\['v'\] is ~?float64\[\].*shape and dtype"),
        ({**V, "v": "x"}, r"vector\['v'\]: a str is not an array"),
        ({**V, "u": [None]}, r"vector\['u'\]\[0\]: a NoneType is not an array"),
        ({**V, "more": 1.0}, r"vector has an unexpected leaf at \['more'\]"),
        ({"w": V["w"], "u": V["u"], "v": V["v"]}, r"has no leaf at \['unused'\]"),
        ({**V, "u": tuple(V["u"])}, "vector has different containers"),
        (None, r"vector has no leaf at \['u'\]\[0\]"),
    ],
)
def test_a_vector_that_does_not_fit_is_named(cluster, vector, said):
    with pytest.raises(JdagError, match=said):
        hvp(chain, cluster)(PARAMS, vector, X)
    cluster.driver.settle()
    assert not any(info["values_held"] for info in cluster.info().values())


def test_a_vector_on_another_worker_or_of_another_shape_is_named(cluster):
    refs, vectors = placed(cluster), placed(cluster, V)
    vectors["w"] = cluster.put("a", V["w"])
    with fails_with(JdagError, "api.vector_w_lives_on_a"):
        hvp(chain, cluster)(refs, vectors, X)
    vectors["w"] = cluster.put("c", V["v"])
    with fails_with(JdagError, "api.vector_w_is_float64_3"):
        hvp(chain, cluster)(refs, vectors, X)


def test_several_arguments_want_a_vector_of_as_many_parts(cluster):
    def two(ctx, w, v):
        return ctx.call("b", last, v, w)

    product = hvp(two, cluster, argnums=(0, 1))
    w, v = PARAMS["w"], PARAMS["v"]
    with fails_with(JdagError, "api.a_tuple_of_2_one"):
        product(w, V["w"], v)
    with fails_with(JdagError, "api.the_vectors_1_is_float64"):
        product(w, (V["w"], V["w"]), v)


def test_a_leaf_that_is_reached_by_another_way_is_named(cluster):
    w = cluster.put("b", PARAMS["w"])

    def closing_over(ctx, v, *_):
        return ctx.call("c", last, v, w)

    with fails_with(JdagError, "api.argument_0_by_another_path"):
        hvp(closing_over, cluster)(w, V["w"])
    other = cluster.put("d", PARAMS["v"])
    both = hvp(closing_over, cluster, argnums=(0, 1))
    with fails_with(JdagError, "api.argument_1_by_another_path"):
        both(other, (V["v"], V["w"]), w)
    got = hvp(closing_over, cluster)(other, V["v"])
    gradient = jax.grad(lambda v: last(v, PARAMS["w"]))
    assert_close(got, jax.jvp(gradient, (PARAMS["v"],), (V["v"],))[1])


def test_a_function_without_a_jvp_is_named_with_its_place(cluster):
    def program_(ctx, params, x):
        h = ctx.call("b", calls_itself, params["w"])
        return ctx.call("c", last, params["v"], h)

    where = r"calls_itself.* failed on 'b', called at test_hvp\.py"
    said = rf"{where}.*no second derivative"
    with pytest.raises(JdagError, match=said):
        hvp(program_, cluster)(PARAMS, V, X)
    nothing_is_left(cluster)
    assert not any(info["values_held"] for info in cluster.info().values())


def test_a_hook_sees_primals_and_may_not_replace_one(cluster):
    seen = []

    def hooked(ctx, params, x, replace):
        h = ctx.call("b", layer, params["w"], x)
        ctx.on_cotangent(h, lambda g: g * 2 if replace else seen.append(g))
        ctx.on_gradient(params["v"], seen.append)
        return ctx.call("c", last, params["v"], h)

    got = hvp(hooked, cluster)(PARAMS, V, X, False)
    wanted = truth(last_of, PARAMS, V, X)
    assert_close(got, wanted)
    assert [type(g) for g in seen] == [type(X)] * 2
    with fails_with(JdagError, "api.replace_a_cotangent_in_a"):
        hvp(hooked, cluster)(PARAMS, V, X, True)


def last_of(ctx, params, x):
    return ctx.call("c", last, params["v"], ctx.call("b", layer, params["w"], x))


def test_losses_and_arguments_that_gradients_refuse_are_refused_the_same_way(cluster):
    with fails_with(RootError, "api.size_9"):
        hvp(lambda ctx, w: ctx.call("b", jnp.sin, w), cluster)(PARAMS["w"], V["w"])
    with fails_with(JdagError, "api.argument_0_n_has_no"):
        hvp(chain, cluster)({"n": np.int64(3)}, {"n": None}, X)
    with fails_with(RemoteError, "api.layer_failed"):
        hvp(lambda ctx, w: ctx.call("b", layer, w, jnp.ones(7)), cluster)(
            PARAMS["w"], V["w"]
        )
    cluster.driver.settle()
    assert not any(info["values_held"] for info in cluster.info().values())


def test_abstract_clusters_are_refused():
    with (
        simulate(["a", "b"], seed=0, values="abstract") as made,
        fails_with(JdagError, "api.values_abstract"),
    ):
        hvp(chain, made)(PARAMS, V, X)
