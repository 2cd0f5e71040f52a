"""Functions of every kind that a worker may be handed as StableHLO."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.tools.compute_cases import array


def layer(w: Any, b: Any, x: Any) -> Any:
    return jnp.tanh(w @ x + b) * 2.0


def softmax(x: Any) -> Any:
    return jax.nn.log_softmax(x * 3.0) @ jnp.arange(4.0)


def layernorm(x: Any, scale: Any, shift: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    spread = jnp.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-6)
    return (x - mean) / spread * scale + shift


def scanned(w: Any, xs: Any) -> Any:
    def step(h: Any, x: Any) -> Any:
        h = jnp.sin(w * h + x)
        return h, h * x

    last, all_of_them = jax.lax.scan(step, jnp.zeros_like(w), xs)
    return {"last": last, "all": all_of_them}


def branched(x: Any, y: Any) -> Any:
    return jax.lax.cond(x.sum() > 0, lambda: jnp.cos(x) * y, lambda: x * y * y)


def looped(x: Any) -> Any:
    return jax.lax.fori_loop(0, 5, lambda i, h: jnp.sin(h) + i, x)


def noisy(key: Any, x: Any) -> Any:
    first, second = jax.random.split(key)
    kept = jax.random.bernoulli(first, 0.7, x.shape)
    return jnp.where(kept, x, 0.0) + jax.random.normal(second, x.shape), second


def several(x: Any, n: Any) -> Any:
    return x * n, jnp.argmax(x), x > 0, n + 1, jnp.uint8(3)


def wave(x: Any, z: Any) -> Any:
    return jnp.fft.fft(x * z), jnp.abs(z), (z * z).real


def narrow(x: Any, y: Any) -> Any:
    return jnp.where(x > 0, 1.0, 0.0) * x @ y, (x * 1.5).astype(jnp.float32)


def solved(a: Any, b: Any) -> Any:
    return jax.scipy.linalg.cho_solve(
        (jnp.linalg.cholesky(a @ a.T + jnp.eye(3)), False), b
    )


@jax.custom_vjp
def straight(x: Any) -> Any:
    return jnp.round(x)


straight.defvjp(
    lambda x: (straight(x), x.shape), lambda shape, g: (g * jnp.ones(shape),)
)


def rounded(x: Any) -> Any:
    return straight(x) * x


def checkpointed(w: Any, x: Any) -> Any:
    return jax.checkpoint(lambda w, x: jnp.sin(w @ x) ** 2)(w, x)


def identity(*arrays: Any) -> Any:
    return arrays


def nothing(x: Any) -> Any:
    return ()


def constant(x: Any) -> Any:
    return jnp.arange(3.0), x.shape[0]


def weak(x: Any, factor: Any, count: Any) -> Any:
    return x * factor, factor * 2, count + 1, x.sum() + count


KEY = jax.random.key(7)
HELD = array(4, 4)


def closing() -> Any:
    held = jnp.asarray(HELD)

    def closed(x: Any) -> Any:
        return jnp.tanh(held @ x) @ held

    return closed


def narrow_arrays() -> tuple[Any, Any]:
    return (
        jnp.asarray(array(3, 4), jnp.bfloat16),
        jnp.asarray(array(4, 2), jnp.bfloat16),
    )


CASES: dict[str, tuple[Any, ...]] = {
    "layer": (layer, array(4, 3), array(4), array(3)),
    "softmax": (softmax, array(5, 4)),
    "layernorm": (layernorm, array(5, 7), array(7), array(7)),
    "scan": (scanned, array(3), array(6, 3)),
    "cond": (branched, array(3), array(3)),
    "cond, the other way": (branched, -array(3), array(3)),
    "loop": (looped, array(3)),
    "random numbers": (noisy, KEY, array(8)),
    "keys": (identity, jax.random.split(KEY, 3), array(2)),
    "ints and bools": (several, array(4), np.int32(3)),
    "complex": (wave, array(8), array(8) + 1j * array(8)),
    "bfloat16": (narrow, *narrow_arrays()),
    "linear algebra": (solved, array(3, 3), array(3)),
    "custom_vjp": (rounded, array(5)),
    "checkpoint": (checkpointed, array(4, 3), array(3)),
    "identity": (identity, array(2, 3), array(4), np.arange(3)),
    "nothing": (nothing, array(3)),
    "constant": (constant, array(3)),
    "numbers": (weak, array(3), 2.5, 7),
    "numbers and bfloat16": (weak, narrow_arrays()[0], 2.5, 7),
    "zero bytes": (identity, jnp.zeros((0, 3)), array(2)),
    "closure": (closing(), array(4)),
    "lambda": (lambda x, y: x * y + jnp.sin(x), array(3), array(3)),
}
