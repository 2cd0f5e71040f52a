"""Forward as a function of flat arrays, and the vjp that each trace of it fixes.

Residuals that are arguments or outputs of the call are found by identity while forward
is traced and kept directly, since jit would copy them. The other residuals are outputs
of forward; the compiled backward rebuilds the vjp from all of them.
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
from jdag.compute.duals import along, is_dual
from jdag.compute.jaxprs import Reaches, reaches
from jdag.compute.moves import home_of, moved_arrays
from jdag.compute.pytrees import Template, flatten
from jdag.compute.sums import addends_n, fold
from jdag.engine.functions import is_unjitted, name_of, shapes_of
from jdag.errors import JdagError, kind_of


@dataclass(eq=False)
class Traced:
    """Static results of one trace of forward: outputs, and locations of residuals.

    It travels as static data of forward's output, so each call has that of the trace
    that served it, even if JAX retraced.
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
    cuts: dict[Any, Any] = field(default_factory=dict)  # Of `jdag.compute.halves`.

    def compile(self, vjp: Callable[..., Any], compiled: Callable[..., Any]) -> None:
        """Compile backward from a vjp, a function of residuals and of cotangents."""
        self.backward = compiled(_backward_of(self, vjp))
        self.dual_backward = compiled(along(self.backward, self.name))
        self.may_raise = True if compiled is as_it_is else None

    def addend_types(self, counts: Sequence[int]) -> tuple[tuple[Any, ...], ...]:
        """The types of cotangents that the backward takes, each in so many addends."""
        avals = compress(self.out_avals, self.out_tracked)
        both = zip(avals, map(addends_n, counts), strict=True)
        return tuple([(aval.strong.struct(),) * count for aval, count in both])


@partial(
    jtu.register_dataclass, data_fields=("outputs", "rest"), meta_fields=("traced",)
)
@dataclass(eq=False, slots=True)
class TracedResult:
    """The result of forward: its outputs, and the residuals found nowhere else."""

    traced: Traced
    outputs: Any
    rest: Any

    def residuals(self, args: Sequence[Any]) -> "Residuals":
        """Return the residuals of a call with these arguments; or the types of both."""
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
    """The residuals for one vjp: the arguments and outputs it needs, and a rest.

    `nbytes` counts the rest only; `keeps` holds every array that this keeps alive.
    `dual` tells whether there are duals among them.
    """

    traced: Traced
    args: Any
    outputs: Any
    rest: Any
    dual: bool

    @property
    def held(self) -> tuple[Any, Any, Any]:
        """What the backward takes before the cotangents."""
        return self.rest, self.args, self.outputs

    @property
    def nbytes(self) -> int:
        """Bytes held beyond the arguments and outputs of the call."""
        return 2 * self.traced.nbytes if self.dual else self.traced.nbytes

    @property
    def keeps(self) -> tuple[Any, ...]:
        """Every array that these residuals keep alive."""
        held = (*self.args, *self.outputs, *self.rest)
        return tuple(jtu.tree_leaves(held)) if self.dual else held

    def __repr__(self) -> str:
        return f"Residuals({self.traced.name}, {self.nbytes} bytes of its own)"


class Function:
    """The source of a pair: a Python function, and the structure of its arguments."""

    digest = b""  # It was not exported.

    def __init__(self, fn: Callable[..., Any], template: Template) -> None:
        self.name = name_of(fn)
        self.fn = fn  # Its key names its globals and objects by identity.
        self.template = template
        self.is_python = self.unjitted = is_unjitted(fn)

    def argument(self, position: int) -> str:
        """Return the name of an argument in errors."""
        return self.template.name(position)

    def declared(self, structs: Sequence[jax.ShapeDtypeStruct]) -> Traced:
        """Return what an unjitted function's `shapes` say of its outputs."""
        if (shapes := shapes_of(self.fn)) is None:
            raise JdagError(
                f"{self.name} is marked by jdag.unjitted, so what it returns is not "
                "known before it has run: mark it by @jdag.unjitted(shapes=fn), where "
                "fn returns a pytree of jax.ShapeDtypeStruct"
            )
        args, kwargs = self.template.rebuild(structs)
        what = f"shapes= of {self.name} returned"
        leaves, out_tree = flatten(shapes(*args, **kwargs), is_dual, what)
        avals = tuple([aval_of(leaf).strong for leaf in leaves])
        return Traced(self.name, out_tree, avals, (False,) * len(avals))

    def forward(
        self, tracked: tuple[bool, ...], compiled: Callable[..., Any]
    ) -> Callable[..., TracedResult]:
        """Return forward as a function of flat arguments; `compiled` makes its vjp."""
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
                given, by_name = self.template.rebuild(values)
                outputs, out_tree = arrays_of(self.name, self.fn(*given, **by_name))
                if compiled is as_it_is:
                    outputs = settled(outputs)
                order = tuple(bool(indices) and aval_of(o).inexact for o in outputs)
                rest = compress(outputs, map(not_, order))
                return list(compress(outputs, order)), list(rest)

            vjp: Any = None
            if indices:
                inputs = [args[index] for index in indices]
                smooth, vjp, other = jax.vjp(split_outputs, *inputs, has_aux=True)
            else:
                smooth, other = split_outputs()
            found = (iter(other), iter(smooth))
            outputs = tuple(next(found[is_tracked]) for is_tracked in order)
            traced = Traced(self.name, out_tree, tuple(map(aval_of, outputs)), order)
            if not any(order):
                return TracedResult(traced, outputs, ())
            traced.reaches = reaches(vjp, len(indices), len(smooth))
            rest = _find_residuals(traced, vjp, args, outputs)
            traced.compile(vjp_of(traced), compiled)
            return TracedResult(traced, outputs, rest)

        body.__name__ = body.__qualname__ = self.name.rpartition(":")[2]
        return body


