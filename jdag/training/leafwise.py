"""Optax transformations applied leaf by leaf.

Leaves may be on different workers, so a transformation in which leaves depend on each
other is refused. Such dependences are found in its jaxpr for all leaves. The slice of a
leaf is the part of that jaxpr that computes the leaf's update and state. If the slice
equals the jaxpr for this leaf alone, the transformation is applied to the leaf alone.
Otherwise (masks, labels, rates by path, noise from keys split over all leaves) the
slice is run, with the leaf's part of the state. Leaves with equal slices share a
compiled function.
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
    """A transformation traced for all leaves, and the leaf of each output and state."""

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
                raise ValueError("it must return one update for each leaf")
            shapes = [jax.tree.map(np.shape, tree) for tree in (state, after)]
            if shapes[0] != shapes[1]:
                raise ValueError("its state must keep its structure and shapes")
        except Exception as error:
            calls = [f.f_code.co_qualname for f, _ in walk_tb(error.__traceback__)]
            raise JdagError(
                "the transformation cannot be applied as tx.update(gradients, state, "
                f"parameters) to leaves such as {avals[0]}: {named_text(error)}, in "
                f"{_named(tx, calls[::-1])}; additional arguments are not supported"
            ) from error
        self.trees = leaves, state
        self.states = jax.tree.leaves(state)

    @cached_property
    def __jdag_key__(self) -> Once:
        return Once((Whole, key_of((self.tx, self.form, self.avals))))

    @cached_property
    def masks(self) -> list[int]:
        """For each update, then each state, a bit mask of leaves on which it depends.

        A state that depends on no leaf, such as zeros, belongs to the leaf whose path
        is a suffix of the state's path, unless a mask would then contain two leaves.
        """
        params, states = map(jax.tree_util.tree_flatten_with_path, self.trees)
        bits = {path: 1 << index for index, (path, _) in enumerate(params[0])}
        owners = []
        for path, _ in states[0]:
            suffixes = [path[start:] for start in range(len(path) + 1)]
            owners.append(next((bits[end] for end in suffixes if end in bits), 0))
        masks = self._dependences(owners)
        if any([mask & (mask - 1) for mask in masks]):
            return self._dependences([0] * len(owners))
        return masks

    def _dependences(self, states: Sequence[int]) -> list[int]:
        """Return the masks of updates and states after any number of steps.

        A mask contains the leaves on which a value depends. `states` are initial masks.
        """
        bits = [1 << index for index in range(len(self.avals))]
        states = list(map(or_, states, depends(self.init.jaxpr, bits)))
        while True:  # Bounded, since masks only grow.
            masks = depends(self.update.jaxpr, [*bits, *states, *bits])
            grown = list(map(or_, states, masks[len(bits) :]))
            if grown == states:
                return [*masks[: len(bits)], *states]
            states = grown

    @cached_property
    def _states_by_mask(self) -> dict[int, list[int]]:
        by_mask: dict[int, list[int]] = defaultdict(list)
        for index, mask in enumerate(self.masks[len(self.avals) :]):
            by_mask[mask].append(index)
        return by_mask

    @cached_property
    def _layout(self) -> tuple[list[Any], Any]:
        """Parts and outer structure of the state, with indices in place of states.

        A part with one state for each leaf is the list of these states' indices.
        """
        form = jax.tree.structure(self.trees[1])
        parts, outer = jax.tree.flatten(
            jax.tree.unflatten(form, range(len(self.states))),
            lambda part: bool(self._by_leaf(part)),
        )
        return [self._by_leaf(part) or part for part in parts], outer

    def _by_leaf(self, part: Any) -> list[Any]:
        """Return a part's state indices if it has one state per leaf, otherwise []."""
        params: Any = jax.tree.structure(self.trees[0])
        indices, form = jax.tree.flatten(part, _is_masked)
        if form != params:
            return []
        masks = self.masks[len(self.avals) :]
        belongs = [
            masks[index] == 1 << leaf
            for leaf, index in enumerate(indices)
            if not _is_masked(index)
        ]
        return indices if all(belongs) else []

    def state(self, leaf: int, values: Sequence[Any]) -> Any:
        """Return the state of a leaf; other leaves' states are `optax.MaskedNode`."""
        by_index: dict[Any, Any] = dict(zip(self.indices(leaf), values, strict=True))
        # Some states of optax would get a wider dtype in a step: cast them back.
        for index, value in by_index.items():
            by_index[index] = lax.convert_element_type(value, self.states[index].dtype)
        parts, form = self._layout
        indices = [part[leaf] if isinstance(part, list) else part for part in parts]
        none = optax.MaskedNode()
        states = [none if _is_masked(i) else by_index.get(i, none) for i in indices]
        return jax.tree.unflatten(form, states)

    def indices(self, leaf: int) -> list[int]:
        return sorted([*self._states_by_mask[0], *self._states_by_mask[1 << leaf]])

    def ends(self, leaf: int) -> tuple[list[Any], list[Any], list[Any]]:
        """Return a leaf's outputs of `init`, and its inputs and outputs of `update`."""
        count, indices = len(self.avals), self.indices(leaf)
        init, update = self.init.jaxpr, self.update.jaxpr
        inputs = [leaf, *[count + index for index in indices], leaf - count]
        outputs = [leaf, *[count + index for index in indices]]
        return (
            [init.outvars[index] for index in indices],
            [update.invars[index] for index in inputs],
            [update.outvars[index] for index in outputs],
        )

    def key(self, leaf: int) -> Hashable:
        """Return a key of a leaf's slice; equal keys mean equal functions."""
        init_outputs, inputs, outputs = self.ends(leaf)
        init_inputs = [self.init.jaxpr.invars[leaf]]
        init_key = self.slicer.key(self.init, init_inputs, init_outputs)
        return init_key, self.slicer.key(self.update, inputs, outputs)

    def refuse_mixing(self, names: Sequence[str]) -> None:
        count = len(self.avals)
        for index, mask in enumerate(self.masks):
            bit = 1 << index if index < count else mask & -mask
            if mask & ~bit:
                what = "its update" if index < count else "a state"
                other = names[(mask & ~bit).bit_length() - 1]
                raise JdagError(
                    f"the transformation mixes leaves, in {self._mixer()}: {what} of "
                    f"{names[bit.bit_length() - 1]} depends on the gradient or value "
                    f"of {other}, but leaves may be on different workers. Leave out "
                    "this transformation; jdag.Optimizer has clip_norm= in place of "
                    "optax.clip_by_global_norm, and skip_not_finite=True in place of "
                    "apply_if_finite and skip_not_finite"
                )

    def _mixer(self) -> str:
        bits = [1 << index for index in range(len(self.avals))]
        equation = first_union(self.init.jaxpr, bits)
        states = depends(self.init.jaxpr, bits)
        for _ in range(len(bits) + len(states)):  # More steps add no dependence.
            if equation is not None:
                break
            masks = [*bits, *states, *bits]
            equation = first_union(self.update.jaxpr, masks)
            states = depends(self.update.jaxpr, masks)[len(bits) :]
        frames = equation.source_info.traceback.frames
        return _named(self.tx, [frame.function_name for frame in frames])


