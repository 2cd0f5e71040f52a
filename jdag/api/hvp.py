"""Hessian-vector products of a program over a cluster: forward over reverse.

Beside the leaves of the parameters their owners make others, whose values are duals
(`jdag.compute.duals`): parameter and vector. The program runs with these, and one
backward pass gives gradients whose tangents are the product. What records, sends and
counts does not know of it.
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
    """Return a function that gives Hessian-vector products of a program's loss.

    The derivative of the gradient along a vector, `jax.jvp` of `jax.grad` in JAX's
    terms, without the Hessian (Pearlmutter, Fast Exact Multiplication by the Hessian,
    1994). Each call is one context with one backward pass. As in JAX, what the program
    fetches and what `jdag.stop_gradient` gives are constants.

    It costs the messages of a gradient and, for each owner of leaves but home, three
    more: its part of the vector, the acknowledgement, and its end. Memory and payload
    double for values, residuals and cotangents that the vector changes, and for them
    alone. A call takes two to three times as long, and is compiled once more.

    Args:
        program: as for `jdag.value_and_grad`. A hook that replaces a cotangent in it
            fails the pass.
        cluster: where it runs; not an abstract one.
        argnums: which arguments after the context to differentiate by: pytrees of
            leaves, or of inexact arrays, which are put at home meanwhile. A leaf that
            is there twice counts as two variables.
        has_aux: whether the program returns more than its loss.
        allow_int: whether there may be arrays without gradients among them.

    Returns:
        A function `(params, vector, *rest)`, where `(params, *rest)` are the arguments
        after the context. The vector has the structure of what is differentiated by (a
        tuple of such, if `argnums` is one), with arrays of the same shapes and dtypes,
        or refs on the same workers; in the place of constants, and with `allow_int` of
        what has no gradient, None. It gives the product, arrays here in the structure
        of gradients, or (product, aux).

    Raises:
        RootError: the program returns no loss that can be differentiated.
        JdagError: an argument to differentiate by is neither a leaf nor inexact; the
            vector does not fit; a function has no such second derivative (see
            `jax.custom_vjp`); the loss depends on a leaf of the arguments by another
            way than through them; the cluster is abstract; and as `Context.call` and
            `Context.backward` do.
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
            given = dict(zip(numbers, used, strict=True))
            _, aux, found = run_pass(ctx, program, args, given, has_aux)
            _refuse_originals(leaves, found)
            aux, products = fetched(aux, found, used, _tangent_of)
        product = products[0] if isinstance(argnums, int) else products
        return (product, aux) if has_aux else product

    return run


def _check(cluster: Cluster) -> None:
    cluster.state.check_open("jdag.hvp")
    if cluster.state.abstract:
        raise JdagError(
            "jdag.hvp computes with values, and this cluster has none: it was made "
            "with values='abstract'; values='real' has them"
        )


def _vectors(vector: Any, argnums: Any, count: int) -> list[tuple[str, Any]]:
    if isinstance(argnums, int):
        return [("the vector", vector)]
    if not isinstance(vector, tuple | list) or len(vector) != count:
        raise JdagError(
            f"the vector is {kind_of(vector)}; with argnums={argnums!r} it is a tuple "
            f"of {count}, one part for each of these arguments"
        )
    return [(f"the vector's [{place}]", part) for place, part in enumerate(vector)]


@dataclass
class _Leaf:
    """A leaf of an argument, and the vector there; None where nothing moves."""

    name: str
    given: Any
    tangent: Any
    used: Any  # What the program gets: the leaf, or its dual.


