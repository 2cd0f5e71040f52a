"""What the suite calls on workers: plain functions and programs, known by their names.

A process of its own finds them in this module. `SEEN` and `KEPT` are what a function
leaves behind in the process of its worker.
"""

import functools
import os
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdag
from jdag import JdagError, program, stop_gradient, unjitted

ONES = jnp.ones((3, 3))

# ------------------------------------------------------------------- plain functions


def total(*arrays):
    return sum(jnp.sum(array) for array in arrays)


def three_times(a):
    return 3.0 * a


def sum_of_product(a, b):
    return jnp.sum(a * b)


def sum_of_sum(a, b):
    return jnp.sum(a + b)


def sum_of_quotient(a, b):
    return jnp.sum(a / b)


def sum_of_cosine(a):
    return jnp.sum(jnp.cos(a))


def stacked(*arrays):
    return jnp.stack(arrays)


def times_transposed(a, b):
    return a @ b.T


def sum_of_chain(*matrices):
    return jnp.sum(functools.reduce(jnp.matmul, matrices))


def in_five(rows):
    return jnp.split(rows, 5)


def first_alone(a, b):
    return jnp.sum(a)


def two_outputs(a):
    return jnp.sin(a), jnp.cos(a)


def weighted(w, h, b):
    return jnp.sum(w @ h + b)


def wave(t, i):
    """The i-th of many calls on one leaf; i is a number, traced."""
    f = 1.7 * (i + 1)
    return jnp.sum(jnp.sin(f * t) * (1 + f / 1000))


def row_of(h, index):
    return jnp.sum(h[index] ** 3)


def square_sum(h):
    return jnp.sum(h**2)


def scaled_and_summed(h, by):
    return jnp.sum(jnp.sin(h) * by)


# ------------------------------------------------------- functions that fail, die, wait


@jax.custom_vjp
def fails_backward(a):
    """The identity; its vjp raises."""
    return a


def _raise(_):
    raise RuntimeError("no way back")


def _failing(_, cotangent):
    shape = jax.ShapeDtypeStruct(cotangent.shape, cotangent.dtype)
    return (jax.pure_callback(_raise, shape, cotangent),)


fails_backward.defvjp(lambda a: (a, None), _failing)


def total_that_fails_backward(a):
    return jnp.sum(fails_backward(a))


def fails_at_once(a):
    raise ValueError("not with these")


TROUBLED = "JDAG_TESTS_TROUBLED"  # Set where processes die and linger.


def _killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _lingered() -> None:
    threading.Event().wait(10)


def dies_forward(a):
    """The identity, during which its worker dies, where a driver has it so."""
    if TROUBLED in os.environ:
        jax.debug.callback(_killed)
    return 1.0 * a


def _called_backward(callback):
    """The identity, in whose vjp a callback is called, where there is trouble."""

    @jax.custom_vjp
    def identity(a):
        return a

    def backward(_, cotangent):
        if TROUBLED in os.environ:
            jax.debug.callback(callback)
        return (cotangent,)

    identity.defvjp(lambda a: (a, None), backward)
    return identity


_KILLED_BACKWARD = _called_backward(_killed)
_LINGERED_BACKWARD = _called_backward(_lingered)


def dies_backward(a):
    """The identity, during whose vjp its worker dies, where a driver has it so."""
    return 1.0 * _KILLED_BACKWARD(a)


def lingers(a):
    """The identity, whose vjp takes ten seconds, where a driver has it so."""
    return 1.0 * _LINGERED_BACKWARD(a)


# ------------------------------------------------------------------------------ hooks

SEEN: list[Any] = []


def doubled(cotangent):
    return 2.0 * cotangent


def plus_one(cotangent):
    return cotangent + 1.0


def noted(cotangent):
    SEEN.append(np.asarray(cotangent))


def noted_again(cotangent):
    SEEN.append(-np.asarray(cotangent))


def of_another_shape(cotangent):
    return jnp.sum(cotangent)


def refuses(cotangent):
    raise ValueError("the hook will not have it")


class Mute(JdagError):
    """An exception that cannot say what it is, though jdag's own can."""

    def __str__(self) -> str:
        raise ValueError("no text")


@unjitted(shapes=lambda a: a)
def fails_without_text(a):
    raise Mute


def fails_without_text_when_traced(a):
    raise Mute


def refuses_without_text(cotangent):
    raise Mute


# --------------------------------------------------------------------------- programs

NEXT = {"b": "c", "c": "d"}


@program
def add_here(ctx, a, b):
    """Add on the worker where this runs, whatever was moved there before."""
    return ctx.call(ctx.here, jnp.add, a, b)


@program
def add_and_forward(ctx, a, b):
    """Add here, then forward to the next worker, and bring its reply back here."""
    made = ctx.call(ctx.here, jnp.add, a, b)
    there = NEXT.get(ctx.here)
    if there is None:
        return made
    moved = ctx.move(there, (made, b))
    return ctx.move(ctx.here, ctx.call(there, add_and_forward, *moved))


@program
def multiply_if_tracked(ctx, a, b):
    return ctx.call(ctx.here, jnp.multiply if b.tracked else jnp.subtract, a, b)


@program
def tracked_of(ctx, *refs):
    return [[ref.tracked, ref.worker] for ref in refs]


@program
def nested_drop(ctx, h):
    """Have the next worker compute with h, and drop what it replies."""
    ctx.call(NEXT[ctx.here], square_sum, h)
    return ctx.call(ctx.here, three_times, h)


