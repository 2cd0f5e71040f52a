"""Oracle version of replicas over workers: plain JAX without routes."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jdag.collectives import replicas
from jdag.collectives.replicas import (
    Check,
    checked_trees,
    checked_workers,
    equals_of,
    refs_of,
    shares_of,
)
from jdag.collectives.routes import How
from jdag.compute.pytrees import unflatten


def replicate(
    ctx: Any, workers: Sequence[str], tree: Any, how: How, check: Check
) -> tuple[Any, ...]:
    """Return the pytree once per worker; `how` is only checked."""
    workers = checked_workers("ctx.replicate", workers, how, check)
    refs, form = refs_of("ctx.replicate", tree)
    return tuple([unflatten(form, ctx.move(worker, refs)) for worker in workers])


def all_reduce(
    ctx: Any, trees: Mapping[str, Any], how: How, check: Check
) -> dict[str, Any]:
    """Return the sum of all pytrees for each worker; `how` is only checked."""
    checked_trees("ctx.all_reduce", trees, how, check)
    lists, forms = equals_of("ctx.all_reduce", trees)
    both = zip(trees, forms, strict=True)
    return {worker: _total(ctx, worker, lists, form) for worker, form in both}


def all_gather(
    ctx: Any, trees: Mapping[str, Any], how: How, check: Check
) -> dict[str, tuple[Any, ...]]:
    """Return the pytrees of all workers for each of them; `how` is only checked."""
    workers = checked_trees("ctx.all_gather", trees, how, check)
    for tree in trees.values():
        refs_of("ctx.all_gather", tree)
    return {w: tuple([ctx.move(w, tree) for tree in trees.values()]) for w in workers}


def reduce_scatter(
    ctx: Any, trees: Mapping[str, Any], how: How, check: Check
) -> dict[str, Any]:
    """Return, for each worker, the sum of its shares; `how` is only checked."""
    shares = shares_of("ctx.reduce_scatter", trees, how, check)
    found = [equals_of("ctx.reduce_scatter", few) for few in shares]
    both = zip(trees, found, strict=True)
    return {worker: _total(ctx, worker, of[0], of[1][0]) for worker, of in both}


def _total(ctx: Any, worker: str, lists: Sequence[Any], form: Any) -> Any:
    columns = zip(*lists, strict=True)
    return unflatten(form, [ctx.call(worker, left_sum, *column) for column in columns])


all_to_all = replicas.all_to_all  # It has no routes.


def left_sum(*arrays: jax.Array) -> Any:
    """Return the sum of the arrays, from left to right."""
    return sum(arrays[1:], arrays[0])
