"""What a program does while it is recorded, or one clear error that says what to do."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdag.compute.pytrees import static
from jdag.engine.functions import program, unjitted
from jdag.errors import ContextError, JdagError, RemoteError
from jdag.plans.compiling import compile
from tests.tools.error_texts import fails_with

X = jnp.linspace(-0.5, 1, 12).reshape(3, 4)
W = jnp.linspace(-1, 1, 16).reshape(4, 4)


def layer(w, x):
    return jnp.sum(jnp.tanh(x @ w))


def plain(ctx, w, x):
    return ctx.call("b", layer, w, x)


@program
def inner(ctx, x):
    return x


@unjitted
def unknown(x):
    return x


def fetches(ctx, w, x):
    return plain(ctx, w, x).fetch()


def fetches_a_leaf(ctx, w, x):
    return w.fetch()


def branches(ctx, w, x):
    return plain(ctx, w, x) if x[0, 0] > 0 else None


def converts(ctx, w, x):
    return plain(ctx, w, np.asarray(x))


def hooks(ctx, w, x):
    ctx.on_cotangent(w, print)


def nests(ctx, w, x):
    return ctx.call("b", inner, x)


def starts(ctx, w, x):
    return ctx.start("b", inner, x)


def goes_back(ctx, w, x):
    ctx.backward(plain(ctx, w, x))


def puts(ctx, w, x):
    return ctx.state.cluster.put("b", W)


def updates(ctx, w, x):
    ctx.state.cluster.update(jnp.negative, w)


def hosts(ctx, w, x):
    return ctx.state.cluster.host("b", dict)


def runs_python(ctx, w, x):
    return ctx.call("b", unknown, X)


def calls_inside_vmap(ctx, w, x):
    return jax.vmap(lambda row: ctx.call("b", layer, w, row))(x)


REFUSED = {
    fetches: "return the ref, which the step then fetches",
    fetches_a_leaf: "return the ref, which the step then fetches",
    branches: "jnp.where",
    converts: "jnp.where",
    hooks: "cannot have hooks",
    nests: "call the other one as a Python function",
    starts: "call the other one as a Python function",
    goes_back: "value_and_grad",
    puts: "outside of the program",
    updates: "outside of the program",
    hosts: "outside of the program",
    runs_python: "unjitted(shapes=fn)",
    calls_inside_vmap: "inside of the called functions",
}


@pytest.mark.parametrize("wrong", REFUSED, ids=lambda wrong: wrong.__name__)
def test_what_cannot_be_recorded_names_the_line_and_the_remedy(cluster, wrong):
    w = cluster.put("b", W)
    with pytest.raises(JdagError) as error:
        compile(wrong, cluster)(w, X)
    said = str(error.value)
    assert REFUSED[wrong] in said
    line = wrong.__code__.co_firstlineno + 1
    wanted = rf"test_recording.py(:{line} in|\", line {line}, in) {wrong.__name__}"
    assert re.search(wanted, said), said
    assert cluster.put("b", W).fetch().shape == (4, 4), "the cluster can still be used"


def test_what_is_computed_from_inputs_between_calls_is_recorded(cluster):
    def own(ctx, w, x, rate):
        scaled = x[::-1] * rate
        return ctx.call("b", layer, w, scaled), {"x": x, "first": x[0], "rate": rate}

    w = cluster.put("c", W)
    step = compile(own, cluster)
    with jax.checking_leaks():
        step(w, X, 2.0)
    for x, rate in ((X, 2.0), (-X, 0.5)):
        value, rest = step(w, x, rate)
        np.testing.assert_allclose(value, layer(W, x[::-1] * rate), rtol=1e-14)
        np.testing.assert_array_equal(rest["x"], x)
        np.testing.assert_array_equal(rest["first"], x[0])
        assert rest["rate"] == rate
    assert "1 plan" in repr(step), "arrays and numbers are inputs"


def test_a_python_number_stays_weak_also_through_what_is_computed_from_it(cluster):
    def weak(ctx, x, rate):
        product = ctx.call("b", jnp.multiply, x, rate)
        return product, ctx.call("b", jnp.multiply, x, rate * 2)

    for exact in (True, False):
        narrow = jnp.arange(3, dtype=jnp.bfloat16)
        for found in compile(weak, cluster, exact=exact)(narrow, 0.3):
            assert found.dtype == jnp.bfloat16


def test_arrays_that_a_program_makes_are_constants(cluster):
    mask = jnp.arange(12.0).reshape(3, 4)

    def masked(ctx, x):
        noise = jax.random.normal(jax.random.key(0), (3, 4))
        assert float(jnp.sum(noise)) != 0, "it has a value"
        key = jax.random.key(1)
        drawn = ctx.call("b", partial(jax.random.normal, shape=(3, 4)), key)
        return ctx.call("b", lambda *a: sum(map(jnp.sum, a)), x, mask, noise, drawn)

    step = compile(masked, cluster)
    noises = [jax.random.normal(jax.random.key(n), (3, 4)) for n in (0, 1)]
    wanted = jnp.sum(X) + jnp.sum(mask) + sum(map(jnp.sum, noises))
    np.testing.assert_allclose(step(X), wanted, rtol=1e-13)
    before = cluster.info()["a"]["bytes_sent"]
    step(X)
    each = cluster.info()["a"]["bytes_sent"] - before
    assert each < mask.nbytes + X.nbytes, "constants are sent once"


def test_statics_are_part_of_the_recording(cluster):
    def repeated(ctx, x, count, name):
        for _ in range(count):
            x = ctx.call("b", getattr(jnp, name), x)
        return x

    step = compile(repeated, cluster)
    for count in (1, 3):
        wanted = X
        for _ in range(count):
            wanted = jnp.sin(wanted)
        found = step(X, static(count), "sin")
        np.testing.assert_allclose(found, wanted, rtol=1e-14)


def test_a_program_that_does_not_repeat_itself_is_refused(cluster):
    runs = []

    def elsewhere(ctx, x):
        runs.append(0)
        return ctx.call("bc"[len(runs) % 2], jnp.sum, x)

    def another_constant(ctx, x):
        runs.append(0)
        return ctx.call("b", jnp.add, x, np.full((3, 4), len(runs)))

    def another_result(ctx, x):
        runs.append(0)
        return (ctx.call("b", jnp.sum, x),) * (1 + len(runs) % 2)

    def own_arithmetic(ctx, x):
        runs.append(0)
        return ctx.call("b", jnp.sum, x * len(runs))

    for wrong in (elsewhere, another_constant, another_result, own_arithmetic):
        with fails_with(JdagError, "plans.two_recordings_differ"):
            compile(wrong, cluster)(X)


def test_a_context_that_was_recorded_is_over(cluster):
    kept = []

    def keeps(ctx, x):
        kept.append(ctx)
        return ctx.call("b", jnp.sum, x)

    compile(keeps, cluster)(X)
    with fails_with(ContextError, "plans.recorded_and_over"):
        kept[0].call("b", jnp.sum, X)


def test_results_are_refs_and_data(cluster):
    with fails_with(JdagError, "plans.returned_an_object_at_1"):
        compile(lambda ctx, x: (x, object()), cluster)(X)


def test_a_function_that_cannot_be_traced_is_a_remote_error(cluster):
    with fails_with(RemoteError, "plans.failed_on_b"):
        compile(lambda ctx, x: ctx.call("b", jnp.matmul, x, x), cluster)(X)


def test_functions_are_traced_once_for_contexts_and_plans(cluster):
    traced = []

    def counted(x):
        traced.append(0)
        return jnp.sum(x) * 3

    def once(ctx, x):
        return ctx.call("b", counted, x)

    with cluster.context() as ctx:
        once(ctx, X).fetch()
    before = len(traced)
    compile(once, cluster, exact=True)(X)
    assert len(traced) == before
