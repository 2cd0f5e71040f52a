"""Checks of the roots of a pass, their cotangents, and hooks."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdag.compute.avals import Aval, aval_of, frozen
from jdag.compute.refs import is_ref
from jdag.context.refs import Ref
from jdag.engine.protocol import LEAF_KINDS, Key, Root, SeedKey
from jdag.errors import ContextError, GraphError, JdagError, RootError, kind_of


def checked_roots(
    roots: tuple[Any, ...], cotangents: Any, *, of_loss: bool = False
) -> list[Any]:
    """Check roots and cotangents; return the cotangent of each root, or None for ones.

    With `of_loss` the root is a program's loss, which may be a constant.
    """
    if not roots:
        raise RootError(
            "ctx.backward() has no roots: expected the refs to start from, such as a "
            "loss, as ctx.backward(loss)"
        )
    for number, root in enumerate(roots):
        _check_root(root, number, of_loss)
    seeds = [None] * len(roots) if cotangents is None else _listed(cotangents, roots)
    return [_seed(root, seeds[number], number) for number, root in enumerate(roots)]


def _check_root(root: Any, number: int, of_loss: bool) -> None:
    if root is None:
        raise RootError(
            f"root {number} is None; it must be a ref: does the function that "
            "computed it return something?"
        )
    if not is_ref(root) or root.key.kind == "slot":
        hint = ""
        if of_loss and isinstance(root, list | tuple | dict):
            hint = (
                "; sum several losses in a call, and return other values together "
                "with the loss as (loss, aux), with has_aux=True"
            )
        elif isinstance(root, list | tuple | dict):
            hint = "; for several roots write ctx.backward(*roots)"
        elif hasattr(root, "dtype") and not is_ref(root):
            hint = "; arrays that were fetched, or computed here, are not in the graph"
        what = root.described if is_ref(root) else kind_of(root)
        raise RootError(
            f"root {number} is {what}; it must be a ref, as returned by ctx.call{hint}"
        )
    if root.descends is not None:
        raise GraphError(
            f"double backward: root {number}, {root!r}, descends from the gradient of "
            f"{root.descends}, which is not differentiable; jdag.stop_gradient("
            "gradient) makes it a constant"
        )
    if root.leaf is not None:
        raise RootError(
            f"root {number} is {root.leaf}, a leaf, so there is no graph to "
            "differentiate; a root must be computed from leaves by ctx.call"
        )
    if not root.aval.inexact:
        raise RootError(
            f"root {number}, {root!r}, is not differentiable: its dtype is "
            f"{root.dtype}, and only float and complex values have cotangents"
        )
    if not (root.tracked or of_loss):
        raise RootError(
            f"root {number}, {root!r}, is a constant: it depends on no tracked value "
            "(a float or complex leaf, without jdag.stop_gradient)"
        )


def _listed(cotangents: Any, roots: Sequence[Any]) -> Sequence[Any]:
    count = len(roots)
    if not isinstance(cotangents, list | tuple):
        if count == 1:
            return [cotangents]
        raise RootError(
            f"cotangents is {kind_of(cotangents)}; for {count} roots it must be a "
            "list or tuple with one for each root, in order"
        )
    if len(cotangents) != count:
        raise RootError(
            f"there are {len(cotangents)} cotangents for {count} roots; expected one "
            "or None for each root, in order"
        )
    return cotangents


def _seed(root: Ref, seed: Any, number: int) -> Any:
    size, is_complex = root.aval.size, root.aval.dtype.kind == "c"
    if seed is None and size == 1 and not is_complex:
        return None
    expected = f"root {number} is {root.aval}"
    if seed is None and size != 1:
        raise RootError(
            f"{expected}, of size {size}; without a cotangent its size must be 1: "
            "sum it in a call, or pass cotangents= to ctx.backward"
        )
    if seed is None:
        raise RootError(
            f"{expected}, which is complex and so needs a cotangent: take its real "
            "part in a call, or pass cotangents= to ctx.backward"
        )
    if is_ref(seed):
        raise RootError(
            f"cotangent {number} is a ref ({seed!r}); it must be an array: "
            "ref.fetch() returns it"
        )
    if isinstance(seed, jax.core.Tracer):
        raise ContextError(
            f"cotangent {number} is a tracer; jdag runs outside of jit, vmap and grad"
        )
    return fitting(root.aval, seed, f"cotangent {number}", expected, RootError)


def fitting(
    aval: Aval, value: Any, name: str, expected: str, kind: type[JdagError]
) -> Any:
    """Check that a value has this shape and dtype; return it as an array.

    `name` and `expected` describe the value and the expectation in errors.
    """
    try:
        value = frozen(value)
        actual = aval_of(value)
    except JdagError as error:
        raise kind(f"{name}: {error}; {expected}") from error
    if isinstance(value, int | float | complex) and not hasattr(value, "dtype"):
        if aval.shape == () and (aval.dtype.kind == "c" or type(value) is not complex):
            return jnp.asarray(value, aval.dtype)
    elif actual.shape == aval.shape and actual.dtype == aval.dtype:
        return value
    raise kind(f"{name} is {actual}, but {expected}; shape and dtype must agree")


def check_hook(
    what: str, ref: Any, fn: Any, admit: Callable[[Ref], Any], *, replaces: bool
) -> None:
    if not is_ref(ref):
        raise JdagError(f"{what} takes a ref as first argument, not {ref!r}")
    if not callable(fn):
        raise JdagError(f"{what} takes a function of an array, not {fn!r}")
    admit(ref)
    if not replaces and ref.key.kind not in LEAF_KINDS:
        raise JdagError(
            f"{what} takes a leaf, the result of cluster.put or cluster.make, but "
            f"{ref!r} is not a leaf; use ctx.on_cotangent for its cotangent"
        )
    if not ref.tracked:
        raise GraphError(f"{what}: {ref!r} is not tracked, so it gets no cotangent")


def seeded_roots(
    frame: Any, number: int, roots: tuple[Ref, ...], cotangents: Any
) -> tuple[tuple[tuple[str, Root], ...], list[tuple[Key, Any]]]:
    for root in roots:
        if is_ref(root) and root.holder is not frame and root.leaf is None:
            frame.admit(root)
    located: list[tuple[str, Root]] = []
    seeds: list[tuple[Key, Any]] = []
    for index, seed in enumerate(checked_roots(roots, cotangents)):
        root, has_seed = roots[index], seed is not None
        located.append((root.owner, Root(root.key, root.aval, has_seed, index)))
        if has_seed:
            key = SeedKey(frame.id, number, index)
            seeds.append((key, frame.state.value(seed)))
    return tuple(located), seeds


def unreached(ref: Ref, passes: int, context: int) -> GraphError:
    assert ref.leaf is not None, ref
    why = f"was not reached by any pass in context {context} ({passes} ended)"
    if not ref.aval.inexact:
        why = f"is not inexact ({ref.aval}; see allow_int)"
    elif not ref.leaf.tracked:
        why = "is untracked, since it was made by tracked=False or cluster.keep"
    elif ref.leaf.dropped:
        why = "was dropped by cluster.drop"
    return GraphError(
        f"{ref.leaf} {why}, so it has no gradient; ctx.gradients() returns only "
        "existing gradients, and jdag.value_and_grad returns zeros for missing ones"
    )
