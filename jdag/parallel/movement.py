"""Copies, chunks and joins of arrays over devices, and sums of their cotangents.

Replication copies an array, then moves the copies. The transpose of the copy is
ReduceAdd: cotangents are added on the original's device, in the order of the copies.
"""

import operator
from collections.abc import Sequence
from functools import partial, reduce
from operator import add
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jdag.compute.avals import aval_of, frozen
from jdag.compute.devices import device_named
from jdag.compute.moves import cuttable, home_of, moved_arrays
from jdag.compute.pytrees import Form, flatten, is_static, paths
from jdag.engine.arrays import HOLE
from jdag.errors import JdagError, kind_of
from jdag.parallel.devices import Device, device_of, resolved_devices

COPIES = Primitive("jdag_copies")
COPIES.multiple_results = True


def replicate(params: Any, devices: Sequence[Device] | None = None) -> tuple[Any, ...]:
    """Copy a pytree to each device.

    Cotangents of the copies are added on the device of the original, in the order of
    the devices. One call adds all leaves. Integers and bools are copied, but have no
    cotangents. Leaves that are not arrays (strings, functions) are shared.

    Args:
        params: a pytree of arrays.
        devices: names or devices; None: all devices of this process.

    Returns:
        One pytree per device, in order.

    Raises:
        JdagError: unusable devices, or a leaf that cannot be copied.
    """
    targets = resolved_devices(devices, "replicate")
    arrays, form = apart(params, "replicate")
    return _placed(form, repeat_arrays(arrays, len(targets)), targets)


def scatter(
    x: Any, devices: Sequence[Device] | None = None, dim: SupportsIndex = 0
) -> tuple[Any, ...]:
    """Split arrays into chunks along a dimension, one chunk on each device.

    n rows over k devices give chunks of `ceil(n / k)` rows; the last chunk may be
    smaller. With too few rows there are fewer chunks than devices.

    Args:
        x: a pytree of arrays with equally many rows.
        devices: names or devices; None: all devices of this process.
        dim: the dimension of rows; negative values count from the end.

    Returns:
        The chunks, in order: pytrees like x. Leaves that are not arrays are shared.

    Raises:
        JdagError: unusable devices; a scalar; no such dimension; arrays with different
            numbers of rows.
    """
    targets = resolved_devices(devices, "scatter")
    arrays, form = apart(x, "scatter")
    dims, count = rows_of(x, arrays, dim, "scatter")
    sizes = chunk_sizes(count, len(targets))
    arrays = list(cuttable(arrays, list(map(home_of, arrays))))
    both = zip(arrays, dims, strict=True)
    pieces = [cut_array(array, sizes, array_dim) for array, array_dim in both]
    flat = [piece[number] for number in range(len(sizes)) for piece in pieces]
    return _placed(form, flat, targets[: len(sizes)])


def gather(
    xs: Sequence[Any], device: Device | None = None, dim: SupportsIndex = 0
) -> Any:
    """Join chunks along a dimension, on one device.

    Args:
        xs: pytrees of arrays with equal structures. Scalars, such as the losses of
            replicas, become a vector for any `dim`.
        device: the device of the result; None: the default device.
        dim: the dimension; negative values count from the end.

    Returns:
        A pytree like each of `xs`. Leaves that are not arrays come from `xs[0]`.

    Raises:
        JdagError: `xs` is empty; structures, dtypes or the other dimensions differ; no
            such dimension; no such device.
    """
    target = device_named(None) if device is None else device_of(device, "gather")
    dim = as_int(dim, "gather")
    flat, form = _alike(xs, "gather", "chunk")
    for index, parts in enumerate(zip(*flat, strict=True)):
        check_joined(parts, dim, f"gather: leaf {_path(xs[0], index)}")
    gathered = columns(flat, [target] * len(flat[0]))
    return form.rebuild([concatenated(parts, dim) for parts in gathered])


def reduce_add(replicas: Sequence[Any], device: Device | None = None) -> Any:
    """Add pytrees, leaf by leaf, in their order: ((r0 + r1) + r2) + ...

    Use it to sum the gradients of replicas. All leaves are added in one call.

    Args:
        replicas: pytrees of arrays with equal structures, shapes and dtypes.
        device: the device of the sums; None: the device of the leaf in the first
            pytree.

    Returns:
        A pytree like each of these. Leaves that are not arrays come from `replicas[0]`.

    Raises:
        JdagError: `replicas` is empty; structures, shapes or dtypes differ; a leaf is
            not numeric (bools, PRNG keys).
    """
    target = None if device is None else device_of(device, "reduce_add")
    flat, form = _alike(replicas, "reduce_add", "replica")
    for index, addends in enumerate(zip(*flat, strict=True)):
        kinds = [aval_of(array).strong for array in addends]
        leaf = f"leaf {_path(replicas[0], index)}"
        if not jnp.issubdtype(addends[0].dtype, jnp.number):
            raise JdagError(
                f"reduce_add needs arrays of numbers, but {leaf} is {kinds[0]}"
            )
        for number, kind in enumerate(kinds):
            if kind != kinds[0]:
                raise JdagError(
                    f"reduce_add: {leaf} is {kinds[0]} in replica 0 and {kind} in "
                    f"replica {number}; shapes and dtypes must be equal"
                )
    homes = [target or home_of(array) for array in flat[0]]
    return form.rebuild(sum_each(columns(flat, homes)))