def _moved(
    bound: Mapping[int, Any], vectors: Sequence[tuple[str, Any]]
) -> tuple[list[_Leaf], Any]:
    """Return the leaves of arguments with the vector there, and the treedef of all."""
    leaves: list[_Leaf] = []
    treedefs = []
    for (number, tree), (name, vector) in zip(bound.items(), vectors, strict=True):
        flat, treedef = _flat(tree, f"argument {number}")
        parts, found = _flat(vector, name)
        if found != treedef:
            raise JdagError(
                f"{name} has {_first_other(flat, parts)}: it has to have the structure "
                f"of argument {number}, {treedef}, and has {found}"
            )
        treedefs.append(treedef)
        for (path, leaf), (_, part) in zip(flat, parts, strict=True):
            at = jtu.keystr(path)
            said = f"argument {number}{at}"
            tangent = _tangent(leaf, part, f"{name}{at}", said)
            if is_ref(leaf) and not leaf.tracked:
                tangent = None  # A constant, as under jax.lax.stop_gradient.
            leaves.append(_Leaf(said, leaf, tangent, leaf))
    return leaves, jtu.treedef_tuple(treedefs)


def _refuse_originals(leaves: Sequence[_Leaf], found: Mapping[Ref, Ref]) -> None:
    """Raise JdagError if a gradient reached a leaf itself and not its dual."""
    for leaf in leaves:
        if leaf.tangent is not None and leaf.given in found:
            raise JdagError(
                f"the loss depends on {leaf.given!r}, {leaf.name}, by another way "
                "than through that argument, which is what jdag.hvp moves along "
                "the vector; a program has to take what it is differentiated by as "
                "its arguments"
            )


def _flat(tree: Any, what: str) -> tuple[list[tuple[Any, Any]], Any]:
    """Return paths and leaves, None among them, and the structure."""
    flatten(tree, what=what)  # It refuses what JAX cannot take.
    flat, treedef = jtu.tree_flatten_with_path(tree, is_leaf=lambda leaf: leaf is None)
    return flat, treedef


def _first_other(flat: Sequence[Any], parts: Sequence[Any]) -> str:
    wanted = [jtu.keystr(path) for path, _ in flat]
    given = [jtu.keystr(path) for path, _ in parts]
    for name in (name for name in wanted if name not in given):
        return f"no leaf {name or 'at the top'}"
    for name in (name for name in given if name not in wanted):
        return f"a leaf {name or 'at the top'} too many"
    return "other containers"


def _tangent(leaf: Any, part: Any, name: str, said: str) -> Any:
    """Return the vector at one leaf, an array or ref; None where there is no such."""
    if not is_ref(leaf):
        if part is None or is_constant(part):
            return None
        raise JdagError(
            f"{name} is {kind_of(part)}, but {said} is {leaf!r}, no array; it takes "
            "None there"
        )
    wanted = f"{said} is {leaf.aval}"
    if not leaf.aval.inexact:
        if part is None or getattr(part, "dtype", None) == jax.dtypes.float0:
            return None
        raise JdagError(
            f"{name} is {kind_of(part)}, but {wanted}, which does not move; it takes "
            "None, or zeros of float0, there"
        )
    if isinstance(part, jax.core.Tracer):
        raise ContextError(
            f"{name} is a tracer; jdag runs outside of jit, vmap and grad"
        )
    if not is_ref(part):
        return fitting(leaf.aval, part, name, wanted, JdagError)
    if part.aval.on(None) != leaf.aval.on(None):
        raise JdagError(
            f"{name} is {part.aval}, but {wanted}; shape and dtype have to agree"
        )
    if part.owner != leaf.owner:
        raise JdagError(
            f"{name}, {part!r}, lives on {part.owner!r}, but {said} on "
            f"{leaf.owner!r}: ctx.move({leaf.worker!r}, ref) first, or an array"
        )
    return part


def _make_duals(cluster: Cluster, leaves: Sequence[_Leaf], put: list[Ref]) -> None:
    owned: dict[str, list[_Leaf]] = {}
    for leaf in leaves:
        if leaf.tangent is not None:
            owned.setdefault(leaf.given.place, []).append(leaf)
    for where, some in owned.items():
        primals = [leaf.given for leaf in some]
        duals = cluster.make(where, seeded, primals, [leaf.tangent for leaf in some])
        put += duals
        for leaf, dual in zip(some, duals, strict=True):
            leaf.used = dual


def _tangent_of(gradient: Any) -> Any:
    """Return the tangent of a gradient; None where the vector has no bearing on it."""
    return gradient.tangent if is_dual(gradient) else None
