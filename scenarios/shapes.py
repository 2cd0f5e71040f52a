"""Small graphs, each of one shape that a distributed backward pass has to get right."""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from jdag.engine.functions import program
from jdag.scenario.case import Case

# ------------------------------------------------------------------- what is computed


def scale(w: Array, x: Array) -> Array:
    """One step of a chain: sin(w * x), elementwise."""
    return jnp.sin(w * x)


def total(x: Array) -> Array:
    """A scalar."""
    return jnp.sum(x)


def product(x: Array, y: Array) -> Array:
    """X * y, elementwise."""
    return x * y


def add(x: Array, y: Array) -> Array:
    """X + y."""
    return x + y


def wave(t: Array, number: Array) -> Array:
    """Call `number` of the fan-out: sum(sin(1.7 (i+1) t) (1 + 1.7 (i+1) / 1000))."""
    factor = 1.7 * (number + 1)
    return jnp.sum(jnp.sin(factor * t) * (1 + factor / 1000))


def add_all(*losses: Array) -> Array:
    """A sum, left to right."""
    result = losses[0]
    for loss in losses[1:]:
        result = result + loss
    return result


def layer(w: Array, x: Array) -> Array:
    """A stage of a pipeline."""
    return jnp.tanh(x @ w)


def last_layer(w: Array, x: Array) -> Array:
    """The last stage and its loss."""
    return jnp.mean(jnp.square(jnp.tanh(x @ w)))


def _vector(number: int, size: int) -> Any:
    return jnp.linspace(0.5, 1.5, size) + 0.1 * number


# --------------------------------------------------------------------------- programs


def chain(workers: Sequence[str], *, length: int = 6, size: int = 3) -> Case:
    """`length` calls one after another, around the workers."""
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
    """One value used on two workers; both results are used on a third."""
    left, right = workers[1 % len(workers)], workers[2 % len(workers)]
    join = workers[3 % len(workers)]

    def body(ctx: Any, params: Any) -> Any:
        top = ctx.call(workers[0], scale, params["t"], params["t"])
        one = ctx.call(left, scale, params["l"], top)
        other = ctx.call(right, scale, params["r"], top)
        return ctx.call(join, total, ctx.call(join, product, one, other))

    params = {"t": _vector(0, size), "l": _vector(1, size), "r": _vector(2, size)}
    return Case(body, params, {"t": workers[0], "l": left, "r": right})


def fan_out(workers: Sequence[str], *, calls: int = 24, size: int = 3) -> Case:
    """`calls` parallel calls on one leaf, around all workers but the first."""
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
    """Add here what came, have the rest of the route do the same, bring it back."""
    z = ctx.call(ctx.here, add, x, y)
    if route:
        z = ctx.call(route[0], pass_on, route[1:], ctx.move(route[0], z), y)
    return ctx.move(ctx.here, z)


def three_hops(workers: Sequence[str], *, size: int = 3) -> Case:
    """A calls b, b calls c, c calls d; each adds, and brings the reply back."""

    def body(ctx: Any, params: Any) -> Any:
        x, y = params["x"], params["y"]
        first, *rest = workers[1:]
        return ctx.call(workers[0], total, ctx.call(first, pass_on, tuple(rest), x, y))

    params = {"x": _vector(0, size), "y": _vector(1, size)}
    return Case(body, params, dict.fromkeys(params, workers[0]))


@program
def double_at(ctx: Any, where: str, x: Any) -> Any:
    """Branch on a fetched value, then have another worker double."""
    if float(jnp.sum(x.fetch())) > 0:
        return ctx.call(where, add, x, x)
    return ctx.call(where, product, x, x)


@program
def ask_back(ctx: Any, caller: str, w: Any, x: Any) -> Any:
    """Compute here, then call a program on whoever called."""
    y = ctx.call(ctx.here, scale, w, x)
    return ctx.call(caller, double_at, ctx.here, y)


def back_to_the_caller(workers: Sequence[str], *, size: int = 3) -> Case:
    """A program on a worker that calls a program on its caller, which branches."""
    home, other = workers[0], workers[1 % len(workers)]

    def body(ctx: Any, params: Any) -> Any:
        y = ctx.call(other, ask_back, home, params["w"], params["x"])
        return ctx.call(home, total, ctx.call(home, product, y, params["x"]))

    params = {"w": _vector(0, size), "x": _vector(1, size)}
    return Case(body, params, {"w": other, "x": home})


def several_roots(workers: Sequence[str], *, size: int = 3) -> Case:
    """One loss on each worker, all of one leaf; the pass starts from all of them."""

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
    """What one worker sends another is used there, and the reply is dropped."""
    home, other = workers[0], workers[1 % len(workers)]

    def body(ctx: Any, params: Any) -> Any:
        value = ctx.call(home, scale, params["w"], params["x"])
        ctx.call(other, product, value, params["y"])  # Nobody uses what it returns.
        return ctx.call(home, total, value)

    params = {"w": _vector(0, size), "x": _vector(1, size), "y": _vector(2, size)}
    return Case(body, params, {"w": home, "x": home, "y": other}, mode=mode)


def pipeline(
    workers: Sequence[str], *, micro_batches: int = 8, width: int = 4, rows: int = 2
) -> Case:
    """One stage a worker, the loss in the last, and some micro-batches in flight."""
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
    """The pipeline for shapes alone: no array is made."""
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
