"""`value_and_grad` of a program over a cluster, in the manner of JAX's."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax.numpy as jnp

from jdag.api.cluster import Cluster
from jdag.api.context import Context
from jdag.api.refs import Ref, read
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
        with leaves_of(cluster, args, numbers, allow_int) as (bound, _):
            pairs = [(number, bound[number]) for number in numbers]
            value, aux, gradients = run_pass(program, cluster, args, pairs, has_aux)
        trees = tuple(map(filled, gradients, [tree for _, tree in pairs]))
        value = (value, aux) if has_aux else value
        return value, trees[0] if isinstance(argnums, int) else trees

    return run


def check_program(what: str, program: object, cluster: object) -> None:
    """Raise JdagError unless this is a function and a cluster on which to run it."""
    if not callable(program):
        raise JdagError(f"{what} takes a function of a context, not {program!r}")
    if not isinstance(cluster, Cluster):
        raise JdagError(f"{what} takes a cluster second, not {cluster!r}")


@contextmanager
def leaves_of(
    cluster: Cluster, args: Sequence[Any], numbers: Sequence[int], allow_int: bool
) -> Iterator[tuple[dict[int, Any], list[Ref]]]:
    """Yield arguments by number, with a leaf for each array, and the leaves made here.

    These, and what is added to them, are dropped at the end.

    Raises:
        JdagError: something in an argument cannot be differentiated by; names it.
    """
    put: list[Ref] = []
    bound: dict[int, Any] = {}
    try:
        for number in numbers:
            what = f"argument {number}"
            leaves, treedef = flatten(args[number], what=what)
            for place in indices_of_arrays(what, args[number], leaves):
                try:
                    if not is_ref(leaves[place]):
                        leaves[place] = cluster.put(cluster.here, leaves[place])
                        put.append(leaves[place])
                    _check_leaf(leaves[place], allow_int)
                except JdagError as error:
                    name = paths(args[number])[place]
                    raise type(error)(f"{what}{name}: {error}") from None
            if not any(map(is_ref, leaves)):
                raise no_arrays(what)
            bound[number] = unflatten(treedef, leaves)
        yield bound, put
    finally:
        if put and not cluster.state.closed:
            cluster.drop(put)


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


def run_pass(
    program: Callable[..., Any],
    cluster: Cluster,
    args: Sequence[Any],
    bound: Sequence[tuple[int, Any]],
    has_aux: bool,
    check: Callable[[Mapping[Ref, Ref]], None] | None = None,
) -> tuple[Any, Any, list[list[Any]]]:
    """Run a program, and a pass from its loss; return loss, aux and gradients.

    `bound` has numbers and pytrees of leaves of the arguments to differentiate by: for
    each the gradients of its leaves, None where the loss does not depend on one.
    `check` is given gradients by leaf before they are read; then the loss is not.
    """
    with cluster.context() as ctx:
        given = dict(enumerate(args)) | dict(bound)
        result = program(ctx, *given.values())
        loss, aux = result if has_aux else (result, ())
        found = _gradients(ctx, loss)
        if check is not None:
            check(found)
            loss = None
        said, treedef = flatten((loss, aux), what="what the program returned")
        chosen = [flatten_refs(tree, is_ref)[0] for _, tree in bound]
        wanted = [found.get(ref) for refs in chosen for ref in refs]
        values = iter(read([*said, *wanted]))
    value, aux = unflatten(treedef, [primal_of(next(values)) for _ in said])
    return value, aux, [[next(values) for _ in refs] for refs in chosen]


def _gradients(ctx: Context, loss: Any) -> Mapping[Ref, Ref]:
    """Run a pass from a loss, if it depends on leaves; return gradients by leaf."""
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
