"""Collectives over several workers, as calls and moves of a context.

All of them are differentiable. The vjp of `all_gather` is a `reduce_scatter`, the vjp
of `reduce_scatter` is an `all_gather`, and the vjp of `all_to_all` is an `all_to_all`.
Values take the routes of `jdag.collectives.routes`, which fix the order of each sum.
"""

# ruff: noqa: D417 - the first argument is the `self` of a method of `Context`.

from collections.abc import Mapping, Sequence
from typing import Any

from jdag.collectives.routes import How


def replicate(ctx: Any, workers: Sequence[str], refs: Any, how: How = "owner") -> Any:
    """Copy arrays to several workers. A backward pass sums the copies' cotangents.

    Args:
        workers: workers, or devices of workers.
        refs: a pytree of refs, tracked or not.
        how: "owner", "tree" or "ring"; see `jdag.collectives.routes`.

    Returns:
        A tuple with one pytree of refs, of the same structure, for each worker.

    Raises:
        JdagError: `workers` is empty or contains an unknown worker or the same worker
            twice; `refs` contains no refs; or `how` is unknown.
    """
    return _call(ctx, "replicate", workers, refs, how)


def all_reduce(ctx: Any, refs_by_worker: Mapping[str, Any], how: How = "owner") -> Any:
    """Sum pytrees of equal structure, such as gradients. Each worker gets the sum.

    Args:
        refs_by_worker: a mapping from each worker, or device of one, to its pytree of
            refs.
        how: "owner", "tree" or "ring"; see `jdag.collectives.routes`.

    Returns:
        A mapping from each worker to the sum, which is tracked and has the same bits
        everywhere.

    Raises:
        JdagError: two pytrees differ in structure, shapes or dtypes. Also the errors of
            `replicate`.
    """
    return _call(ctx, "all_reduce", refs_by_worker, how)


def all_gather(ctx: Any, refs_by_worker: Mapping[str, Any], how: How = "owner") -> Any:
    """Copy each worker's pytree to all workers. A backward pass sums their cotangents.

    Args:
        refs_by_worker: a mapping from each worker, or device of one, to its pytree of
            refs.
        how: "owner": each worker sends its pytree to every other worker; "tree": along
            a binary tree from its worker; "ring": around the ring, in n - 1 steps for n
            workers.

    Returns:
        A mapping from each worker to a tuple of all pytrees, in order.

    Raises:
        JdagError: the errors of `replicate`.
    """
    return _call(ctx, "all_gather", refs_by_worker, how)


def reduce_scatter(
    ctx: Any, refs_by_worker: Mapping[str, Any], how: How = "owner"
) -> Any:
    """Sum shares: each worker gets the sum of all workers' shares for it.

    Args:
        refs_by_worker: a mapping from each worker, or device of one, to a list of
            pytrees of refs, one for each worker, in order. Shares for the same worker
            are equal in structure, shapes and dtypes.
        how: "owner" sums on the receiver, its own share first, then the others in
            order; "tree" sums along a binary tree to the receiver; "ring" sums around
            the ring from the worker after the receiver, in n - 1 steps of one share for
            n workers.

    Returns:
        A mapping from each worker to the sum of its shares.

    Raises:
        JdagError: the number of shares is wrong. Also the errors of `all_reduce`.
    """
    return _call(ctx, "reduce_scatter", refs_by_worker, how)


def all_to_all(ctx: Any, refs_by_worker: Mapping[str, Any]) -> Any:
    """Send each worker the shares that all workers have for it.

    Args:
        refs_by_worker: as in `reduce_scatter`; shares may differ in structure.

    Returns:
        A mapping from each worker to a tuple of its shares, in the order of senders.

    Raises:
        JdagError: the number of shares is wrong. Also the errors of `replicate`.
    """
    return _call(ctx, "all_to_all", refs_by_worker, "owner")


def _call(ctx: Any, kind: str, *args: Any) -> Any:
    frame = ctx._frame
    frame.check(f"ctx.{kind}")
    return getattr(frame.replicas, kind)(ctx, *args, ctx.state.place)
