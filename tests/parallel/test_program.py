"""One program over all devices: leaves of any number, reductions over replicas."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jdag.compute.jaxprs import collectives
from jdag.errors import JdagError
from jdag.parallel import data_parallel, row_mean
from tests.parallel.cases import array, close, names, norm_params, normed, normed_alone

HOW = "shard_map"


def total(tree: Any) -> Any:
    """A sum in which each leaf has a weight of its own."""
    leaves = jax.tree.leaves(tree)
    return sum([jnp.sum(leaf * (n + 2)) for n, leaf in enumerate(leaves)])


def valued(fn: Any, by: Any, p: Any, x: Any) -> Any:
    """What a function returns, and the gradients of its total."""

    def loss(*args: Any) -> Any:
        found = fn(*args)
        return total(found), found

    (_, found), gradients = jax.value_and_grad(loss, by, has_aux=True)(p, x)
    return found, gradients


def on_one_device(fn: Any, by: Any, p: Any, x: Any) -> Any:
    """The same by plain JAX; else each operation is compiled for each shape."""
    return jax.jit(partial(valued, fn, by))(p, x)


def test_axes_are_those_of_groups_where_leaves_are_as_many():
    x, y = array(4, 4), array(4, 4, seed=1)
    p = [array(4, 4, seed=2 + n) for n in range(3)]

    def layers(p: Any, x: Any) -> Any:
        return x @ p[0] @ p[1] @ p[2]

    models: list[Any] = [
        (layers, 0, p, x),
        (lambda p, x: jnp.tanh(x @ p[0]) @ p[1], (0, 1), p[:2], x),
        (lambda p, x: x[0] * x[1], 1, [], (x, y)),
        (lambda p, x: (x[0] @ p[0] - x[1]) ** 2, 1, p[:1], (x, y)),
    ]
    for fn, by, *args in models:
        spread = partial(data_parallel, fn, devices=names(2), how=HOW)
        close(valued(spread, by, *args), on_one_device(fn, by, *args))


def test_rows_along_another_dim_are_not_taken_for_those_along_the_first():
    y = jnp.arange(4.0).reshape(2, 2)
    found = data_parallel(
        lambda p, x, rows: jnp.cumsum(x[0], 0) + x[1],
        {},
        (y, y),
        names(1),
        dim=1,
        axis_name="all",
        how=HOW,
    )
    np.testing.assert_array_equal(found, [[0, 2], [4, 7]])


# ------------------------------------------------ functions that reduce over replicas


@pytest.mark.parametrize(("rows", "devices"), [(7, 3), (2, 4)])
def test_batch_normalisation_is_that_of_one_device(rows, devices):
    params, x = norm_params(), array(rows, 3, seed=7)
    cotangent = array(rows, 4, seed=8)

    def spread(params: Any, x: Any) -> Any:
        settings: Any = {"axis_name": "all", "has_aux": True, "how": HOW}
        return data_parallel(normed, params, x, names(devices), **settings)

    wanted, alone_vjp, statistics = jax.vjp(normed_alone, params, x, has_aux=True)
    found, vjp, aux = jax.vjp(spread, params, x, has_aux=True)
    close(found, wanted)
    close(aux, statistics)
    close(vjp(cotangent), alone_vjp(cotangent), 1e-9)
    close(spread(params, x), (wanted, statistics))


def test_rows_that_fill_up_are_no_rows_and_divide_nothing_by_zero():
    def inverse(p: Any, x: Any, rows: Any) -> Any:
        assert rows.shape == (2,) and rows.dtype == jnp.float32
        return p / x + row_mean(1 / x, rows, "all"), jax.lax.psum(jnp.sum(rows), "all")

    x, p = jnp.asarray([1.0, 2.0, 4.0]), jnp.float64(3)

    def spread(p: Any, x: Any) -> Any:
        settings: Any = {"axis_name": "all", "has_aux": True}
        return data_parallel(inverse, p, x, names(2), **settings)

    out, vjp, count = jax.vjp(spread, p, x, has_aux=True)
    assert count == 3
    close(out, p / x + jnp.mean(1 / x))
    close(vjp(x), jax.vjp(lambda p, x: p / x + jnp.mean(1 / x), p, x)[1](x))


def test_complex_rows_are_reduced_over_replicas_as_on_one_device():
    def turned(p: Any, x: Any, mean: Any) -> Any:
        h = jnp.exp(x * p["a"]) * jnp.conj(p["b"])
        return (h - mean(h)) * jnp.abs(mean(h * h)), jnp.sin(h)

    def spread(p: Any, x: Any) -> Any:
        def fn(p: Any, x: Any, rows: Any) -> Any:
            return turned(p, x, lambda h: row_mean(h, rows, "all"))

        return data_parallel(fn, p, x, names(3), axis_name="all", how=HOW)

    def alone(p: Any, x: Any) -> Any:
        return turned(p, x, lambda h: jnp.mean(h, 0))

    x, a, b = [array(*shape, seed=4) for shape in ((7, 2), (2,), (2,))]
    p = {"a": a + 0.5j * b, "b": jnp.asarray([1 - 2j, 0.5j])}
    rows = x * (1 + 1j)
    wanted, alone_vjp = jax.vjp(alone, p, rows)
    found, vjp = jax.vjp(spread, p, rows)
    close(found, wanted)
    close(spread(p, rows), wanted)
    cotangents = (rows * (2 - 1j), jnp.conj(rows))
    close(vjp(cotangents), alone_vjp(cotangents), 1e-9)


def test_a_mean_of_integers_is_refused():
    def mean(p: Any, x: Any, rows: Any) -> Any:
        return x, row_mean(x, rows, "all")

    with pytest.raises(JdagError, match=r"row_mean takes floats, not int64\[2\]: conv"):
        data_parallel(mean, {}, jnp.arange(6), names(3), axis_name="all", has_aux=True)


def test_a_mean_of_low_precision_has_a_sum_of_float32():
    def mean(p: Any, x: Any, rows: Any) -> Any:
        return x, row_mean(x, rows, "all")

    x = jnp.full(1001, 100, jnp.float16)  # Their sum is more than a float16 can be.
    _, found = data_parallel(mean, {}, x, names(4), axis_name="all", has_aux=True)
    assert found == 100 and found.dtype == jnp.float16


def reduced(x: Any) -> Any:
    y = x * jax.lax.axis_index("all") + jax.lax.psum(x, "all")
    y = jax.lax.cond(True, lambda y: jax.lax.psum(y[:, 0], "all"), lambda y: y[:, 1], y)
    return jax.lax.all_gather(y, "all")


def test_collectives_are_those_over_the_axis_in_their_order():
    mesh = Mesh(np.array(jax.devices()[:2]), ("all",))
    spec = PartitionSpec("all")
    program = jax.shard_map(
        reduced, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    jaxpr = jax.make_jaxpr(program)(jnp.ones((4, 3)))
    found = ["psum(float64[2,3])", "psum(float64[2])", "all_gather(float64[2])"]
    assert collectives(jaxpr, "all") == found
    assert collectives(jaxpr, "rows") == []
