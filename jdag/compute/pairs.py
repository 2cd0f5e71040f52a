"""Compiled forward/vjp pairs of functions.

A pair is made once for each function, statics, abstract values and configuration, and
shared by all workers of the process. `jdag.compute.tracing` explains how it keeps its
residuals.

For duals (`jdag.compute.duals`) a pair computes the jvp: of forward, giving outputs and
residuals with tangents; then of the vjp, along the tangents of residuals and
cotangents. Each is compiled when the first dual arrives.
"""

import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from itertools import compress
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

import jax
import numpy as np

from jdag.compute.avals import Aval, aval_of, is_deleted, is_there
from jdag.compute.configuration import Configuration, configuration
from jdag.compute.duals import along, any_dual, primal_of, refuse_no_jvp
from jdag.compute.fingerprint import key_of
from jdag.compute.jaxprs import (
    Reaches,
    has_callback,
    has_move,
    passed_on,
    unportable,
)
from jdag.compute.pytrees import Template, unflatten
from jdag.compute.sums import few
from jdag.compute.tracing import Function, Residuals, Traced, as_it_is
from jdag.engine.functions import code_of, is_ours, is_unjitted, name_of, shapes_of
from jdag.errors import JdagError

PAIRS_MAX = 4096
ANEW_MAX = 32


