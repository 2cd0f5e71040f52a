"""How replicas run: one call per device, or one program over all devices.

A plan is made once for a `DispatchTask` and cached. `Each` calls a compiled pair on
every device, with any chunk sizes. `OneProgram` (`jdag.parallel.program`) is one
forward and one vjp over all devices. Both have

    forward(arrays, homes, target) -> outputs, residuals
    vjp(residuals, cotangents, homes) -> a cotangent for each tracked array, or None

`homes` are the devices of the arrays (None: unknown). Outputs are joined on the target
device; a cotangent is returned on its array's device, and None means that all are zero.
Residuals stay on the devices. Gradients of the replicas are added where the parameters
live, in the order of the replicas.
"""

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu

from jdag.compute.avals import Aval, intern_aval
from jdag.compute.moves import Target, cuttable, home_of, transferred
from jdag.compute.pairs import Pair, pair
from jdag.compute.pytrees import Template
from jdag.engine.functions import name_of
from jdag.errors import JdagError
from jdag.parallel.apply import all_ended, forward_all, vjp_all
from jdag.parallel.movement import added, check_joined, cut, joined
from jdag.parallel.processes import Processes, Terms


class DispatchTask(NamedTuple):
    """A function, the avals of its arrays, and how they are split into replicas.

    Attributes:
        shared: the number of parameter arrays; these come first, then arrays with rows.
        sizes: the number of rows of each chunk.
        dim: the dimension of rows.
        axis_name: set for a function that reduces over replicas.
        processes: set for several processes; the other fields are of this one.
        terms: the properties that must be equal on all processes.
        everywhere: the number of real rows of each replica, of all processes.
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
    terms: Terms = ()
    everywhere: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The function's name."""
        return name_of(self.fn)

    @property
    def rows(self) -> int:
        """The number of rows of all chunks."""
        return sum(self.sizes)

    def of_tracked(self, values: Sequence[Any]) -> list[Any]:
        """Select the values of tracked arrays; `values` has one per array."""
        return [*compress(values, self.tracked)]

    def chunk(self, rows: int) -> tuple[Aval, ...]:
        """The avals of the arguments of a replica with this number of rows."""
        avals = list(self.avals)
        for index in range(self.shared, len(avals)):
            aval = avals[index]
            shape = (*aval.shape[: self.dim], rows, *aval.shape[self.dim + 1 :])
            avals[index] = intern_aval(shape, aval.dtype, aval.weak)
        return tuple(avals)

    def outputs_of(self, out_tree: Any) -> Any:
        """The structure of the outputs that are joined, without aux."""
        if not self.has_aux:
            return out_tree
        node, parts = out_tree.node_data(), out_tree.children()
        if node is None or node[0] is not tuple or len(parts) != 2:
            raise JdagError(
                f"{self.name} returned {out_tree}; with has_aux=True it returns a "
                "pair, (outputs, aux)"
            )
        return parts[0]


class Each:
    """One compiled call per device; chunks may have different sizes."""

    def __init__(self, task: DispatchTask) -> None:
        self._task = task
        self._count = len(task.sizes)

        def made(number: int) -> Pair:
            avals = task.chunk(task.sizes[number])
            return pair(task.fn, task.template, avals, task.tracked)

        self._pairs = all_ended(made, self._count)
        self._wheres = [device for device in task.devices for _ in task.avals]
        first = task.outputs_of(self._pairs[0].out_tree)
        self._joined = first.num_leaves
        for number, one in enumerate(self._pairs):
            tree = task.outputs_of(one.out_tree)
            if tree != first:
                raise JdagError(
                    f"{task.name} returned {first} of replica 0 and {tree} of replica "
                    f"{number}: outputs of other structures cannot be joined"
                )
        for index in range(self._joined):
            parts = [one.out_avals[index] for one in self._pairs]
            check_joined(parts, task.dim, f"output {index} of {task.name}")

    def forward(
        self, arrays: Sequence[Any], homes: Sequence[Target], target: Target
    ) -> tuple[Any, Any]:
        """Return the joined outputs, a pytree on the target device, and residuals."""
        outputs, residuals = forward_all(self._pairs, self._cut(arrays, homes))
        size, rows = self._joined, self._joined * self._count
        flat = [value for replica in outputs for value in replica[:size]]
        flat += outputs[0][size:]
        leaves = transferred(flat, [target] * len(flat))
        parts = [leaves[index:rows:size] for index in range(size)]
        leaves[:rows] = [joined(part, self._task.dim) for part in parts]
        return jtu.tree_unflatten(self._pairs[0].out_tree, leaves), residuals

    def vjp(
        self, residuals: Any, cotangents: Sequence[Any], homes: Sequence[Target]
    ) -> list[Any] | None:
        """Return a cotangent for each tracked array, on its device; None: all zero."""
        task = self._task
        found = vjp_all(self._pairs, residuals, self._spread(cotangents))
        if found[0] is None:
            return None
        wheres = task.of_tracked(homes)
        back = transferred(
            [ct for replica in found for ct in replica], wheres * len(found)
        )
        parts = [back[index :: len(wheres)] for index in range(len(wheres))]
        first = sum(task.tracked[: task.shared])
        return [*added(parts[:first]), *[joined(p, task.dim) for p in parts[first:]]]

    def _cut(self, arrays: Sequence[Any], homes: Sequence[Target]) -> list[list[Any]]:
        """Return the arguments of each replica, on its device."""
        task, size = self._task, len(arrays)
        if self._count == 1:
            return [transferred(arrays, self._wheres, homes)]
        shared, froms = list(arrays[: task.shared]), list(homes[: task.shared])
        whole = cuttable(arrays[task.shared :], homes[task.shared :])
        pieces = [cut(array, task.sizes, task.dim) for array in whole]
        flat, sources = [], []
        for chunk in zip(*pieces, strict=True):
            flat += [*shared, *chunk]
            sources += [*froms, *map(home_of, chunk)]
        there = transferred(flat, self._wheres, sources)
        return [there[n : n + size] for n in range(0, len(there), size)]

    def _spread(self, cotangents: Sequence[Any]) -> list[list[Any]]:
        """Return the cotangents of each replica's outputs, on its device."""
        dim, count = self._task.dim, self._count
        flat: list[Any] = []
        for index, tracked in enumerate(self._pairs[0].out_tracked[: self._joined]):
            if not tracked:
                continue
            shapes = [made.out_avals[index].shape for made in self._pairs]
            if shapes[0]:
                sizes = tuple([shape[dim] for shape in shapes])
                flat += cut(cotangents[index], sizes, dim)
            else:
                flat += _unstacked(cotangents[index])
        there = transferred(flat, self._task.devices * (len(flat) // count))
        spread = []
        for number, made in enumerate(self._pairs):
            own = iter(there[number::count])
            given = [next(own) if t else None for t in made.out_tracked[: self._joined]]
            aux = len(made.out_tracked) - self._joined  # May differ between replicas.
            spread.append([*given, *[None] * aux])
        return spread


@jax.jit
def _unstacked(array: Any) -> Any:
    return [array[number] for number in range(array.shape[0])]
