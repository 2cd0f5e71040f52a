"""Slices of a jaxpr: the equations that some outputs need, found in linear time.

A jaxpr over many leaves has one slice for each leaf; slices with the same computation
have equal keys. Branches and jits over many leaves are narrowed to the outputs that are
needed. Slices contain no effects, such as prints.
"""

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import compress, repeat
from operator import or_
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jdag.compute.jaxpr_cutting import JITS, SHARDED, JaxprPart, inputs_of, variables

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_OF_INPUTS = ("donated_invars", *SHARDED[::2])


class Slicer:
    def __init__(self) -> None:
        self._makers: dict[int, tuple[Any, dict[Any, int]]] = {}
        self._texts: dict[int, tuple[Any, Hashable]] = {}

    def slice(self, jaxpr: Any, outputs: Sequence[Any]) -> JaxprPart:
        makers = self._makers_of(jaxpr)
        used_outputs: dict[int, set[Any]] = {}
        pending: list[int] = []
        equations: list[Any] = []

        def require(atoms: Sequence[Any]) -> None:
            for var in variables(atoms):
                if var in makers:
                    if makers[var] not in used_outputs:
                        heappush(pending, -makers[var])
                    used_outputs.setdefault(makers[var], set()).add(var)

        require(outputs)
        while pending:  # Last equation first: all users of its outputs are then known.
            place = -heappop(pending)
            eqn = jaxpr.eqns[place]
            used = [var in used_outputs[place] for var in eqn.outvars]
            equations.append(eqn if all(used) else self._narrowed(eqn, used))
            require(equations[-1].invars)
        equations.reverse()
        reads = inputs_of(equations, outputs, set(jaxpr.constvars))
        return JaxprPart(equations, reads, outputs)

    def function(self, closed: Any, outputs: Sequence[Any]) -> Callable[..., list[Any]]:
        """Return a function that maps inputs to outputs. Missing inputs are zeros."""
        part = self.slice(closed.jaxpr, outputs)
        run = part.function(closed)

        def sliced(inputs: Mapping[Any, Any]) -> list[Any]:
            zeros = [var for var in part.reads if var not in inputs]
            values = {var: jnp.zeros(var.aval.shape, var.aval.dtype) for var in zeros}
            values.update(inputs)
            return run(*[values[var] for var in part.reads])

        return sliced

    def key(
        self, closed: Any, inputs: Sequence[Any], outputs: Sequence[Any]
    ) -> Hashable:
        """Return a key of the slice's computation; equal keys give the same bits."""
        part = self.slice(closed.jaxpr, outputs)
        numbers = {var: number for number, var in enumerate(inputs)}
        consts = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))

        def key_of(atom: Any) -> Hashable:
            if not variables([atom]):
                return repr(atom.val), str(atom.aval)
            if atom in consts:
                return _bytes(consts[atom])
            return numbers.setdefault(atom, len(numbers)), str(atom.aval)

        lines: list[Hashable] = [str(var.aval) for var in inputs]
        for eqn in part.equations:
            names = tuple([(key, self._text(p)) for key, p in eqn.params.items()])
            ends = tuple(map(key_of, eqn.invars)), tuple(map(key_of, eqn.outvars))
            lines.append((eqn.primitive.name, names, *ends))
        return tuple(lines), tuple(map(key_of, outputs))

    def _makers_of(self, jaxpr: Any) -> dict[Any, int]:
        if id(jaxpr) not in self._makers:
            makers = {v: n for n, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
            self._makers[id(jaxpr)] = jaxpr, makers
        return self._makers[id(jaxpr)][1]

    def _narrowed(self, eqn: Any, used: Sequence[bool]) -> Any:
        params, is_cond = dict(eqn.params), eqn.primitive.name == "cond"
        if not is_cond and eqn.primitive.name not in JITS:
            return eqn
        inner = params["branches"] if is_cond else (params["jaxpr"],)
        parts = [
            self.slice(branch.jaxpr, [*compress(branch.jaxpr.outvars, used)])
            for branch in inner
        ]
        keep = [False] * len(inner[0].jaxpr.invars)
        for branch, part in zip(inner, parts, strict=True):
            reads = set(part.reads)
            used_inputs = [invar in reads for invar in branch.jaxpr.invars]
            keep = list(map(or_, keep, used_inputs))
        narrow = []
        for branch, part in zip(inner, parts, strict=True):
            narrowed = part._replace(reads=[*compress(branch.jaxpr.invars, keep)])
            narrow.append(
                core.ClosedJaxpr(narrowed.as_jaxpr(branch.jaxpr), branch.consts)
            )
        if is_cond:
            params["branches"] = tuple(narrow)
        else:
            params["jaxpr"] = narrow[0]
            ends = [*zip(_OF_INPUTS, repeat(keep)), *zip(SHARDED[1::2], repeat(used))]
            params.update({k: tuple(compress(params[k], flags)) for k, flags in ends})
        invars = [*eqn.invars[:is_cond], *compress(eqn.invars[is_cond:], keep)]
        outvars = [*compress(eqn.outvars, used)]
        return eqn.replace(invars=invars, outvars=outvars, params=params)

    def _text(self, value: Any) -> Hashable:
        """Return a key of an equation's parameter. Each jaxpr is printed only once."""
        if isinstance(value, tuple | list):
            return tuple(map(self._text, value))
        if not isinstance(value, core.ClosedJaxpr | core.Jaxpr):
            return _ADDRESS.sub("", repr(value))
        if id(value) not in self._texts:
            consts = tuple(map(_bytes, getattr(value, "consts", ())))
            self._texts[id(value)] = value, (_ADDRESS.sub("", str(value)), consts)
        return self._texts[id(value)][1]


def _bytes(value: Any) -> tuple[str, bytes]:
    if jnp.issubdtype(jax.typeof(value).dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return str(jax.typeof(value)), np.asarray(value).tobytes()
