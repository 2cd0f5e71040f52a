"""Small graphs, each with one shape that a distributed backward pass must handle."""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from jdag.engine.functions import program
from jdag.scenario import Case

# ------------------------------------------------------------------------- functions


def scale(w: Array, x: Array) -> Array:
    """Compute sin(w * x), elementwise."""
    return jnp.sin(w * x)


def total(x: Array) -> Array:
    """Return the sum, a scalar."""
    return jnp.sum(x)


def product(x: Array, y: Array) -> Array:
    """Multiply elementwise."""
    return x * y


def add(x: Array, y: Array) -> Array:
    """Add elementwise."""
    return x + y


def wave(t: Array, number: Array) -> Array:
    """Compute sum(sin(f t) (1 + f / 1000)), f = 1.7 (number + 1)."""
    factor = 1.7 * (number + 1)
    return jnp.sum(jnp.sin(factor * t) * (1 + factor / 1000))


def add_all(*losses: Array) -> Array:
    """Sum from left to right."""
    result = losses[0]
    for loss in losses[1:]:
        result = result + loss
    return result


def layer(w: Array, x: Array) -> Array:
    """Compute a stage of a pipeline."""
    return jnp.tanh(x @ w)


def last_layer(w: Array, x: Array) -> Array:
    """Compute the last stage and its loss."""
    return jnp.mean(jnp.square(jnp.tanh(x @ w)))


def _vector(number: int, size: int) -> Any:
    return jnp.linspace(0.5, 1.5, size) + 0.1 * number


# --------------------------------------------------------------------------- programs


def chain(workers: Sequence[str], *, length: int = 6, size: int = 3) -> Case:
    """Return a chain of `length` calls around the workers."""
    names = [f"w{number}" for number in range(length)]
    placement = {name: workers[n % len(workers)] for n, name in enumerate(names)}

    def body(ctx: Any, params: Any) -> Any:
        value: Any = jnp.ones(size)
        for name in names:
            value = ctx.call(placement[name], scale, params[name], value)
        return ctx.call(workers[0], total, value)

    params = {name: _vector(number, size) for number, name in enumerate(names)}
    return Case(body, params, placement)


def diamond(workers: Sequence[str], *, size: int = 3) -> Case:
    """Return a case with a value used on two workers and joined on a third."""
    left, right = workers[1 % len(workers)], workers[2 % len(workers)]
    join = workers[3 % len(workers)]

    def body(ctx: Any, params: Any) -> Any:
        top = ctx.call(workers[0], scale, params["t"], params["t"])
        x = ctx.call(left, scale, params["l"], top)
        y = ctx.call(right, scale, params["r"], top)
        return ctx.call(join, total, ctx.call(join, product, x, y))

    params = {"t": _vector(0, size), "l": _vector(1, size), "r": _vector(2, size)}
    return Case(body, params, {"t": workers[0], "l": left, "r": right})


def fan_out(workers: Sequence[str], *, calls: int = 24, size: int = 3) -> Case:
    """Return `calls` parallel calls on one leaf, on all workers except the first."""
    others = workers[1:] or workers

    def body(ctx: Any, params: Any) -> Any:
        losses = [
            ctx.call(others[number % len(others)], wave, params["t"], float(number))
            for number in range(calls)
        ]
        return ctx.call(workers[0], add_all, *losses)

    return Case(body, {"t": _vector(0, size)}, {"t": workers[0]})


@program
def pass_on(ctx: Any, route: Sequence[str], x: Any, y: Any) -> Any:
    """Add on this worker, then on the rest of the route, and return the result."""
    z = ctx.call(ctx.here, add, x, y)
    if route:
        z = ctx.call(route[0], pass_on, route[1:], ctx.move(route[0], z), y)
    return ctx.move(ctx.here, z)


def three_hops(workers: Sequence[str], *, size: int = 3) -> Case:
    """Return nested programs: a calls b, b calls c, c calls d; each adds."""

    def body(ctx: Any, params: Any) -> Any:
        x, y = params["x"], params["y"]
        first, *rest = workers[1:]
        return ctx.call(workers[0], total, ctx.call(first, pass_on, tuple(rest), x, y))

    params = {"x": _vector(0, size), "y": _vector(1, size)}
    return Case(body, params, dict.fromkeys(params, workers[0]))