@program
def nested_sine(ctx, h):
    return ctx.call(ctx.here, three_times, ctx.call(NEXT[ctx.here], jnp.sin, h))


@program
def forwarding_failure(ctx, h):
    return ctx.call(NEXT[ctx.here], total_that_fails_backward, h)


KEPT: dict[str, Any] = {}


@program
def program_without_text(ctx):
    raise Mute


@program
def there(ctx, depth):
    return ctx.call("c", back_again, depth + 1)


@program
def back_again(ctx, depth):
    return ctx.call("b", there, depth + 1)


@program
def keep(ctx, given):
    made = ctx.call(ctx.here, three_times, given)
    KEPT[ctx.here] = (ctx, made)
    return made


@program
def keep_at_second_hop(ctx, given):
    made = ctx.call(ctx.here, three_times, given)
    KEPT[ctx.here] = (ctx, made)
    return ctx.call(NEXT[ctx.here], keep, made)


def said(attempt, *args):
    """What jdag says when it refuses; "" where it does not."""
    try:
        attempt(*args)
    except JdagError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@program
def use_what_was_kept(ctx):
    kept, ref = KEPT.pop(ctx.here)
    other = "a" if ctx.here != "a" else "b"
    return {
        "call": said(kept.call, ctx.here, three_times, 1.0),
        "move": said(kept.move, other, 1.0),
        "call with its ref": said(kept.call, other, three_times, ref),
        "its ref in another context": said(ctx.call, ctx.here, three_times, ref),
        "fetch": said(ref.fetch),
        "backward": said(kept.backward, ref),
        "gradients": said(kept.gradients),
        "graph": said(kept.graph),
    }


@program
def start_the_others(ctx, w):
    tasks = [ctx.start(worker, nested_sine, w) for worker in ("b", "c")]
    first, second = (task.result() for task in reversed(tasks))
    return ctx.call(ctx.here, sum_of_sum, first, second)


@program
def raise_when_started(ctx, text):
    raise ValueError(text)


@program
def meet(ctx, folder):
    """Return once two programs are in this folder at the same time."""
    (Path(folder) / ctx.here).touch()
    while len(list(Path(folder).iterdir())) < 2:
        threading.Event().wait(0.001)
    return ctx.here


# -------------------------------------------------- programs on which the peer hangs
# Each takes a leaf on a and one on b, and returns its losses.


def dropped_reply(ctx, w, v):
    ctx.call("b", sum_of_product, w, v)
    return [ctx.call("c", scaled_and_summed, w, v)]


def stopped_gradient(ctx, w, v):
    target = stop_gradient(ctx.call("b", jnp.multiply, w, v))
    return [ctx.call("c", scaled_and_summed, w, target)]


def integer_reply(ctx, w, v):
    index = ctx.call("b", jnp.argmax, w)
    return [ctx.call("c", scaled_and_summed, w, v), ctx.call("a", row_of, w, index)]


def only_logged(ctx, w, v):
    h = ctx.call("b", jnp.multiply, w, v)
    ctx.move("d", h)
    return [ctx.call("c", square_sum, h)]


def nested_dropped_reply(ctx, w, v):
    h = ctx.call("b", nested_drop, w)
    return [ctx.call("c", scaled_and_summed, h, v)]


def two_losses(ctx, w, v):
    return [ctx.call("b", sum_of_product, w, v), ctx.call("c", scaled_and_summed, w, v)]


# ------------------------------------------- what cluster.run runs: several callers


def train_once(leaf, by, cluster):
    with cluster.context() as ctx:
        h = ctx.call(leaf.worker, scaled_and_summed, leaf, by * ONES)
        loss = ctx.call(cluster.here, three_times, h)
        ctx.backward(loss)
        return ctx.id, ctx.gradient(leaf).fetch(), len(ctx.gradients())


def open_twenty(t1, t2, cluster):
    there = t1.worker
    with ExitStack() as stack:
        contexts = [stack.enter_context(cluster.context()) for _ in range(20)]
        losses = []
        for ctx in contexts:
            t3 = ctx.call(there, jnp.add, t1, t2)
            t4 = ctx.call(there, jnp.multiply, t2, t3)
            t5 = ctx.call(there, jnp.matmul, t3, t4)
            losses.append(ctx.call(there, sum_of_sum, t4, t5))
        for ctx, loss in zip(contexts, losses, strict=True):
            ctx.backward(loss)
        return [
            (ctx.id, loss.fetch(), *jdag.fetch(ctx.gradient([t1, t2])))
            for ctx, loss in zip(contexts, losses, strict=True)
        ]


def dies_with_a_context_open(leaf, cluster):
    with cluster.context() as ctx:
        ctx.call("d", three_times, 2.0).fetch()
        ctx.backward(ctx.call(leaf.worker, total, leaf), retain_graph=True)
        ctx.call(cluster.here, dies_forward, leaf).fetch()


# -------------------------------------------- what an optimizer applies on each owner


def _refused_below_zero(gradient):
    if np.any(np.asarray(gradient) < 0):
        raise ValueError("a gradient below zero")
    return np.asarray(-0.5 * gradient)


def fragile_update(updates, state, params=None):
    """A step of SGD 0.5 that fails, when it runs, where a gradient is below zero."""

    def step(leaf):
        shape = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        return jax.pure_callback(_refused_below_zero, shape, leaf)

    return jax.tree.map(step, updates), state


def no_state(params):
    return ()


FRAGILE = optax.GradientTransformation(no_state, fragile_update)


def difference(a, b):
    return jnp.sum(a) - jnp.sum(b)


def mean_square(h):
    return jnp.mean(h**2)
