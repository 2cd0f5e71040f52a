"""Facts about jaxprs: dependence of outputs on inputs, callbacks and moves.

Dependence is never missed: if an equation's inner jaxpr is of unknown structure, all of
its outputs depend on all of its inputs.
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
    return any("callback" in eqn.primitive.name for eqn in equations(part))


def unportable(closed: Any) -> str:
    """Return why a jaxpr cannot be sent as StableHLO, as a predicate; "" if it can."""
    if closed.effects or has_callback(closed):
        return "calls back into Python, as jax.pure_callback and jax.debug.print do"
    counts = [1]  # Numbers of devices in the jaxpr's meshes.
    for eqn in equations(closed):
        counts.append(getattr(eqn.params.get("mesh"), "size", 1))
        sharding = eqn.params.get("sharding")
        counts.append(getattr(sharding, "num_devices", 1))
    if max(counts) > 1:
        return f"is for {max(counts)} devices, as jax.shard_map and jax.pmap are"
    return ""


def has_move(part: Any) -> bool:
    return any(eqn.primitive is MOVE for eqn in equations(part))


def equations(part: Any) -> Iterator[Any]:
    for eqn in getattr(getattr(part, "jaxpr", part), "eqns", ()):
        yield eqn
        for param in eqn.params.values():
            for inner in param if isinstance(param, tuple | list) else (param,):
                yield from equations(inner)


def collectives(part: Any, axis: str) -> list[str]:
    operations = []
    for eqn in equations(part):
        axes = [eqn.params.get(name, ()) for name in ("axes", "axis_name")]
        names = [value if isinstance(value, tuple) else (value,) for value in axes]
        inputs = ", ".join([atom.aval.str_short() for atom in eqn.invars])
        # axis_index, which has no inputs, is not a collective.
        if inputs and any([axis in value_axes for value_axes in names]):
            operations.append(f"{eqn.primitive.name}({inputs})")
    return operations


def forwarded_inputs(closed: Any) -> tuple[int, ...] | None:
    """Return the input index of each output; None if an output is not an input."""
    indices = {variable: index for index, variable in enumerate(closed.jaxpr.invars)}
    outputs = closed.jaxpr.outvars
    if closed.jaxpr.eqns or any(isinstance(output, core.Literal) for output in outputs):
        return None
    if not all(output in indices for output in outputs):
        return None  # An output is a constant.
    return tuple([indices[output] for output in outputs])


def reaches(vjp: Any, inputs: int, outputs: int) -> Reaches:
    """For each input of a vjp's function, return which outputs depend on it.

    An input's cotangent is zero if none of them has a cotangent. Dependence is read
    from the linear program that JAX transposes, not from the function: a custom_vjp may
    give a cotangent to an input that no output depends on. Residuals may be missing in
    `vjp`.
    """
    try:
        _, constant, linear, _ = vjp.fun.args  # True for outputs without a tangent.
        residuals = len(linear.invars) - inputs  # In JAX 0.10 residuals are constants.
    except (AttributeError, ValueError):
        residuals, constant = -1, ()
    if residuals < 0 or len(constant) != outputs:
        # Other versions of JAX: assume full dependence, which only costs messages.
        return ((True,) * outputs,) * inputs
    bits = [1 << index for index in range(inputs)]
    linear_masks = iter(depends(linear, [0] * residuals + bits))
    masks = [0 if is_constant else next(linear_masks) for is_constant in constant]
    return tuple(
        tuple(bool(mask >> index & 1) for mask in masks) for index in range(inputs)
    )


def depends(jaxpr: Any, inputs: Sequence[int]) -> list[int]:
    """For each output, return the union of the masks of inputs that it depends on."""
    masks: dict[Any, int] = dict(zip(jaxpr.invars, inputs, strict=True))
    for _ in _followed(jaxpr, masks):
        pass
    return [_mask(masks, atom) for atom in jaxpr.outvars]


def first_union(jaxpr: Any, inputs: Sequence[int]) -> Any:
    """Return the first outer equation whose output has several bits, or None."""
    masks: dict[Any, int] = dict(zip(jaxpr.invars, inputs, strict=True))
    for eqn in _followed(jaxpr, masks):
        if any([_mask(masks, variable).bit_count() > 1 for variable in eqn.outvars]):
            return eqn
    return None


def _followed(jaxpr: Any, masks: dict[Any, int]) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        inputs = [_mask(masks, atom) for atom in eqn.invars]
        masks.update(zip(eqn.outvars, _outputs(eqn, inputs), strict=True))
        yield eqn


def _mask(masks: dict[Any, int], atom: Any) -> int:
    return 0 if isinstance(atom, core.Literal) else masks.get(atom, 0)


def _outputs(eqn: Any, inputs: Sequence[int]) -> list[int]:
    """Return each output's mask; unknown primitives give the union of all inputs."""
    name = eqn.primitive.name
    params = eqn.params
    if name == "cond":
        masks = [depends(branch.jaxpr, inputs[1:]) for branch in params["branches"]]
        return [_union((inputs[0], *some)) for some in zip(*masks, strict=True)]
    inner = params.get("jaxpr", params.get("call_jaxpr"))
    if name == MOVE.name:
        return list(inputs)
    if name in _PLAIN and inner is not None:
        return depends(getattr(inner, "jaxpr", inner), inputs)
    return [_union(inputs)] * len(eqn.outvars)


def _union(masks: Sequence[int]) -> int:
    return reduce(or_, masks, 0)
