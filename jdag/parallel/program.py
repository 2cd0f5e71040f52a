"""One program over all devices: a forward and a vjp by `jax.shard_map`.

JAX implements `jax.pmap` by shard_map, so both names select this program. All chunks
have the same size: missing rows are padded with copies of the last row; outputs of
padding are cut off and get no cotangents. A function that reduces over the replicas
gets a mask of the real rows.

The function is traced once, for one replica. An array's layout is SAME (replicated),
ONE_EACH (stacked, one element per replica) or an int (sharded along that dimension).

With several processes the program covers the devices of all: local arrays become shards
of global arrays and back, without copies. Before it runs, the processes compare its
terms and its collectives.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdag.compute.jaxprs import collectives
from jdag.compute.moves import Target, cuttable, home_of, is_free, outside, transferred
from jdag.compute.tracing import Function, Traced, as_it_is
from jdag.errors import JdagError
from jdag.parallel.dispatch import DispatchTask
from jdag.parallel.movement import added, check_joined
from jdag.parallel.processes import INSIDE, Processes, Terms, numbered

AXIS = "replicas"  # The axis name if the caller gives none.

Lie = str | int
SAME, ONE_EACH = "same", "one each"


class OneProgram:
    """Forward and vjp of one task, each one program over all of its devices.

    The task's chunks have equal sizes, or it has an axis name.
    """

    def __init__(self, task: DispatchTask) -> None:
        self._task = task
        self._reals = task.everywhere or task.sizes
        self._size = max(self._reals)
        self._axis = task.axis_name or AXIS
        self._padded = self._size * len(task.sizes)
        self._lacking = self._padded > task.rows
        own = task.devices
        self._own = Mesh(np.array(own), (self._axis,))
        self._processes = task.processes if task.everywhere else None
        everywhere = self._processes.devices if self._processes else own
        self._all = Mesh(np.array(everywhere), (self._axis,))
        traced, replica = self._traced()
        self._traced_by, self._outputs = traced, self._joined(traced)
        self._out_lies: list[Lie] = [
            task.dim if index < self._outputs and aval.shape else ONE_EACH
            for index, aval in enumerate(traced.out_avals)
        ]
        self._in_lies: list[Lie] = [SAME] * task.shared
        self._in_lies += [task.dim] * (len(task.avals) - task.shared)
        self._wheres = list(map(self._target, self._in_lies))
        # A vjp would have to move them again.
        self._takes_free = self._processes is None and True not in task.tracked
        rest = len(replica.jaxpr.outvars) - len(traced.out_avals)
        outs = [*self._out_lies, *[ONE_EACH] * rest]
        local = jaxpr_as_fun(replica)
        self._forward = self._mapped("replica", local, self._in_lies, outs)
        if traced.backward is not None:
            self._backward = self._mapped("replica_vjp", *self._vjp_of(traced, rest))

    def forward(
        self, arrays: Sequence[Any], homes: Sequence[Target], target: Target
    ) -> tuple[Any, Any]:
        """Return the joined outputs, a pytree on the target device, and residuals."""
        shared, traced = self._task.shared, self._traced_by
        rows = cuttable(arrays[shared:], homes[shared:])
        if self._lacking:
            rows = [_filled(array, self._padded, self._task.dim) for array in rows]
        there = self._brought([*arrays[:shared], *rows], homes[:shared])
        made = self._forward(*there)
        size = len(self._out_lies)
        outputs, rest = made[:size], made[size:]
        leaves = self._gathered(outputs, target)
        found = jtu.tree_unflatten(traced.out_tree, leaves)
        if traced.backward is None:
            return found, None
        kept = [there[index] for index in traced.args_kept if index < len(there)]
        return found, [*kept, *[outputs[p] for p in traced.outputs_kept], *rest]

    def vjp(
        self, residuals: Any, cotangents: Sequence[Any], homes: Sequence[Target]
    ) -> list[Any] | None:
        """Return a cotangent for each tracked array, on its device; None: all zero."""
        if residuals is None:
            return None
        task, indices = self._task, self._cotangents
        lies = [self._out_lies[index] for index in indices]
        given = [cotangents[index] for index in indices]
        if self._lacking:
            given = [
                array if lie == ONE_EACH else _with_zeros(array, self._padded, task.dim)
                for array, lie in zip(given, lies, strict=True)
            ]
        there = transferred(given, list(map(self._target, lies)))
        found = self._backward(*residuals, *there)
        back = transferred(found, task.of_tracked(homes))
        first = sum(task.tracked[: task.shared])
        return [*added(back[:first]), *map(self._cut_off, back[first:])]

    # ---- what each replica computes

    def _traced(self) -> tuple[Traced, Any]:
        """Trace one replica; return what it fixed and a jaxpr of flat arrays."""
        task = self._task
        tracked = task.tracked if task.axis_name is None else (*task.tracked, False)
        body = Function(task.fn, task.template).forward(tracked, as_it_is)
        axes = [(self._axis, len(self._reals))]
        structs = [aval.struct() for aval in task.chunk(self._size)]
        replica, returned = jax.make_jaxpr(
            lambda *arrays: body(*arrays, *self._real_rows()),
            axis_env=axes,
            return_shape=True,
        )(*structs)
        return returned.traced, replica

    def _real_rows(self) -> list[Any]:
        """The mask of real rows, as a list of at most one argument."""
        if self._task.axis_name is None:
            return []
        count = jnp.asarray(self._reals)[jax.lax.axis_index(self._axis)]
        real = jnp.arange(self._size) < count
        return [real.astype(jnp.float32)]

    def _joined(self, traced: Traced) -> int:
        """Return the number of joined outputs, after which aux follows; check them."""
        task = self._task
        count: int = task.outputs_of(traced.out_tree).num_leaves
        for index, aval in enumerate(traced.out_avals[:count]):
            if not aval.shape:
                continue
            check_joined((aval,), task.dim, f"output {index} of {task.name}")
            if task.axis_name is not None and aval.shape[task.dim] != self._size:
                raise JdagError(
                    f"output {index} of {task.name} is {aval} for an input of "
                    f"{self._size} rows; with axis_name outputs have as many rows, or "
                    "are scalars; return statistics of all rows as aux (has_aux=True)"
                )
        return count

    def _vjp_of(
        self, traced: Traced, rest: int
    ) -> tuple[Callable[..., Any], list[Lie], list[Lie]]:
        """Return the vjp of one replica, with the layouts of arguments and results.

        Its arguments are the residuals of `forward` and a cotangent of each joined
        tracked output.
        """
        task, indices = self._task, traced.args_kept
        has_rows = len(task.avals) in indices  # The mask is recomputed.
        ins = [self._in_lies[index] for index in indices[: len(indices) - has_rows]]
        args = len(ins)
        ins += [self._out_lies[index] for index in traced.outputs_kept]
        outputs = len(ins)
        ins += [ONE_EACH] * rest
        held = len(ins)
        tracked = [n for n, is_tracked in enumerate(traced.out_tracked) if is_tracked]
        self._cotangents = [index for index in tracked if index < self._outputs]
        ins += [self._out_lies[index] for index in self._cotangents]
        without = [()] * (len(tracked) - len(self._cotangents))

        def replica_vjp(*arrays: Any) -> Any:
            rows = self._real_rows() if has_rows else []
            sums = [*[(ct,) for ct in arrays[held:]], *without]
            kept = (*arrays[:args], *rows), arrays[args:outputs]
            return traced.backward(arrays[outputs:held], *kept, sums)

        both = zip(self._in_lies, task.tracked, strict=True)
        outs = [ONE_EACH if lie == SAME else lie for lie, is_one in both if is_one]
        return replica_vjp, ins, outs

    # ---- as a program over all devices

    def _mapped(
        self,
        step: str,
        local: Callable[..., Any],
        ins: Sequence[Lie],
        outs: Sequence[Lie],
    ) -> Callable[..., Any]:
        def inner(*arrays: Any) -> list[Any]:
            given = zip(arrays, ins, strict=True)
            made = local(*[a[0] if lie == ONE_EACH else a for a, lie in given])
            both = zip(made, outs, strict=True)
            return [a[None] if lie == ONE_EACH else a for a, lie in both]

        # check_vma=False: replicated and varying values are not distinguished. Then the
        # transpose of psum is psum, and gradients are those of the sum over replicas.
        program = jax.jit(
            jax.shard_map(
                inner,
                mesh=self._all,
                in_specs=tuple(map(self._spec, ins)),
                out_specs=list(map(self._spec, outs)),
                check_vma=False,
            )
        )
        if self._processes is None:
            return outside(program)
        return outside(self._together(self._processes, program, step, ins, outs))

    def _together(
        self,
        processes: Processes,
        program: Any,
        step: str,
        ins: Sequence[Lie],
        outs: Sequence[Lie],
    ) -> Callable[..., Any]:
        """Wrap the global program to take and return this process's arrays."""
        found: list[Terms] = []

        def run(*arrays: Any) -> list[Any]:
            if any([isinstance(one, jax.core.Tracer) for one in arrays]):
                raise JdagError(INSIDE)
            wide = self._with_shards(arrays, self._all, ins, jax.process_count())
            if not found:
                names = collectives(program.trace(*wide).jaxpr, self._axis)
                said = ("step", step), *numbered("collective", names)
                found.append((*self._task.terms, *said))
            processes.agreed(found[0])
            return self._with_shards(
                program(*wide), self._own, outs, -jax.process_count()
            )

        return run

    def _with_shards(
        self, arrays: Sequence[Any], mesh: Mesh, lies: Sequence[Lie], times: int
    ) -> list[Any]:
        """Return arrays with the same local shards, `times` as long; -n: an nth."""
        found = []
        for array, lie in zip(arrays, lies, strict=True):
            shape = list(array.shape)
            if lie != SAME:
                dim = lie if isinstance(lie, int) else 0
                shape[dim] = shape[dim] * times if times > 0 else shape[dim] // -times
            target = NamedSharding(mesh, self._spec(lie))
            shards = [shard.data for shard in array.addressable_shards]
            make = jax.make_array_from_single_device_arrays
            found.append(make(tuple(shape), target, shards))
        return found

    def _spec(self, lie: Lie) -> PartitionSpec:
        if lie == SAME:
            return PartitionSpec()
        dim = 0 if lie == ONE_EACH else int(lie)
        return PartitionSpec(*[None] * dim, self._axis)

    def _target(self, lie: Lie) -> Target:
        return NamedSharding(self._own, self._spec(lie))

    # ---- to the devices, and back

    def _brought(self, arrays: list[Any], homes: Sequence[Target]) -> list[Any]:
        """Move the program's arguments; `homes` are those of the first arrays."""
        wheres: Sequence[Target] = self._wheres
        if self._takes_free:
            both = zip(arrays, wheres, strict=True)
            wheres = [None if is_free(array) else where for array, where in both]
            if wheres.count(None) == len(wheres):
                return arrays
        return transferred(
            arrays, wheres, [*homes, *map(home_of, arrays[len(homes) :])]
        )

    def _gathered(self, outputs: Sequence[Any], target: Target) -> list[Any]:
        leaves = transferred(outputs, [target] * len(outputs))
        count = self._outputs
        both = zip(leaves[:count], self._out_lies, strict=False)
        joined = [a if lie == ONE_EACH else self._cut_off(a) for a, lie in both]
        return [*joined, *(_firsts(leaves[count:]) if leaves[count:] else [])]

    def _cut_off(self, array: Any) -> Any:
        return _real(array, self._task.rows, self._task.dim) if self._lacking else array


@partial(jax.jit, static_argnums=(1, 2))
def _filled(array: Any, count: int, dim: int) -> Any:
    """Pad an array to `count` rows with copies of the last row."""
    indices = jnp.minimum(jnp.arange(count), array.shape[dim] - 1)
    return jnp.take(array, indices, axis=dim)


@partial(jax.jit, static_argnums=(1, 2))
def _with_zeros(array: Any, count: int, dim: int) -> Any:
    widths = [(0, 0)] * array.ndim
    widths[dim] = (0, count - array.shape[dim])
    return jnp.pad(array, widths)


@partial(jax.jit, static_argnums=(1, 2))
def _real(array: Any, count: int, dim: int) -> Any:
    return jax.lax.slice_in_dim(array, 0, count, axis=dim)


@jax.jit
def _firsts(stacks: Any) -> Any:
    return [stack[0] for stack in stacks]
