"""Compiled forward/vjp pairs of functions.

There is one pair for each combination of function, statics, abstract values and
configuration, shared by all workers of the process. `jdag.compute.tracing` explains its
residuals.

For duals (`jdag.compute.duals`) a pair computes jvps. The jvp of forward returns
outputs and residuals with tangents; the jvp of the vjp takes the tangents of residuals
and cotangents. Each jvp is compiled when the first dual arrives.
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

from jdag.compute.avals import Aval, aval_of, is_deleted, is_live
from jdag.compute.configuration import Configuration, configuration
from jdag.compute.duals import any_dual, jvp_of, primal_of, refuse_no_jvp
from jdag.compute.fingerprint import key_of
from jdag.compute.jaxprs import (
    Reaches,
    forwarded_inputs,
    has_callback,
    has_move,
    unportable,
)
from jdag.compute.pytrees import Template, unflatten
from jdag.compute.sums import limited
from jdag.compute.tracing import Function, Residuals, Traced, without_jit
from jdag.engine.functions import code_of, is_ours, is_unjitted, name_of, shapes_of
from jdag.errors import JdagError

PAIRS_MAX = 4096
ANEW_MAX = 32


class Pair:
    """Forward and vjp of one function for one set of abstract values.

    `out_avals`, `out_tree`, `out_tracked`, `args_kept`, `outputs_kept` (the positions
    of arguments and outputs that residuals hold) and `residual_bytes` (the bytes of all
    other residuals) are known before the first run. `reaches` gives for each tracked
    input the tracked outputs that depend on it; its cotangent is zero if no such output
    has a cotangent.

    Functions marked by `jdag.unjitted`, which are never traced, and functions that move
    arrays between devices (`jdag.compute.moves`) run unjitted. If forward has callbacks
    or is unjitted, `may_raise` is true: forward and vjp wait for their results, so that
    errors are raised there. `Placed` is a pair on devices other than the default device
    (None). `source` is a `jdag.compute.tracing.Function` or an `ExportedProgram`.
    """

    device: str | None = None
    in_devices: tuple[str | None, ...] | None = None
    out_devices: tuple[str | None, ...] | None = None
    unportable = ""  # Why a jitted pair cannot be sent as StableHLO; "" if it can.

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
            self.passes = forwarded_inputs(trace.jaxpr)
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
        compiled: Any = without_jit if self.source.unjitted else jax.jit
        self.compiled: Any = compiled(self.source.forward(self.tracked, compiled))
        self._dual_forward: Any = compiled(jvp_of(self.compiled, self.name))

    @property
    def pair(self) -> "Pair":
        return self

    def forward(self, args: Sequence[Any]) -> tuple[tuple[Any, ...], Residuals | None]:
        """Run the function on `args`, in order of position.

        For duals at tracked positions the outputs and residuals are duals as well; at
        other positions, as under a stopped gradient, tangents are ignored.

        Returns the outputs in the order of `out_tree`, and the residuals. The residuals
        are None if no output is tracked.
        """
        dual = any_dual(args)
        if dual:
            indices = zip(args, self.tracked, strict=True)
            args = [arg if tracked else primal_of(arg) for arg, tracked in indices]
            dual = any_dual(args)
        if dual and self.source.digest:
            self.source.refuse_dual()
        if (
            self.passes is not None
            and not dual
            and all(map(is_reusable, args, self.avals))
        ):
            outputs = tuple([args[index] for index in self.passes])  # jit would copy.
            if self.traced.backward is None:
                return outputs, None
            return outputs, Residuals(self.traced, (), (), (), False)
        try:
            returned = self._dual_forward(*args) if dual else self.compiled(*args)
            if self.may_raise or dual:  # Custom rules of duals may contain callbacks.
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
        """Compute the tracked inputs' cotangents from the outputs' cotangents.

        Args:
            residuals: returned by `forward`; they may be used several times.
            cotangents: for each tracked output any number of addends of its shape and
                dtype, summed in the order of `add`; no addend means zero.

        Returns:
            One cotangent for each tracked input, as from `jax.vjp` (with JAX's
            convention for complex values); duals if any residual or cotangent is dual.
        """
        traced = residuals.traced
        sums, held = limited(cotangents), residuals.held
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
        if counts is None:
            return self._trace().lower()
        residuals = self.residual_types()
        traced = residuals.traced
        return traced.backward.lower(*residuals.held, traced.addend_types(counts))

    def residual_types(self) -> Residuals:
        structs = [aval.struct() for aval in self.avals]
        residuals: Residuals = self._trace().out_info.residuals(structs)
        return residuals

    def _trace(self) -> Any:
        return self.compiled.trace(*[aval.struct() for aval in self.avals])

    def __repr__(self) -> str:
        inputs = ", ".join(map(str, self.avals))
        return f"Pair({self.name}({inputs}) -> {', '.join(map(str, self.out_avals))})"


def output_types(pair: Any) -> list[Aval]:
    return _on(pair.out_avals, pair.out_devices)


@lru_cache(maxsize=PAIRS_MAX)
def input_types(pair: Any) -> Sequence[Aval]:
    avals = [aval.strong for aval in compress(pair.avals, pair.tracked)]
    return tuple(_on(avals, pair.in_devices))


def _on(avals: Sequence[Aval], devices: Sequence[str | None] | None) -> list[Aval]:
    if devices is None:
        return list(avals)
    return [aval.on(device) for aval, device in zip(avals, devices, strict=True)]


def _check_declared(*traces: Traced) -> None:
    if len(dict.fromkeys([(trace.out_tree, trace.out_avals) for trace in traces])) > 1:
        texts = [(trace.out_tree, list(map(str, trace.out_avals))) for trace in traces]
        declared, returned = [unflatten(*text) for text in texts]
        name = traces[0].name
        raise JdagError(
            f"{name} returned {returned}, but its shapes= function declares {declared}"
        )


def is_reusable(value: Any, aval: Aval) -> bool:
    if type(value) is np.ndarray:
        same = value.dtype == aval.dtype and not aval.weak
        return same and not value.flags.writeable
    return is_live(value)


def refuse_deleted(
    name: str, array_name: Callable[[int], str], arrays: Sequence[Any], error: Exception
) -> None:
    for index, array in enumerate(arrays):
        if is_deleted(array):
            raise JdagError(
                f"{array_name(index)} of {name}, {aval_of(array)}, was deleted "
                "or donated; jdag shares the arrays that are put, passed or fetched, "
                "and needs them until their context ends: donate a copy (jnp.copy)"
            ) from error


class _Key(tuple[Any, ...]):
    fn: Callable[..., Any]


@lru_cache(maxsize=PAIRS_MAX)
def typed_name(pair: Any) -> str:
    return f"{pair.name}({', '.join(map(str, pair.avals))})"


class PairCache:
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

        `avals` (weak types count) and `tracked` have an entry for each position of
        `template`. `configured` are JAX's current settings, if the caller has just read
        them.
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
                    f"argument {position} of {name_of(key.fn)} is tracked but is "
                    f"{aval}; only float and complex arrays carry cotangents"
                )
        self.count(key.fn, fn_key)
        return Pair(Function(key.fn, template), avals, tracked)

    def count(self, fn: Callable[..., Any], key: Hashable) -> None:
        """Record that a function with this `key_of` is compiled.

        Warns once about code compiled for many closures, defaults or partials.
        """
        code = code_of(fn)
        # Functions of jdag, such as optimizer steps, are partials of users' functions.
        if code is None or is_ours(code.co_filename):
            return
        hashes = self._keys.setdefault(code, {})
        if len(hashes) >= ANEW_MAX:
            return
        hashes[hash(key)] = None  # Hashes, since keys would keep closures alive.
        if len(hashes) == ANEW_MAX:
            warnings.warn(
                f"{name_of(fn)} ({code.co_filename}:{code.co_firstlineno}) was "
                f"compiled for {ANEW_MAX} different closures, defaults or "
                "partials: a function defined in a loop is compiled in each iteration. "
                "Define it once, and pass the values that change as arguments: arrays "
                "and numbers directly, other values as jdag.static(value)",
                stacklevel=2,
            )


CACHE = PairCache(PAIRS_MAX)
pair = CACHE.pair  # Looks up the cache of the process.
