"""Facts about jaxprs: dependence of outputs on inputs, callbacks and moves.

Dependence is never missed: if an equation's inner jaxpr is not understood, all of its
outputs depend on all of its inputs.
"""

from collections.abc import Iterator, Sequence
from functools import reduce
from operator import or_
from typing import Any

from jax.extend import core

from jdag.compute.moves import MOVE

# Primitives whose inner jaxpr has the inputs and outputs of the equation.
_PLAIN: tuple[str, ...] = (
    *("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat2"),
    "vjp_node[jit]",  # A jit in the linear program of a vjp, in JAX 0.12.
)

Reaches = tuple[tuple[bool, ...], ...]


def has_callback(part: Any) -> bool:
    """Tell whether a jaxpr, or one inside of it, calls back into Python."""
    return any("callback" in equation.primitive.name for equation in equations(part))


def unportable(closed: Any) -> str:
    """Say why a jaxpr cannot be sent as StableHLO, after a name; "" if it can."""
    if closed.effects or has_callback(closed):
        return "calls back into Python, as jax.pure_callback and jax.debug.print do"
    counts = [1]  # Of devices, by the meshes in it.
    for equation in equations(closed):
        counts.append(getattr(equation.params.get("mesh"), "size", 1))
        sharding = equation.params.get("sharding")
        counts.append(getattr(sharding, "num_devices", 1))
    if max(counts) > 1:
        return f"is for {max(counts)} devices, as jax.shard_map and jax.pmap are"
    return ""


def has_move(part: Any) -> bool:
    """Tell whether arrays move between devices in a jaxpr, or in one inside of it."""
    return any(equation.primitive is MOVE for equation in equations(part))


def equations(part: Any) -> Iterator[Any]:
    """Yield the equations of a jaxpr and of its inner jaxprs, in order."""
    for equation in getattr(getattr(part, "jaxpr", part), "eqns", ()):
        yield equation
        for param in equation.params.values():
            for inner in param if isinstance(param, tuple | list) else (param,):
                yield from equations(inner)


def collectives(part: Any, axis: str) -> list[str]:
    """Return the operations of a jaxpr, and its inner ones, over an axis, in order."""
    found = []
    for equation in equations(part):
        over = [equation.params.get(name, ()) for name in ("axes", "axis_name")]
        names = [one if isinstance(one, tuple) else (one,) for one in over]
        given = ", ".join([atom.aval.str_short() for atom in equation.invars])
        # axis_index, which has no inputs, is not a collective.
        if given and any([axis in some for some in names]):
            found.append(f"{equation.primitive.name}({given})")
    return found


def passed_on(closed: Any) -> tuple[int, ...] | None:
    """Return which input each output is; None for a jaxpr that computes something."""
    indices = {variable: index for index, variable in enumerate(closed.jaxpr.invars)}
    outputs = closed.jaxpr.outvars
    if closed.jaxpr.eqns or any(isinstance(one, core.Literal) for one in outputs):
        return None
    if not all(output in indices for output in outputs):
        return None  # A constant.
    return tuple([indices[output] for output in outputs])


def reaches(vjp: Any, inputs: int, outputs: int) -> Reaches:
    """Return for each input of a vjp's function which outputs it reaches.

    Its cotangent is zero if none of these has one. This is read from the linear program
    that JAX transposes: in the function itself an output may not depend on an input to
    which a custom_vjp still gives a cotangent.

    Args:
        vjp: the result of `jax.vjp`; residuals may be missing.
        inputs: how many arrays the function takes.
        outputs: how many it returns.
    """
    try:
        _, constant, linear, _ = vjp.fun.args  # True of outputs without a tangent.
        residuals = len(linear.invars) - inputs  # They are constants in JAX 0.10.
    except (AttributeError, ValueError):
        residuals, constant = -1, ()
    if residuals < 0 or len(constant) != outputs:
        # Other versions of JAX: assume that all depend on all, which sends more.
        return ((True,) * outputs,) * inputs
    bits = [1 << index for index in range(inputs)]
    found = iter(depends(linear, [0] * residuals + bits))
    masks = [0 if is_constant else next(found) for is_constant in constant]
    return tuple(
        tuple(bool(mask >> index & 1) for mask in masks) for index in range(inputs)
    )


def depends(jaxpr: Any, inputs: Sequence[int]) -> list[int]:
    """Return for each output of an open jaxpr the union of the masks it depends on.

    `inputs` holds one mask per input, of any bits; constants have none.
    """
    masks: dict[Any, int] = dict(zip(jaxpr.invars, inputs, strict=True))
    for _ in _followed(jaxpr, masks):
        pass
    return [_mask(masks, atom) for atom in jaxpr.outvars]


def first_union(jaxpr: Any, inputs: Sequence[int]) -> Any:
    """Return the first equation whose outputs depend on several bits, or None.

    That of the outermost jaxpr; inputs of one bit at most.
    """
    masks: dict[Any, int] = dict(zip(jaxpr.invars, inputs, strict=True))
    for equation in _followed(jaxpr, masks):
        if any([_mask(masks, one).bit_count() > 1 for one in equation.outvars]):
            return equation
    return None


def _followed(jaxpr: Any, masks: dict[Any, int]) -> Iterator[Any]:
    """Yield each equation once the masks of its outputs are known."""
    for equation in jaxpr.eqns:
        taken = [_mask(masks, atom) for atom in equation.invars]
        masks.update(zip(equation.outvars, _outputs(equation, taken), strict=True))
        yield equation


def _mask(masks: dict[Any, int], atom: Any) -> int:
    return 0 if isinstance(atom, core.Literal) else masks.get(atom, 0)


def _outputs(equation: Any, taken: Sequence[int]) -> list[int]:
    """The mask of each output; for an unknown primitive the union of all inputs."""
    name = equation.primitive.name
    params = equation.params
    if name == "cond":
        found = [depends(branch.jaxpr, taken[1:]) for branch in params["branches"]]
        return [_union((taken[0], *masks)) for masks in zip(*found, strict=True)]
    inner = params.get("jaxpr", params.get("call_jaxpr"))
    if name == MOVE.name:
        return list(taken)
    if name in _PLAIN and inner is not None:
        return depends(getattr(inner, "jaxpr", inner), taken)
    return [_union(taken)] * len(equation.outvars)


def _union(masks: Sequence[int]) -> int:
    return reduce(or_, masks, 0)
