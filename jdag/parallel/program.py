"""One program over all devices: a forward and a vjp, by `jax.pmap` or `jax.shard_map`.

Each device has the parameters, its chunk of rows, and what its replica keeps for the
vjp. Chunks have one size; where rows do not suffice, the last row stands in for those
that lack, what the function makes of it is cut off, and nothing flows back to it. A
function that reduces over the replicas is told which rows are real.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdag.compute.moves import Target, cuttable, home_of, is_free, moved, outside
from jdag.compute.tracing import Function, Traced, as_it_is
from jdag.errors import JdagError
from jdag.parallel.dispatch import Task
from jdag.parallel.movement import added_stacks, check_joined

AXIS = "replicas"  # The axis of a function that does not name it.

# How the arrays of a group lie on the devices: the same on each, one of each replica,
# or (an int) cut along that dimension.
Lie = str | int
SAME, ONE_EACH = "same", "one each"


class Mapping(Protocol):
    """How a function of one replica's arrays becomes a program over all devices."""

    reshapes: bool  # Whether `laid` and `whole` do anything.
    brings: bool  # Whether arrays that were not put on a device may come as they are.

    def mapped(
        self, local: Callable[..., Any], ins: tuple[Any, ...], outs: tuple[Lie, ...]
    ) -> Callable[..., Any]:
        """Return the program; its arguments and results are groups, pytrees of arrays.

        Args:
            local: what each replica computes of its part of each group.
            ins: for each argument how it lies.
            outs: the same for each of the tuple that it returns.
        """

    def target(self, lie: Lie) -> Target:
        """Return the sharding of arrays that lie so."""

    def laid(self, array: Any, dim: int) -> Any:
        """Return an array, cut along `dim`, as `mapped` takes it."""

    def whole(self, array: Any, dim: int) -> Any:
        """Return what `mapped` gave, joined along `dim`."""


class ByShardMap:
    """`jax.shard_map`: what is cut along a dimension is one array over all devices."""

    reshapes = False
    brings = True

    def __init__(self, devices: tuple[jax.Device, ...], axis: str) -> None:
        self._axis = axis
        self._mesh = Mesh(np.array(devices), (axis,))

    def mapped(
        self, local: Callable[..., Any], ins: tuple[Lie, ...], outs: tuple[Lie, ...]
    ) -> Callable[..., Any]:
        """See `Mapping`."""

        def inner(*groups: Any) -> tuple[Any, ...]:
            given = zip(groups, ins, strict=True)
            made = local(*[_first(g) if lie == ONE_EACH else g for g, lie in given])
            both = zip(made, outs, strict=True)
            return tuple([_only(g) if lie == ONE_EACH else g for g, lie in both])

        # Like pmap it does not tell what is equal on all devices from what is not:
        # then the transpose of a psum is a psum, and gradients are those of the sum.
        return jax.jit(
            jax.shard_map(
                inner,
                mesh=self._mesh,
                in_specs=tuple(map(self._spec, ins)),
                out_specs=tuple(map(self._spec, outs)),
                check_vma=False,
            )
        )

    def target(self, lie: Lie) -> Target:
        """See `Mapping`."""
        return NamedSharding(self._mesh, self._spec(lie))

    def laid(self, array: Any, dim: int) -> Any:
        """See `Mapping`."""
        return array

    def whole(self, array: Any, dim: int) -> Any:
        """See `Mapping`."""
        return array

    def _spec(self, lie: Lie) -> PartitionSpec:
        if lie == SAME:
            return PartitionSpec()
        dim = 0 if lie == ONE_EACH else int(lie)
        return PartitionSpec(*[None] * dim, self._axis)


