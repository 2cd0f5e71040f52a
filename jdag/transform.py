"""`value_and_grad` of a program over a cluster, in the manner of JAX's."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from jdag.cluster import Cluster
from jdag.compute.pytrees import flatten, paths, unflatten
from jdag.context import Context
from jdag.errors import JdagError, RootError
from jdag.ref import Ref, fetch, is_ref


def value_and_grad(
    program: Callable[..., Any],
    cluster: Cluster,
    *,
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """Return a function that gives a program's value and gradients over a cluster.

    Each call is one context with one backward pass.

    Args:
        program: takes a context first, then arguments; returns a ref to its loss, an
            inexact value of size 1, or with `has_aux` (loss, pytree of refs and data).
        cluster: where it runs.
        argnums: which arguments after the context to differentiate by: pytrees of
            leaves, or of inexact arrays, which are put at home meanwhile.
        has_aux: whether the program returns more than its loss.

    Returns:
        A function of the arguments after the context that gives (value, gradients), or
        ((value, aux), gradients): arrays here, gradients in the structure of the
        arguments; where the loss does not depend on a leaf, they are zeros.

    Raises:
        RootError: the program returns no loss that can be differentiated.
        JdagError: an argument to differentiate by is neither a leaf nor inexact; and as
            `Context.call` and `Context.backward` do.
    """
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    def run(*args: Any) -> Any:
        bound = list(args)
        put: list[Ref] = []
        try:
            for number in numbers:
                bound[number] = _leaves(cluster, args, number, put)
            chosen = [bound[number] for number in numbers]
            with cluster.context() as ctx:
                result = program(ctx, *bound)
                loss, aux = result if has_aux else (result, ())
                gradients = _gradients(ctx, loss, chosen)
                value, aux, gradients = fetch((loss, aux, gradients))
        finally:
            if put and not cluster.home.closed:
                cluster.drop(put)
        filled = [
            _filled(gradient, refs)
            for gradient, refs in zip(gradients, chosen, strict=True)
        ]
        found = filled[0] if isinstance(argnums, int) else tuple(filled)
        return ((value, aux) if has_aux else value), found

    return run


def _leaves(cluster: Cluster, args: Sequence[Any], number: int, put: list[Ref]) -> Any:
    """Return an argument with a leaf for each array; note those in `put`."""
    tree = args[number]
    leaves, treedef = flatten(tree)
    names = paths(tree)
    bound = []
    for leaf, name in zip(leaves, names, strict=True):
        ref = leaf
        if not is_ref(leaf):
            ref = cluster.put(cluster.here, leaf)
            put.append(ref)
        if ref.leaf is None:
            raise JdagError(
                f"argument {number}{name}, {ref!r}, is no leaf; value_and_grad "
                "differentiates by leaves and by arrays"
            )
        if not ref.aval.inexact:
            raise JdagError(
                f"argument {number}{name} is {ref.aval}, which has no gradient; "
                "differentiate by float and complex arrays"
            )
        bound.append(ref)
    return unflatten(treedef, bound)


def _gradients(ctx: Context, loss: Any, chosen: Sequence[Any]) -> list[Any]:
    """Return what of the gradients of each argument there is, None for the rest."""
    independent = is_ref(loss) and not loss.tracked and loss.aval.inexact
    if independent and loss.leaf is None and loss.descends is None:
        if loss.size != 1:
            raise RootError(f"the loss is {loss.aval}; its size has to be 1")
        found: Any = {}
    else:
        ctx.backward(loss)
        found = ctx.gradients()
    return [[found.get(leaf) for leaf in flatten(refs)[0]] for refs in chosen]


def _filled(gradients: Sequence[Any], refs: Any) -> Any:
    """Return gradients in the structure of `refs`, zeros where there is none."""
    leaves, treedef = flatten(refs)
    filled = []
    for gradient, leaf in zip(gradients, leaves, strict=True):
        if gradient is not None:
            filled.append(gradient)
        elif leaf.holder.home.abstract:
            filled.append(leaf.aval.struct())
        else:
            filled.append(jnp.zeros(leaf.shape, leaf.dtype))
    return unflatten(treedef, filled)
