"""A jaxpr is cut in two: what some outputs need, and what the others need beyond that.

Light equations of the second part, such as sums over a batch, go to the first: XLA
fuses them with others there, and rounds them differently if they stand alone. Those
that follow a heavy one (a product of matrices, a convolution, a loop), or are added to
what follows one, stay. Heavy ones are not fused, so both parts have the bits of the
whole. Without outputs of the first kind the second part is all.
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
    """Equations in order, the variables that they read from elsewhere, and outputs."""

    equations: Sequence[Any]
    reads: Variables
    outputs: Sequence[Any]

    def of(self, jaxpr: Any) -> Any:
        """Return these equations of a jaxpr as one of their own."""
        return jaxpr.replace(
            invars=list(self.reads),
            outvars=list(self.outputs),
            eqns=list(self.equations),
            debug_info=jaxpr.debug_info.with_unknown_names(),
        )

    def function(self, closed: Any) -> Callable[..., Any]:
        """Return these equations of a closed jaxpr as a function of what they read."""
        alone = core.ClosedJaxpr(self.of(closed.jaxpr), closed.consts)
        return core.jaxpr_as_fun(alone)

    def jitted(self, closed: Any, name: str) -> Callable[..., Any]:
        """Return that function jitted, under a name for profiles."""
        run = self.function(closed)

        def half(*values: Any) -> list[Any]:
            return run(*values)

        half.__name__ = half.__qualname__ = name
        return jax.jit(half) if self.outputs else run


def cut_jaxpr(
    closed: Any, second: Sequence[bool]
) -> tuple[JaxprPart, JaxprPart, Variables]:
    """Return both parts, and what the second needs: its stash, variables.

    The first part's outputs are its own, then variables for the stash. Outputs of the
    second part that the first computes are not among the second's, but in the stash.

    Args:
        closed: a closed jaxpr without effects.
        second: for each output, whether it is one of the second part.
    """
    jaxpr = closed.jaxpr
    known = set(jaxpr.constvars)
    inputs = list(compress(jaxpr.outvars, map(not_, second)))
    outputs = list(compress(jaxpr.outvars, second))
    early = _needed(jaxpr, inputs, known)
    late = _needed(jaxpr, outputs, known | _made(early))
    if inputs:
        stay = _staying(late)
        early += compress(late, map(not_, stay))
        late = list(compress(late, stay))
        place = {
            one: index for index, each in enumerate(jaxpr.eqns) for one in each.outvars
        }
        early.sort(key=lambda each: place[each.outvars[0]])
    computed = _made(early)
    stash = read_by(late, outputs, known)
    own = set(variables(inputs))
    made = [*inputs, *[one for one in stash if one in computed and one not in own]]
    left = [one for one in outputs if not variables([one]) or one not in computed]
    first = JaxprPart(early, read_by(early, made, known), made)
    return first, JaxprPart(late, stash, left), stash


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Return the atoms that are not literals."""
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]


def _needed(jaxpr: Any, outputs: Any, known: set[Any]) -> list[Any]:
    """The equations that compute the outputs from known variables, in order.

    Of what is recomputed by jax.checkpoint, only what is needed.
    """
    needed = set(variables(outputs)) - known
    found: list[Any] = []
    for each in reversed(jaxpr.eqns):
        used = [one in needed for one in each.outvars]
        if any(used):
            partly = each.primitive.name == _RECOMPUTED and not all(used)
            found.append(_partly(jaxpr, each, used) if partly else each)
            needed.update(set(variables(found[-1].invars)) - known)
    return found[::-1]


def _partly(jaxpr: Any, equation: Any, used: list[bool]) -> Any:
    """An equation of a jaxpr with these outputs alone, and what they need."""
    alone = JaxprPart([equation], read_by([equation], (), set()), equation.outvars).of(
        jaxpr
    )
    return partial_eval.dce_jaxpr(alone, used)[0].eqns[0]


def _staying(late: Sequence[Any]) -> list[bool]:
    """Of each equation of the second part whether it stays there."""
    heavy = list(map(_is_heavy, late))
    stay = []
    made: set[Any] = set()
    for each, is_heavy in zip(late, heavy, strict=True):
        stay.append(is_heavy or not made.isdisjoint(variables(each.invars)))
        made.update(each.outvars if stay[-1] else ())
    added: set[Any] = set()  # What light equations that stay read.
    first: set[Any] = set()  # What those read that go.
    for index, each in reversed([*enumerate(late)]):
        own = set(each.outvars)
        stay[index] = stay[index] or bool(own & added and not own & first)
        if not (stay[index] and heavy[index]):
            (added if stay[index] else first).update(variables(each.invars))
    return stay


def _is_heavy(equation: Any) -> bool:
    has_inner = any(True for _ in core.jaxprs_in_params(equation.params))
    return has_inner or equation.primitive.name in _HEAVY


def _made(equations: Iterable[Any]) -> set[Any]:
    return {one for each in equations for one in each.outvars}


def read_by(equations: Sequence[Any], outputs: Any, known: set[Any]) -> list[Any]:
    """Return the variables that these read and that are not known, in order."""
    made = _made(equations) | known
    read = chain(*[each.invars for each in equations], outputs)
    return [one for one in dict.fromkeys(variables(read)) if one not in made]


def inlined(closed: Any) -> Any:
    """Return a closed jaxpr without nested jits, but for those with shardings."""
    structs = [
        jax.ShapeDtypeStruct(one.shape, one.dtype, weak_type=one.weak_type)
        for one in closed.in_avals
    ]
    return jax.make_jaxpr(partial(_inline, closed))(*structs)


def _inline(closed: Any, *args: Any) -> list[Any]:
    values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(closed.jaxpr.invars, args, strict=True))

    def value(atom: Any) -> Any:
        return values[atom] if variables([atom]) else atom.val

    for each in closed.jaxpr.eqns:
        if _is_plain_jit(each):
            made = _inline(each.params["jaxpr"], *map(value, each.invars))
        else:
            few = list(dict.fromkeys(variables(each.invars)))
            alone = JaxprPart([each], few, each.outvars)
            made = alone.function(closed)(*map(value, few))
        values.update(zip(each.outvars, made, strict=True))
    return list(map(value, closed.jaxpr.outvars))


def _is_plain_jit(equation: Any) -> bool:
    given = chain(*[equation.params.get(name, ()) for name in SHARDED])
    free = [one is None or type(one).__name__ == "UnspecifiedValue" for one in given]
    return equation.primitive.name in JITS and all(free)
