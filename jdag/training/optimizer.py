"""An optimizer over refs: an optax transformation, leaf by leaf, stepped on each owner.

Every leaf has a state of its own beside it. A leaf without a gradient is not stepped,
nor is its state.
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
    """Steps leaves by their gradients, each on its owner, all owners at once.

    Args:
        tx: an optax `GradientTransformation`, of which each leaf gets its part, as of
            all leaves in one place: sgd, adam, schedules (which count each leaf's own
            steps), weight decay, `inject_hyperparams`, `MultiSteps`, masks, labels and
            rates by place, `add_noise`, chains of these. It stays as it is: what it
            holds is looked at once.
        refs: the leaves, a pytree, on any workers. Programs that `cluster.run` runs may
            be handed the optimizer: they step the same leaves and states.
        clip_norm: None, or the norm over all gradients of a step, on all owners, to
            which they are scaled down where it is larger.
        skip_not_finite: whether a step in which a gradient has an inf or a NaN, on any
            owner, is skipped: leaves, states and `steps` stay as they are. So losses
            can be scaled, and the scale chosen by whether `steps` has grown.

    Raises:
        JdagError: a ref is no leaf or not inexact; or the transformation mixes leaves
            (`clip_by_global_norm`, `apply_if_finite`, `prodigy`), or takes more than
            gradients and parameters (`lookahead`, `reduce_on_plateau`, line searches):
            it is named.
        WorkerLost: an owner is gone.
    """

    __jdag_taken__ = (
        "programs of cluster.run, which have a cluster, may be handed it as an "
        "argument of its own"
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
            raise JdagError("an Optimizer needs leaves to step, and there are none")
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
        self._pairs: dict[Ref, Pair] = {}  # Of one that was handed over.
        self._steps = 0
        self._made: Callable[[], str] | None = None  # What to say of the last step.

    def __jdag_handed__(self) -> Partial:
        """Return data of which another program makes its own, by calling them."""
        self._check_held()
        own = Assignments(self._state, self._state.driver.current)
        scale = (1.0,) if self._is_scaled else ()
        changes = [self._change(ref, ref, scale) for ref in self._states]
        pairs = [PairData(own.pair_of(change)) for change in changes]
        refs = unflatten(self._treedef, list(self._states))
        states = list(self._states.values())
        norm, skips = self._clip_norm, self._skips
        return Partial(remade, refs, states, pairs, norm, skips)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        # What `copy.copy`, `copy.deepcopy` and `pickle` ask for.
        raise JdagError(
            f"a copy of {self!r} would step the same leaves and states: make another "
            "jdag.Optimizer, of copies of the leaves (cluster.copy(refs))"
        )

    def __repr__(self) -> str:
        owners = ", ".join(repr(worker) for worker in _by_owner(self._states))
        clip = "" if self._clip_norm is None else f", clip_norm={self._clip_norm}"
        clip += ", skip_not_finite=True" if self._skips else ""
        return f"Optimizer({len(self._states)} leaves on {owners or 'no worker'}{clip})"

    @property
    def states(self) -> Any:
        """The states as refs on the owners, in the structure of the leaves.

        Raises:
            ContextError: they were dropped.
        """
        self._check_held()
        return unflatten(self._treedef, list(self._states.values()))

    @property
    def steps(self) -> int:
        """How many steps were made; one that raised WorkerLost is none.

        `cluster.load` restores it, from checkpoints that have it.
        """
        return self._steps

    def resumed(self, steps: int) -> None:
        """Count on from so many steps: leaves and states are those after them."""
        self._steps = steps

    def step(self, ctx: Context, gradients: Any = None) -> None:
        """Give each leaf that has a gradient in `ctx` its next version, on its owner.

        Leaves without one, and their states, stay as they are. `gradients` are used in
        place of those in `ctx`: refs in the structure of the leaves, each on its leaf's
        worker, such as `ctx.all_reduce` gives. One message goes to each owner. Waits
        for nothing, but with `clip_norm` or `skip_not_finite` for one exchange before
        it: the owners' squared norms come here, are summed in the order of the leaves,
        and the scale goes out with the step. What raises here has stepped no leaf. What
        fails later, on an owner, fails for that leaf alone: reading its new version
        raises.

        Raises:
            ContextError: the context is over, or of another cluster; or the states were
                dropped.
            JdagError: `gradients` are not those of the leaves, or on other workers.
            RemoteError: the transformation, or a norm, could not be computed.
            WorkerLost: an owner is gone. The error names the step, and on which owners
                the one before was made; so does that of leaving the context, where an
                owner is lost after the step was asked for.
        """
        self._check_held()
        if not isinstance(ctx, Context):
            raise JdagError(
                f"Optimizer.step takes the context whose gradients it is to use, not "
                f"{kind_of(ctx)}"
            )
        self.check_state(ctx.state)
        present = self._present(ctx, gradients)
        try:
            scale = self._scale(ctx, present)
            if self._skips and any(map(math.isnan, scale)):
                return
            self._state.cluster.assign(
                [self._change(ref, of, scale) for ref, of in present.items()]
            )
        except JdagError as error:
            self.refused(error)
        ctx.remarks.append(self.counted(tuple(present)))

    def check_state(self, state: ClusterState) -> None:
        """Raise ContextError unless its leaves are of the cluster of this state."""
        self._check_held()
        if state is not self._state:
            raise ContextError(
                f"a step of leaves of {self._state} with the gradients of "
                f"{state.beside(self._state)}; the context has to be one of the "
                "leaves' cluster"
            )

    def refused(self, error: JdagError) -> NoReturn:
        """Raise an error of a step that was not made, with what it means for leaves."""
        text = f"no leaf of {self!r} was stepped by step {self._steps + 1}"
        if self._made is not None and isinstance(error, WorkerLost):
            text = f"{text}; {self._made()}"
        _raise(error, text)

    def counted(self, refs: Sequence[Ref]) -> Callable[[], str]:
        """Count a step of these leaves; return what to say of it where one is lost."""
        self._steps += 1
        self._made = partial(self._said_of_step, self._steps, refs)
        return self._made

    def planned(
        self, ctx: Context, gradients: Mapping[Key, Ref], bring: Callable[..., Ref]
    ) -> tuple[tuple[Ref, ...], Sequence[Assignment], Ref | None]:
        """Return leaves that a plan steps by these gradients, and what makes them.

        `ctx` records what gives the scale, if there is one; `bring` gives a ref to that
        on another worker, as a Python number. The last is the scale where it tells, as
        NaN, that the step is skipped.
        """
        self._check_held()
        present = {
            ref: gradients[ref.key] for ref in self._states if ref.key in gradients
        }
        scale = None
        if self._is_scaled and present:
            squares = self._squares(ctx, present)
            given = [squares[ref] for ref in present]  # In the order of the leaves.
            scale = ctx.call(ctx.here, clip_scale, static(self._clip_norm), given)
        changes = [
            self._change(ref, of, () if scale is None else (bring(scale, ref.owner),))
            for ref, of in present.items()
        ]
        own = Assignments(self._state, self._state.driver.current)
        return tuple(present), own.planned(changes), scale if self._skips else None

    def _change(self, ref: Ref, gradient: Ref, scale: tuple[Any, ...]) -> Change:
        return Change(
            partial(stepped_if_finite if self._skips else stepped, self._tx[ref]),
            [ref, *flatten(self._states[ref])[0]],
            (ref, self._states[ref], gradient, *scale),
            f"stepping {self._called(ref)}",
            self._pairs.get(ref),
        )

    def _said_of_step(self, number: int, refs: Sequence[Ref]) -> str:
        lost = self._state.driver.current.lost
        owners = {ref.worker: lost(ref.owner) is not None for ref in refs}
        made, gone = (
            ", ".join(repr(owner) for owner in owners if owners[owner] is is_lost)
            for is_lost in (False, True)
        )
        text = f"step {number} of {self!r} was made on {made or 'no owner'}"
        return f"{text}; the leaves on {gone} are lost" if gone else text

    def _present(self, ctx: Context, given: Any) -> dict[Ref, Ref]:
        found = ctx.gradients()
        if given is None:
            return {ref: found[ref] for ref in self._states if ref in found}
        gradients, form = flatten_refs(given, is_ref)
        if form != self._treedef:
            raise JdagError(
                "Optimizer.step takes gradients in the structure of its leaves, "
                f"{self._treedef}, and these are {form}"
            )
        present = dict(zip(self._states, gradients, strict=True))
        for ref, gradient in present.items():
            if (gradient.shape, gradient.dtype) != (ref.shape, ref.dtype):
                raise JdagError(
                    f"a gradient of {gradient.aval} for {self._called(ref)}, which is "
                    f"{ref.aval}"
                )
        return present

    def _scale(self, ctx: Context, gradients: Mapping[Ref, Ref]) -> tuple[Any, ...]:
        """Return the factor that scales all gradients, () if there is none."""
        if not (self._is_scaled and gradients):
            return ()
        squares = self._squares(ctx, gradients)
        of = dict(zip(squares, fetch(list(squares.values())), strict=True))
        if ctx.state.abstract:  # Shapes have no norm; a scale travels all the same.
            return (1.0,)
        # In the order of the leaves, wherever they are.
        return (clip_scale(self._clip_norm, [of[ref] for ref in gradients]),)

    def _squares(self, ctx: Context, gradients: Mapping[Ref, Ref]) -> dict[Ref, Ref]:
        refs: list[Ref] = []
        squares: list[Any] = []
        norms = finite_norms if self._skips else squared_norms
        for owner, own in _by_owner(gradients).items():
            refs += own
            squares += ctx.call(owner, norms, [gradients[ref] for ref in own])
        return dict(zip(refs, squares, strict=True))

    def drop(self) -> None:
        """Drop the states from their owners; the leaves stay. Twice is once."""
        held = flatten(list(self._states.values()))[0]
        self._state.cluster.drop([ref for ref in held if not ref.leaf.dropped])
        self._states.clear()

    def _check_held(self) -> None:
        if not self._states:
            raise ContextError("an Optimizer whose states were dropped; make another")

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
    """Return an optimizer over the leaves and states of another program's."""
    made = object.__new__(Optimizer)
    made._begin(refs, clip_norm, skips)
    for ref, state, data in zip(made._names, states, pairs, strict=True):
        made._states[ref], made._tx[ref] = state, None
        made._pairs[ref] = data.pair.pair
    return made


