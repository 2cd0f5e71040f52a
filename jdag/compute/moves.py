"""Moves between devices, as a primitive: cotangents of a move flow back to its source.

JAX silently ignores `device_put` inside of jit. This primitive can be traced, so its
shapes are known, but not compiled: a function with it in its jaxpr runs unjitted, and
jitting it elsewhere is an error. It is linear; its transpose moves the cotangents back.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NoReturn

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding

from jdag.compute.devices import device_named
from jdag.compute.duals import is_array
from jdag.errors import JdagError

# A device, a sharding over several, or None if unknown.
Target = Any


def moved_arrays(
    arrays: Sequence[Any],
    targets: Sequence[Target],
    homes: Sequence[Target] | None = None,
) -> list[Any]:
    """Return the arrays, each on its target; arrays already there are unchanged.

    Differentiable, but not jittable unless nothing moves. Arrays move in one call,
    tracers in one more.

    Args:
        arrays: JAX arrays, or tracers of `jax.grad`, `jax.vjp` or `jax.jvp` over them.
        targets: for each a device, a sharding, or None: it stays where it is.
        homes: where each array lives, if known.
    """
    found = list(arrays)
    if homes is None or None in homes:
        homes = list(map(home_of, arrays))
    elif homes == targets:  # Equal lists, or tuples: most calls have nothing to move.
        return found
    both = enumerate(zip(homes, targets, strict=True))
    far = [
        index
        for index, (home, target) in both
        if home is not target and target is not None and home != target
    ]
    # Beside a tracer an array would be differentiated too.
    tracers = [index for index in far if isinstance(found[index], jax.core.Tracer)]
    others = [index for index in far if index not in tracers] if tracers else far
    for indices in filter(None, (tracers, others)):
        sources = tuple([homes[index] for index in indices])
        there = tuple([targets[index] for index in indices])
        given = [found[index] for index in indices]
        put = MOVE.bind(*given, targets=there, sources=sources)
        for index, array in zip(indices, put, strict=True):
            found[index] = array
    return found


def beside(arrays: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Return each array on the device of its counterpart in `others`, when known.

    Inside of jax.checkpoint the device of an array is known only in the second run.
    """
    homes = list(map(home_of, others))
    if None not in homes:
        return moved_arrays(arrays, homes)
    found: list[Any] = BESIDE.bind(*arrays, *others)
    return found


def _beside(*both: Any) -> list[Any]:
    """Implements `beside`; values that are not JAX arrays use the default device."""
    arrays, others = _halves(both)
    homes = [home_of(other) for other in others]
    return moved_arrays(
        arrays, [device_named(None) if home is None else home for home in homes]
    )


def home_of(value: Any) -> Target:
    """Return where an array (or a tracer's array) lives; None if unknown."""
    value = array_behind(value)
    return _home(value.sharding) if is_array(value) else None


@lru_cache(maxsize=4096)
def _home(sharding: Any) -> Target:
    """The device of a sharding over one, or the sharding: `Array.device`, kept."""
    devices = tuple(sharding.device_set)
    return devices[0] if len(devices) == 1 else sharding


def is_explicit(home: Target) -> bool:
    """Tell whether a target's mesh is part of the types of its arrays."""
    return isinstance(home, NamedSharding) and not home.mesh.are_all_axes_auto


def cuttable(arrays: Sequence[Any], homes: Sequence[Target]) -> Sequence[Any]:
    """Return the arrays without a mesh in their types, which would forbid slicing.

    Each stays on its devices; nothing is copied.
    """
    if not any(map(is_explicit, homes)):
        return arrays
    return moved_arrays(arrays, [_automatic(home) for home in homes], homes)


def _automatic(home: Target) -> Target:
    if not is_explicit(home):
        return home
    axes = home.mesh.axis_names
    mesh = Mesh(home.mesh.devices, axes, axis_types=(AxisType.Auto,) * len(axes))
    return NamedSharding(mesh, home.spec, memory_kind=home.memory_kind)


def is_free(value: Any) -> bool:
    """Tell whether a program over devices accepts an array wherever it is.

    JAX transfers uncommitted arrays faster than `moved_arrays`, unless a guard
    restricts implicit transfers.
    """
    if not is_array(value) or value.committed:
        return False
    config: Any = jax.config
    return config.jax_transfer_guard_device_to_device in (None, "allow")


def array_behind(value: Any) -> Any:
    """Return the array behind a tracer of grad, vjp or jvp; None for other tracers."""
    while isinstance(value, jax.core.Tracer):
        value = getattr(value, "primal", None)
    return value


def _put(*arrays: Any, targets: tuple[Target, ...], **_: Any) -> list[Any]:
    # With a bare device as target the array would keep its old mesh in its type, and
    # functions compiled for arrays without one would be compiled again.
    there = [
        SingleDeviceSharding(target) if isinstance(target, jax.Device) else target
        for target in targets
    ]
    put: list[Any] = jax.device_put(list(arrays), there)
    return put


def _typed(*avals: Any, targets: tuple[Target, ...], **_: Any) -> list[Any]:
    return [
        aval
        if is_explicit(target)
        else ShapedArray(aval.shape, aval.dtype, aval.weak_type)
        for aval, target in zip(avals, targets, strict=True)
    ]


def _transposed(
    cotangents: Sequence[Any], *_: Any, targets: Any, sources: tuple[Target, ...]
) -> list[Any]:
    found = list(cotangents)
    indices = [p for p, ct in enumerate(cotangents) if type(ct) is not ad.Zero]
    # If the source was unknown, as inside of jax.checkpoint, use the default device.
    homes = [device_named(None) if sources[p] is None else sources[p] for p in indices]
    there = [home_of(found[p]) or targets[p] for p in indices]
    # Bound also where nothing moves: inside of jit it is refused.
    ends = {"targets": tuple(homes), "sources": tuple(there)}
    back = MOVE.bind(*[found[p] for p in indices], **ends)
    for index, cotangent in zip(indices, back, strict=True):
        found[index] = cotangent
    return found


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise JdagError(
        "arrays cannot move between devices inside of jax.jit, jax.vmap, or a loop or "
        "branch of jax.lax: JAX would ignore the move. Call functions of jdag.parallel "
        "outside of these, and jit the functions given to them; jax.grad, jax.vjp "
        "and ctx.call may be around it"
    )


def primitive(
    name: str,
    impl: Callable[..., Any],
    typed: Callable[..., Any],
    refuse: Callable[..., NoReturn] = _refuse,
) -> Primitive:
    """Return a primitive with several results, refused inside of jit and vmap."""
    made = Primitive(name)
    made.multiple_results = True
    made.def_impl(impl)
    made.def_abstract_eval(typed)
    mlir.register_lowering(made, refuse)
    batching.primitive_batchers[made] = refuse
    return made


MOVE = primitive("jdag_move", _put, _typed)
ad.deflinear2(MOVE, _transposed)


def _halves(both: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    half = len(both) // 2
    return list(both[:half]), list(both[half:])


def _beside_along(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    arrays, others = _halves(primals)
    along = [ad.instantiate_zeros(tangent) for tangent in _halves(tangents)[0]]
    return beside(arrays, others), beside(along, others)


BESIDE = primitive("jdag_beside", _beside, lambda *both: _halves(both)[0])
ad.primitive_jvps[BESIDE] = _beside_along
# What flows back is moved on from where it is.
ad.primitive_transposes[BESIDE] = lambda cts, *both: [*cts, *[None] * len(cts)]
