"""How replicas run: one alone, one call a device, or one program over all devices.

A plan is made once for a function, its abstract values and devices, and kept. It takes
the arrays of a call as they came, and carries cotangents back to where these live:

    forward(arrays, homes, target)       -> (outputs on the target, residuals)
    vjp(residuals, cotangents, homes)    -> a cotangent for each tracked array

`Alone` is for one replica, whose call is plain JAX's but for where its arrays are.
`Each` calls a compiled pair on every device, whatever the chunks. `OneProgram` is a
forward and a vjp over all devices, by `jax.pmap` or by `jax.shard_map`; chunks have one
size then, and where rows do not suffice the last row stands in for those that lack.
Residuals stay on the devices. Gradients of the replicas come to where the parameters
live, and are added there in the order of the replicas.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.tree_util as jtu

from jdag.compute.avals import Aval, intern_aval
from jdag.compute.moves import Target, cuttable, home_of, moved
from jdag.compute.pytrees import Template
from jdag.errors import JdagError
from jdag.functions import name_of
from jdag.parallel.apply import Call, forward_all, pair_of, vjp_all, working
from jdag.parallel.movement import added, check_joined, cut, joined
from jdag.parallel.processes import Processes


class Task(NamedTuple):
    """What is to be done: a function, and the arrays that it will be given.

    The arrays of parameters come first (`shared` of them), then those with rows, which
    lie along `dim`; `sizes` are the rows of each chunk. A function that reduces over
    replicas has an `axis_name`. Over several `processes` all this is of this one, and
    `everywhere` are the real rows of each replica of all.
    """

    fn: Callable[..., Any]
    template: Template
    avals: tuple[Aval, ...]
    tracked: tuple[bool, ...]
    shared: int
    sizes: tuple[int, ...]
    dim: int
    devices: tuple[jax.Device, ...]
    axis_name: str | None = None
    has_aux: bool = False
    processes: Processes | None = None
    everywhere: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The name of the function."""
        return name_of(self.fn)

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return sum(self.sizes)

    def chunk(self, rows: int) -> tuple[Aval, ...]:
        """The abstract values that a replica with so many rows is given."""
        avals = list(self.avals)
        for place in range(self.shared, len(avals)):
            aval = avals[place]
            shape = (*aval.shape[: self.dim], rows, *aval.shape[self.dim + 1 :])
            avals[place] = intern_aval(shape, aval.dtype, aval.weak)
        return tuple(avals)

    def outputs_of(self, out_tree: Any) -> Any:
        """The structure of the outputs that are joined: aux is of the first replica.

        Raises:
            JdagError: it should return a pair and does not.
        """
        if not self.has_aux:
            return out_tree
        node, parts = out_tree.node_data(), out_tree.children()
        if node is None or node[0] is not tuple or len(parts) != 2:
            raise JdagError(
                f"{self.name} returned {out_tree}; with has_aux=True it returns a "
                "pair, (outputs, aux)"
            )
        return parts[0]


class Plan(Protocol):
    """What runs the replicas of one task."""

    def forward(
        self, arrays: Sequence[Any], homes: Sequence[Target], target: Target
    ) -> tuple[Any, Any]:
        """Return the joined outputs, a pytree on the target device, and residuals.

        Args:
            arrays: of the task.
            homes: where each lives, None where that is not known.
            target: where outputs go.
        """

    def vjp(
        self, residuals: Any, cotangents: Sequence[Any], homes: Sequence[Target]
    ) -> list[Any] | None:
        """Return a cotangent for each tracked array, where it lives; None: all zero."""


# ------------------------------------------------------------------------- one replica