class ByPmap:
    """`jax.pmap`: what is cut along a dimension has one of replicas before that."""

    reshapes = True
    brings = True

    def __init__(self, devices: tuple[jax.Device, ...], axis: str) -> None:
        self._devices = devices
        self._axis = axis
        self._mesh = Mesh(np.array(devices), (axis,))

    def mapped(
        self, local: Callable[..., Any], ins: tuple[Lie, ...], outs: tuple[Lie, ...]
    ) -> Callable[..., Any]:
        """See `Mapping`."""
        # All groups are one argument: of several with as many leaves together pmap
        # takes each for one array, and `in_axes` for those of the leaves.
        mapped: Callable[..., Any] = jax.pmap(
            lambda groups: local(*groups),
            axis_name=self._axis,
            in_axes=(tuple(map(self._dim, ins)),),
            out_axes=tuple(map(self._dim, outs)),
            devices=self._devices,
        )
        return lambda *groups: mapped(groups)

    def target(self, lie: Lie) -> Target:
        """See `Mapping`."""
        dim = self._dim(lie)
        spec = () if dim is None else (*[None] * dim, self._axis)
        return NamedSharding(self._mesh, PartitionSpec(*spec))

    def laid(self, array: Any, dim: int) -> Any:
        """See `Mapping`."""
        shape = array.shape
        rows = shape[dim] // len(self._devices)
        return array.reshape(*shape[:dim], len(self._devices), rows, *shape[dim + 1 :])

    def whole(self, array: Any, dim: int) -> Any:
        """See `Mapping`."""
        shape = array.shape
        rows = shape[dim] * shape[dim + 1]
        return array.reshape(*shape[:dim], rows, *shape[dim + 2 :])

    def _dim(self, lie: Lie) -> int | None:
        if lie == SAME:
            return None
        return 0 if lie == ONE_EACH else int(lie)


def _first(group: Any) -> Any:
    return jtu.tree_map(lambda array: array[0], group)


def _only(group: Any) -> Any:
    return jtu.tree_map(lambda array: array[None], group)


class Shape(NamedTuple):
    """What a trace fixed: as in `jdag.compute.tracing`, and which outputs are what.

    `joined` are the places of outputs with rows; of the first `outputs` the others are
    scalars, and what comes after these is aux.
    """

    traced: Traced
    joined: tuple[int, ...]
    outputs: int

    @property
    def scalars(self) -> tuple[int, ...]:
        """The places of outputs that are one number of each replica."""
        return tuple([p for p in range(self.outputs) if p not in self.joined])


class Kept:
    """What each replica has beside its joined outputs: others, and residuals.

    `shape` is static data of the trace that made it.
    """

    __slots__ = ("others", "rest", "shape")

    def __init__(self, shape: Shape, others: Any, rest: Any) -> None:
        self.shape = shape
        self.others = others
        self.rest = rest


jtu.register_pytree_node(
    Kept,
    lambda kept: ((kept.others, kept.rest), kept.shape),
    lambda shape, children: Kept(shape, *children),
)


