"""Cutting a jaxpr into the equations that some outputs need, and all others.

Light equations of the second part, such as sums over a batch, move to the first part:
XLA fuses them with other equations there, and would round them differently in a
separate program. Light equations stay if they read the result of a heavy equation (a
product of matrices, a convolution, a loop) or are added to such a result. Heavy
equations are not fused, so both parts compute the same bits as the uncut jaxpr. If the
first part has no outputs, the second part has all equations.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, compress
from operator import not_
from typing import Any, NamedTuple

import jax
from jax.extend import core
from jax.interpreters import partial_eval

_HEAVY = ("dot_general", "ragged_dot_general", "conv_general_dilated", "scatter-add")
_RECOMPUTED = "remat2"  # The primitive of jax.checkpoint.
JITS = ("jit", "pjit")
SHARDED = ("in_shardings", "out_shardings", "in_layouts", "out_layouts")

Variables = Sequence[Any]


class JaxprPart(NamedTuple):
    equations: Sequence[Any]
    reads: Variables
    outputs: Sequence[Any]

    def as_jaxpr(self, jaxpr: Any) -> Any:
        return jaxpr.replace(
            invars=list(self.reads),
            outvars=list(self.outputs),
            eqns=list(self.equations),
            debug_info=jaxpr.debug_info.with_unknown_names(),
        )

    def function(self, closed: Any) -> Callable[..., Any]:
        alone = core.ClosedJaxpr(self.as_jaxpr(closed.jaxpr), closed.consts)
        return core.jaxpr_as_fun(alone)

    def jitted(self, closed: Any, name: str) -> Callable[..., Any]:
        run = self.function(closed)

        def half(*values: Any) -> list[Any]:
            return run(*values)

        half.__name__ = half.__qualname__ = name
        return jax.jit(half) if self.outputs else run


def cut_jaxpr(
    closed: Any, second: Sequence[bool]
) -> tuple[JaxprPart, JaxprPart, Variables]:
    """Return both parts, and the stash: the variables that the second part reads.

    `second` selects the outputs of the second part. The first part returns the other
    outputs, then variables for the stash. If the first part computes an output of the
    second part, that output is only in the stash. The jaxpr has no effects.
    """
    jaxpr = closed.jaxpr
    constants = set(jaxpr.constvars)
    inputs = list(compress(jaxpr.outvars, map(not_, second)))
    outputs = list(compress(jaxpr.outvars, second))
    early = _needed(jaxpr, inputs, constants)
    late = _needed(jaxpr, outputs, constants | _outputs_of(early))
    if inputs:
        place = {atom: n for n, each in enumerate(jaxpr.eqns) for atom in each.outvars}
        stay = _second_part_flags(late)
        early += compress(late, map(not_, stay))
        late = list(compress(late, stay))
        early.sort(key=lambda eqn: place[eqn.outvars[0]])
    computed = _outputs_of(early)
    stash = inputs_of(late, outputs, constants)
    added = computed - set(variables(inputs))
    first_outputs = [*inputs, *[atom for atom in stash if atom in added]]
    second_outputs = [
        atom for atom in outputs if not variables([atom]) or atom not in computed
    ]
    first = JaxprPart(early, inputs_of(early, first_outputs, constants), first_outputs)
    return first, JaxprPart(late, stash, second_outputs), stash


def variables(atoms: Iterable[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]


def _needed(jaxpr: Any, outputs: Any, available: set[Any]) -> list[Any]:
    """Return the equations that compute the outputs, narrowing `jax.checkpoint`."""
    needed = set(variables(outputs)) - available
    equations: list[Any] = []
    for eqn in reversed(jaxpr.eqns):
        used = [var in needed for var in eqn.outvars]
        if any(used):
            partly = eqn.primitive.name == _RECOMPUTED and not all(used)
            equations.append(_narrowed(jaxpr, eqn, used) if partly else eqn)
            needed.update(set(variables(equations[-1].invars)) - available)
    return equations[::-1]


def _narrowed(jaxpr: Any, eqn: Any, used: list[bool]) -> Any:
    alone = JaxprPart([eqn], inputs_of([eqn], (), set()), eqn.outvars).as_jaxpr(jaxpr)
    return partial_eval.dce_jaxpr(alone, used)[0].eqns[0]


def _second_part_flags(late: Sequence[Any]) -> list[bool]:
    heavy = list(map(_is_heavy, late))
    stay = []
    heavy_outs: set[Any] = set()
    for eqn, is_heavy in zip(late, heavy, strict=True):
        stay.append(is_heavy or not heavy_outs.isdisjoint(variables(eqn.invars)))
        heavy_outs.update(eqn.outvars if stay[-1] else ())
    added: set[Any] = set()  # Inputs of light equations that stay.
    read_early: set[Any] = set()  # Inputs of equations that move to the first part.
    for index, eqn in reversed([*enumerate(late)]):
        outputs = set(eqn.outvars)
        stay[index] = stay[index] or bool(outputs & added and not outputs & read_early)
        if not (stay[index] and heavy[index]):
            (added if stay[index] else read_early).update(variables(eqn.invars))
    return stay


def _is_heavy(eqn: Any) -> bool:
    has_inner = any(True for _ in core.jaxprs_in_params(eqn.params))
    return has_inner or eqn.primitive.name in _HEAVY


def _outputs_of(equations: Iterable[Any]) -> set[Any]:
    return {var for eqn in equations for var in eqn.outvars}


def inputs_of(equations: Sequence[Any], outputs: Any, available: set[Any]) -> list[Any]:
    excluded = _outputs_of(equations) | available
    read = chain(*[eqn.invars for eqn in equations], outputs)
    return [var for var in dict.fromkeys(variables(read)) if var not in excluded]


def inlined(closed: Any) -> Any:
    structs = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
        for aval in closed.in_avals
    ]
    return jax.make_jaxpr(partial(_inline, closed))(*structs)


def _inline(closed: Any, *args: Any) -> list[Any]:
    values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(closed.jaxpr.invars, args, strict=True))

    def value(atom: Any) -> Any:
        return values[atom] if variables([atom]) else atom.val

    for eqn in closed.jaxpr.eqns:
        if _is_plain_jit(eqn):
            results = _inline(eqn.params["jaxpr"], *map(value, eqn.invars))
        else:
            inputs = list(dict.fromkeys(variables(eqn.invars)))
            alone = JaxprPart([eqn], inputs, eqn.outvars)
            results = alone.function(closed)(*map(value, inputs))
        values.update(zip(eqn.outvars, results, strict=True))
    return list(map(value, closed.jaxpr.outvars))


def _is_plain_jit(eqn: Any) -> bool:
    shardings = chain(*[eqn.params.get(name, ()) for name in SHARDED])
    unspecified = [
        sharding is None or type(sharding).__name__ == "UnspecifiedValue"
        for sharding in shardings
    ]
    return eqn.primitive.name in JITS and all(unspecified)
