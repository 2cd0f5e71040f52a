"""Forward as a function of flat arrays, and the vjp of each of its traces.

Residuals that are arguments or outputs of the call are identified during the trace of
forward and kept directly, since jit would copy them. The other residuals are outputs of
forward. The compiled backward rebuilds the vjp from all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from operator import not_
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax._src.lax.lax import _convert_element_type

from jdag.compute.avals import Aval, aval_of
from jdag.compute.devices import device_named
from jdag.compute.duals import is_dual, jvp_of
from jdag.compute.jaxprs import Reaches, reaches
from jdag.compute.moves import home_of, moved_arrays
from jdag.compute.pytrees import Template, flatten
from jdag.compute.sums import addends_n, fold
from jdag.engine.functions import is_unjitted, name_of, shapes_of
from jdag.errors import JdagError, kind_of


@dataclass(eq=False)
class Traced:
    """Static results of one trace of forward: outputs, and locations of residuals.

    A `Traced` is static data of forward's output. So each call gets the data of the
    trace that computed its result, even if JAX has retraced forward.
    """

    name: str
    out_tree: Any
    out_avals: tuple[Aval, ...]
    out_tracked: tuple[bool, ...]
    args_kept: tuple[int, ...] = ()
    outputs_kept: tuple[int, ...] = ()
    sources: tuple[tuple[int, int], ...] = ()
    reaches: Reaches = ()
    nbytes: int = 0
    vjp_tree: Any = None
    may_raise: bool | None = None
    backward: Any = None
    dual_backward: Any = None
    cuts: dict[Any, Any] = field(default_factory=dict)  # Used by `compute.halves`.

    def compile(self, vjp: Callable[..., Any], compiled: Callable[..., Any]) -> None:
        self.backward = compiled(_backward_of(self, vjp))
        self.dual_backward = compiled(jvp_of(self.backward, self.name))
        self.may_raise = True if compiled is without_jit else None

    def addend_types(self, counts: Sequence[int]) -> tuple[tuple[Any, ...], ...]:
        avals = compress(self.out_avals, self.out_tracked)
        both = zip(avals, map(addends_n, counts), strict=True)
        return tuple([(aval.strong.struct(),) * count for aval, count in both])


@partial(
    jtu.register_dataclass, data_fields=("outputs", "rest"), meta_fields=("traced",)
)
@dataclass(eq=False, slots=True)
class TracedResult:
    traced: Traced
    outputs: Any
    rest: Any

    def residuals(self, args: Sequence[Any]) -> "Residuals":
        args_kept = tuple([args[place] for place in self.traced.args_kept])
        outputs = tuple([self.outputs[place] for place in self.traced.outputs_kept])
        return Residuals(self.traced, args_kept, outputs, self.rest, False)


@partial(
    jtu.register_dataclass,
    data_fields=("args", "outputs", "rest"),
    meta_fields=("traced", "dual"),
)
@dataclass(eq=False, repr=False, slots=True)
class Residuals:
    """The residuals of one vjp: arguments, outputs, and other arrays (`rest`).

    `nbytes` counts only the other arrays. `keeps` lists every array that the residuals
    keep alive. `dual` says whether a residual is a dual.
    """

    traced: Traced
    args: Any
    outputs: Any
    rest: Any
    dual: bool

    @property
    def held(self) -> tuple[Any, Any, Any]:
        return self.rest, self.args, self.outputs

    @property
    def nbytes(self) -> int:
        return 2 * self.traced.nbytes if self.dual else self.traced.nbytes

    @property
    def keeps(self) -> tuple[Any, ...]:
        held = (*self.args, *self.outputs, *self.rest)
        return tuple(jtu.tree_leaves(held)) if self.dual else held

    def __repr__(self) -> str:
        return f"Residuals({self.traced.name}, {self.nbytes} bytes of its own)"


class Function:
    digest = b""  # Only exported functions have a digest.

    def __init__(self, fn: Callable[..., Any], template: Template) -> None:
        self.name = name_of(fn)
        self.fn = fn  # Keeps alive the objects whose ids are in its key.
        self.template = template
        self.is_python = self.unjitted = is_unjitted(fn)

    def argument(self, position: int) -> str:
        return self.template.name(position)

    def declared(self, structs: Sequence[jax.ShapeDtypeStruct]) -> Traced:
        if (shapes := shapes_of(self.fn)) is None:
            raise JdagError(
                f"{self.name} is marked by jdag.unjitted, so the types of its outputs "
                "are not known before it runs: mark it with @jdag.unjitted(shapes=fn), "
                "where fn returns a pytree of jax.ShapeDtypeStruct"
            )
        args, kwargs = self.template.rebuild(structs)
        what = f"shapes= of {self.name} returned"
        leaves, out_tree = flatten(shapes(*args, **kwargs), is_dual, what)
        avals = tuple([aval_of(leaf).strong for leaf in leaves])
        return Traced(self.name, out_tree, avals, (False,) * len(avals))

    def forward(
        self, tracked: tuple[bool, ...], compiled: Callable[..., Any]
    ) -> Callable[..., TracedResult]:
        indices = tuple(compress(range(len(tracked)), tracked))

        def body(*args: Any) -> TracedResult:
            args = tuple(map(as_jax, args))
            out_tree: Any = None
            order: tuple[bool, ...] = ()

            def split_outputs(*inexact: Any) -> tuple[list[Any], list[Any]]:
                nonlocal out_tree, order
                values = list(args)
                for index, value in zip(indices, inexact, strict=True):
                    values[index] = value
                arguments, keywords = self.template.rebuild(values)
                result = self.fn(*arguments, **keywords)
                outputs, out_tree = flat_outputs(self.name, result)
                if compiled is without_jit:
                    outputs = on_home_device(outputs)
                order = tuple(bool(indices) and aval_of(o).inexact for o in outputs)
                rest = compress(outputs, map(not_, order))
                return list(compress(outputs, order)), list(rest)

            vjp: Any = None
            if indices:
                inputs = [args[index] for index in indices]
                smooth, vjp, rest_outputs = jax.vjp(
                    split_outputs, *inputs, has_aux=True
                )
            else:
                smooth, rest_outputs = split_outputs()
            sources = (iter(rest_outputs), iter(smooth))
            outputs = tuple(next(sources[is_tracked]) for is_tracked in order)
            traced = Traced(self.name, out_tree, tuple(map(aval_of, outputs)), order)
            if not any(order):
                return TracedResult(traced, outputs, ())
            traced.reaches = reaches(vjp, len(indices), len(smooth))
            rest = _find_residuals(traced, vjp, args, outputs)
            traced.compile(vjp_of(traced), compiled)
            return TracedResult(traced, outputs, rest)

        body.__name__ = body.__qualname__ = self.name.rpartition(":")[2]
        return body


def without_jit(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


def as_jax(value: Any) -> Any:
    """Convert numpy values as jit would, so that promotion does not depend on jit."""
    return jnp.asarray(value) if isinstance(value, np.ndarray | np.generic) else value


def flat_outputs(name: str, tree: Any) -> tuple[list[Any], Any]:
    leaves, out_tree = flatten(tree, is_dual, f"what {name} returned")
    arrays = []
    for index, leaf in enumerate(leaves):
        if is_dual(leaf):
            arrays.append(leaf)
            continue
        try:
            is_array = isinstance(leaf, jax.Array)
            arrays.append(strong(leaf if is_array else jnp.asarray(leaf)))
        except (TypeError, ValueError, OverflowError) as error:
            path = jtu.keystr(jtu.tree_flatten_with_path(tree)[0][index][0])
            raise JdagError(
                f"{name} returned {kind_of(leaf)} "
                f"{f'at {path}' if path else 'as its output'}; a function must "
                "return arrays, Python scalars, or pytrees of these"
            ) from error
    return arrays, out_tree


def on_home_device(outputs: Sequence[Any]) -> list[Any]:
    """Move an unjitted function's outputs from other devices to the current one."""
    default, homes = device_named(None), list(map(home_of, outputs))
    targets = [default if isinstance(home, jax.Device) else None for home in homes]
    return moved_arrays(outputs, targets, homes)