def as_it_is(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn`: the identity in place of jit, for what runs unjitted."""
    return fn


def as_jax(value: Any) -> Any:
    """Convert numpy values as jit would, so that promotion does not depend on jit."""
    return jnp.asarray(value) if isinstance(value, np.ndarray | np.generic) else value


def arrays_of(name: str, tree: Any) -> tuple[list[Any], Any]:
    """Flatten what a function returned to arrays of strong type; duals stay."""
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
                f"{f'at {path}' if path else 'as its output'}; functions return "
                "arrays, Python scalars, and pytrees of these"
            ) from error
    return arrays, out_tree


def settled(outputs: Sequence[Any]) -> list[Any]:
    """Move outputs that an unjitted function left elsewhere to its own device."""
    here, homes = device_named(None), list(map(home_of, outputs))
    targets = [here if isinstance(home, jax.Device) else None for home in homes]
    return moved_arrays(outputs, targets, homes)


def strong(array: Any) -> Any:
    """Return the array without weak type, which does not survive a transfer."""
    if not jax.typeof(array).weak_type:
        return array
    return jax.lax.convert_element_type(array, array.dtype)


def weakened(values: Sequence[Any], avals: Sequence[Aval]) -> tuple[Any, ...]:
    """Return the values with the weak types of these, which calls make strong."""
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
    """Record in `traced` the source of each residual of the vjp; return the rest.

    A source is (0, index in the rest), (1, in args_kept) or (2, in outputs_kept).
    """
    residuals, traced.vjp_tree = jtu.tree_flatten(vjp)
    known = {id(output): (2, index) for index, output in enumerate(outputs)}
    known.update({id(arg): (1, index) for index, arg in enumerate(args)})
    kept: tuple[dict[int, int], ...] = ({}, {}, {})
    rest: list[Any] = []
    sources = []
    for residual in residuals:
        home, index = known.get(id(residual), (0, len(rest)))
        if home == 0:  # JAX itself returns no residual twice.
            rest.append(residual)
        sources.append((home, kept[home].setdefault(index, len(kept[home]))))
    traced.sources = tuple(sources)
    traced.args_kept = tuple(kept[1])
    traced.outputs_kept = tuple(kept[2])
    traced.nbytes = sum(aval_of(residual).nbytes for residual in rest)
    return tuple(rest)


def vjp_of(traced: Traced) -> Callable[..., Any]:
    """Return the vjp as a function of residuals, in order, and of cotangents."""

    def vjp(residuals: list[Any], cotangents: list[Any]) -> tuple[Any, ...]:
        found = jtu.tree_unflatten(traced.vjp_tree, residuals)(cotangents)
        return tuple(map(strong, found))

    return vjp


def _backward_of(traced: Traced, vjp: Callable[..., Any]) -> Callable[..., Any]:
    avals = list(compress(traced.out_avals, traced.out_tracked))

    def backward(rest: Any, args: Any, outputs: Any, sums: Any) -> tuple[Any, ...]:
        held = (rest, args, outputs)
        residuals = [held[home][index] for home, index in traced.sources]
        cotangents = [
            fold(tuple(map(as_jax, addends)))
            if addends
            else jnp.zeros(aval.shape, aval.dtype)
            for addends, aval in zip(sums, avals, strict=True)
        ]
        found: tuple[Any, ...] = vjp(residuals, cotangents)
        return found

    name = f"vjp_{traced.name.rpartition(':')[2]}"
    backward.__name__ = backward.__qualname__ = name
    return backward