class Alone:
    """One replica: a compiled call, with all rows."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._pair = pair_of(Call(task.fn, task.template, []), task.avals, task.tracked)
        (device,) = task.devices
        self._wheres = (device,) * len(task.avals)
        joined = task.outputs_of(self._pair.out_tree).num_leaves
        out_avals = self._pair.out_avals[:joined]
        for place, aval in enumerate(out_avals):
            check_joined((aval,), task.dim, f"output {place} of {task.name}")
        self._scalars = [n for n, aval in enumerate(out_avals) if not aval.shape]
        tracked = [n for n, is_one in enumerate(self._pair.out_tracked) if is_one]
        self._places = [n if n < joined else None for n in tracked]

    def forward(
        self, arrays: Sequence[Any], homes: Sequence[Target], target: Target
    ) -> tuple[Any, Any]:
        """See `Plan`."""
        args = moved(arrays, self._wheres, homes)
        with working(self._pair, args):
            outputs, residuals = self._pair.forward(args)
        leaves = moved(outputs, (target,) * len(outputs))
        for place in self._scalars:
            leaves[place] = joined((leaves[place],), self._task.dim)
        return jtu.tree_unflatten(self._pair.out_tree, leaves), residuals

    def vjp(
        self, residuals: Any, cotangents: Sequence[Any], homes: Sequence[Target]
    ) -> list[Any] | None:
        """See `Plan`."""
        if residuals is None:
            return None
        given = [None if n is None else cotangents[n] for n in self._places]
        for number, place in enumerate(self._places):
            if place in self._scalars:
                (given[number],) = _unstacked(given[number])
        sums = [() if ct is None else (ct,) for ct in self._there(given)]
        with working(self._pair, residuals.keeps):
            found = self._pair.vjp(residuals, sums)
        both = zip(homes, self._task.tracked, strict=True)
        return moved(found, [home for home, is_tracked in both if is_tracked])

    def _there(self, cotangents: Sequence[Any]) -> list[Any]:
        """Bring the cotangents that there are to the device."""
        given = [ct for ct in cotangents if ct is not None]
        there = iter(moved(given, self._task.devices * len(given)))
        return [None if ct is None else next(there) for ct in cotangents]


# ------------------------------------------------------------------- one call a device


class Each:
    """One compiled call a device, of several; chunks may have different sizes."""

    def __init__(self, task: Task) -> None:
        call = Call(task.fn, task.template, [])
        self._task = task
        pairs = []
        for number, size in enumerate(task.sizes):
            try:
                pairs.append(pair_of(call, task.chunk(size), task.tracked))
            except Exception as error:  # Of the user's function: whatever it likes.
                last = len(task.sizes) - 1
                error.add_note(f"It was raised by replica {number} of 0 to {last}.")
                raise
        self._pairs = tuple(pairs)
        self._wheres = [device for device in task.devices for _ in task.avals]
        first = task.outputs_of(self._pairs[0].out_tree)
        self._joined = first.num_leaves
        for number, made in enumerate(self._pairs):
            tree = task.outputs_of(made.out_tree)
            if tree != first:
                raise JdagError(
                    f"{task.name} returned {first} of replica 0 and {tree} of replica "
                    f"{number}: outputs of other structures cannot be joined"
                )
        for place in range(self._joined):
            parts = [made.out_avals[place] for made in self._pairs]
            check_joined(parts, task.dim, f"output {place} of {task.name}")

    def forward(
        self, arrays: Sequence[Any], homes: Sequence[Target], target: Target
    ) -> tuple[Any, Any]:
        """See `Plan`."""
        outputs, residuals = forward_all(self._pairs, self._cut(arrays, homes))
        return self._gathered(outputs, target), residuals

    def vjp(
        self, residuals: Any, cotangents: Sequence[Any], homes: Sequence[Target]
    ) -> list[Any] | None:
        """See `Plan`."""
        task = self._task
        found = vjp_all(self._pairs, residuals, self._spread(cotangents))
        if found[0] is None:
            return None
        places = [place for place, tracked in enumerate(task.tracked) if tracked]
        wheres = [homes[place] for place in places] * len(found)
        back = moved([ct for replica in found for ct in replica], wheres)
        parts = [back[n :: len(places)] for n in range(len(places))]
        first = sum(task.tracked[: task.shared])
        sums = added(parts[:first])
        return [*sums, *[joined(part, task.dim) for part in parts[first:]]]

    def _cut(self, arrays: Sequence[Any], homes: Sequence[Target]) -> list[list[Any]]:
        """Return what each replica is given, on its device."""
        task, size = self._task, len(arrays)
        shared, froms = list(arrays[: task.shared]), list(homes[: task.shared])
        whole = cuttable(arrays[task.shared :], homes[task.shared :])
        pieces = [cut(array, task.sizes, task.dim) for array in whole]
        flat, sources = [], []
        for chunk in zip(*pieces, strict=True):
            flat += [*shared, *chunk]
            sources += [*froms, *map(home_of, chunk)]
        there = moved(flat, self._wheres, sources)
        return [there[n : n + size] for n in range(0, len(there), size)]

    def _gathered(self, outputs: Sequence[Sequence[Any]], target: Target) -> Any:
        count, size = len(outputs), self._joined
        flat = [value for replica in outputs for value in replica[:size]]
        flat += outputs[0][size:]
        leaves = moved(flat, [target] * len(flat))
        parts = [leaves[n : count * size : size] for n in range(size)]
        leaves[: count * size] = [joined(part, self._task.dim) for part in parts]
        return jtu.tree_unflatten(self._pairs[0].out_tree, leaves)

    def _spread(self, cotangents: Sequence[Any]) -> list[list[Any]]:
        """The cotangents of each replica's outputs, on its device."""
        count = len(self._pairs)
        spread: list[list[Any]]  # Aux may be of other structures.
        spread = [[None] * len(made.out_tracked) for made in self._pairs]
        moving, places = [], []
        for place, tracked in enumerate(self._pairs[0].out_tracked):
            if not tracked or place >= self._joined:
                continue
            shapes = [made.out_avals[place].shape for made in self._pairs]
            if not shapes[0]:
                pieces = _unstacked(cotangents[place])
            else:
                sizes = tuple([shape[self._task.dim] for shape in shapes])
                pieces = cut(cotangents[place], sizes, self._task.dim)
            moving.extend(pieces)
            places.extend([(number, place) for number in range(count)])
        wheres = [self._task.devices[number] for number, _ in places]
        for (number, place), value in zip(places, moved(moving, wheres), strict=True):
            spread[number][place] = value
        return spread


@jax.jit
def _unstacked(array: Any) -> Any:
    return [array[number] for number in range(array.shape[0])]
