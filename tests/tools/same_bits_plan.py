"""The names that random programs use in `same_bits`; workers import them too."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

import jdag
from jdag.errors import GraphError, UnusedSendError
from tests.tools.random_functions import HOOKS
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
    return above


def note(fetched: Any) -> None:
    """Ignore values: they are recorded where they are fetched."""


def hook(ctx: Any, ref: Any, number: int, how: str) -> None:
    attach = ctx.on_gradient if how == "gradient" else ctx.on_cotangent
    attach(ref, HOOKS[how])


_backward: list[Callable[..., None]] = []


def backward(ctx: Any, number: int, roots: list[Any]) -> None:
    _backward[-1](ctx, number, roots)


def write(folder: Path, number: int, text: str) -> None:
    (folder / f"plan{number}.py").write_text(HEAD + text + "\n")


def play(
    cluster: Any,
    plan: Plan,
    passes: Sequence[Pass],
    main: Callable[..., None],
    mode: Any,
) -> list[str]:
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
