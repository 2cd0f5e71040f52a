"""The oracle's version of `jdag.collectives.replicas`: plain JAX without routes."""

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
    workers = checked_workers("ctx.replicate", workers, how, check)
    refs, form = refs_of("ctx.replicate", tree)
    return tuple([unflatten(form, ctx.move(worker, refs)) for worker in workers])


def all_reduce(
    ctx: Any, trees: Mapping[str, Any], how: How, check: Check
) -> dict[str, Any]:
    checked_trees("ctx.all_reduce", trees, how, check)
    lists, forms = equals_of("ctx.all_reduce", trees)
    both = zip(trees, forms, strict=True)
    return {worker: _total(ctx, worker, lists, form) for worker, form in both}


def all_gather(
    ctx: Any, trees: Mapping[str, Any], how: How, check: Check
) -> dict[str, tuple[Any, ...]]:
    workers = checked_trees("ctx.all_gather", trees, how, check)
    for tree in trees.values():
        refs_of("ctx.all_gather", tree)
    return {w: tuple([ctx.move(w, tree) for tree in trees.values()]) for w in workers}


def reduce_scatter(
    ctx: Any, trees: Mapping[str, Any], how: How, check: Check
) -> dict[str, Any]:
    shares = shares_of("ctx.reduce_scatter", trees, how, check)
    sums = {}
    for worker, equals in zip(trees, shares, strict=True):
        lists, forms = equals_of("ctx.reduce_scatter", equals)
        sums[worker] = _total(ctx, worker, lists, forms[0])
    return sums


def _total(ctx: Any, worker: str, lists: Sequence[Any], form: Any) -> Any:
    columns = zip(*lists, strict=True)
    return unflatten(form, [ctx.call(worker, left_sum, *column) for column in columns])


all_to_all = replicas.all_to_all  # An all-to-all has no routes.


def left_sum(*arrays: jax.Array) -> Any:
    return sum(arrays[1:], arrays[0])
