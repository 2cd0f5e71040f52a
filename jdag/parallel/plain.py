"""Oracle version of replicas over workers: plain JAX without routes."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jdag.compute.pytrees import unflatten
from jdag.parallel.replicas import Check, checked, equals_of, refs_of, workers_of
from jdag.parallel.routes import How


def replicate(
    ctx: Any, workers: Sequence[str], tree: Any, how: How, check: Check
) -> tuple[Any, ...]:
    """Return the pytree once per worker; `how` is only checked."""
    workers = checked("ctx.replicate", workers, how, check)
    refs, form = refs_of("ctx.replicate", tree)
    return tuple([unflatten(form, ctx.move(worker, refs)) for worker in workers])


def all_reduce(
    ctx: Any, trees: Mapping[str, Any], how: How, check: Check
) -> dict[str, Any]:
    """Return the sum of all pytrees for each worker; `how` is only checked."""
    checked("ctx.all_reduce", workers_of(trees), how, check)
    lists, forms = equals_of("ctx.all_reduce", trees)
    columns = list(zip(*lists, strict=True))
    found = {}
    for worker, form in zip(trees, forms, strict=True):
        refs = [ctx.call(worker, total, *column) for column in columns]
        found[worker] = unflatten(form, refs)
    return found


def total(*arrays: jax.Array) -> Any:
    """Return the sum of the arrays, from left to right."""
    return sum(arrays[1:], arrays[0])
