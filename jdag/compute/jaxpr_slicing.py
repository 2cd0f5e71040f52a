"""What some outputs of a jaxpr need, found in time of its own size.

A jaxpr over many leaves has a slice for each of them, and slices that compute the same
have the same key. Branches and jits over many leaves are narrowed to the outputs that
are needed. Effects, such as prints, are in no slice.
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

from jdag.compute.jaxpr_cutting import JITS, SHARDED, JaxprPart, read_by, variables

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_OF_INPUTS = ("donated_invars", *SHARDED[::2])


class Slicer:
    """Takes slices of jaxprs, and keeps what it has seen of each."""

    def __init__(self) -> None:
        self._makers: dict[int, tuple[Any, dict[Any, int]]] = {}
        self._texts: dict[int, tuple[Any, Hashable]] = {}

    def slice(self, jaxpr: Any, outputs: Sequence[Any]) -> JaxprPart:
        """Return the equations that outputs need, and the inputs that they read."""
        makers = self._makers_of(jaxpr)
        wanted: dict[int, set[Any]] = {}
        waiting: list[int] = []
        found: list[Any] = []

        def want(atoms: Sequence[Any]) -> None:
            for one in variables(atoms):
                if one in makers:
                    if makers[one] not in wanted:
                        heappush(waiting, -makers[one])
                    wanted.setdefault(makers[one], set()).add(one)

        want(outputs)
        while waiting:  # The last first: what needs an equation has been seen then.
            place = -heappop(waiting)
            each = jaxpr.eqns[place]
            used = [one in wanted[place] for one in each.outvars]
            found.append(each if all(used) else self._narrowed(each, used))
            want(found[-1].invars)
        found.reverse()
        return JaxprPart(found, read_by(found, outputs, set(jaxpr.constvars)), outputs)

    def function(self, closed: Any, outputs: Sequence[Any]) -> Callable[..., list[Any]]:
        """Return a function from inputs by variable to outputs.

        An input that is missing is one on which no output depends: zeros stand for it.
        """
        part = self.slice(closed.jaxpr, outputs)
        run = part.function(closed)

        def sliced(given: Mapping[Any, Any]) -> list[Any]:
            zeros = [one for one in part.reads if one not in given]
            whole = {one: jnp.zeros(one.aval.shape, one.aval.dtype) for one in zeros}
            whole.update(given)
            return run(*[whole[one] for one in part.reads])

        return sliced

    def key(
        self, closed: Any, inputs: Sequence[Any], outputs: Sequence[Any]
    ) -> Hashable:
        """Return a key of what a slice computes: equal ones give the same bits."""
        part = self.slice(closed.jaxpr, outputs)
        numbers = {one: number for number, one in enumerate(inputs)}
        consts = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))

        def of(atom: Any) -> Hashable:
            if not variables([atom]):
                return repr(atom.val), str(atom.aval)
            if atom in consts:
                return _bytes(consts[atom])
            return numbers.setdefault(atom, len(numbers)), str(atom.aval)

        lines: list[Hashable] = [str(one.aval) for one in inputs]
        for each in part.equations:
            names = tuple([(name, self._text(v)) for name, v in each.params.items()])
            ends = tuple(map(of, each.invars)), tuple(map(of, each.outvars))
            lines.append((each.primitive.name, names, *ends))
        return tuple(lines), tuple(map(of, outputs))

    def _makers_of(self, jaxpr: Any) -> dict[Any, int]:
        if id(jaxpr) not in self._makers:
            made = {v: at for at, each in enumerate(jaxpr.eqns) for v in each.outvars}
            self._makers[id(jaxpr)] = jaxpr, made
        return self._makers[id(jaxpr)][1]

    def _narrowed(self, each: Any, used: Sequence[bool]) -> Any:
        """Return a branch or a jit with these outputs alone; others as they are."""
        params, is_cond = dict(each.params), each.primitive.name == "cond"
        if not is_cond and each.primitive.name not in JITS:
            return each
        inner = params["branches"] if is_cond else (params["jaxpr"],)
        parts = [
            self.slice(one.jaxpr, [*compress(one.jaxpr.outvars, used)]) for one in inner
        ]
        keep = [False] * len(inner[0].jaxpr.invars)
        for one, part in zip(inner, parts, strict=True):
            reads = set(part.reads)
            own = [invar in reads for invar in one.jaxpr.invars]
            keep = list(map(or_, keep, own))
        narrow = []
        for one, part in zip(inner, parts, strict=True):
            few = part._replace(reads=[*compress(one.jaxpr.invars, keep)])
            narrow.append(core.ClosedJaxpr(few.of(one.jaxpr), one.consts))
        if is_cond:
            params["branches"] = tuple(narrow)
        else:
            params["jaxpr"] = narrow[0]
            ends = [*zip(_OF_INPUTS, repeat(keep)), *zip(SHARDED[1::2], repeat(used))]
            params.update({key: tuple(compress(params[key], of)) for key, of in ends})
        invars = [*each.invars[:is_cond], *compress(each.invars[is_cond:], keep)]
        outvars = [*compress(each.outvars, used)]
        return each.replace(invars=invars, outvars=outvars, params=params)

    def _text(self, value: Any) -> Hashable:
        """Return what a parameter of an equation is; a jaxpr is written out once."""
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
