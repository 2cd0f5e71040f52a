"""`value_and_grad` of a program over a cluster, in the manner of JAX's."""

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
        ((value, aux), gradients), all arrays here. Gradients have the structure of the
        arguments: zeros where the loss does not depend on a leaf, and for untracked
        leaves, as `jax.grad` has them for what goes through `jax.lax.stop_gradient`;
        None for statics and numbers; and with `allow_int` zeros of dtype float0, as in
        JAX, for what has no gradient.

    Raises:
        RootError: the program returns no loss that can be differentiated.
        JdagError: an argument to differentiate by is neither a leaf nor inexact; and as
            `Context.call` and `Context.backward` do.
    """
    check_program("jdag.value_and_grad", program, cluster)

    def run(*args: Any) -> Any:
        numbers = argument_numbers(argnums, len(args))
        with ExitStack() as stack:
            bound, _ = leaves_of(cluster, args, numbers, allow_int, stack)
            ctx = stack.enter_context(cluster.context())
            loss, aux, found = run_pass(ctx, program, args, bound, has_aux)
            wanted = [bound[number] for number in numbers]
            (value, aux), trees = fetched((loss, aux), found, wanted)
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
    numbers: Sequence[int],
    allow_int: bool,
    stack: ExitStack,
) -> tuple[dict[int, Any], list[Ref]]:
    """Return arguments by number, with a leaf for each array, and the leaves made here.

    These, and what is added to them, are dropped when the stack is left.

    Raises:
        JdagError: something in an argument cannot be differentiated by; names it.
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
    """Raise JdagError unless this is a leaf that can be differentiated by."""
    if ref.leaf is None:
        raise JdagError(
            f"{ref!r} is no leaf; gradients are those of leaves and of arrays"
        )
    if not (ref.aval.inexact or allow_int):
        raise JdagError(
            f"{ref.aval} has no gradient; differentiate by float and complex arrays, "
            "or allow others among them by allow_int=True"
        )


def run_pass(
    ctx: Context,
    program: Callable[..., Any],
    args: Sequence[Any],
    bound: Mapping[int, Any],
    has_aux: bool,
) -> tuple[Any, Any, Mapping[Ref, Ref]]:
    """Run a program, and a pass from its loss if that depends on leaves.

    `bound` has pytrees of leaves in the place of the arguments of these numbers.

    Returns:
        Loss, aux, and gradients by leaf.
    """
    result = program(ctx, *(dict(enumerate(args)) | dict(bound)).values())
    if has_aux and not (isinstance(result, tuple | list) and len(result) == 2):
        what = f"(loss, aux), and this one {repr_of(result)}"
        raise RootError(f"with has_aux=True a program returns {what}")
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
    """Fetch what a program returned and the gradients of pytrees of leaves, at once.

    `part` takes a gradient that was fetched, or None, and gives what is returned of it,
    None for zeros.
    """
    others, treedef = flatten(returned, what="what the program returned")
    forms = [flatten_refs(tree, is_ref) for tree in trees]
    wanted = [gradients.get(ref) for refs, _ in forms for ref in refs]
    values = iter(read_refs([*others, *wanted]))
    data = unflatten(treedef, [primal_of(next(values)) for _ in others])
    return data, tuple(
        unflatten(
            form.bare, [gradient_or_zeros(part(next(values)), ref) for ref in refs]
        )
        for refs, form in forms
    )


def gradient_or_zeros(gradient: Any, leaf: Any) -> Any:
    """Return what was fetched of a leaf's gradient, zeros if there is none."""
    if gradient is not None:
        return gradient
    abstract = leaf.holder.state.abstract
    if not leaf.aval.inexact:
        return no_gradient(leaf.aval, abstract)
    return leaf.aval.struct() if abstract else jnp.zeros(leaf.shape, leaf.dtype)