# ------------------------------------------------- arrays of pytrees, and their rows


def apart(tree: Any, caller: str) -> tuple[list[Any], Form]:
    leaves, treedef = flatten(tree, what=f"{caller}: this")
    arrays: list[Any] = []
    rest = list(leaves)
    for index, leaf in enumerate(leaves):
        if is_static(leaf):
            continue
        rest[index] = HOLE
        try:
            arrays.append(as_array(leaf))
        except JdagError as error:
            raise JdagError(f"{caller}: leaf {_path(tree, index)}: {error}") from None
    return arrays, Form(treedef, rest)


def _placed(
    form: Form, arrays: Sequence[Any], targets: Sequence[jax.Device]
) -> tuple[Any, ...]:
    size = form.num_leaves
    moved = moved_arrays(arrays, [target for target in targets for _ in range(size)])
    numbers = range(len(targets))
    return tuple([form.rebuild(moved[n * size : (n + 1) * size]) for n in numbers])


def columns(
    rows: Sequence[Sequence[Any]],
    homes: list[Any],
    sources: Sequence[jax.Device] | None = None,
) -> list[list[Any]]:
    """Transpose rows of arrays into columns; move column i to the device `homes[i]`.

    `sources` are the devices of the rows, if known.
    """
    size = len(homes)
    froms = sources and [device for device in sources for _ in homes]
    moved = moved_arrays([a for row in rows for a in row], homes * len(rows), froms)
    return [moved[index::size] for index in range(size)]


def as_array(leaf: Any) -> Any:
    """Return a leaf as a JAX array; a mutable numpy array is copied."""
    if isinstance(leaf, jax.Array):  # Including tracers.
        return leaf if isinstance(leaf, jax.core.Tracer) else frozen(leaf)
    aval_of(leaf)
    return jnp.array(leaf)


def rows_of(
    tree: Any, arrays: Sequence[Any], dim: SupportsIndex, what: str
) -> tuple[list[int], int]:
    """Return the dimension of rows of each array, and the number of rows."""
    row_dim = as_int(dim, what)
    if not arrays:
        raise JdagError(f"{what}: the pytree to split into chunks has no arrays")
    ranks = [array.ndim for array in arrays]
    counts = [
        array.shape[row_dim] if -rank <= row_dim < rank else None
        for array, rank in zip(arrays, ranks, strict=True)
    ]
    for index, count in enumerate(counts):
        if count is not None and count == counts[0]:
            continue
        leaf = f"{what}: leaf {_array_path(tree, index)}"
        if not ranks[index]:
            raise JdagError(
                f"{leaf} is {aval_of(arrays[index])}, a scalar, which has no rows to "
                "split into chunks"
            )
        _along(row_dim, ranks[index], leaf)
        raise JdagError(
            f"{leaf} has {count} rows along dim {dim}, and leaf {_array_path(tree, 0)} "
            f"has {counts[0]}; the numbers must be equal"
        )
    return [row_dim % rank for rank in ranks], counts[0] or 0


def as_int(dim: SupportsIndex, what: str) -> int:
    number: Any = None if isinstance(dim, bool) else dim
    try:
        return operator.index(number)
    except TypeError:
        raise JdagError(f"{what}: dim = {dim!r}: expected an int") from None


def _along(dim: int, ndim: int, what: str) -> int:
    if not -ndim <= dim < ndim:
        raise JdagError(
            f"{what} has {ndim} dimensions, but dim is {dim}: expected {-ndim} to "
            f"{ndim - 1}"
        )
    return dim % ndim


