"""Hessian-vector products of a program over a cluster: forward over reverse.

A dual number is a pair of arrays: a value (the primal) and its derivative along the
vector (the tangent); see `jdag.compute.duals`. For each parameter, the worker that owns
it makes a leaf that contains a dual of the parameter and its part of the vector. The
program runs with these leaves. One backward pass then computes gradients that are duals
too, and their tangents are the product. The engine treats duals like any other value.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import jax
import jax.tree_util as jtu

from jdag.api.cluster import Cluster
from jdag.api.value_and_grad import check_program, fetched, leaves_of, run_pass
from jdag.compute.duals import is_dual, seeded
from jdag.compute.pytrees import argument_numbers, flatten, is_constant
from jdag.compute.refs import is_ref
from jdag.context.refs import Ref
from jdag.context.roots import fitting
from jdag.errors import ContextError, JdagError, kind_of
from jdag.processes.functions.encoder import differentiating_twice


def hvp(
    program: Callable[..., Any],
    cluster: Cluster,
    *,
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """Return a function that computes Hessian-vector products of a program's loss.

    This is the derivative of the gradient along a vector, `jax.jvp` of `jax.grad`,
    without the Hessian (Pearlmutter, Fast Exact Multiplication by the Hessian, 1994).
    Each call is one context with one backward pass. As in JAX, fetched values and
    results of `jdag.stop_gradient` are constants.

    The cost in messages is that of a gradient plus two messages for each other worker
    that owns leaves: its part of the vector, and a drop. Memory and
    payload double for the values, residuals and cotangents that the vector changes. A
    call takes two to three times as long as a gradient, and is compiled separately.

    Args:
        program: as for `jdag.value_and_grad`. A hook that replaces a cotangent fails
            the pass.
        cluster: a cluster with real values.
        argnums: the arguments after the context to differentiate by: pytrees of leaves,
            or of inexact arrays, which are put on this worker during the call. A leaf
            that occurs twice counts as two variables.
        has_aux: whether the program returns (loss, aux).
        allow_int: allow arrays without gradients in these arguments.

    Returns:
        A function `(params, vector, *rest)`, where `(params, *rest)` are the arguments
        after the context. The vector has the structure of the arguments `argnums` (a
        tuple if `argnums` is a tuple), with arrays of the same shapes and dtypes, or
        refs on the same workers; None in place of constants, and with `allow_int` of
        arrays without gradients. The function returns the product, arrays on this
        worker in the structure of gradients, or (product, aux).

    Raises:
        RootError: the program returns no loss that can be differentiated.
        JdagError: an argument to differentiate by is neither a leaf nor inexact; the
            vector does not fit the arguments; a function has no second derivative (see
            `jax.custom_vjp`); the program uses a leaf of the arguments by another path,
            such as a closure; or the cluster is abstract. Also the errors of
            `Context.call` and `Context.backward`.
    """
    check_program("jdag.hvp", program, cluster)

    def run(params: Any, vector: Any, *rest: Any) -> Any:
        _check(cluster)
        args = (params, *rest)
        numbers = argument_numbers(argnums, len(args))
        vectors = _vectors(vector, argnums, len(numbers))
        with ExitStack() as stack:
            bound, put = leaves_of(cluster, args, numbers, allow_int, stack)
            leaves, treedef = _moved(bound, vectors)
            _make_duals(cluster, leaves, put)
            used = jtu.tree_unflatten(treedef, [leaf.used for leaf in leaves])
            stack.enter_context(differentiating_twice())
            ctx = stack.enter_context(cluster.context())
            duals = dict(zip(numbers, used, strict=True))
            _, aux, gradients = run_pass(ctx, program, args, duals, has_aux)
            _refuse_originals(leaves, gradients)
            aux, products = fetched(aux, gradients, used, _tangent_of)
        product = products[0] if isinstance(argnums, int) else products
        return (product, aux) if has_aux else product

    return run


def _check(cluster: Cluster) -> None:
    cluster.state.check_open("jdag.hvp")
    if cluster.state.abstract:
        raise JdagError(
            "jdag.hvp needs values, and this cluster has none: it was made with "
            "values='abstract', not values='real'"
        )


def _vectors(vector: Any, argnums: Any, count: int) -> list[tuple[str, Any]]:
    if isinstance(argnums, int):
        return [("the vector", vector)]
    if not isinstance(vector, tuple | list) or len(vector) != count:
        raise JdagError(
            f"the vector is {kind_of(vector)}; with argnums={argnums!r} it must be a "
            f"tuple of {count} parts, one for each of these arguments"
        )
    return [(f"the vector's [{index}]", part) for index, part in enumerate(vector)]


@dataclass
class _Leaf:
    """A leaf of an argument. Its tangent is its part of the vector, or None."""

    name: str
    original: Any
    tangent: Any
    used: Any  # The value for the program: the leaf, or its dual.


def _moved(
    bound: Mapping[int, Any], vectors: Sequence[tuple[str, Any]]
) -> tuple[list[_Leaf], Any]:
    leaves: list[_Leaf] = []
    treedefs = []
    for (number, tree), (name, vector) in zip(bound.items(), vectors, strict=True):
        flat, treedef = _flat(tree, f"argument {number}")
        parts, structure = _flat(vector, name)
        if structure != treedef:
            raise JdagError(
                f"{name} has {_first_difference(flat, parts)}: its structure must be "
                f"that of argument {number}, {treedef}, but is {structure}"
            )
        treedefs.append(treedef)
        for (path, leaf), (_, part) in zip(flat, parts, strict=True):
            suffix = jtu.keystr(path)
            leaf_name = f"argument {number}{suffix}"
            tangent = _tangent(leaf, part, f"{name}{suffix}", leaf_name)
            if is_ref(leaf) and not leaf.tracked:
                tangent = None  # A constant, as under jax.lax.stop_gradient.
            leaves.append(_Leaf(leaf_name, leaf, tangent, leaf))
    return leaves, jtu.treedef_tuple(treedefs)


def _refuse_originals(leaves: Sequence[_Leaf], gradients: Mapping[Ref, Ref]) -> None:
    for leaf in leaves:
        if leaf.tangent is not None and leaf.original in gradients:
            raise JdagError(
                f"the loss depends on {leaf.original!r}, {leaf.name}, by another path "
                "than through that argument, and jdag.hvp sees only the argument; "
                "a program must take the leaves that it is differentiated by as its "
                "arguments"
            )


def _flat(tree: Any, what: str) -> tuple[list[tuple[Any, Any]], Any]:
    """Return the (path, leaf) pairs of a pytree and its structure; None is a leaf."""
    flatten(tree, what=what)  # Raises for unsupported pytrees.
    flat, treedef = jtu.tree_flatten_with_path(tree, is_leaf=lambda leaf: leaf is None)
    return flat, treedef


def _first_difference(flat: Sequence[Any], parts: Sequence[Any]) -> str:
    expected = [jtu.keystr(path) for path, _ in flat]
    actual = [jtu.keystr(path) for path, _ in parts]
    for name in (name for name in expected if name not in actual):
        return f"no leaf at {name or 'the top'}"
    for name in (name for name in actual if name not in expected):
        return f"an unexpected leaf at {name or 'the top'}"
    return "different containers"


def _tangent(leaf: Any, part: Any, name: str, leaf_name: str) -> Any:
    """Check the vector's part for one leaf; return it, or None for a constant."""
    if not is_ref(leaf):
        if part is None or is_constant(part):
            return None
        raise JdagError(
            f"{name} is {kind_of(part)}, but {leaf_name} is {leaf!r}, not an array; "
            "expected None"
        )
    expected = f"{leaf_name} is {leaf.aval}"
    if not leaf.aval.inexact:
        if part is None or getattr(part, "dtype", None) == jax.dtypes.float0:
            return None
        raise JdagError(
            f"{name} is {kind_of(part)}, but {expected}, which has no tangent; "
            "expected None or zeros of float0"
        )
    if isinstance(part, jax.core.Tracer):
        raise ContextError(
            f"{name} is a tracer; jdag runs outside of jit, vmap and grad"
        )
    if not is_ref(part):
        return fitting(leaf.aval, part, name, expected, JdagError)
    if part.aval.on(None) != leaf.aval.on(None):
        raise JdagError(
            f"{name} is {part.aval}, but {expected}; shape and dtype must agree"
        )
    if part.owner != leaf.owner:
        raise JdagError(
            f"{name}, {part!r}, is on {part.owner!r}, but {leaf_name} is on "
            f"{leaf.owner!r}: ctx.move({leaf.worker!r}, ref) first, or use an array"
        )
    return part


def _make_duals(cluster: Cluster, leaves: Sequence[_Leaf], put: list[Ref]) -> None:
    owned: dict[str, list[_Leaf]] = {}
    for leaf in leaves:
        if leaf.tangent is not None:
            owned.setdefault(leaf.original.place, []).append(leaf)
    for place, group in owned.items():
        primals = [leaf.original for leaf in group]
        duals = cluster.make(place, seeded, primals, [leaf.tangent for leaf in group])
        put += duals
        for leaf, dual in zip(group, duals, strict=True):
            leaf.used = dual


def _tangent_of(gradient: Any) -> Any:
    return gradient.tangent if is_dual(gradient) else None