@program
def double_at(ctx: Any, where: str, x: Any) -> Any:
    """Branch on a fetched value, then double it on another worker."""
    if float(jnp.sum(x.fetch())) > 0:
        return ctx.call(where, add, x, x)
    return ctx.call(where, product, x, x)


@program
def ask_back(ctx: Any, caller: str, w: Any, x: Any) -> Any:
    """Compute on this worker, then call a program on the caller."""
    y = ctx.call(ctx.here, scale, w, x)
    return ctx.call(caller, double_at, ctx.here, y)


def back_to_the_caller(workers: Sequence[str], *, size: int = 3) -> Case:
    """Return a program that calls a program on its caller, which branches."""
    home, remote = workers[0], workers[1 % len(workers)]

    def body(ctx: Any, params: Any) -> Any:
        y = ctx.call(remote, ask_back, home, params["w"], params["x"])
        return ctx.call(home, total, ctx.call(home, product, y, params["x"]))

    params = {"w": _vector(0, size), "x": _vector(1, size)}
    return Case(body, params, {"w": remote, "x": home})


def several_roots(workers: Sequence[str], *, size: int = 3) -> Case:
    """Return one loss on each worker, all of one leaf; all are roots of the pass."""

    def body(ctx: Any, params: Any) -> Any:
        losses = []
        for number, worker in enumerate(workers):
            name = f"w{number}"
            value = ctx.call(worker, scale, params[name], params["shared"])
            losses.append(ctx.call(worker, total, value))
        return losses

    params = {f"w{n}": _vector(n, size) for n in range(len(workers))}
    placement = {f"w{n}": worker for n, worker in enumerate(workers)}
    return Case(
        body,
        {**params, "shared": _vector(7, size)},
        {**placement, "shared": workers[0]},
    )


def dropped_reply(
    workers: Sequence[str],
    *,
    size: int = 3,
    mode: Literal["smart", "fast"] = "smart",
) -> Case:
    """Return a call on another worker whose result is not used."""
    home, remote = workers[0], workers[1 % len(workers)]

    def body(ctx: Any, params: Any) -> Any:
        value = ctx.call(home, scale, params["w"], params["x"])
        ctx.call(remote, product, value, params["y"])  # The result is not used.
        return ctx.call(home, total, value)

    params = {"w": _vector(0, size), "x": _vector(1, size), "y": _vector(2, size)}
    return Case(body, params, {"w": home, "x": home, "y": remote}, mode=mode)


def pipeline(
    workers: Sequence[str], *, micro_batches: int = 8, width: int = 4, rows: int = 2
) -> Case:
    """Return a pipeline with one stage for each worker and the loss in the last."""
    stages = len(workers)

    def body(ctx: Any, params: Any) -> Any:
        losses = []
        for number in range(micro_batches):
            value = jnp.full((rows, width), 0.1 * (number + 1))
            for stage, worker in enumerate(workers):
                function = layer if stage + 1 < stages else last_layer
                with ctx.tag(stage=stage, micro_batch=number):
                    value = ctx.call(worker, function, params[f"stage{stage}"], value)
            losses.append(value)
        return losses

    matrix = jnp.linspace(-1.0, 1.0, width * width).reshape(width, width)
    params = {f"stage{stage}": matrix + 0.01 * stage for stage in range(stages)}
    placement = {f"stage{stage}": worker for stage, worker in enumerate(workers)}
    return Case(body, params, placement)


def abstract_pipeline(
    workers: Sequence[str], *, micro_batches: int = 64, width: int = 64, rows: int = 8
) -> Case:
    """Return the same pipeline for abstract values, without arrays."""
    stages = len(workers)
    batch = jax.ShapeDtypeStruct((rows, width), jnp.float32)

    def body(ctx: Any, params: Any) -> Any:
        losses = []
        for number in range(micro_batches):
            value = params[f"batch{number}"]
            for stage, worker in enumerate(workers):
                function = layer if stage + 1 < stages else last_layer
                value = ctx.call(worker, function, params[f"stage{stage}"], value)
            losses.append(value)
        return losses

    weight = jax.ShapeDtypeStruct((width, width), jnp.float32)
    params: dict[str, Any] = {f"stage{stage}": weight for stage in range(stages)}
    placement = {f"stage{stage}": worker for stage, worker in enumerate(workers)}
    for number in range(micro_batches):
        params[f"batch{number}"] = batch
        placement[f"batch{number}"] = workers[0]
    return Case(body, params, placement)