class Pair:
    """Forward and vjp of one function for one set of abstract values.

    `out_avals`, `out_tree`, `out_tracked`, `args_kept`, `outputs_kept` (the places of
    arguments and outputs that residuals hold) and `residual_bytes` (what they hold
    beyond these) are known without running anything. `reaches` says for each tracked
    input which tracked outputs depend on it: without a cotangent of one of these its
    own is zero.
    What moves arrays between devices (`jdag.compute.moves`) runs unjitted by itself.
    What `jdag.unjitted` marks runs so too, and is never traced.
    `may_raise` tells that forward holds callbacks or is not jitted; forward and vjp
    then wait for their results, so that what goes wrong is raised there. All of
    its devices are the default one (None): on others a pair is a `Placed`.

    Args:
        source: a `jdag.compute.tracing.Function`, or what one was exported as.
        avals: the abstract value of each argument.
        tracked: for each, whether cotangents flow back to it.
    """

    device: str | None = None
    in_devices: tuple[str | None, ...] | None = None
    out_devices: tuple[str | None, ...] | None = None
    unportable = ""  # Why it cannot go as StableHLO, beside being unjitted.

    def __init__(
        self, source: Any, avals: tuple[Aval, ...], tracked: tuple[bool, ...]
    ) -> None:
        self.name: str = source.name
        self.source = source
        self.avals = avals
        self.tracked = tracked
        structs = [aval.struct() for aval in avals]
        self.passes: tuple[int, ...] | None = None
        self.may_raise = True
        self._compile()
        if not source.unjitted:
            trace = self._trace()
            traced = trace.out_info.traced
            self.may_raise = has_callback(trace.jaxpr)
            self.unportable = unportable(trace.jaxpr)
            self.passes = passed_on(trace.jaxpr)
            if has_move(trace.jaxpr):  # jit would ignore the move.
                source.unjitted = self.may_raise = True
                self._compile()
        if source.unjitted:
            traced = (
                source.declared(structs)
                if source.is_python
                else jax.eval_shape(self.compiled, *structs).traced
            )
        self.traced = traced
        self.out_tree: Any = traced.out_tree
        self.out_avals: tuple[Aval, ...] = traced.out_avals
        self.out_tracked: tuple[bool, ...] = traced.out_tracked
        self.residual_bytes: int = traced.nbytes
        self.args_kept: tuple[int, ...] = traced.args_kept
        self.outputs_kept: tuple[int, ...] = traced.outputs_kept
        self.reaches: Reaches = traced.reaches

    def _compile(self) -> None:
        compiled: Any = as_it_is if self.source.unjitted else jax.jit
        self.compiled: Any = compiled(self.source.forward(self.tracked, compiled))
        self._dual_forward: Any = compiled(along(self.compiled, self.name))

    @property
    def pair(self) -> "Pair":
        """The pair without devices."""
        return self

    def forward(self, args: Sequence[Any]) -> tuple[tuple[Any, ...], Residuals | None]:
        """Run the function on `args`, in order of position.

        Of duals at tracked positions the outputs and residuals are duals as well; at
        others, as where a gradient is stopped, a tangent counts for nothing.

        Returns the outputs in the order of `out_tree` and the residuals; these are None
        when no output is tracked.
        """
        dual = any_dual(args)
        if dual:
            indices = zip(args, self.tracked, strict=True)
            args = [arg if tracked else primal_of(arg) for arg, tracked in indices]
            dual = any_dual(args)
        if dual and self.source.digest:
            self.source.refuse_dual()
        if self.passes is not None and not dual and all(map(stays, args, self.avals)):
            outputs = tuple([args[index] for index in self.passes])  # jit would copy.
            has_vjp = self.traced.backward is not None
            return outputs, Residuals(
                self.traced, (), (), (), False
            ) if has_vjp else None
        try:
            returned = self._dual_forward(*args) if dual else self.compiled(*args)
            if self.may_raise or dual:  # Rules of their own may have callbacks in them.
                jax.block_until_ready(returned)
        except (RuntimeError, ValueError, TypeError) as error:
            refuse_deleted(self.name, self.source.argument, args, error)
            if dual:
                refuse_no_jvp(self.name, error)
            raise
        if self.source.unjitted and self.source.is_python:
            _check_declared(self.traced, returned.traced)
        if returned.traced.backward is None:
            return returned.outputs, None
        residuals = returned.residuals(args)
        residuals.dual = dual and any(map(any_dual, residuals.held))
        return returned.outputs, residuals

    def vjp(
        self, residuals: Residuals, cotangents: Sequence[Sequence[Any]]
    ) -> tuple[Any, ...]:
        """Carry cotangents of the outputs back to the tracked inputs.

        Args:
            residuals: what `forward` returned; they may be used again.
            cotangents: for each tracked output, in order, any number of addends of its
                shape and dtype, summed in the order of `add`; none at all is zero.

        Returns:
            One cotangent for each tracked input, in order of position, as `jax.vjp`
            gives them (for complex values JAX's convention holds). They are duals if a
            residual or a cotangent is.
        """
        traced = residuals.traced
        sums, held = few(cotangents), residuals.held
        assert len(sums) == sum(traced.out_tracked), (self.name, len(sums))
        dual = residuals.dual or any(map(any_dual, sums))
        if dual and self.source.digest:
            self.source.refuse_dual()
        if traced.may_raise is None and not dual:
            traced.may_raise = has_callback(traced.backward.trace(*held, sums).jaxpr)
        try:
            backward = traced.dual_backward if dual else traced.backward
            gradients: tuple[Any, ...] = backward(*held, sums)
            if traced.may_raise or dual:
                jax.block_until_ready(gradients)
        except (RuntimeError, ValueError, TypeError) as error:
            refuse_deleted(self.name, "residual {}".format, residuals.keeps, error)
            if dual:
                refuse_no_jvp(self.name, error)
            raise
        return gradients

    def lowered(self, counts: Sequence[int] | None = None) -> Any:
        """Lower the jitted forward; or the vjp, for these numbers of addends."""
        if counts is None:
            return self._trace().lower()
        residuals = self.residual_types()
        traced = residuals.traced
        return traced.backward.lower(*residuals.held, traced.addend_types(counts))

    def residual_types(self) -> Residuals:
        """The types of the residuals that the jitted forward returns."""
        structs = [aval.struct() for aval in self.avals]
        made: Residuals = self._trace().out_info.residuals(structs)
        return made

    def _trace(self) -> Any:
        return self.compiled.trace(*[aval.struct() for aval in self.avals])

    def __repr__(self) -> str:
        inputs = ", ".join(map(str, self.avals))
        return f"Pair({self.name}({inputs}) -> {', '.join(map(str, self.out_avals))})"


def output_types(pair: Any) -> list[Aval]:
    """The types of a pair's outputs, with their devices; it is not made if decoded."""
    return _on(pair.out_avals, pair.out_devices)


def input_types(pair: Any) -> list[Aval]:
    """The types of the cotangents of its tracked inputs, with their devices."""
    avals = [aval.strong for aval in compress(pair.avals, pair.tracked)]
    return _on(avals, pair.in_devices)


def _on(avals: Sequence[Aval], devices: Sequence[str | None] | None) -> list[Aval]:
    if devices is None:
        return list(avals)
    return [aval.on(device) for aval, device in zip(avals, devices, strict=True)]


