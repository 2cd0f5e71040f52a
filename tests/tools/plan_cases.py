"""Programs for plans, known by their names, and the same steps without a plan."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jdag


def layer(p, x):
    return jnp.tanh(x @ p["w"] + p["b"])


def mse(x, y):
    return jnp.mean((x - y) ** 2)


def network(ctx, params, x, y):
    for p in params:
        x = ctx.call(p["w"].worker, layer, p, x)
    return ctx.call("a", mse, x, y)


def weigh(p, x):
    return jnp.sum(p * x)


def paired(ctx, params, x):
    return [ctx.call(p.worker, weigh, p, x) for p in params]


def train(exact: bool, params: Any, optimizer: Any, nth: int, cluster: Any) -> None:
    step = jdag.compile(paired, cluster, optimizer=optimizer, exact=exact)
    for number in range(4):
        step(params, np.float64(2.0 ** (nth + 2 * number)))


def put(cluster: Any, owners: Sequence[str], dtype: Any = float) -> list[Any]:
    rng = np.random.default_rng(len(owners))
    return [
        {
            "w": cluster.put(worker, rng.normal(size=(3, 3)).astype(dtype)),
            "b": cluster.put(worker, np.zeros(3, dtype)),
        }
        for worker in owners
    ]


def batch(number: int, dtype: Any = float) -> tuple[Any, Any]:
    rng = np.random.default_rng(number)
    x, y = rng.normal(size=(2, 4, 3)).astype(dtype)
    return x, y


def bits(tree: Any) -> list[bytes]:
    leaves = [
        one.fetch() if isinstance(one, jdag.Ref) else one
        for one in jax.tree.leaves(tree)
    ]
    return [np.asarray(one).tobytes() for one in leaves]


def close(found: Any, wanted: Any, dtype: Any = float, times: float = 1.0) -> None:
    relative = 1e-12 if np.dtype(dtype).itemsize == 8 else 1e-6
    both = [[np.asarray(one) for one in jax.tree.leaves(of)] for of in (found, wanted)]
    for one, other in zip(*both, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        scale = np.max(np.abs(other), initial=0.0)
        assert np.max(np.abs(one - other), initial=0.0) <= times * relative * scale


def eagerly(cluster: Any, program: Any, optimizer: Any = None) -> Callable[..., Any]:
    def step(*args: Any) -> Any:
        with cluster.context() as ctx:
            value = program(ctx, *args)
            if optimizer is not None:
                ctx.backward(jax.tree.leaves(value)[0])
                optimizer.step(ctx)
            return jdag.fetch(value)

    return step


def stepping(
    cluster: Any, program: Any, optimizer: Any, exact: bool | None
) -> Callable[..., Any]:
    if exact is None:
        return eagerly(cluster, program, optimizer)
    return jdag.compile(program, cluster, optimizer=optimizer, exact=exact)
