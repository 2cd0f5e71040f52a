"""Roots of a pass, their cotangents, and hooks: checked before anything runs."""

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
    """Return the cotangent of each root, None where that is ones.

    With `of_loss` no one wrote ctx.backward, and a root may be a constant.

    Raises:
        RootError, GraphError: see `Context.backward`.
    """
    if not roots:
        raise RootError(
            "ctx.backward() has no roots: it takes the refs to start from, such as a "
            "loss, as ctx.backward(loss)"
        )
    for number, root in enumerate(roots):
        _check_root(root, number, of_loss)
    seeds = [None] * len(roots) if cotangents is None else _listed(cotangents, roots)
    return [_seed(root, seeds[number], number) for number, root in enumerate(roots)]


def _check_root(root: Any, number: int, of_loss: bool) -> None:
    if root is None:
        raise RootError(
            f"root {number} is None; it has to be a ref: does the function that made "
            "it return something?"
        )
    if not is_ref(root) or root.key.kind == "slot":
        hint = ""
        if of_loss and isinstance(root, list | tuple | dict):
            hint = (
                "; sum several losses in a call, and return what is not differentiated "
                "beside the loss: (loss, aux), with has_aux=True"
            )
        elif isinstance(root, list | tuple | dict):
            hint = "; of several write ctx.backward(*roots)"
        elif hasattr(root, "dtype") and not is_ref(root):
            hint = "; what was fetched, or computed here, is cut off from the graph"
        what = root.described if is_ref(root) else kind_of(root)
        raise RootError(
            f"root {number} is {what}; it has to be a ref, as ctx.call gives{hint}"
        )
    if root.descends is not None:
        raise GraphError(
            f"double backward: root {number}, {root!r}, descends from the gradient of "
            f"{root.descends}, which is not differentiable; jdag.stop_gradient("
            "gradient) makes it a constant"
        )
    if root.leaf is not None:
        raise RootError(
            f"root {number} is {root.leaf}, itself a leaf, so there is nothing to go "
            "back through; a root is computed from leaves by ctx.call"
        )
    if not root.aval.inexact:
        raise RootError(
            f"root {number}, {root!r}, is not differentiable: its dtype is "
            f"{root.dtype}, and only float and complex values have cotangents"
        )
    if not (root.tracked or of_loss):
        raise RootError(
            f"root {number}, {root!r}, is a constant: nothing that it was computed "
            "from is tracked (a float or complex leaf, without jdag.stop_gradient)"
        )


def _listed(cotangents: Any, roots: Sequence[Any]) -> Sequence[Any]:
    count = len(roots)
    if not isinstance(cotangents, list | tuple):
        if count == 1:
            return [cotangents]
        raise RootError(
            f"cotangents is {kind_of(cotangents)}; for {count} roots it is a "
            "list or tuple with one for each, in their order"
        )
    if len(cotangents) != count:
        raise RootError(
            f"{len(cotangents)} cotangents for {count} roots; there has to be one for "
            "each, in their order, or None"
        )
    return cotangents


def _seed(root: Ref, seed: Any, number: int) -> Any:
    size, is_complex = root.aval.size, root.aval.dtype.kind == "c"
    if seed is None and size == 1 and not is_complex:
        return None
    wanted = f"root {number} is {root.aval}"
    if seed is None and size != 1:
        raise RootError(
            f"{wanted}, of size {size}; without a cotangent its size has to "
            "be 1: sum it in a call, or give ctx.backward cotangents="
        )
    if seed is None:
        raise RootError(
            f"{wanted}, complex, which needs a cotangent: take its real part in a "
            "call, or give ctx.backward cotangents="
        )
    if is_ref(seed):
        raise RootError(
            f"cotangent {number} is a ref ({seed!r}); it has to be an array: "
            "ref.fetch() gives it"
        )
    if isinstance(seed, jax.core.Tracer):
        raise ContextError(
            f"cotangent {number} is a tracer; jdag runs outside of jit, vmap and grad"
        )
    return fitting(root.aval, seed, f"cotangent {number}", wanted, RootError)


def fitting(
    aval: Aval, value: Any, name: str, wanted: str, kind: type[JdagError]
) -> Any:
    """Return a value as an array that has this shape and dtype, or take a number so.

    Args:
        aval: what it has to be.
        value: an array, or for the shape () a Python number.
        name: what an error calls it.
        wanted: what an error says that it has to fit.
        kind: of the error.

    Raises:
        JdagError: it has another shape or dtype, or is no array.
    """
    try:
        value = frozen(value)
        found = aval_of(value)
    except JdagError as error:
        raise kind(f"{name}: {error}; {wanted}") from error
    if isinstance(value, int | float | complex) and not hasattr(value, "dtype"):
        if aval.shape == () and (aval.dtype.kind == "c" or type(value) is not complex):
            return jnp.asarray(value, aval.dtype)
    elif found.shape == aval.shape and found.dtype == aval.dtype:
        return value
    raise kind(f"{name} is {found}, but {wanted}; shape and dtype have to agree")


def check_hook(
    what: str, ref: Any, fn: Any, admit: Callable[[Ref], Any], *, replaces: bool
) -> None:
    """Raise unless this can be a hook; `admit` does unless the ref can be used here."""
    if not is_ref(ref):
        raise JdagError(f"{what} takes a ref first, not {ref!r}")
    if not callable(fn):
        raise JdagError(f"{what} takes a function of an array, not {fn!r}")
    admit(ref)
    if not replaces and ref.key.kind not in LEAF_KINDS:
        raise JdagError(
            f"{what} takes a leaf, as cluster.put and cluster.make give, and "
            f"{ref!r} is none; ctx.on_cotangent sees its cotangent"
        )
    if not ref.tracked:
        raise GraphError(
            f"{what}: {ref!r} is not tracked, so that no cotangent ever comes"
        )


def seeded_roots(
    frame: Any, number: int, roots: tuple[Ref, ...], cotangents: Any
) -> tuple[tuple[tuple[str, Root], ...], list[tuple[Key, Any]]]:
    """Return the roots of a pass by owner, and the cotangents that are given."""
    for root in roots:
        if is_ref(root) and root.holder is not frame and root.leaf is None:
            frame.admit(root)
    told: list[tuple[str, Root]] = []
    stored: list[tuple[Key, Any]] = []
    for index, seed in enumerate(checked_roots(roots, cotangents)):
        root, given = roots[index], seed is not None
        told.append((root.owner, Root(root.key, root.aval, given, index)))
        if given:
            key = SeedKey(frame.id, number, index)
            stored.append((key, frame.state.value(seed)))
    return tuple(told), stored


def unreached(ref: Ref, passes: int, context: int) -> GraphError:
    """The error that says why a leaf has no gradient in a context."""
    assert ref.leaf is not None, ref
    why = f"was reached by no pass, of {passes} in context {context}"
    if not ref.aval.inexact:
        why = f"is not inexact ({ref.aval}; see allow_int)"
    elif not ref.leaf.tracked:
        why = "is untracked, as it was put with tracked=False or kept"
    elif ref.leaf.dropped:
        why = "was dropped by cluster.drop"
    return GraphError(
        f"{ref.leaf} {why}, so it has no gradient; ctx.gradients() has those that "
        "there are, and jdag.value_and_grad fills in zeros"
    )
