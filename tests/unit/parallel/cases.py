"""What these tests share: devices, and models with gradients known on one of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jdag.parallel import data_parallel, row_mean

# Rows for two devices: of chunks of one size, and of two.
ROWS = (4, 5)
# Sums of these, left to right, are 0; from right to left 2.
BIG = 2.0**24
UNEVEN = np.asarray([BIG, 1, 1, -BIG], np.float32)
ODD = {"a": 1.0, 1: 2.0}  # JAX cannot sort its keys.


def names(count: int, first: int = 0) -> list[str]:
    return [f"cpu:{(first + number) % 8}" for number in range(count)]


def where(tree: Any) -> list[str]:
    return [f"cpu:{leaf.device.id}" for leaf in jax.tree.leaves(tree)]


def array(*shape: int, seed: int = 0, dtype: Any = np.float64) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(values, dtype)


def meshed(value: Any, axis: AxisType) -> Any:
    mesh = Mesh(np.asarray(jax.devices()[2:6]), ("some",), axis_types=(axis,))
    return jax.device_put(value, NamedSharding(mesh, PartitionSpec("some", None)))


def close(found: Any, wanted: Any, tolerance: float = 1e-11) -> None:
    structure: Any = jax.tree.structure(found)
    assert structure == jax.tree.structure(wanted)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    for one, other in pairs:
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        wide = np.result_type(np.float64, one.dtype)
        there, truth = np.asarray(one, wide), np.asarray(other, wide)
        scale = 1 + np.max(np.abs(truth), initial=0)
        np.testing.assert_allclose(there, truth, rtol=tolerance, atol=tolerance * scale)


# ------------------------------------------------------- batch normalisation, both ways


def normed(params: Any, x: Any, rows: Any) -> Any:
    h = jnp.tanh(x @ params["w"])
    mean = row_mean(h, rows, "all")
    var = row_mean((h - mean) ** 2, rows, "all")
    out = (h - mean) / jnp.sqrt(var + 1e-5) * params["g"] + params["b"]
    running = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, params["old"], var)
    return out, {"mean": mean, "running": running}


def normed_alone(params: Any, x: Any) -> Any:
    h = jnp.tanh(x @ params["w"])
    mean, var = jnp.mean(h, 0), jnp.var(h, 0)
    out = (h - mean) / jnp.sqrt(var + 1e-5) * params["g"] + params["b"]
    return out, {"mean": mean, "running": 0.9 * params["old"] + 0.1 * var}


def norm_params() -> Any:
    shapes = {"w": (3, 4), "g": (4,), "b": (4,), "old": (4,)}
    return {
        name: array(*shape, seed=n) for n, (name, shape) in enumerate(shapes.items())
    }


# ----------------------------------------------------------------- calls on workers


def rows_out(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["w"]).sum(1)


def spread_loss(params: Any, x: Any, output: str) -> Any:
    y = data_parallel(rows_out, params, x, output_device=output)
    return jnp.sum(y**3)


def plain_loss(params: Any, x: Any) -> Any:
    return jnp.sum(rows_out(params, x) ** 3)


def program(ctx: Any, params: Any, x: Any, place: str) -> Any:
    x = ctx.call("a", jnp.cos, x)
    loss = ctx.call(place, spread_loss, params, x, "cpu:2")
    return ctx.call("a", jnp.sin, loss)
