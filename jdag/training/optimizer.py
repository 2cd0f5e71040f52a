"""An optimizer over refs: an optax transformation that runs on each leaf's owner.

Each leaf has its own state on the same worker. A step changes neither a leaf without a
gradient nor its state.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, NoReturn

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import Partial
from msgspec import Meta

from jdag.compute.pairs import Pair
from jdag.compute.pytrees import flatten, flatten_refs, paths, static, unflatten
from jdag.compute.refs import is_ref
from jdag.context.cluster_state import ClusterState
from jdag.context.context import Context
from jdag.context.leaves import Assignments, Change
from jdag.context.refs import Ref, fetch
from jdag.engine.functions import remote, unjitted
from jdag.engine.protocol import Assignment, Key
from jdag.errors import ContextError, JdagError, WorkerLost, kind_of, unusable
from jdag.settings.validation import converted
from jdag.training.leafwise import Leafwise, leafwise
from jdag.wire.specs import PairData

_POSITIVE = Meta(gt=0, description="a number above 0, or None")
_CLIP_NORM = Annotated[float, _POSITIVE] | None


class Optimizer:
    """Updates leaves by their gradients, on all owners in parallel.

    It may be an argument of programs of `cluster.run`, which then step the same leaves
    and states.

    Args:
        tx: an optax `GradientTransformation`. Results equal those on one machine for
            sgd, adam, schedules (which count the steps of each leaf), weight decay,
            `inject_hyperparams`, `MultiSteps`, masks, labels and rates by path,
            `add_noise`, and chains of these. Later changes of objects in `tx` have no
            effect.
        refs: a pytree of leaves, on any workers.
        clip_norm: the maximum of the global norm of a step's gradients, as in
            `optax.clip_by_global_norm`; None: no clipping.
        skip_not_finite: skip a step if a gradient has an inf or a NaN: leaves, states
            and `steps` do not change. A loss scale can be adapted by testing `steps`.

    Raises:
        JdagError: a ref is not a leaf or not inexact; or the transformation mixes
            leaves (`clip_by_global_norm`, `apply_if_finite`, `prodigy`), or needs more
            than gradients and parameters (`lookahead`, `reduce_on_plateau`, line
            searches). The error names the ref or the transformation.
        WorkerLost: an owner is lost.
    """

    __jdag_taken__ = (
        "programs of cluster.run, which have a cluster, take it as an argument of its "
        "own"
    )

    def __init__(
        self,
        tx: optax.GradientTransformation,
        refs: Any,
        clip_norm: float | None = None,
        *,
        skip_not_finite: bool = False,
    ) -> None:
        methods = [getattr(tx, name, None) for name in ("init", "update")]
        if isinstance(tx, type) or not all(map(callable, methods)):
            allowed = "an optax.GradientTransformation, such as optax.sgd(0.1)"
            raise JdagError(unusable("tx", tx, allowed))
        leaves = flatten_refs(refs, is_ref)[0]
        if not leaves:
            raise JdagError("an Optimizer needs leaves, but the pytree has no refs")
        clip_norm = converted(_CLIP_NORM, clip_norm, "clip_norm")
        converted(bool, skip_not_finite, "skip_not_finite")
        _state_of(leaves).check_open("jdag.Optimizer")
        self._begin(refs, clip_norm, skip_not_finite)
        avals = [ref.aval for ref in leaves]
        each = leafwise(tx, self._treedef.bare, avals, list(self._names.values()))
        self._tx.update(zip(leaves, each, strict=True))
        try:
            for ref, tx_of in self._tx.items():
                make = self._state.cluster.make
                self._states[ref] = make(ref.place, tx_of.init, ref)
        except JdagError as error:
            failed = list(self._names)[len(self._states)]
            self.drop()
            _raise(error, f"{self._called(failed)} has no state")

    def _begin(self, refs: Any, clip_norm: float | None, skips: bool) -> None:
        leaves, self._treedef = flatten_refs(refs, is_ref)
        self._state = _state_of(leaves)
        self._clip_norm, self._skips = clip_norm, skips
        self._is_scaled = skips or clip_norm is not None
        self._names = dict(zip(leaves, paths(refs, is_ref), strict=True))
        self._states: dict[Ref, Any] = {}
        self._tx: dict[Ref, Any] = {}
        self._pairs: dict[Ref, Pair] = {}  # Traced steps, from another program.
        self._steps = 0
        self._describe_last_step: Callable[[], str] | None = None

    def __jdag_handed__(self) -> Partial:
        """Return a call of `remade`, by which another program makes its optimizer."""
        self._check_held()
        assignments = Assignments(self._state, self._state.driver.current)
        scale = (1.0,) if self._is_scaled else ()
        changes = [self._change(ref, ref, scale) for ref in self._states]
        pairs = [PairData(assignments.pair_of(change)) for change in changes]
        refs = unflatten(self._treedef, list(self._states))
        states = list(self._states.values())
        norm, skips = self._clip_norm, self._skips
        return Partial(remade, refs, states, pairs, norm, skips)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        # `copy.copy`, `copy.deepcopy` and `pickle` call this.
        raise JdagError(
            f"a copy of {self!r} would step the same leaves and states: make another "
            "jdag.Optimizer for copies of the leaves (cluster.copy(refs))"
        )

    def __repr__(self) -> str:
        owners = ", ".join(repr(worker) for worker in _by_owner(self._states))
        clip = "" if self._clip_norm is None else f", clip_norm={self._clip_norm}"
        clip += ", skip_not_finite=True" if self._skips else ""
        return f"Optimizer({len(self._states)} leaves on {owners or 'no worker'}{clip})"

    @property
    def states(self) -> Any:
        """Refs of the states, in the structure of the leaves.

        Raises:
            ContextError: the states were dropped.
        """
        self._check_held()
        return unflatten(self._treedef, list(self._states.values()))

    @property
    def steps(self) -> int:
        """The number of completed steps. Steps that raised WorkerLost do not count.

        `cluster.load` restores this number if the checkpoint contains it.
        """
        return self._steps

    def resumed(self, steps: int) -> None:
        """Set the number of steps, after leaves and states were restored."""
        self._steps = steps

    def step(self, ctx: Context, gradients: Any = None) -> None:
        """Update each leaf that has a gradient in `ctx`, on its owner.

        Leaves without a gradient, and their states, do not change. One message is sent
        to each owner, without waiting. With `clip_norm` or `skip_not_finite` the step
        first fetches the owners' squared norms, which are summed in the order of the
        leaves.

        If this call raises, no leaf was changed. A later error, on the owner of a leaf,
        affects that leaf alone: reading its new version raises the error.

        Args:
            ctx: the context of the gradients, of the leaves' cluster.
            gradients: None, or gradients to use in place of the context's: refs in the
                structure of the leaves, each on its leaf's worker, such as the result
                of `ctx.all_reduce`.

        Raises:
            ContextError: the context is not open, or belongs to another cluster; or the
                states were dropped.
            JdagError: `gradients` do not fit the leaves, or are on other workers.
            RemoteError: the transformation, or a norm, could not be computed.
            WorkerLost: an owner is lost; the error names the step, and the owners that
                completed the step before. If an owner is lost after this call, leaving
                the context raises the error.
        """
        self._check_held()
        if not isinstance(ctx, Context):
            raise JdagError(
                f"Optimizer.step takes the context of the gradients, not {kind_of(ctx)}"
            )
        self.check_state(ctx.state)
        present = self._present(ctx, gradients)
        try:
            scale = self._scale(ctx, present)
            if self._skips and any(map(math.isnan, scale)):
                return
            self._state.cluster.assign(
                [
                    self._change(ref, gradient, scale)
                    for ref, gradient in present.items()
                ]
            )
        except JdagError as error:
            self.refused(error)
        ctx.remarks.append(self.counted(tuple(present)))

    def check_state(self, state: ClusterState) -> None:
        """Raise ContextError unless the leaves belong to the cluster of this state."""
        self._check_held()
        if state is not self._state:
            raise ContextError(
                f"a step of leaves of {self._state} with the gradients of "
                f"{state.beside(self._state)}; the context must belong to the leaves' "
                "cluster"
            )

    def refused(self, error: JdagError) -> NoReturn:
        """Raise the error of a step, adding that no leaf has changed."""
        text = f"no leaf of {self!r} was stepped by step {self._steps + 1}"
        if self._describe_last_step is not None and isinstance(error, WorkerLost):
            text = f"{text}; {self._describe_last_step()}"
        _raise(error, text)

    def counted(self, refs: Sequence[Ref]) -> Callable[[], str]:
        """Count a step of these leaves; return a function that describes the step."""
        self._steps += 1
        self._describe_last_step = partial(self._description, self._steps, refs)
        return self._describe_last_step

    def planned(
        self, ctx: Context, gradients: Mapping[Key, Ref], bring: Callable[..., Ref]
    ) -> tuple[tuple[Ref, ...], Sequence[Assignment], Ref | None]:
        """Return the leaves that a plan updates by these gradients, and the changes.

        Args:
            ctx: records the computation of the scale, if there is a scale.
            gradients: the gradients by the keys of their leaves.
            bring: returns a ref of the scale on another worker, as a Python number.

        Returns:
            The leaves; the assignments of a step; and, with `skip_not_finite`, a ref of
            the scale, which is NaN for a skipped step.
        """
        self._check_held()
        present = {
            ref: gradients[ref.key] for ref in self._states if ref.key in gradients
        }
        scale = None
        if self._is_scaled and present:
            squares = self._squares(ctx, present)
            ordered = [squares[ref] for ref in present]  # In the order of the leaves.
            scale = ctx.call(ctx.here, clip_scale, static(self._clip_norm), ordered)
        changes = [
            self._change(ref, grad, () if scale is None else (bring(scale, ref.owner),))
            for ref, grad in present.items()
        ]
        assignments = Assignments(self._state, self._state.driver.current)
        skip = scale if self._skips else None
        return tuple(present), assignments.planned(changes), skip

    def _change(self, ref: Ref, gradient: Ref, scale: tuple[Any, ...]) -> Change:
        return Change(
            partial(stepped_if_finite if self._skips else stepped, self._tx[ref]),
            [ref, *flatten(self._states[ref])[0]],
            (ref, self._states[ref], gradient, *scale),
            f"stepping {self._called(ref)}",
            self._pairs.get(ref),
        )

    def _description(self, number: int, refs: Sequence[Ref]) -> str:
        lost = self._state.driver.current.lost
        owners = {ref.worker: lost(ref.owner) is not None for ref in refs}
        alive_owners, lost_owners = (
            ", ".join(repr(owner) for owner in owners if owners[owner] is is_lost)
            for is_lost in (False, True)
        )
        text = f"step {number} of {self!r} was made on {alive_owners or 'no owner'}"
        return f"{text}; the leaves on {lost_owners} are lost" if lost_owners else text

    def _present(self, ctx: Context, gradients: Any) -> dict[Ref, Ref]:
        by_leaf = ctx.gradients()
        if gradients is None:
            return {ref: by_leaf[ref] for ref in self._states if ref in by_leaf}
        refs, form = flatten_refs(gradients, is_ref)
        if form != self._treedef:
            raise JdagError(
                "Optimizer.step takes gradients in the structure of its leaves, "
                f"{self._treedef}, not {form}"
            )
        present = dict(zip(self._states, refs, strict=True))
        for ref, gradient in present.items():
            if (gradient.shape, gradient.dtype) != (ref.shape, ref.dtype):
                raise JdagError(
                    f"a gradient of {gradient.aval} for {self._called(ref)}, which is "
                    f"{ref.aval}"
                )
        return present

    def _scale(self, ctx: Context, gradients: Mapping[Ref, Ref]) -> tuple[Any, ...]:
        if not (self._is_scaled and gradients):
            return ()
        squares = self._squares(ctx, gradients)
        values = dict(zip(squares, fetch(list(squares.values())), strict=True))
        if ctx.state.abstract:  # In abstract mode there are no norms.
            return (1.0,)
        # In the order of the leaves, wherever they are.
        return (clip_scale(self._clip_norm, [values[ref] for ref in gradients]),)

    def _squares(self, ctx: Context, gradients: Mapping[Ref, Ref]) -> dict[Ref, Ref]:
        refs: list[Ref] = []
        squares: list[Any] = []
        norms = finite_norms if self._skips else squared_norms
        for owner, leaves in _by_owner(gradients).items():
            refs += leaves
            squares += ctx.call(owner, norms, [gradients[ref] for ref in leaves])
        return dict(zip(refs, squares, strict=True))

    def drop(self) -> None:
        """Drop the states, but not the leaves. Repeated calls have no effect."""
        states = flatten(list(self._states.values()))[0]
        self._state.cluster.drop([ref for ref in states if not ref.leaf.dropped])
        self._states.clear()

    def _check_held(self) -> None:
        if not self._states:
            raise ContextError(
                "the Optimizer's states were dropped; make another Optimizer"
            )

    def _called(self, ref: Ref) -> str:
        name = self._names[ref]
        return f"{name} ({ref.leaf})" if name else str(ref.leaf)


@remote
def remade(
    refs: Any,
    states: Sequence[Any],
    pairs: Sequence[PairData],
    clip_norm: float | None,
    skips: bool,
) -> Optimizer:
    optimizer = object.__new__(Optimizer)
    optimizer._begin(refs, clip_norm, skips)
    for ref, state, data in zip(optimizer._names, states, pairs, strict=True):
        optimizer._states[ref], optimizer._tx[ref] = state, None
        optimizer._pairs[ref] = data.pair.pair
    return optimizer


@remote
def squared_norms(gradients: Sequence[Any]) -> list[Any]:
    return [squared_norm(gradient) for gradient in gradients]


@remote
def finite_norms(gradients: Sequence[Any]) -> list[Any]:
    """Return squared norms; NaN for an array with an inf or a NaN."""
    both = zip(gradients, squared_norms(gradients), strict=True)
    return [jnp.where(jnp.isfinite(grad).all(), norm, jnp.nan) for grad, norm in both]


@remote
def squared_norm(gradient: Any) -> Any:
    wide = jnp.promote_types(jnp.abs(gradient).dtype, jnp.float32)
    return jnp.sum(jnp.square(jnp.abs(gradient).astype(wide)))


def _scalar(*_: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((), jnp.result_type(float))


@unjitted(shapes=_scalar)
def clip_scale(clip_norm: float | None, squares: Sequence[Any]) -> Any:
    """Return the factor that clips gradients of these squared norms; NaN if any is NaN.

    The factor is a weak scalar of JAX, so that `jax.transfer_guard` allows it.
    """
    total = 0.0
    for square in squares:
        total += float(square)
    norm = math.sqrt(total)
    if clip_norm is not None and norm > clip_norm:
        scale = clip_norm / norm
    else:
        scale = norm if math.isnan(norm) else 1.0
    return jax.device_put(scale)


@remote
def stepped(tx: Leafwise, leaf: Any, state: Any, gradient: Any, *scale: Any) -> Any:
    for factor in scale:
        gradient = (gradient * factor).astype(gradient.dtype)
    update, state = tx.update(gradient, state, leaf)
    return optax.apply_updates(leaf, update), state


@remote
def stepped_if_finite(
    tx: Leafwise, leaf: Any, state: Any, gradient: Any, scale: Any
) -> Any:
    skipped = jnp.isnan(scale)
    result = stepped(tx, leaf, state, gradient, jnp.where(skipped, 0, scale))
    former = leaf, state
    return jax.tree.map(lambda new, old: jnp.where(skipped, old, new), result, former)


def _by_owner(refs: Iterable[Ref]) -> dict[str, list[Ref]]:
    owners: dict[str, list[Ref]] = {}
    for ref in refs:
        owners.setdefault(ref.worker, []).append(ref)
    return owners


def _raise(error: JdagError, text: str) -> NoReturn:
    raise type(error)(f"{error}\n{text}") from error.__cause__


def _state_of(leaves: Sequence[Ref]) -> ClusterState:
    for ref in leaves:
        if ref.leaf is None or not ref.leaf.tracked:
            raise JdagError(
                f"{ref!r} cannot be stepped: an Optimizer takes float or complex "
                "leaves, the results of cluster.put and cluster.make, without "
                "tracked=False"
            )
    if len(dict.fromkeys(leaves)) < len(leaves):
        raise JdagError("a leaf occurs twice; an Optimizer takes each leaf once")
    state = leaves[0].holder.state
    assert isinstance(state, ClusterState), state
    return state