def strong(array: Any) -> Any:
    """Return the array without weak type, which does not survive a transfer."""
    if not jax.typeof(array).weak_type:
        return array
    return jax.lax.convert_element_type(array, array.dtype)


def weakened(values: Sequence[Any], avals: Sequence[Aval]) -> tuple[Any, ...]:
    return tuple(
        [
            _convert_element_type(value, aval.dtype, weak_type=True)
            if aval.weak and not aval_of(value).weak
            else value
            for value, aval in zip(values, avals, strict=True)
        ]
    )


def _find_residuals(
    traced: Traced, vjp: Any, args: tuple[Any, ...], outputs: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Set `sources` as in `ExportHeader`, and return the other residuals."""
    residuals, traced.vjp_tree = jtu.tree_flatten(vjp)
    known_arrays = {id(output): (2, index) for index, output in enumerate(outputs)}
    known_arrays.update({id(arg): (1, index) for index, arg in enumerate(args)})
    indices: tuple[dict[int, int], ...] = ({}, {}, {})
    rest: list[Any] = []
    sources = []
    for residual in residuals:
        home, index = known_arrays.get(id(residual), (0, len(rest)))
        if home == 0:  # JAX itself returns no residual twice.
            rest.append(residual)
        sources.append((home, indices[home].setdefault(index, len(indices[home]))))
    traced.sources = tuple(sources)
    traced.args_kept = tuple(indices[1])
    traced.outputs_kept = tuple(indices[2])
    traced.nbytes = sum(aval_of(residual).nbytes for residual in rest)
    return tuple(rest)


def vjp_of(traced: Traced) -> Callable[..., Any]:
    def vjp(residuals: list[Any], cotangents: list[Any]) -> tuple[Any, ...]:
        gradients = jtu.tree_unflatten(traced.vjp_tree, residuals)(cotangents)
        return tuple(map(strong, gradients))

    return vjp


def _backward_of(traced: Traced, vjp: Callable[..., Any]) -> Callable[..., Any]:
    avals = list(compress(traced.out_avals, traced.out_tracked))

    def backward(rest: Any, args: Any, outputs: Any, sums: Any) -> tuple[Any, ...]:
        homes = (rest, args, outputs)
        residuals = [homes[home][index] for home, index in traced.sources]
        cotangents = [
            fold(tuple(map(as_jax, addends)))
            if addends
            else jnp.zeros(aval.shape, aval.dtype)
            for addends, aval in zip(sums, avals, strict=True)
        ]
        gradients: tuple[Any, ...] = vjp(residuals, cotangents)
        return gradients

    name = f"vjp_{traced.name.rpartition(':')[2]}"
    backward.__name__ = backward.__qualname__ = name
    return backward