def _check_declared(*both: Traced) -> None:
    if len(dict.fromkeys([(one.out_tree, one.out_avals) for one in both])) > 1:
        texts = [(one.out_tree, list(map(str, one.out_avals))) for one in both]
        said, found = [unflatten(*text) for text in texts]
        raise JdagError(f"{both[0].name} returned {found}; its shapes= said {said}")


def stays(value: Any, aval: Aval) -> bool:
    """Whether a value can be passed on uncopied: it exists and never changes."""
    if type(value) is np.ndarray:
        same = value.dtype == aval.dtype and not aval.weak
        return same and not value.flags.writeable
    return is_there(value)


def refuse_deleted(
    name: str, what: Callable[[int], str], arrays: Sequence[Any], error: Exception
) -> None:
    """Raise JdagError if one of the arrays of a failed call was deleted."""
    for index, array in enumerate(arrays):
        if is_deleted(array):
            raise JdagError(
                f"{what(index)} of {name}, {aval_of(array)}, was deleted or donated; "
                "arrays that jdag holds have to live as long as their context, and "
                "what was put, passed or fetched is shared: donate a copy (jnp.copy)"
            ) from error


class _Key(tuple[Any, ...]):
    """The key of a pair; its function is attached but not compared."""

    fn: Callable[..., Any]


@lru_cache(maxsize=PAIRS_MAX)
def typed_name(pair: Any) -> str:
    """A pair's name with the types of its inputs: module:name(float32[8,4])."""
    return f"{pair.name}({', '.join(map(str, pair.avals))})"


class PairCache:
    """The pairs made so far; the least recently used are dropped first."""

    def __init__(self, pairs_max: int) -> None:
        self._pair = lru_cache(maxsize=pairs_max)(self._make)
        self._keys: WeakKeyDictionary[CodeType, dict[int, None]] = WeakKeyDictionary()

    def pair(
        self,
        fn: Callable[..., Any],
        template: Template,
        avals: tuple[Aval, ...],
        tracked: tuple[bool, ...],
        configured: Configuration | None = None,
    ) -> Pair:
        """Return the forward/vjp pair of `fn`, cached or new.

        Args:
            fn: a pure function of pytrees of arrays and statics.
            template: the structure of its arguments, from `pytrees.split`.
            avals: the abstract value of each position; weak types count.
            tracked: for each position, whether cotangents flow back to it.
            configured: the current settings of JAX, if they have just been looked at.
        """
        configured = configured or configuration()
        mark = is_unjitted(fn) and key_of(shapes_of(fn))
        key = _Key((key_of(fn), template, avals, tracked, mark, configured))
        key.fn = fn
        return self._pair(key)

    def __len__(self) -> int:
        return self._pair.cache_info().currsize

    def _make(self, key: _Key) -> Pair:
        fn_key, template, avals, tracked, *_ = key
        assert len(avals) == len(tracked), (avals, tracked)
        for position, aval in enumerate(avals):
            if tracked[position] and not aval.inexact:
                raise JdagError(
                    f"argument {position} of {name_of(key.fn)} is tracked but {aval}; "
                    "only float and complex arrays carry cotangents"
                )
        self.count(key.fn, fn_key)
        return Pair(Function(key.fn, template), avals, tracked)

    def count(self, fn: Callable[..., Any], key: Hashable) -> None:
        """Record that a function with this `key_of` is compiled.

        Warns once about code compiled for many closures, defaults or partials.
        """
        code = code_of(fn)
        # jdag's own, such as optimizer steps, are partials of users' functions.
        if code is None or is_ours(code.co_filename):
            return
        seen = self._keys.setdefault(code, {})
        if len(seen) >= ANEW_MAX:
            return
        seen[hash(key)] = None  # Hashes, since keys would keep closures alive.
        if len(seen) == ANEW_MAX:
            warnings.warn(
                f"{name_of(fn)} ({code.co_filename}:{code.co_firstlineno}) was "
                f"compiled for {ANEW_MAX} different closures, defaults or partials: a "
                "function made anew in a loop is compiled anew each time. Define it "
                "once, and pass what changes as an argument: arrays and numbers as "
                "they are, anything else as jdag.static(value)",
                stacklevel=2,
            )


CACHE = PairCache(PAIRS_MAX)
pair = CACHE.pair  # From the cache of the process.