@remote
@dataclass(frozen=True)
class Leafwise:
    """The transformation of one leaf.

    It applies `tx` to the leaf alone, or runs the leaf's slice of the jaxpr in `whole`.
    """

    tx: optax.GradientTransformation
    whole: Whole | None = None
    index: int = 0  # The index of the leaf in `whole`.

    @cached_property
    def __jdag_key__(self) -> Once:
        return Once((Leafwise, key_of((self.tx, self.whole, self.index))))

    def init(self, leaf: Any) -> Any:
        whole = self.whole
        if whole is None:
            return self.tx.init(leaf)
        outputs, _, _ = whole.ends(self.index)
        run = whole.slicer.function(whole.init, outputs)
        values = run({whole.init.jaxpr.invars[self.index]: leaf})
        return whole.state(self.index, values)

    def update(self, gradient: Any, state: Any, leaf: Any) -> tuple[Any, Any]:
        whole = self.whole
        if whole is None:
            update, state = self.tx.update(gradient, state, leaf)
            return update, state
        _, inputs, outputs = whole.ends(self.index)
        run = whole.slicer.function(whole.update, outputs)
        values = [gradient, *jax.tree.leaves(state), leaf]
        update, *states = run(dict(zip(inputs, values, strict=True)))
        return update, whole.state(self.index, states)


def leafwise(
    tx: optax.GradientTransformation,
    form: Form,
    avals: Sequence[Aval],
    names: Sequence[str],
) -> list[Leafwise]:
    """Return the transformation of each leaf of a pytree of this form.

    Raises:
        JdagError: the transformation mixes leaves, cannot be applied to them, or has
            mutable state.
    """
    refuse_mutable(partial(tx.update, tx.init))
    whole = Whole(tx, form, avals)
    if len(avals) == 1:
        several = None
        with suppress(JdagError):  # A mask for one leaf, for example, does not fit two.
            several = Whole(tx, _form_of([0, 0]), [*avals, *avals])
        if several is not None:
            several.refuse_mixing(["the leaf", "another"])
    whole.refuse_mixing(names)
    by_key: dict[Any, Leafwise] = {}
    for aval in dict.fromkeys(avals):
        with suppress(JdagError):  # Some transformations need a leaf in a tree.
            alone = Whole(tx, _form_of(0), [aval])
            by_key[aval, alone.key(0)] = Leafwise(tx)
    result = []
    for index, aval in enumerate(avals):
        sliced = Leafwise(tx, whole, index)
        result.append(by_key.setdefault((aval, whole.key(index)), sliced))
        if result[-1].whole and (whole.init.effects or whole.update.effects):
            raise JdagError(
                "the transformation has effects, such as jax.debug.print, and treats "
                f"{names[index]} differently from a single leaf; remove the effects"
            )
    return result


def _named(tx: optax.GradientTransformation, calls: Sequence[str]) -> str:
    default = name_of(tx.update).rpartition(":")[2]
    parts = [call.partition(".<locals>.") for call in (*calls, default)]
    inside = [name for name, _, rest in parts if rest.startswith(("update", "init"))]
    return inside[0] if inside else default


def _is_masked(part: Any) -> bool:
    return isinstance(part, optax.MaskedNode)


def _form_of(tree: Any) -> Form:
    leaves, treedef = jax.tree.flatten(tree)
    return Form(treedef, [HOLE] * len(leaves))
