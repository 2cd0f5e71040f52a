"""An option: narrow cotangents are summed in float32, each eight rounded once."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdag
from jdag.compute.duals import Dual
from jdag.compute.sums import add, fold
from tests.tools.compute_cases import Call, Leaf, array, summed
from tests.tools.error_texts import fails_with

USES = 512
PARTS = np.random.default_rng(3).uniform(0.5, 0.99, (USES, 16)).astype(jnp.bfloat16)
LAUNCHED = partial(jdag.launch, allow=["tests"])


@pytest.fixture
def wide() -> Iterator[None]:
    jdag.sum_in_float32()
    yield
    jdag.sum_in_float32(False)


def in_float32(addends: list[Any]) -> Any:
    while len(addends) > 1:
        groups = [addends[start : start + 8] for start in range(0, len(addends), 8)]
        sums = [summed([jnp.asarray(one, jnp.float32) for one in g]) for g in groups]
        addends = [total.astype(addends[0].dtype) for total in sums]
    return addends[0]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_sum_is_rounded_once_for_each_eight(wide: None, dtype: Any):
    addends = [array(50, seed=n, dtype=dtype) for n in range(70)]
    for count in (3, 8, 10, 64, 65, 70):
        wanted = np.asarray(in_float32(addends[:count])).tobytes()
        assert np.asarray(add(addends[:count])).tobytes() == wanted
        assert np.asarray(fold(addends[:count])).tobytes() == wanted
    assert np.asarray(add(addends)).tobytes() != np.asarray(summed(addends)).tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64])
def test_sums_of_other_dtypes_keep_their_bits(wide: None, dtype: Any):
    addends = [array(50, seed=n, dtype=dtype) for n in range(20)]
    assert np.asarray(add(addends)).tobytes() == np.asarray(summed(addends)).tobytes()


def test_the_sum_inside_a_vjp_is_made_so_and_the_option_recompiles_it(wide: None):
    addends = [jnp.bfloat16(1), *[jnp.bfloat16(2**-9)] * 7]
    call = Call(lambda x: x * 1.0, Leaf(jnp.bfloat16(3)))
    (gradient,) = call.vjp(addends)
    assert (float(gradient), gradient.dtype) == (1 + 2**-6, jnp.bfloat16)
    jdag.sum_in_float32(False)
    (gradient,) = Call(lambda x: x * 1.0, Leaf(jnp.bfloat16(3))).vjp(addends)
    assert float(gradient) == 1


def test_tangents_are_summed_as_their_primals(wide: None):
    one, few = jnp.bfloat16(1), jnp.bfloat16(2**-9)
    total = add([Dual(one, few), few, *[Dual(few, one)] * 6])
    assert total.primal == one + 7 * jnp.float32(2**-9).astype(jnp.bfloat16)
    assert (total.primal.dtype, float(total.tangent)) == (jnp.bfloat16, 6)


def loss(w: Any, part: Any) -> Any:
    return jnp.sum(w * part, dtype=jnp.float32)


def losses(ctx: Any, w: Any) -> Any:
    return [ctx.call("b", loss, w, part) for part in PARTS]


def total(*given: Any) -> Any:
    return sum(given)


def gradient_of(make: Any, home: str, program: Any = None) -> Any:
    with make(["a", "b"]) as cluster:
        w = cluster.put(home, jnp.ones(16, jnp.bfloat16))
        if program is not None:
            found = jdag.compile(program, cluster, exact=True).value_and_grad(w)[1]
            return np.asarray(found)
        with cluster.context() as ctx:
            ctx.backward(*losses(ctx, w))
            return np.asarray(ctx.gradient(w).fetch())


@pytest.mark.parametrize("home", ["a", "b"])
def test_a_leaf_with_512_micro_batches_has_a_gradient_to_two_units(
    wide: None, home: str
):
    exact = PARTS.astype(np.float64).sum(0)
    found = gradient_of(partial(jdag.simulate, seed=0), home)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(np.float64), exact, rtol=2 * 2**-8)
    plain = jax.grad(lambda w: sum([loss(w, part) for part in PARTS]))
    bad = np.asarray(plain(jnp.ones(16, jnp.bfloat16))).astype(np.float64)
    assert (abs(bad - exact) > 0.1 * exact).all()  # 256 + 0.9 is 256.
    if home == "b":
        wanted = np.asarray(in_float32(list(map(jnp.asarray, PARTS))))
        assert found.tobytes() == wanted.tobytes()


def test_processes_that_are_launched_have_it_too(wide: None):
    simulated = gradient_of(partial(jdag.simulate, seed=0), "a")
    assert gradient_of(LAUNCHED, "a").tobytes() == simulated.tobytes()


def test_plans_have_it_too(wide: None):
    def program(ctx: Any, w: Any) -> Any:
        few = losses(ctx, w)
        return ctx.call("b", total, *few)

    simulated = gradient_of(partial(jdag.simulate, seed=0), "a")
    found = gradient_of(partial(jdag.simulate, seed=0), "a", program)
    assert found.tobytes() == simulated.tobytes()


def test_a_cluster_refuses_a_change_of_the_option(wide: None):
    with jdag.simulate(["a", "b"], seed=0) as cluster:
        jdag.sum_in_float32(False)
        with fails_with(jdag.JdagError, "properties.jdag_sums_in_float32_is"):
            cluster.put("a", jnp.ones(3))
