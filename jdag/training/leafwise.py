"""An optax transformation as a function of one leaf, if it treats each by itself.

Leaves are on workers of their own, so what makes one depend on another is refused: the
jaxpr of the transformation of all leaves tells. A leaf's part of that jaxpr is what
optax does to it. Where the transformation of a leaf alone is the same, the leaf goes
alone; else (masks, labels, rates by place, noise by keys that are split over all) its
part is run, on its part of the state. Leaves with equal parts share what is compiled.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from operator import or_
from traceback import walk_tb
from typing import Any

import jax
import numpy as np
import optax
from jax import lax

from jdag.compute.avals import Aval
from jdag.compute.callables import refuse_mutable
from jdag.compute.fingerprint import Once, key_of
from jdag.compute.jaxpr_slicing import Slicer
from jdag.compute.jaxprs import depends, first_union
from jdag.compute.pytrees import Form
from jdag.engine.arrays import HOLE
from jdag.engine.functions import name_of, remote
from jdag.errors import JdagError, named_text


class Whole:
    """A transformation of all leaves, traced; outputs and states by leaf.

    Raises:
        JdagError: it cannot be applied to them.
    """

    def __init__(
        self, tx: optax.GradientTransformation, form: Form, avals: Sequence[Aval]
    ) -> None:
        self.tx, self.form, self.avals = tx, form, tuple(avals)
        self.slicer = Slicer()
        update: Callable[..., Any] = tx.update
        try:
            leaves = form.rebuild([aval.struct() for aval in avals])
            self.init, state = jax.make_jaxpr(tx.init, return_shape=True)(leaves)
            traced = jax.make_jaxpr(update, return_shape=True)(leaves, state, leaves)
            self.update, (updates, after) = traced
            if len(jax.tree.leaves(updates)) != len(avals):
                raise ValueError("it does not return an update for each leaf")
            shapes = [jax.tree.map(np.shape, one) for one in (state, after)]
            if shapes[0] != shapes[1]:
                raise ValueError("its state changes its structure or shapes")
        except Exception as error:
            calls = [at.f_code.co_qualname for at, _ in walk_tb(error.__traceback__)]
            raise JdagError(
                "the transformation cannot be applied as tx.update(gradients, state, "
                f"parameters) to leaves such as {avals[0]}: {named_text(error)}, in "
                f"{_named(tx, calls[::-1])}; one that takes more is not supported"
            ) from error
        self.trees = leaves, state
        self.states = jax.tree.leaves(state)

    @cached_property
    def __jdag_key__(self) -> Once:
        """Its identity for caches."""
        return Once((Whole, key_of((self.tx, self.form, self.avals))))

    @cached_property
    def masks(self) -> list[int]:
        """What updates and then states depend on: a bit for each leaf.

        A state that depends on none, such as zeros, is of the leaf to whose path its
        own path leads, unless another leaf needs it.
        """
        params, states = map(jax.tree_util.tree_flatten_with_path, self.trees)
        bits = {path: 1 << place for place, (path, _) in enumerate(params[0])}
        ends = [[path[at:] for at in range(len(path) + 1)] for path, _ in states[0]]
        own = [next((bits[end] for end in few if end in bits), 0) for few in ends]
        found = self._followed(own)
        if any([mask & (mask - 1) for mask in found]):
            return self._followed([0] * len(own))
        return found

    def _followed(self, carried: Sequence[int]) -> list[int]:
        """Return masks; what a state carries is followed until nothing new comes in."""
        bits = [1 << place for place in range(len(self.avals))]
        carried = list(map(or_, carried, depends(self.init.jaxpr, bits)))
        while True:  # Bounded: masks of so many bits only grow.
            masks = depends(self.update.jaxpr, [*bits, *carried, *bits])
            grown = list(map(or_, carried, masks[len(bits) :]))
            if grown == carried:
                return [*masks[: len(bits)], *carried]
            carried = grown

    @cached_property
    def _own(self) -> dict[int, list[int]]:
        """The places of states, by mask."""
        found: dict[int, list[int]] = defaultdict(list)
        for place, mask in enumerate(self.masks[len(self.avals) :]):
            found[mask].append(place)
        return found

    @cached_property
    def _layout(self) -> tuple[list[Any], Any]:
        """The numbers of states, or lists of one for each leaf; and their structure."""
        form = jax.tree.structure(self.trees[1])
        parts, outer = jax.tree.flatten(
            jax.tree.unflatten(form, range(len(self.states))),
            lambda part: bool(self._by_leaf(part)),
        )
        return [self._by_leaf(part) or part for part in parts], outer

    def _by_leaf(self, part: Any) -> list[Any]:
        """Return the states of a part that has one, or none, for each leaf; else []."""
        every: Any = jax.tree.structure(self.trees[0])
        numbers, form = jax.tree.flatten(part, _is_masked)
        if form != every:
            return []
        owned = self.masks[len(self.avals) :]
        places = [at for at, one in enumerate(numbers) if not _is_masked(one)]
        own = [owned[numbers[place]] == 1 << place for place in places]
        return numbers if all(own) else []

    def state(self, place: int, values: Sequence[Any]) -> Any:
        """Return the state of a leaf; `optax.MaskedNode` is for what it has none of."""
        of: dict[Any, Any] = dict(zip(self.kept(place), values, strict=True))
        # Some of optax's states would be wider after a step; a leaf keeps its type.
        for at, value in of.items():
            of[at] = lax.convert_element_type(value, self.states[at].dtype)
        parts, form = self._layout
        own = [part[place] if isinstance(part, list) else part for part in parts]
        none = optax.MaskedNode()
        held = [none if _is_masked(one) else of.get(one, none) for one in own]
        return jax.tree.unflatten(form, held)

    def kept(self, place: int) -> list[int]:
        """The places of the states that a leaf has: its own, and those of no leaf."""
        return sorted([*self._own[0], *self._own[1 << place]])

    def ends(self, place: int) -> tuple[list[Any], list[Any], list[Any]]:
        """Of a leaf the outputs of `init`; inputs and outputs of `update`."""
        count, kept = len(self.avals), self.kept(place)
        first, then = self.init.jaxpr, self.update.jaxpr
        inputs = [place, *[count + at for at in kept], place - count]
        outputs = [place, *[count + at for at in kept]]
        return (
            [first.outvars[at] for at in kept],
            [then.invars[at] for at in inputs],
            [then.outvars[at] for at in outputs],
        )

    def key(self, place: int) -> Hashable:
        """All that it does to a leaf, to be compared."""
        made, inputs, outputs = self.ends(place)
        begun = self.slicer.key(self.init, [self.init.jaxpr.invars[place]], made)
        return begun, self.slicer.key(self.update, inputs, outputs)

    def refuse_mixing(self, names: Sequence[str]) -> None:
        """Raise if an update, or a state, depends on several leaves or gradients."""
        count = len(self.avals)
        for place, mask in enumerate(self.masks):
            own = 1 << place if place < count else mask & -mask
            if mask & ~own:
                what = "its update" if place < count else "a state"
                other = names[(mask & ~own).bit_length() - 1]
                raise JdagError(
                    f"the transformation mixes leaves, in {self._mixer()}: {what} of "
                    f"{names[own.bit_length() - 1]} depends on the gradient or value "
                    f"of {other}, and leaves may be on different workers. Leave out "
                    "what takes them all together; in place of "
                    "optax.clip_by_global_norm jdag.Optimizer has clip_norm=, and of "
                    "apply_if_finite and skip_not_finite it has skip_not_finite=True"
                )

    def _mixer(self) -> str:
        """The name of the first transformation in which leaves meet."""
        bits = [1 << place for place in range(len(self.avals))]
        found = first_union(self.init.jaxpr, bits)
        carried = depends(self.init.jaxpr, bits)
        for _ in range(len(bits) + len(carried)):  # By then leaves have met.
            if found is not None:
                break
            masks = [*bits, *carried, *bits]
            found = first_union(self.update.jaxpr, masks)
            carried = depends(self.update.jaxpr, masks)[len(bits) :]
        frames = found.source_info.traceback.frames
        return _named(self.tx, [frame.function_name for frame in frames])


@remote
@dataclass(frozen=True)
class Leafwise:
    """A transformation of one leaf: alone, or as its part of what is done to all."""

    tx: optax.GradientTransformation
    whole: Whole | None = None
    place: int = 0

    @cached_property
    def __jdag_key__(self) -> Once:
        """Its identity for caches; found once, since each step asks for it."""
        return Once((Leafwise, key_of((self.tx, self.whole, self.place))))

    def init(self, leaf: Any) -> Any:
        """Return the state of the leaf."""
        whole = self.whole
        if whole is None:
            return self.tx.init(leaf)
        made, _, _ = whole.ends(self.place)
        run = whole.slicer.function(whole.init, made)
        values = run({whole.init.jaxpr.invars[self.place]: leaf})
        return whole.state(self.place, values)

    def update(self, gradient: Any, state: Any, leaf: Any) -> tuple[Any, Any]:
        """Return the leaf's update and its next state."""
        if self.whole is None:
            update, state = self.tx.update(gradient, state, leaf)
            return update, state
        whole = self.whole
        _, inputs, outputs = whole.ends(self.place)
        run = whole.slicer.function(whole.update, outputs)
        given = [gradient, *jax.tree.leaves(state), leaf]
        update, *after = run(dict(zip(inputs, given, strict=True)))
        return update, whole.state(self.place, after)


