"""Moves between devices, as a primitive: a move flows back to where it came from.

JAX ignores `device_put` inside of jit in silence. This primitive can be traced, so that
its shapes are known, but not compiled: what has it in its jaxpr runs unjitted, and
where somebody else jits it that is an error. It is linear; its transpose moves the
cotangents back.

A program over several devices (`outside`) is a primitive as well where it is traced:
then it is refused in the same words, and not by JAX, which would compare its devices
with those of what is around it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.tree_util as jtu
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import SingleDeviceSharding

from jdag.compute.devices import named
from jdag.errors import JdagError

# A device, a sharding over several, or None where it is not known.
Target = Any

MOVE = Primitive("jdag_move")
MOVE.multiple_results = True
RUN = Primitive("jdag_run")
RUN.multiple_results = True


def moved(arrays: Sequence[Any], targets: Sequence[Target]) -> list[Any]:
    """Return the arrays, each on its target; what is there already is as it was.

    It can be differentiated, not jitted, unless nothing moves. All move in one call.

    Args:
        arrays: JAX arrays, or tracers of `jax.grad`, `jax.vjp` or `jax.jvp` over them.
        targets: for each a device, a sharding, or None: it stays where it is.
    """
    found, homes = list(arrays), list(map(home_of, arrays))
    both = enumerate(zip(homes, targets, strict=True))
    far = [
        place
        for place, (home, target) in both
        if home is not target and target is not None and home != target
    ]
    if far:
        sources = tuple([homes[place] for place in far])
        there = tuple([targets[place] for place in far])
        given = [found[place] for place in far]
        put = MOVE.bind(*given, targets=there, sources=sources)
        for place, array in zip(far, put, strict=True):
            found[place] = array
    return found


def home_of(value: Any) -> Target:
    """Return where an array lives, or what a tracer stands for; None if not known."""
    value = array_behind(value)
    return value.device if isinstance(value, jax.Array) else None


def array_behind(value: Any) -> Any:
    """Return the array that a tracer of grad, vjp or jvp stands for; None of others."""
    while isinstance(value, jax.core.Tracer):
        value = getattr(value, "primal", None)
    return value


def outside(program: Callable[..., Any]) -> Callable[..., Any]:
    """Return a program over several devices, to be run outside of any other.

    It can be traced, so that its shapes are known, and differentiated, not compiled.

    Args:
        program: of pytrees of arrays to a pytree of arrays.
    """

    def run(*groups: Any) -> Any:
        leaves, treedef = jtu.tree_flatten(groups)
        if None not in [home_of(leaf) for leaf in leaves]:
            return program(*groups)
        if jax.sharding.get_abstract_mesh().manual_axes:
            _refuse()  # It is traced within a program over devices.
        structs, out_tree = jtu.tree_flatten(jax.eval_shape(program, *groups))

        def flat(*arrays: Any) -> list[Any]:
            return jtu.tree_leaves(program(*jtu.tree_unflatten(treedef, arrays)))

        avals = [ShapedArray(one.shape, one.dtype, one.weak_type) for one in structs]
        found = RUN.bind(*leaves, run=flat, avals=tuple(avals))
        return jtu.tree_unflatten(out_tree, found)

    return run


def _put(*arrays: Any, targets: tuple[Target, ...], sources: Any) -> list[Any]:
    del sources
    # By its device alone an array would keep the mesh that it comes from in its type,
    # and what has been compiled for one without would be compiled again.
    there = [
        SingleDeviceSharding(target) if isinstance(target, jax.Device) else target
        for target in targets
    ]
    put: list[Any] = jax.device_put(list(arrays), there)
    return put


def _transposed(
    cotangents: Sequence[Any], *_: Any, targets: Any, sources: tuple[Target, ...]
) -> list[Any]:
    found = list(cotangents)
    places = [p for p, ct in enumerate(cotangents) if type(ct) is not ad.Zero]
    if places:
        # Where the source was not known, as inside of jax.checkpoint, the default one.
        homes = [named(None) if sources[p] is None else sources[p] for p in places]
        back = moved([found[p] for p in places], homes)
        for place, cotangent in zip(places, back, strict=True):
            found[place] = cotangent
    return found


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise JdagError(
        "arrays cannot move between devices inside of jax.jit, jax.vmap, or a loop or "
        "branch of jax.lax: JAX would ignore the move. Call what jdag.parallel has "
        "outside of these, and jit the functions that it is given; jax.grad, jax.vjp "
        "and ctx.call may be around it"
    )


MOVE.def_impl(_put)
MOVE.def_abstract_eval(lambda *avals, targets, sources: list(avals))
ad.deflinear2(MOVE, _transposed)
mlir.register_lowering(MOVE, _refuse)
batching.primitive_batchers[MOVE] = _refuse


def _along(
    primals: Sequence[Any], tangents: Sequence[Any], *, run: Any, avals: Any
) -> Any:
    del avals
    return jax.jvp(run, tuple(primals), tuple(map(ad.instantiate_zeros, tangents)))


RUN.def_impl(lambda *arrays, run, avals: run(*arrays))
RUN.def_abstract_eval(lambda *_, run, avals: list(avals))
ad.primitive_jvps[RUN] = _along
mlir.register_lowering(RUN, _refuse)
batching.primitive_batchers[RUN] = _refuse
