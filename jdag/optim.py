"""An optimizer over refs: an optax transformation, leaf by leaf, stepped on each owner.

Every leaf has a state of its own, kept beside it, so that leaves that a step does not
touch stand still whole. That is the transformation as it was written only if it never
mixes leaves; its jaxpr tells.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax.extend import core

from jdag.assignments import Change
from jdag.cluster import Cluster
from jdag.compute.avals import Aval
from jdag.compute.pytrees import flatten, unflatten
from jdag.context import Context
from jdag.errors import ContextError, JdagError
from jdag.ref import Ref, fetch, is_ref

# Sub-jaxprs whose inputs and outputs are those of their equation, one for one.
_PLAIN = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat2")


class Optimizer:
    """Steps leaves by their gradients, each on its owner.

    Args:
        tx: an optax `GradientTransformation` that treats each leaf by itself: sgd,
            adam, schedules, weight decay, chains of these.
        refs: the leaves, a pytree, on any workers.
        clip_norm: None, or the norm over all gradients of a step, on all owners, to
            which they are scaled down where it is larger.

    Raises:
        JdagError: a ref is no leaf or not inexact, or the transformation mixes leaves
            (such as `optax.clip_by_global_norm`), or it takes more than gradients and
            parameters.
    """

    def __init__(
        self,
        tx: optax.GradientTransformation,
        refs: Any,
        clip_norm: float | None = None,
    ) -> None:
        leaves, self._treedef = flatten(refs, is_ref)
        if not leaves:
            raise JdagError("an Optimizer needs leaves to step, and there are none")
        if clip_norm is not None and not clip_norm > 0:
            raise JdagError(f"clip_norm={clip_norm!r}: it has to be above 0, or None")
        self._cluster = _cluster_of(leaves)
        _refuse_mixing(tx, leaves[0].aval)
        self._step = partial(_stepped, tx)
        self._clip_norm = clip_norm
        self._states: dict[Ref, Any] = {}
        for ref in leaves:
            state = self._cluster.make(ref.worker, partial(_init, tx), ref)
            self._states[ref] = state

    @property
    def states(self) -> Any:
        """The states as refs on the owners, in the structure of the leaves."""
        return unflatten(self._treedef, list(self._states.values()))

    def step(self, ctx: Context) -> None:
        """Give each leaf that has a gradient in `ctx` its next version, on its owner.

        Leaves without one, and their states, stay as they are. Waits for nothing, but
        with `clip_norm` for one exchange: the owners' squared norms come here, are
        summed in the order of the leaves, and the scale goes back.

        Raises:
            ContextError: the context is over, or of another cluster.
            RemoteError: a norm could not be computed.
            WorkerLost: an owner is gone.
        """
        if ctx.home is not self._cluster.home:
            raise ContextError(
                f"a step of leaves of {self._cluster.home} with the gradients of "
                f"{ctx.home}; the context has to be one of the leaves' cluster"
            )
        found = ctx.gradients()
        stepped = [ref for ref in self._states if ref in found]
        scale = self._scale(ctx, [found[ref] for ref in stepped])
        for ref in stepped:
            state = self._states[ref]
            targets = [ref, *flatten(state)[0]]
            args = (ref, state, found[ref], scale)
            self._cluster.assign([Change(self._step, targets, args)])

    def _scale(self, ctx: Context, gradients: Sequence[Ref]) -> float:
        if self._clip_norm is None or not gradients:
            return 1.0
        squares = [ctx.call(ref.worker, squared_norm, ref) for ref in gradients]
        total = 0.0
        for square in fetch(squares):
            total += float(square)
        norm = math.sqrt(total)
        return 1.0 if norm <= self._clip_norm else self._clip_norm / norm

    def drop(self) -> None:
        """Drop the states from their owners; the leaves stay."""
        self._cluster.drop(list(self._states.values()))
        self._states.clear()


def squared_norm(gradient: Any) -> Any:
    """Return the sum of squared magnitudes, at least in float32: a scalar."""
    wide = jnp.promote_types(jnp.abs(gradient).dtype, jnp.float32)
    return jnp.sum(jnp.square(jnp.abs(gradient).astype(wide)))


def _init(tx: optax.GradientTransformation, leaf: Any) -> Any:
    return tx.init(leaf)


def _stepped(
    tx: optax.GradientTransformation, leaf: Any, state: Any, gradient: Any, scale: Any
) -> Any:
    scaled = (gradient * scale).astype(gradient.dtype)
    update, state = tx.update(scaled, state, leaf)
    return optax.apply_updates(leaf, update), state


def _cluster_of(leaves: Sequence[Ref]) -> Cluster:
    for ref in leaves:
        if ref.leaf is None or not ref.aval.inexact:
            raise JdagError(
                f"{ref!r} cannot be stepped: an Optimizer takes float or complex "
                "leaves, as cluster.put and cluster.make give"
            )
    if len(dict.fromkeys(leaves)) < len(leaves):
        raise JdagError(
            "a leaf is there twice; an Optimizer steps each of its own once"
        )
    cluster = cast(Any, leaves[0].holder.home).cluster
    assert isinstance(cluster, Cluster), cluster
    return cluster


# ------------------------------------------------------------------- what mixes leaves


def _refuse_mixing(tx: optax.GradientTransformation, aval: Aval) -> None:
    """Raise if the update of one leaf depends on another leaf or its gradient.

    The transformation is traced for two leaves of the first one's shape, and what each
    output depends on is read off the jaxpr. What a state carries is followed from step
    to step until nothing new comes in.
    """
    name = "the transformation"
    pair = (aval.struct(), aval.struct())
    try:
        begun = jax.make_jaxpr(tx.init)(pair)
        state = jax.eval_shape(tx.init, pair)
        stepped = jax.make_jaxpr(tx.update)(pair, state, pair)
    except TypeError as error:
        raise JdagError(
            f"{name} cannot be applied as tx.update(gradients, state, parameters) to "
            f"leaves such as {aval}: {error}; one that takes more is not supported"
        ) from error
    carried = _depends(begun.jaxpr, [1, 2])
    while True:  # Bounded: masks of two bits only grow.
        masks = _depends(stepped.jaxpr, [1, 2, *carried, 1, 2])
        grown = [old | new for old, new in zip(carried, masks[2:], strict=True)]
        if grown == carried:
            break
        carried = grown
    if masks[0] & 2 or masks[1] & 1:
        raise JdagError(
            f"{name} mixes leaves: its update of one depends on another's gradient or "
            "value, which are on different workers. Leave out what takes them all "
            "together, such as optax.clip_by_global_norm: clip_norm= clips here"
        )


def _depends(jaxpr: Any, inputs: Sequence[int]) -> list[int]:
    """Return for each output of a jaxpr the union of the masks it depends on."""
    masks: dict[Any, int] = dict(zip(jaxpr.invars, inputs, strict=True))
    for equation in jaxpr.eqns:
        taken = [_mask(masks, atom) for atom in equation.invars]
        masks.update(zip(equation.outvars, _outputs(equation, taken), strict=True))
    return [_mask(masks, atom) for atom in jaxpr.outvars]


def _mask(masks: dict[Any, int], atom: Any) -> int:
    return 0 if isinstance(atom, core.Literal) else masks.get(atom, 0)


def _outputs(equation: Any, taken: Sequence[int]) -> list[int]:
    """Return what each output depends on; of unknown insides, on every input."""
    name = equation.primitive.name
    params = equation.params
    if name == "cond":
        found = [_depends(branch.jaxpr, taken[1:]) for branch in params["branches"]]
        return [_union((taken[0], *masks)) for masks in zip(*found, strict=True)]
    inner = params.get("jaxpr", params.get("call_jaxpr"))
    if name in _PLAIN and inner is not None:
        return _depends(getattr(inner, "jaxpr", inner), taken)
    return [_union(taken)] * len(equation.outvars)


def _union(masks: Sequence[int]) -> int:
    total = 0
    for mask in masks:
        total |= mask
    return total
