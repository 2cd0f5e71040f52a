"""`value_and_grad` of a program over a cluster, like `jax.value_and_grad`."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import jax.numpy as jnp

from jdag.api.cluster import Cluster
from jdag.compute.duals import primal_of
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
from jdag.context.context import Context
from jdag.context.refs import Ref, read_refs
from jdag.context.roots import checked_roots
from jdag.errors import JdagError, RootError, no_arrays, repr_of


def value_and_grad(
    program: Callable[..., Any],
    cluster: Cluster,
    *,
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """Return a function that computes a program's value and gradients over a cluster.

    Each call is one context with one backward pass.

    Args:
        program: takes a context first, then arguments; returns a ref to its loss, an
            inexact value of size 1, or with `has_aux` (loss, pytree of refs and data).
        cluster: the cluster to use.
        argnums: the arguments after the context to differentiate by: pytrees of leaves,
            or of inexact arrays, which are put on this worker during the call. Statics
            in them (functions, as in modules; strings, bools), and Python numbers
            inside a pytree, are passed unchanged.
        has_aux: whether the program returns (loss, aux).
        allow_int: allow arrays without gradients in these arguments: integers, bools,
            PRNG keys, such as the indices of sparse arrays.

    Returns:
        A function of the arguments after the context that returns (value, gradients),
        or ((value, aux), gradients), all arrays on this worker. Gradients have the
        structure of the arguments: zeros for untracked leaves and for leaves on which
        the loss does not depend, as `jax.grad` and `jax.lax.stop_gradient` do; None for
        statics and numbers; and with `allow_int` zeros of dtype float0 for arrays
        without gradients, as in JAX.

    Raises:
        RootError: the program returns no loss that can be differentiated.
        JdagError: an argument to differentiate by is neither a leaf nor inexact. Also
            the errors of `Context.call` and `Context.backward`.
    """
    check_program("jdag.value_and_grad", program, cluster)

    def run(*args: Any) -> Any:
        numbers = argument_numbers(argnums, len(args))
        with ExitStack() as stack:
            bound, _ = leaves_of(cluster, args, numbers, allow_int, stack)
            ctx = stack.enter_context(cluster.context())
            loss, aux, gradients = run_pass(ctx, program, args, bound, has_aux)
            params = [bound[number] for number in numbers]
            (value, aux), trees = fetched((loss, aux), gradients, params)
        value = (value, aux) if has_aux else value
        return value, trees[0] if isinstance(argnums, int) else trees

    return run


def check_program(what: str, program: object, cluster: object) -> None:
    if not callable(program):
        raise JdagError(f"{what} takes a function of a context, not {program!r}")
    if not isinstance(cluster, Cluster):
        raise JdagError(f"{what} takes a cluster as second argument, not {cluster!r}")


def leaves_of(
    cluster: Cluster,
    args: Sequence[Any],
    numbers: Sequence[int],
    allow_int: bool,
    stack: ExitStack,
) -> tuple[dict[int, Any], list[Ref]]:
    """Put the arrays in some arguments on this worker, as leaves.

    Returns these arguments by number, with leaves in place of arrays, and a list of the
    new leaves. When `stack` is left, all leaves in the list are dropped.
    """
    put: list[Ref] = []

    def drop() -> None:
        if put and not cluster.state.closed:
            cluster.drop(put)

    stack.callback(drop)
    bound: dict[int, Any] = {}
    for number in numbers:
        what = f"argument {number}"
        leaves, treedef = flatten(args[number], what=what)
        indices = indices_of_arrays(what, args[number], leaves)
        if not indices:
            raise no_arrays(what)
        for index in indices:
            try:
                if not is_ref(leaves[index]):
                    leaves[index] = cluster.put(cluster.here, leaves[index])
                    put.append(leaves[index])
                check_leaf(leaves[index], allow_int)
            except JdagError as error:
                name = paths(args[number])[index]
                raise type(error)(f"{what}{name}: {error}") from None
        bound[number] = unflatten(treedef, leaves)
    return bound, put


def check_leaf(ref: Ref, allow_int: bool) -> None:
    if ref.leaf is None:
        raise JdagError(
            f"{ref!r} is not a leaf; only leaves and arrays have gradients here"
        )
    if not (ref.aval.inexact or allow_int):
        raise JdagError(
            f"{ref.aval} has no gradient; differentiate by float and complex arrays, "
            "or set allow_int=True"
        )


def run_pass(
    ctx: Context,
    program: Callable[..., Any],
    args: Sequence[Any],
    bound: Mapping[int, Any],
    has_aux: bool,
) -> tuple[Any, Any, Mapping[Ref, Ref]]:
    """Run a program and, if its loss is tracked, a pass; return loss, aux, gradients.

    `bound` maps numbers of arguments to the pytrees of leaves that replace them.
    """
    result = program(ctx, *(dict(enumerate(args)) | dict(bound)).values())
    if has_aux and not (isinstance(result, tuple | list) and len(result) == 2):
        raise RootError(
            "with has_aux=True a program must return (loss, aux), but this one "
            f"{repr_of(result)}"
        )
    loss, aux = result if has_aux else (result, ())
    checked_roots((loss,), None, of_loss=True)
    if not loss.tracked:
        return loss, aux, {}
    ctx.backward(loss)
    return loss, aux, ctx.gradients()


def fetched(
    returned: Any,
    gradients: Mapping[Ref, Ref],
    trees: Sequence[Any],
    part: Callable[[Any], Any] = lambda gradient: gradient,
) -> tuple[Any, tuple[Any, ...]]:
    """Fetch a program's result and the gradients of pytrees of leaves, in one request.

    `part` is applied to each fetched gradient (None if there is none) and returns the
    value to return. If `part` returns None, zeros are returned for that leaf.
    """
    leaves, treedef = flatten(returned, what="the result of the program")
    forms = [flatten_refs(tree, is_ref) for tree in trees]
    by_leaf = [gradients.get(ref) for refs, _ in forms for ref in refs]
    values = iter(read_refs([*leaves, *by_leaf]))
    data = unflatten(treedef, [primal_of(next(values)) for _ in leaves])
    return data, tuple(
        unflatten(
            form.bare, [gradient_or_zeros(part(next(values)), ref) for ref in refs]
        )
        for refs, form in forms
    )


def gradient_or_zeros(gradient: Any, leaf: Any) -> Any:
    if gradient is not None:
        return gradient
    abstract = leaf.holder.state.abstract
    if not leaf.aval.inexact:
        return no_gradient(leaf.aval, abstract)
    return leaf.aval.struct() if abstract else jnp.zeros(leaf.shape, leaf.dtype)
