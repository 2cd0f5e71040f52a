"""`value_and_grad` of a program over a cluster, in the manner of JAX's."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jdag.api.cluster import Cluster
from jdag.api.context import Context
from jdag.api.refs import Ref, fetch
from jdag.compute.pytrees import (
    argument_numbers,
    flatten,
    flatten_refs,
    indices_of_arrays,
    no_gradient,
    paths,
    unflatten,
)
from jdag.compute.refs import is_ref
from jdag.errors import JdagError, RootError, no_arrays


def value_and_grad(
    program: Callable[..., Any],
    cluster: Cluster,
    *,
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """Return a function that gives a program's value and gradients over a cluster.

    Each call is one context with one backward pass.

    Args:
        program: takes a context first, then arguments; returns a ref to its loss, an
            inexact value of size 1, or with `has_aux` (loss, pytree of refs and data).
        cluster: where it runs.
        argnums: which arguments after the context to differentiate by: pytrees of
            leaves, or of inexact arrays, which are put at home meanwhile. Statics in
            them (functions, as in modules; strings, bools) stay as they are, and so do
            Python numbers inside a pytree.
        has_aux: whether the program returns more than its loss.
        allow_int: whether there may be arrays without gradients among them: integers,
            bools, PRNG keys; so for sparse arrays, which have indices.

    Returns:
        A function of the arguments after the context that gives (value, gradients), or
        ((value, aux), gradients): arrays here, gradients in the structure of the
        arguments; where the loss does not depend on a leaf, they are zeros. They are
        None for such statics and numbers, and with `allow_int` zeros of dtype float0,
        as JAX has it, for what has no gradient.

    Raises:
        RootError: the program returns no loss that can be differentiated.
        JdagError: an argument to differentiate by is neither a leaf nor inexact; and as
            `Context.call` and `Context.backward` do.
    """
    check_program("jdag.value_and_grad", program, cluster)

    def run(*args: Any) -> Any:
        numbers = argument_numbers(argnums, len(args))
        bound = list(args)
        put: list[Ref] = []
        try:
            for number in numbers:
                bound[number] = leaves_of(cluster, args, number, put, allow_int)
            chosen = [bound[number] for number in numbers]
            with cluster.context() as ctx:
                result = program(ctx, *bound)
                loss, aux = result if has_aux else (result, ())
                found = gradients_of(ctx, loss)
                gradients = [
                    [found.get(ref) for ref in flatten_refs(refs, is_ref)[0]]
                    for refs in chosen
                ]
                value, aux, gradients = fetch((loss, aux, gradients))
        finally:
            if put and not cluster.state.closed:
                cluster.drop(put)
        trees = tuple(map(filled, gradients, chosen))
        value = (value, aux) if has_aux else value
        return value, trees[0] if isinstance(argnums, int) else trees

    return run


def check_program(what: str, program: object, cluster: object) -> None:
    """Raise JdagError unless this is a function and a cluster on which to run it."""
    if not callable(program):
        raise JdagError(f"{what} takes a function of a context, not {program!r}")
    if not isinstance(cluster, Cluster):
        raise JdagError(f"{what} takes a cluster second, not {cluster!r}")


def leaves_of(
    cluster: Cluster,
    args: Sequence[Any],
    number: int,
    put: list[Ref],
    allow_int: bool,
) -> Any:
    """Return an argument with a leaf for each array; note in `put` those made here.

    Raises:
        JdagError: something in it cannot be differentiated by; names it.
    """
    leaves, treedef = flatten(args[number], what=f"argument {number}")
    bound = list(leaves)
    what = f"argument {number}"
    for place in indices_of_arrays(what, args[number], leaves):
        try:
            ref = leaf = leaves[place]
            if not is_ref(leaf):
                ref = cluster.put(cluster.here, leaf)
                put.append(ref)
            _check_leaf(ref, allow_int)
        except JdagError as error:
            name = paths(args[number])[place]
            raise type(error)(f"{what}{name}: {error}") from None
        bound[place] = ref
    if not any(map(is_ref, bound)):
        raise no_arrays(what)
    return unflatten(treedef, bound)


def _check_leaf(ref: Ref, allow_int: bool) -> None:
    if ref.leaf is None:
        raise JdagError(
            f"{ref!r} is no leaf; gradients are those of leaves and of arrays"
        )
    if not (ref.aval.inexact or allow_int):
        raise JdagError(
            f"{ref.aval} has no gradient; differentiate by float and complex arrays, "
            "or allow others among them by allow_int=True"
        )


def gradients_of(ctx: Context, loss: Any) -> Mapping[Ref, Ref]:
    """Run a pass from a loss; return the gradients of the leaves that it reaches.

    Raises:
        RootError: it is no loss that can be differentiated; one that depends on no leaf
            can be.
    """
    independent = is_ref(loss) and not loss.tracked and loss.aval.inexact
    if independent and loss.leaf is None and loss.descends is None:
        if loss.size != 1:
            raise RootError(f"the loss is {loss.aval}; its size has to be 1")
        return {}
    ctx.backward(loss)
    return ctx.gradients()


def filled(gradients: Sequence[Any], refs: Any) -> Any:
    """Return gradients in the structure of `refs`, zeros where there is None."""
    leaves, form = flatten_refs(refs, is_ref)
    arrays = []
    for gradient, leaf in zip(gradients, leaves, strict=True):
        abstract = leaf.holder.state.abstract
        if gradient is not None:
            arrays.append(gradient)
        elif not leaf.aval.inexact:
            arrays.append(no_gradient(leaf.aval, abstract))
        elif abstract:
            arrays.append(leaf.aval.struct())
        else:
            arrays.append(jnp.zeros(leaf.shape, leaf.dtype))
    return unflatten(form.bare, arrays)