def chunk_sizes(count: int, devices: int) -> tuple[int, ...]:
    """Return the sizes of chunks of `count` rows; zero rows give one empty chunk."""
    size = max(1, -(-count // devices))
    full = max(0, count - 1) // size
    return (*(size,) * full, count - full * size)


def check_joined(parts: Sequence[Any], dim: int, what: str) -> None:
    first = parts[0]
    rank = len(first.shape)
    axis = _along(dim, rank, what) if rank else 0
    for replica, part in enumerate(parts):
        rests = [
            (*array.shape[:axis], *array.shape[axis + 1 :], len(array.shape))
            for array in (first, part)
        ]
        if rests[0] != rests[1] or part.dtype != first.dtype:
            raise JdagError(
                f"{what} is {aval_of(first).strong} in replica 0 and "
                f"{aval_of(part).strong} in replica {replica}: these cannot be joined "
                f"along dim {dim}"
            )


def _alike(trees: Sequence[Any], what: str, noun: str) -> tuple[list[list[Any]], Form]:
    if not isinstance(trees, Sequence) or not trees:
        raise JdagError(
            f"{what} needs a list of pytrees, one for each {noun}, not "
            f"{trees if isinstance(trees, Sequence) else kind_of(trees)}"
        )
    parts = [apart(tree, what) for tree in trees]
    first = parts[0][1]
    for number, (_, form) in enumerate(parts):
        if form != first:
            raise JdagError(
                f"{what}: {noun} 0 is {first} and {noun} {number} is {form}: their "
                "structures must be equal"
            )
    return [arrays for arrays, _ in parts], first


def _path(tree: Any, index: int) -> str:
    return paths(tree)[index] or "itself"


def _array_path(tree: Any, number: int) -> str:
    leaves = jtu.tree_leaves(tree)
    indices = [index for index, leaf in enumerate(leaves) if not is_static(leaf)]
    return _path(tree, indices[number])


# ----------------------------------------------------- operations, one jitted call each


def repeat_arrays(arrays: Sequence[Any], count: int) -> list[Any]:
    """Repeat the arrays `count` times; cotangents are added in the order of copies."""
    copies = list(arrays) * count
    # Bind tracers only: JAX would also differentiate arrays in the same primitive.
    places = [n for n, array in enumerate(copies) if isinstance(array, jax.core.Tracer)]
    if count > 1 and places:
        tracers = [copies[n] for n in places[: len(places) // count]]
        for n, copy in zip(places, COPIES.bind(*tracers, count=count), strict=True):
            copies[n] = copy
    return copies


def sum_each(sums: Sequence[Any]) -> list[Any]:
    """Return the sum of each list of addends, from left to right.

    Each list is on one device. Instead of a list, an array may have the addends along
    its first dimension. All sums on one device are one call.
    """
    if all([len(addends) == 1 for addends in sums]):
        return [addends[0] for addends in sums]
    homes = [home_of(jtu.tree_leaves(addends)[0]) for addends in sums]
    totals: list[Any] = [None] * len(sums)
    for device in dict.fromkeys(homes):
        indices = [index for index, home in enumerate(homes) if home == device]
        results = _added([sums[index] for index in indices])
        for index, total in zip(indices, results, strict=True):
            totals[index] = total
    return totals


@jax.jit
def _added(sums: Any) -> Any:
    return [reduce(add, [*addends]) for addends in sums]


def cut_array(array: Any, sizes: tuple[int, ...], dim: int) -> Sequence[Any]:
    return (array,) if len(sizes) == 1 else _cut(array, sizes, dim)


@partial(jax.jit, static_argnums=(1, 2))
def _cut(array: Any, sizes: tuple[int, ...], dim: int) -> Any:
    return jax.lax.split(array, sizes, dim)


def concatenated(parts: Sequence[Any], dim: int) -> Any:
    if len(parts) == 1 and parts[0].ndim:
        return parts[0]
    return _joined(tuple(parts), dim)


@partial(jax.jit, static_argnums=1)
def _joined(parts: Any, dim: int) -> Any:
    if parts[0].ndim == 0:
        return jnp.stack(parts)
    return jnp.concatenate(parts, dim)


# -------------------------------------------------------------------- copying is linear


def _repeated(*arrays: Any, count: int) -> list[Any]:
    return list(arrays) * count


def _reduce_add(cotangents: Sequence[Any], *_: Any, count: int) -> list[Any]:
    size = len(cotangents) // count
    sums = [
        [ct for ct in cotangents[index::size] if type(ct) is not ad.Zero]
        for index in range(size)
    ]
    totals = iter(sum_each([addends for addends in sums if addends]))
    both = zip(sums, cotangents, strict=False)
    return [next(totals) if addends else zero for addends, zero in both]


def _batched(arrays: Sequence[Any], dims: Sequence[Any], *, count: int) -> Any:
    return COPIES.bind(*arrays, count=count), list(dims) * count


COPIES.def_impl(_repeated)
COPIES.def_abstract_eval(_repeated)
ad.deflinear2(COPIES, _reduce_add)
mlir.register_lowering(COPIES, mlir.lower_fun(_repeated, multiple_results=True))
batching.primitive_batchers[COPIES] = _batched
