"""One program over all devices: `jax.shard_map` of a function over equal chunks.

Since JAX 0.8 `jax.pmap` does the same, but with a leading dimension of devices, which
would cost a copy of rows and outputs. JAX differentiates the program. Missing rows are
padded with copies of the last row, and outputs of padding are cut off. A function that
reduces over the replicas gets a mask of the real rows.

A differentiated parameter is spread (`SPREAD`): its copies, one on each device, are the
shards of one array, so that each copy has its own gradient. The transpose is ReduceAdd:
gradients are added in the order of the devices, on the device of the parameter.

With several processes the program covers the devices of all. Arrays of this process
become shards of global arrays, and back, without copies (`LABEL`). Before the program
and before its vjp, the processes compare their functions, shapes and collectives.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import ShapedArray
from jax.interpreters import ad
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdag.compute.avals import aval_of
from jdag.compute.configuration import configuration
from jdag.compute.devices import device_named
from jdag.compute.fingerprint import key_of
from jdag.compute.jaxprs import collectives, has_move
from jdag.compute.moves import cuttable, home_of, is_free, moved_arrays, primitive
from jdag.compute.pairs import CACHE
from jdag.compute.tracing import Function, TracedResult, without_jit
from jdag.errors import JdagError
from jdag.parallel.apply import tracked_of
from jdag.parallel.movement import check_joined, sum_each
from jdag.parallel.processes import numbered, replace
from jdag.parallel.task import ParallelTask

_AXIS = "replicas"  # The axis name if the caller gives none.
PROGRAMS_MAX = 512


def in_one_program(task: ParallelTask) -> Any:
    """Return the joined outputs of all replicas; None if the function moves arrays.

    Either the chunks have equal sizes, or the task has an axis name.
    """
    dim, shared, arrays = task.dim, task.shared, task.call.arrays
    mesh = Mesh(np.array(task.devices), (task.axis_name or _AXIS,))
    real, padded = sum(task.sizes), max(task.everywhere or task.sizes) * mesh.size
    spread = [n for n, tracked in enumerate(tracked_of(arrays[:shared])) if tracked]
    inputs = list(cuttable(arrays, list(map(home_of, arrays))))
    if padded > real:
        inputs[shared:] = [_filled(array, padded, dim) for array in inputs[shared:]]
    specs = [PartitionSpec()] * shared
    specs += [PartitionSpec(*[None] * dim, *mesh.axis_names)] * (len(arrays) - shared)
    copies = _spread([inputs[n] for n in spread], mesh)
    for n, array in zip(spread, copies, strict=True):
        inputs[n], specs[n] = array, PartitionSpec(*mesh.axis_names)
    both = zip(inputs, specs, strict=True)
    shardings = [
        None if not task.everywhere and is_free(array) else NamedSharding(mesh, spec)
        for array, spec in both
    ]
    result = _run(task, mesh, specs, moved_arrays(inputs, shardings))
    if result is None:
        return None
    by_rows = NamedSharding(mesh, PartitionSpec(*mesh.axis_names))
    count = len(result.outputs)
    outputs = moved_arrays(result.outputs, [task.target] * count, [by_rows] * count)
    size = task.outputs_of(result.traced.out_tree).num_leaves
    if padded > real or dim:
        avals = zip(outputs[:size], result.traced.out_avals, strict=False)
        outputs[:size] = [_cut_off(a, real, dim) if v.shape else a for a, v in avals]
    outputs[size:] = _firsts(outputs[size:]) if outputs[size:] else []
    return jtu.tree_unflatten(result.traced.out_tree, outputs)


def _run(
    task: ParallelTask,
    mesh: Mesh,
    specs: Sequence[PartitionSpec],
    arrays: Sequence[Any],
) -> TracedResult | None:
    processes = task.processes if task.everywhere else None
    if processes is None:
        program, _ = _program(task, mesh, specs, arrays)
        return program(*arrays) if program else None
    wide = Mesh(np.array(processes.devices), mesh.axis_names)
    both = zip(arrays, specs, strict=True)
    arrays = [_labelled(array, spec, mesh, wide) for array, spec in both]
    program, names = _program(task, wide, specs, arrays)
    assert program is not None, task.axis_name
    terms = (*task.terms, *numbered("collective", names))
    processes.agreed((*terms, ("step", "replica")))
    result: TracedResult = program(*arrays)
    by_rows = PartitionSpec(*mesh.axis_names)
    outputs = [_labelled(array, by_rows, wide, mesh) for array in result.outputs]

    def agree(cotangents: Any, _: Any) -> Any:
        processes.agreed((*terms, ("step", "replica_vjp")))
        return cotangents

    indices = [n for n, tracked in enumerate(tracked_of(outputs)) if tracked]
    replace(outputs, indices, agree)
    return TracedResult(result.traced, outputs, ())


# ------------------------------------------------------------------ the program itself


def _program(
    task: ParallelTask,
    mesh: Mesh,
    specs: Sequence[PartitionSpec],
    arrays: Sequence[Any],
) -> tuple[Callable[..., Any] | None, list[str]]:
    """Return the program (None if the function moves arrays) and its collectives."""
    fn, template, arguments = task.call
    scalars = tuple([array.ndim == 0 for array in arguments])
    fixed = (*specs,), scalars, task.dim, task.everywhere or task.sizes
    options = task.shared, task.axis_name, task.has_aux, mesh
    key = key_of(fn), template.key, configuration(), fixed, options
    cached = _cache_entry(key)
    if not cached:
        CACHE.count(fn, key_of(fn))
        # The closure must not retain arrays.
        bare = task._replace(call=task.call._replace(arrays=[]))
        mapped = jax.shard_map(
            _replica_of(bare, specs, scalars),
            mesh=mesh,
            in_specs=(*specs,),
            out_specs=PartitionSpec(*mesh.axis_names),
            check_vma=False,  # So that the transpose of a psum is a psum.
        )
        program = jax.jit(mapped)
        jaxpr = program.trace(*[aval_of(array).struct() for array in arrays]).jaxpr
        is_usable = task.axis_name is not None or not has_move(jaxpr)
        cached += [program if is_usable else None, collectives(jaxpr, *mesh.axis_names)]
    program, names = cached
    return program, names


@lru_cache(maxsize=PROGRAMS_MAX)
def _cache_entry(key: Hashable) -> list[Any]:
    del key
    return []


def _replica_of(
    task: ParallelTask, specs: Sequence[PartitionSpec], scalars: Sequence[bool]
) -> Callable[..., TracedResult]:
    """Return one replica's function. Rows are the first dimension of its outputs."""
    reals, axis = task.everywhere or task.sizes, task.axis_name
    count = len(specs) + (axis is not None)
    fn, template, _ = task.call
    body = Function(fn, template).forward((False,) * count, without_jit)

    def replica(*arrays: Any) -> TracedResult:
        both = zip(arrays, scalars, strict=True)
        inputs = [a.reshape(()) if is_scalar else a for a, is_scalar in both]
        if axis is not None:
            real = jnp.arange(max(reals)) < jnp.asarray(reals)[jax.lax.axis_index(axis)]
            inputs.append(real.astype(jnp.float32))
        result = body(*inputs)
        size = task.outputs_of(result.traced.out_tree).num_leaves
        outputs = [
            _rows_first(task, index, array, max(reals))
            for index, array in enumerate(result.outputs[:size])
        ]
        outputs += [jax.lax.stop_gradient(aux)[None] for aux in result.outputs[size:]]
        return TracedResult(result.traced, outputs, ())

    return replica


