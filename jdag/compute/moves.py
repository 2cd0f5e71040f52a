"""Moves between devices, as a primitive whose transpose moves cotangents back.

JAX silently ignores `device_put` inside of jit. This primitive can be traced, so its
shapes are known, but not compiled: a function whose jaxpr contains it runs unjitted,
and jitting it elsewhere is an error. It is linear.
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

# A device, a sharding over several devices, or None if unknown.
Target = Any


def moved_arrays(
    arrays: Sequence[Any],
    targets: Sequence[Target],
    homes: Sequence[Target] | None = None,
) -> list[Any]:
    """Return the arrays, each on its target. Arrays already there are unchanged.

    The function is differentiable, but it cannot be jitted unless nothing moves. One
    call moves all arrays, and a second call moves all tracers of `jax.grad`, `jax.vjp`
    or `jax.jvp`. A target is a device, a sharding, or None (no move); `homes` are the
    current devices or shardings, if known.
    """
    moved = list(arrays)
    if homes is None or None in homes:
        homes = list(map(home_of, arrays))
    elif homes == targets:  # Most calls have nothing to move.
        return moved
    pairs = enumerate(zip(homes, targets, strict=True))
    moving = [
        index
        for index, (home, target) in pairs
        if home is not target and target is not None and home != target
    ]
    # In one call with a tracer, arrays would be differentiated too.
    tracers = [index for index in moving if isinstance(moved[index], jax.core.Tracer)]
    plain = [index for index in moving if index not in tracers] if tracers else moving
    for indices in filter(None, (tracers, plain)):
        sources = tuple([homes[index] for index in indices])
        ends = tuple([targets[index] for index in indices])
        inputs = [moved[index] for index in indices]
        outputs = MOVE.bind(*inputs, targets=ends, sources=sources)
        for index, array in zip(indices, outputs, strict=True):
            moved[index] = array
    return moved


def beside(arrays: Sequence[Any], peers: Sequence[Any]) -> list[Any]:
    """Return each array on the device of its counterpart in `peers`.

    Inside of jax.checkpoint the device of an array is known only in the second run.
    """
    homes = list(map(home_of, peers))
    if None not in homes:
        return moved_arrays(arrays, homes)
    moved: list[Any] = BESIDE.bind(*arrays, *peers)
    return moved


def _beside(*arrays_and_peers: Any) -> list[Any]:
    """Implements `beside`; values that are not JAX arrays use the default device."""
    arrays, peers = _halves(arrays_and_peers)
    homes = [home_of(peer) for peer in peers]
    return moved_arrays(
        arrays, [device_named(None) if home is None else home for home in homes]
    )


def home_of(value: Any) -> Target:
    """Return an array's or tracer's device or sharding; None if it is unknown."""
    value = array_behind(value)
    return _home(value.sharding) if is_array(value) else None


@lru_cache(maxsize=4096)
def _home(sharding: Any) -> Target:
    devices = tuple(sharding.device_set)
    return devices[0] if len(devices) == 1 else sharding


def is_explicit(home: Target) -> bool:
    return isinstance(home, NamedSharding) and not home.mesh.are_all_axes_auto


def cuttable(arrays: Sequence[Any], homes: Sequence[Target]) -> Sequence[Any]:
    """Return the arrays without a mesh in their types: a mesh would forbid slicing.

    Each array stays on its devices; nothing is copied.
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
    """Whether a program over devices accepts an array on any device.

    JAX transfers uncommitted arrays faster than `moved_arrays`, unless a guard
    restricts implicit transfers.
    """
    if not is_array(value) or value.committed:
        return False
    config: Any = jax.config
    return config.jax_transfer_guard_device_to_device in (None, "allow")


def array_behind(value: Any) -> Any:
    while isinstance(value, jax.core.Tracer):
        value = getattr(value, "primal", None)
    return value


def _put(*arrays: Any, targets: tuple[Target, ...], **_: Any) -> list[Any]:
    # With a bare device as target the array would keep its old mesh in its type, and
    # functions compiled for arrays without one would be compiled again.
    shardings = [
        SingleDeviceSharding(target) if isinstance(target, jax.Device) else target
        for target in targets
    ]
    moved: list[Any] = jax.device_put(list(arrays), shardings)
    return moved


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
    moved = list(cotangents)
    indices = [n for n, ct in enumerate(cotangents) if type(ct) is not ad.Zero]
    # An unknown source, as inside of jax.checkpoint, means the default device.
    homes = [device_named(None) if sources[n] is None else sources[n] for n in indices]
    origins = [home_of(moved[index]) or targets[index] for index in indices]
    # Bind the primitive even if nothing moves, so that jit refuses it.
    ends = {"targets": tuple(homes), "sources": tuple(origins)}
    back = MOVE.bind(*[moved[index] for index in indices], **ends)
    for index, cotangent in zip(indices, back, strict=True):
        moved[index] = cotangent
    return moved


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise JdagError(
        "arrays cannot move between devices inside of jax.jit, jax.vmap, or a loop or "
        "branch of jax.lax, since JAX would ignore the move. Call functions of "
        "jdag.parallel outside of these, and jit the functions passed to them; "
        "jax.grad, jax.vjp and ctx.call may be outside"
    )


def primitive(
    name: str,
    impl: Callable[..., Any],
    typed: Callable[..., Any],
    refuse: Callable[..., NoReturn] = _refuse,
) -> Primitive:
    new = Primitive(name)
    new.multiple_results = True
    new.def_impl(impl)
    new.def_abstract_eval(typed)
    mlir.register_lowering(new, refuse)
    batching.primitive_batchers[new] = refuse
    return new


MOVE = primitive("jdag_move", _put, _typed)
ad.deflinear2(MOVE, _transposed)


def _halves(both: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    half = len(both) // 2
    return list(both[:half]), list(both[half:])


def _beside_along(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    arrays, peers = _halves(primals)
    directions = [ad.instantiate_zeros(tangent) for tangent in _halves(tangents)[0]]
    return beside(arrays, peers), beside(directions, peers)


BESIDE = primitive("jdag_beside", _beside, lambda *both: _halves(both)[0])
ad.primitive_jvps[BESIDE] = _beside_along
# Cotangents stay on their devices; the transpose of the next move moves them.
ad.primitive_transposes[BESIDE] = lambda cts, *both: [*cts, *[None] * len(cts)]