@remote
def squared_norms(gradients: Sequence[Any]) -> list[Any]:
    """Return of each array the sum of squared magnitudes; see `squared_norm`."""
    return [squared_norm(gradient) for gradient in gradients]


@remote
def finite_norms(gradients: Sequence[Any]) -> list[Any]:
    """Return the same, but NaN of an array with an inf or a NaN."""
    both = zip(gradients, squared_norms(gradients), strict=True)
    return [jnp.where(jnp.isfinite(one).all(), norm, jnp.nan) for one, norm in both]


@remote
def squared_norm(gradient: Any) -> Any:
    """Return the sum of squared magnitudes, at least in float32: a scalar."""
    wide = jnp.promote_types(jnp.abs(gradient).dtype, jnp.float32)
    return jnp.sum(jnp.square(jnp.abs(gradient).astype(wide)))


def _scalar(*_: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((), jnp.result_type(float))


@unjitted(shapes=_scalar)
def clip_scale(clip_norm: float | None, squares: Sequence[Any]) -> Any:
    """Return the factor that clips gradients of these squared norms; NaN if one is.

    A weak scalar of JAX, so that a guard of implicit transfers lets it pass.
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
    """Return a leaf and its optimizer state after one step, on its owner."""
    for factor in scale:
        gradient = (gradient * factor).astype(gradient.dtype)
    update, state = tx.update(gradient, state, leaf)
    return optax.apply_updates(leaf, update), state


@remote
def stepped_if_finite(
    tx: Leafwise, leaf: Any, state: Any, gradient: Any, scale: Any
) -> Any:
    """Return the same; as they were where the scale is NaN."""
    skipped = jnp.isnan(scale)
    made = stepped(tx, leaf, state, gradient, jnp.where(skipped, 0, scale))
    old = leaf, state
    return jax.tree.map(lambda new, was: jnp.where(skipped, was, new), made, old)


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
                "leaves, as cluster.put and cluster.make give, and none that was put "
                "with tracked=False"
            )
    if len(dict.fromkeys(leaves)) < len(leaves):
        raise JdagError(
            "a leaf is there twice; an Optimizer steps each of its own once"
        )
    state = leaves[0].holder.state
    assert isinstance(state, ClusterState), state
    return state
