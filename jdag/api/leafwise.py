"""An optax transformation as a function of one leaf, if it treats each by itself.

Leaves are on workers of their own, so what makes one depend on another is refused: the
jaxpr of the transformation tells. What acts on a leaf by its place among all (by a tree
of masks or labels) is handed the leaf in its place, with `optax.MaskedNode` in all
others; where the place makes no difference the leaf goes alone, so that leaves of one
shape share what is compiled.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
import optax

from jdag.compute.avals import Aval
from jdag.compute.callables import refuse_mutable
from jdag.compute.fingerprint import Once, key_of
from jdag.compute.jaxprs import depends
from jdag.compute.pytrees import Form, flatten
from jdag.engine.functions import remote
from jdag.errors import JdagError, named_text


@remote
@dataclass(frozen=True)
class Leafwise:
    """A transformation of one leaf: alone, or in its place in a form."""

    tx: optax.GradientTransformation
    form: Form | None = None
    place: int = 0

    @cached_property
    def __jdag_key__(self) -> Once:
        """Its identity for caches; found once, since each step asks for it."""
        return Once((Leafwise, key_of((self.tx, self.form, self.place))))

    def init(self, leaf: Any) -> Any:
        """Return the state of the leaf."""
        return self.tx.init(self._within(leaf))

    def update(self, gradient: Any, state: Any, leaf: Any) -> tuple[Any, Any]:
        """Return the leaf's update and its next state."""
        within = self._within
        updates, state = self.tx.update(within(gradient), state, within(leaf))
        (update,) = flatten(updates)[0]
        return update, state

    def _within(self, leaf: Any) -> Any:
        if self.form is None:
            return leaf
        leaves: list[Any] = [optax.MaskedNode()] * self.form.num_leaves
        leaves[self.place] = leaf
        return self.form.rebuild(leaves)


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
    _refuse_mixing(tx, form, avals, names)
    alone = Leafwise(tx)
    known = {(aval, _traced(alone, aval)): alone for aval in dict.fromkeys(avals)}
    found = []
    for place, aval in enumerate(avals):
        placed = Leafwise(tx, form, place)
        traced = _traced(placed, aval)
        if traced is None:  # Where neither can be traced, a step says why.
            placed = alone
        found.append(known.setdefault((aval, traced), placed))
    return found


def _traced(tx: Leafwise, aval: Aval) -> Any:
    """Return all that it does to such a leaf, to be compared; None if it raises."""
    try:
        parts = _jaxprs(tx, aval.struct())
        text = [re.sub(r" at 0x[0-9a-f]+", "", str(part)) for part in parts]
        constants = [value for part in parts for value in part.consts]
        return tuple(text), tuple(np.asarray(value).tobytes() for value in constants)
    except Exception:  # Whatever a user's transformation raises: it cannot be traced.
        return None


def _refuse_mixing(
    tx: optax.GradientTransformation,
    form: Form,
    avals: Sequence[Aval],
    names: Sequence[str],
) -> None:
    """Raise if the update of one leaf depends on another leaf or its gradient.

    The transformation is traced for all leaves together (a single leaf twice, if
    possible), and what each output depends on is read off the jaxpr: a bit a leaf. What
    a state carries is followed from step to step until nothing new comes in.
    """
    begun, stepped = [closed.jaxpr for closed in _together(tx, form, avals)]
    if len(begun.invars) > len(avals):
        names = ["the leaf", "another"]
    bits = [1 << place for place in range(len(begun.invars))]
    carried = depends(begun, bits)
    while True:  # Bounded: masks of so many bits only grow.
        masks = depends(stepped, [*bits, *carried, *bits])
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


def _together(
    tx: optax.GradientTransformation, form: Form, avals: Sequence[Aval]
) -> Any:
    leaves = [aval.struct() for aval in avals]
    if len(leaves) == 1:
        with suppress(Exception):  # A mask for one leaf, say, does not fit two.
            return _jaxprs(tx, leaves * 2)
    try:
        return _jaxprs(tx, form.rebuild(leaves))
    except Exception as error:
        raise JdagError(
            "the transformation cannot be applied as tx.update(gradients, state, "
            f"parameters) to leaves such as {avals[0]}: {named_text(error)}; "
            "one that takes more is not supported"
        ) from error


def _jaxprs(tx: optax.GradientTransformation | Leafwise, leaves: Any) -> Any:
    update: Callable[..., Any] = tx.update
    begun, state = jax.make_jaxpr(tx.init, return_shape=True)(leaves)
    return begun, jax.make_jaxpr(update)(leaves, state, leaves)
