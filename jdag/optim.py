"""An optimizer over refs: an optax transformation, leaf by leaf, stepped on each owner.

Every leaf has a state of its own, kept beside it, so that leaves that a step does not
touch stand still whole. That is the transformation as it was written only if it never
mixes leaves; its jaxpr tells.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, cast

import jax
import jax.numpy as jnp
import optax
from jax.extend import core

from jdag.assignments import Change
from jdag.cluster import Cluster
from jdag.compute.avals import Aval
from jdag.compute.pytrees import flatten, paths, unflatten
from jdag.context import Context
from jdag.errors import ContextError, JdagError
from jdag.ref import Ref, fetch, is_ref

# Sub-jaxprs whose inputs and outputs are those of their equation, one for one.
_PLAIN = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat2")


class Optimizer:
    """Steps leaves by their gradients, each on its owner, all owners at once.

    Args:
        tx: an optax `GradientTransformation` that treats each leaf by itself: sgd,
            adam, schedules (which count each leaf's own steps), weight decay,
            `inject_hyperparams`, `MultiSteps`, chains of these.
        refs: the leaves, a pytree, on any workers.
        clip_norm: None, or the norm over all gradients of a step, on all owners, to
            which they are scaled down where it is larger.

    Raises:
        JdagError: a ref is no leaf or not inexact; or the transformation mixes leaves
            (`clip_by_global_norm`, `apply_if_finite`, `prodigy`), or takes more than
            gradients and parameters (`lookahead`, `reduce_on_plateau`).
        WorkerLost: an owner is gone.
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
        names = paths(refs, is_ref)
        _refuse_mixing(tx, [ref.aval for ref in leaves], names)
        self._step = partial(_stepped, tx)
        self._clip_norm = clip_norm
        self._names = dict(zip(leaves, names, strict=True))
        self._states: dict[Ref, Any] = {}
        try:
            for ref in leaves:
                state = self._cluster.make(ref.worker, partial(_init, tx), ref)
                self._states[ref] = state
        except JdagError as error:
            failed = list(self._names)[len(self._states)]
            self.drop()
            _raise(error, f"{self._called(failed)} has no state")

    def __repr__(self) -> str:
        owners = ", ".join(repr(worker) for worker in _by_owner(self._states))
        clip = "" if self._clip_norm is None else f", clip_norm={self._clip_norm}"
        return f"Optimizer({len(self._states)} leaves on {owners or 'no worker'}{clip})"

    @property
    def states(self) -> Any:
        """The states as refs on the owners, in the structure of the leaves.

        Raises:
            ContextError: they were dropped.
        """
        self._check_held()
        return unflatten(self._treedef, list(self._states.values()))

    def step(self, ctx: Context) -> None:
        """Give each leaf that has a gradient in `ctx` its next version, on its owner.

        Leaves without one, and their states, stay as they are. One message goes to each
        owner. Waits for nothing, but with `clip_norm` for one exchange before it: the
        owners' squared norms come here, are summed in the order of the leaves, and the
        scale goes out with the step. What raises here has stepped no leaf. What fails
        later, on an owner, fails for that leaf alone: reading its new version raises.

        Raises:
            ContextError: the context is over, or of another cluster; or the states were
                dropped.
            RemoteError: the transformation, or a norm, could not be computed.
            WorkerLost: an owner is gone.
        """
        self._check_held()
        if ctx.home is not self._cluster.home:
            raise ContextError(
                f"a step of leaves of {self._cluster.home} with the gradients of "
                f"{ctx.home}; the context has to be one of the leaves' cluster"
            )
        found = ctx.gradients()
        present = {ref: found[ref] for ref in self._states if ref in found}
        try:
            scale = self._scale(ctx, present)
            self._cluster.assign(
                [
                    Change(
                        self._step,
                        [ref, *flatten(self._states[ref])[0]],
                        (ref, self._states[ref], gradient, *scale),
                        f"stepping {self._called(ref)}",
                    )
                    for ref, gradient in present.items()
                ]
            )
        except JdagError as error:
            _raise(error, f"no leaf of {self!r} was stepped")

    def _scale(self, ctx: Context, gradients: Mapping[Ref, Ref]) -> tuple[float, ...]:
        """The factor of all gradients where they are to be clipped, else nothing."""
        if self._clip_norm is None or not gradients:
            return ()
        owners = _by_owner(gradients)
        squares = {
            owner: ctx.call(owner, squared_norms, [gradients[ref] for ref in refs])
            for owner, refs in owners.items()
        }
        of = {
            ref: float(square)
            for owner, values in fetch(squares).items()
            for ref, square in zip(owners[owner], values, strict=True)
        }
        total = 0.0
        for ref in gradients:  # In the order of the leaves, wherever they are.
            total += of[ref]
        norm = math.sqrt(total)
        return (1.0 if norm <= self._clip_norm else self._clip_norm / norm,)

    def drop(self) -> None:
        """Drop the states from their owners; the leaves stay. Twice is once."""
        self._cluster.drop(list(self._states.values()))
        self._states.clear()

    def _check_held(self) -> None:
        if not self._states:
            raise ContextError("an Optimizer whose states were dropped; make another")

    def _called(self, ref: Ref) -> str:
        """How users know a leaf: its place among the leaves, and which it is."""
        name = self._names[ref]
        return f"{name} ({ref.leaf})" if name else str(ref.leaf)


def squared_norms(gradients: Sequence[Any]) -> list[Any]:
    """Return of each array the sum of squared magnitudes; see `squared_norm`."""
    return [squared_norm(gradient) for gradient in gradients]


def squared_norm(gradient: Any) -> Any:
    """Return the sum of squared magnitudes, at least in float32: a scalar."""
    wide = jnp.promote_types(jnp.abs(gradient).dtype, jnp.float32)
    return jnp.sum(jnp.square(jnp.abs(gradient).astype(wide)))


def _init(tx: optax.GradientTransformation, leaf: Any) -> Any:
    return tx.init(leaf)


def _stepped(
    tx: optax.GradientTransformation, leaf: Any, state: Any, gradient: Any, *scale: Any
) -> Any:
    for factor in scale:
        gradient = (gradient * factor).astype(gradient.dtype)
    update, state = tx.update(gradient, state, leaf)
    return optax.apply_updates(leaf, update), state


def _by_owner(refs: Iterable[Ref]) -> dict[str, list[Ref]]:
    owners: dict[str, list[Ref]] = {}
    for ref in refs:
        owners.setdefault(ref.worker, []).append(ref)
    return owners


def _raise(error: JdagError, text: str) -> NoReturn:
    """Raise the same error, saying more."""
    raise type(error)(f"{error}\n{text}") from error.__cause__


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


def _refuse_mixing(
    tx: optax.GradientTransformation, avals: Sequence[Aval], names: Sequence[str]
) -> None:
    """Raise if the update of one leaf depends on another leaf or its gradient.

    The transformation is traced for all leaves together (of one alone, for two of its
    kind), and what each output depends on is read off the jaxpr: a bit a leaf. What a
    state carries is followed from step to step until nothing new comes in.
    """
    if len(avals) == 1:
        avals, names = [*avals, *avals], ["the leaf", "another"]
    leaves = [aval.struct() for aval in avals]
    try:
        begun = jax.make_jaxpr(tx.init)(leaves)
        state = jax.eval_shape(tx.init, leaves)
        stepped = jax.make_jaxpr(tx.update)(leaves, state, leaves)
    except Exception as error:
        raise JdagError(
            "the transformation cannot be applied as tx.update(gradients, state, "
            f"parameters) to leaves such as {avals[0]}: {type(error).__name__}: "
            f"{error}; one that takes more is not supported"
        ) from error
    bits = [1 << place for place in range(len(avals))]
    carried = _depends(begun.jaxpr, bits)
    while True:  # Bounded: masks of so many bits only grow.
        masks = _depends(stepped.jaxpr, [*bits, *carried, *bits])
        rest = masks[len(bits) :]
        grown = [old | new for old, new in zip(carried, rest, strict=True)]
        if grown == carried:
            break
        carried = grown
    for name, bit, mask in zip(names, bits, masks, strict=False):
        if mask & ~bit:
            other = names[(mask & ~bit).bit_length() - 1]
            raise JdagError(
                f"the transformation mixes leaves: its update of {name} depends on the "
                f"gradient or value of {other}, and leaves may be on different "
                "workers. Leave out what takes them all together, such as "
                "optax.clip_by_global_norm: clip_norm= clips here"
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