class OneProgram:
    """Forward and vjp of one task, each one program over all of its devices."""

    def __init__(self, task: Task, mapping: Callable[..., Mapping]) -> None:
        self._task = task
        self._reals = task.everywhere or task.sizes
        self._size = max(self._reals)
        self._count = len(task.sizes)
        self._rows = task.rows
        self._lacking = self._size * self._count - task.rows
        self._axis = task.axis_name or AXIS
        self._mapping = mapping(task.devices[: self._count], self._axis)
        tracked = task.tracked if task.axis_name is None else (*task.tracked, False)
        self._body = Function(task.fn, task.template).forward(tracked, as_it_is)
        dim, mapped = task.dim, self._mapping.mapped
        self._forward = outside(mapped(self._replica, (SAME, dim), (dim, ONE_EACH)))
        ins = (SAME, dim, dim, ONE_EACH, dim, ONE_EACH)
        self._backward = outside(mapped(self._replica_vjp, ins, (ONE_EACH, dim)))
        # Arrays on the way to the devices, and from there.
        taken = len(task.avals) - task.shared
        lies: list[Lie] = [SAME] * task.shared + [dim] * taken
        self._wheres = [self._mapping.target(lie) for lie in lies]
        # For a vjp they would have to be brought there once more.
        self._takes_free = self._mapping.brings and True not in task.tracked
        is_bare = not (self._lacking or self._mapping.reshapes)
        self._laid = self._lay if is_bare else jax.jit(self._lay, static_argnums=1)
        self._whole = self._unlay if is_bare else jax.jit(self._unlay)

    def forward(
        self, arrays: Sequence[Any], homes: Sequence[Target], target: Target
    ) -> tuple[Any, Any]:
        """See `Plan`."""
        shared = self._task.shared
        whole = cuttable(arrays[shared:], homes[shared:])
        chunk = [self._laid(array, True) for array in whole]
        there = self._brought([*arrays[:shared], *chunk], homes[:shared])
        rows, kept = self._forward(there[:shared], there[shared:])
        outputs = self._gathered(rows, kept, target)
        if kept.shape.traced.backward is None:
            return outputs, None
        return outputs, self._residuals(there, rows, kept)

    def vjp(
        self, residuals: Any, cotangents: Sequence[Any], homes: Sequence[Target]
    ) -> list[Any] | None:
        """See `Plan`."""
        if residuals is None:
            return None
        task, mapping, shape = self._task, self._mapping, residuals[-1].shape
        traced, places, scalars = shape.traced, shape.joined, shape.scalars
        given = [
            None
            if not is_tracked or (place not in places and place not in scalars)
            else self._laid(cotangents[place], False)
            if place in places
            else cotangents[place]
            for place, is_tracked in enumerate(traced.out_tracked)
        ]
        moving = [place for place, ct in enumerate(given) if ct is not None]
        lies: list[Lie] = [task.dim if p in places else ONE_EACH for p in moving]
        there = moved(
            [given[place] for place in moving], list(map(mapping.target, lies))
        )
        for place, cotangent in zip(moving, there, strict=True):
            given[place] = cotangent
        of_rows = [given[place] for place in places]
        shared, chunk = self._backward(*residuals, of_rows, without(given, places))
        wheres = [home for home, t in zip(homes, task.tracked, strict=True) if t]
        back = moved([*shared, *chunk], wheres)
        sums = added_stacks(back[: len(shared)])
        return [*sums, *map(self._whole, back[len(shared) :])]

    # ---- what each replica computes

    def _replica(self, shared: Any, chunk: Any) -> tuple[Any, Kept]:
        returned = self._body(*self._args(shared, chunk))
        shape, outputs = self._shape(returned.traced), returned.outputs
        places = shape.joined
        kept = Kept(shape, without(outputs, places), returned.rest)
        return [outputs[place] for place in places], kept

    def _replica_vjp(
        self, shared: Any, chunk: Any, rows: Any, kept: Kept, of_rows: Any, others: Any
    ) -> tuple[Any, Any]:
        traced, places, task = kept.shape.traced, kept.shape.joined, self._task
        args = self._args(shared, chunk)
        outputs = within(kept.others, places, rows)
        cotangents = within(others, places, of_rows)
        both = zip(cotangents, traced.out_tracked, strict=True)
        sums = [() if ct is None else (ct,) for ct, tracked in both if tracked]
        found = traced.backward(
            kept.rest,
            tuple([args[place] for place in traced.args_kept]),
            tuple([outputs[place] for place in traced.outputs_kept]),
            sums,
        )
        first = sum(task.tracked[: task.shared])
        return list(found[:first]), list(found[first:])

    def _args(self, shared: Sequence[Any], chunk: Sequence[Any]) -> list[Any]:
        if self._task.axis_name is None:
            return [*shared, *chunk]
        count = jnp.asarray(self._reals)[jax.lax.axis_index(self._axis)]
        real = jnp.arange(self._size) < count
        return [*shared, *chunk, real.astype(jnp.float32)]

    # ---- which output is what

    def _shape(self, traced: Traced) -> Shape:
        """Return what the outputs are; those with rows are to be joined.

        Raises:
            JdagError: one lacks the dimension or, where rows may be cut off, the rows.
        """
        task = self._task
        found = []
        count = task.outputs_of(traced.out_tree).num_leaves
        for place in range(count):
            aval = traced.out_avals[place]
            if not aval.shape:
                continue
            check_joined((aval,), task.dim, f"output {place} of {task.name}")
            if task.axis_name is not None and aval.shape[task.dim] != self._size:
                raise JdagError(
                    f"output {place} of {task.name} is {aval} where it was given "
                    f"{self._size} rows; with axis_name outputs have as many rows, or "
                    "are scalars; return what is of all rows as aux (has_aux=True)"
                )
            found.append(place)
        return Shape(traced, tuple(found), count)

    # ---- to the devices, and back

    def _brought(self, arrays: list[Any], homes: Sequence[Target]) -> list[Any]:
        """Return what the program is given; homes are those of the first arrays."""
        wheres: Sequence[Target] = self._wheres
        if self._takes_free:
            both = zip(arrays, wheres, strict=True)
            wheres = [None if is_free(array) else where for array, where in both]
            if wheres.count(None) == len(wheres):
                return arrays
        return moved(arrays, wheres, [*homes, *map(home_of, arrays[len(homes) :])])

    def _lay(self, array: Any, stands_in: bool) -> Any:
        """Bring an array to the form of chunks; the last row, or zeros, fill it up."""
        dim = self._task.dim
        if self._lacking and stands_in:
            places = jnp.minimum(jnp.arange(self._size * self._count), self._rows - 1)
            array = jnp.take(array, places, axis=dim)
        elif self._lacking:
            widths = [(0, 0)] * array.ndim
            widths[dim] = (0, self._lacking)
            array = jnp.pad(array, widths)
        return self._mapping.laid(array, dim)

    def _unlay(self, array: Any) -> Any:
        dim = self._task.dim
        array = self._mapping.whole(array, dim)
        if self._lacking:
            array = jax.lax.slice_in_dim(array, 0, self._rows, axis=dim)
        return array

    def _gathered(self, rows: Sequence[Any], kept: Kept, target: Target) -> Any:
        traced, places, count = kept.shape
        leaves = within(kept.others, places, rows)
        leaves = moved(leaves, [target] * len(leaves))
        for place in places:
            leaves[place] = self._whole(leaves[place])
        leaves[count:] = _firsts(leaves[count:])
        return jtu.tree_unflatten(traced.out_tree, leaves)

    def _residuals(self, there: Sequence[Any], rows: Any, kept: Kept) -> Any:
        """What the vjp is given of forward's; None for what it does not use."""
        (traced, places, _), shared = kept.shape, self._task.shared
        args = [a if p in traced.args_kept else None for p, a in enumerate(there)]
        outputs = [
            output if place in traced.outputs_kept else None
            for place, output in enumerate(within(kept.others, places, rows))
        ]
        held = Kept(kept.shape, without(outputs, places), kept.rest)
        return args[:shared], args[shared:], [outputs[p] for p in places], held


def _firsts(stacks: list[Any]) -> list[Any]:
    return _compiled_firsts(stacks) if stacks else stacks


@jax.jit
def _compiled_firsts(stacks: Any) -> Any:
    return [stack[0] for stack in stacks]


def without(values: Sequence[Any], places: Sequence[int]) -> list[Any]:
    """Return the values with None at these places."""
    return [None if p in places else value for p, value in enumerate(values)]


def within(values: Sequence[Any], places: Sequence[int], others: Sequence[Any]) -> Any:
    """Return the values with others at these places."""
    found = list(values)
    for place, other in zip(places, others, strict=True):
        found[place] = other
    return found