def leafwise(
    tx: optax.GradientTransformation,
    form: Form,
    avals: Sequence[Aval],
    names: Sequence[str],
) -> list[Leafwise]:
    """Return the transformation of each leaf of a pytree of this form.

    Raises:
        JdagError: it mixes leaves, cannot be applied to them, or could change unseen.
    """
    refuse_mutable(partial(tx.update, tx.init))
    whole = Whole(tx, form, avals)
    if len(avals) == 1:
        several = None
        with suppress(JdagError):  # A mask for one leaf, say, does not fit two.
            several = Whole(tx, _form_of([0, 0]), [*avals, *avals])
        if several is not None:
            several.refuse_mixing(["the leaf", "another"])
    whole.refuse_mixing(names)
    known: dict[Any, Leafwise] = {}
    for aval in dict.fromkeys(avals):
        with suppress(JdagError):  # Then it is another for a leaf in a tree.
            alone = Whole(tx, _form_of(0), [aval])
            known[aval, alone.key(0)] = Leafwise(tx)
    found = []
    for place, aval in enumerate(avals):
        placed = Leafwise(tx, whole, place)
        found.append(known.setdefault((aval, whole.key(place)), placed))
        if found[-1].whole and (whole.init.effects or whole.update.effects):
            raise JdagError(
                "the transformation has effects, such as jax.debug.print, and does to "
                f"{names[place]} what it does not do to a leaf alone; leave them out"
            )
    return found


def _named(tx: optax.GradientTransformation, calls: Sequence[str]) -> str:
    """Return the transformation in whose function is the first of these calls."""
    own = name_of(tx.update).rpartition(":")[2]
    parts = [call.partition(".<locals>.") for call in (*calls, own)]
    inside = [name for name, _, rest in parts if rest.startswith(("update", "init"))]
    return inside[0] if inside else own


def _is_masked(part: Any) -> bool:
    return isinstance(part, optax.MaskedNode)


def _form_of(tree: Any) -> Form:
    leaves, treedef = jax.tree.flatten(tree)
    return Form(treedef, [HOLE] * len(leaves))
