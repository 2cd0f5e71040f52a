"""The names that random programs use in `same_bits`; workers import them too."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

import jdag
from jdag.errors import GraphError, UnusedSendError
from tests.tools.random_programs import Pass, Plan

HEAD = """\
from jdag import fetch, program, static, stop_gradient
from tests.tools.random_functions import Broken, both, fused, gather, mix, product
from tests.tools.random_functions import ranks, scale, split, total
from tests.tools.same_bits_plan import array, backward, decide, hook, note, values

"""
array = jnp.array


def values(tree: Any) -> tuple[Any, Any]:
    """Return the outputs of the function `both`."""
    return tree["ranks"], tree["value"]


def decide(above: bool) -> bool:
    """Return which branch is taken."""
    return above


def note(fetched: Any) -> None:
    """Ignore values: they are recorded where they are fetched."""


def look(cotangent: Any) -> None:
    """Leave a cotangent as it is."""


def weigh(cotangent: Any) -> Any:
    """Scale a cotangent."""
    return 0.7 * cotangent


def clip(cotangent: Any) -> Any:
    """Clip a cotangent."""
    return jnp.clip(cotangent, -0.5, 0.5)


def bend(cotangent: Any) -> Any:
    """Change a cotangent in a way that is not linear."""
    return jnp.sin(cotangent)


HOOKS: dict[str, Callable[[Any], Any]] = {
    hook.__name__: hook for hook in (look, weigh, clip, bend)
}


def hook(ctx: Any, ref: Any, number: int, how: str) -> None:
    """Attach a hook to a value."""
    if how == "gradient":
        ctx.on_gradient(ref, look)
    else:
        ctx.on_cotangent(ref, HOOKS[how])


_backward: list[Callable[..., None]] = []


def backward(ctx: Any, number: int, roots: list[Any]) -> None:
    """Run a backward pass of the program that is being played."""
    _backward[-1](ctx, number, roots)


def write(folder: Path, number: int, text: str) -> None:
    """Write the source of a program as a module."""
    (folder / f"plan{number}.py").write_text(HEAD + text + "\n")


def play(
    cluster: Any,
    plan: Plan,
    passes: Sequence[Pass],
    main: Callable[..., None],
    mode: Any,
) -> list[str]:
    """Run a program in one context; return how each pass ended."""
    leaves = [cluster.put(leaf.worker, leaf.array) for leaf in plan.leaves]
    numbers = {leaf: number for number, leaf in enumerate(leaves)}
    ended = []

    def run(ctx: Any, number: int, roots: list[Any]) -> None:
        step = passes[number]
        given = [None if one is None else jnp.array(one) for one in step.cotangents]
        try:
            ctx.backward(*roots, cotangents=given, retain_graph=step.retain, mode=mode)
            ended.append("finished")
        except (GraphError, UnusedSendError) as error:
            ended.append(type(error).__name__)
        jdag.fetch({numbers[leaf]: ref for leaf, ref in ctx.gradients().items()})

    _backward.append(run)
    try:
        with cluster.context() as ctx:
            main(ctx, *leaves)
    finally:
        _backward.pop()
        cluster.drop(leaves)
    return ended