def _rows_first(task: ParallelTask, index: int, array: Any, rows: int) -> Any:
    if not array.ndim:
        return array[None]
    check_joined((array,), task.dim, f"output {index} of {task.name}")
    if task.axis_name is not None and array.shape[task.dim] != rows:
        raise JdagError(
            f"output {index} of {task.name} is {aval_of(array)} for an input of "
            f"{rows} rows; with axis_name an output must have as many rows or be a "
            "scalar; return statistics of all rows as aux (has_aux=True)"
        )
    return jnp.moveaxis(array, task.dim, 0)


@partial(jax.jit, static_argnums=(1, 2))
def _filled(array: Any, count: int, dim: int) -> Any:
    indices = jnp.minimum(jnp.arange(count), array.shape[dim] - 1)
    return jnp.take(array, indices, axis=dim)


@partial(jax.jit, static_argnums=(1, 2))
def _cut_off(array: Any, count: int, dim: int) -> Any:
    return jnp.moveaxis(array[:count], 0, dim)


@jax.jit
def _firsts(stacks: Any) -> Any:
    return [stack[0] for stack in stacks]


# ----------------------------------------------------- arrays over devices, as shards


def _spread(arrays: Sequence[Any], mesh: Mesh) -> Sequence[Any]:
    homes = tuple([home_of(array) or device_named(None) for array in arrays])
    return SPREAD.bind(*arrays, mesh=mesh, homes=homes) if arrays else []


def _put(*arrays: Any, mesh: Mesh, **_: Any) -> list[Any]:
    replicated = NamedSharding(mesh, PartitionSpec())
    sharded = NamedSharding(mesh, PartitionSpec(*mesh.axis_names))
    copies = jax.device_put(list(map(jnp.atleast_1d, arrays)), replicated)
    return [_relabelled(a, sharded, _times(a.shape, mesh.size)) for a in copies]


def _times(shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    return (count * shape[0], *shape[1:]) if shape else (count,)


def _reduce_add(
    cotangents: Sequence[Any], *arrays: Any, mesh: Mesh, homes: tuple[Any, ...]
) -> list[Any]:
    indices = [n for n, ct in enumerate(cotangents) if type(ct) is not ad.Zero]
    moved = moved_arrays([cotangents[n] for n in indices], [homes[n] for n in indices])
    gradients: list[Any] = [ad.Zero(array.aval.to_ct_aval()) for array in arrays]
    both = zip(moved, indices, strict=True)
    sums = sum_each([ct.reshape(mesh.size, *gradients[n].aval.shape) for ct, n in both])
    for n, total in zip(indices, sums, strict=True):
        gradients[n] = total
    return gradients


def _relabelled(array: Any, sharding: NamedSharding, shape: tuple[int, ...]) -> Any:
    parts = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def _labelled(array: Any, spec: PartitionSpec, source: Mesh, target: Mesh) -> Any:
    names = zip_longest(array.shape, spec)
    shape = tuple([n * target.size // source.size if name else n for n, name in names])
    source_end = NamedSharding(source, spec), array.shape
    target_end = NamedSharding(target, spec), shape
    return LABEL.bind(array, source=source_end, target=target_end)[0]


def _back(cotangents: Any, array: Any, *, source: Any, target: Any) -> Any:
    if type(cotangents[0]) is ad.Zero:
        return [ad.Zero(array.aval.to_ct_aval())]
    return LABEL.bind(*cotangents, source=target, target=source)


SPREAD = primitive(
    "jdag_spread",
    _put,
    lambda *avals, mesh, homes: [
        ShapedArray(_times(aval.shape, mesh.size), aval.dtype) for aval in avals
    ],
)
ad.deflinear2(SPREAD, _reduce_add)
LABEL = primitive(
    "jdag_label",
    lambda array, source, target: [_relabelled(array, *target)],
    lambda aval, source, target: [ShapedArray(target[1], aval.dtype)],
)
ad.deflinear2(LABEL, _back)
