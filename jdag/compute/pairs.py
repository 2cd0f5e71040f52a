"""Compiled forward/vjp pairs of functions; `jax.vjp` lives here only.

A pair is made once for each function, statics, abstract values and configuration, and
shared by all workers of the process. Residuals that are arguments or outputs of the
call are found by identity while forward is traced and handed on as they are: jit would
copy them. The other residuals are outputs of forward; the vjp is built again from all
of them inside the compiled backward.

Of duals (`jdag.compute.duals`) a pair computes the jvp: of forward, outputs and
residuals with their tangents; then of the vjp, along the tangents of residuals and
cotangents. Each is compiled when the first dual comes.
"""

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from jdag.compute.avals import Aval, aval_of, is_deleted
from jdag.compute.duals import along, any_dual, is_dual, primal_of, refuse_no_jvp
from jdag.compute.jaxprs import Reaches, has_callback, reaches
from jdag.compute.pytrees import Template
from jdag.compute.sums import ADDENDS_MAX, fold
from jdag.errors import JdagError, kind_of
from jdag.functions import code_of, is_ours, is_unjitted, key_of, name_of

PAIRS_MAX = 4096
ANEW_MAX = 32


class Configuration(NamedTuple):
    """The settings of JAX that what a function computes depends on."""

    jax_enable_x64: bool
    jax_default_matmul_precision: str | None
    jax_default_prng_impl: str
    jax_numpy_dtype_promotion: str


def configuration() -> Configuration:
    """Return the settings as they are now."""
    config: Any = jax.config
    return Configuration(
        config.jax_enable_x64,
        config.jax_default_matmul_precision,
        config.jax_default_prng_impl,
        config.jax_numpy_dtype_promotion,
    )


class _Spec:
    """What one trace of forward fixed: the outputs, and where the residuals are.

    It travels as static data of forward's output, so that each call has the spec of the
    very trace that served it, also when JAX traced anew.
    """

    def __init__(self, name: str, out_tree: Any, out_avals: tuple[Aval, ...]) -> None:
        self.name = name
        self.out_tree = out_tree
        self.out_avals = out_avals
        self.out_tracked: tuple[bool, ...] = (False,) * len(out_avals)
        self.vjp_tree: Any = None
        self.args_kept: tuple[int, ...] = ()
        self.outputs_kept: tuple[int, ...] = ()
        self.sources: tuple[tuple[int, int], ...] = ()
        self.nbytes = 0
        self.reaches: Reaches = ()
        self.may_raise: bool | None = None
        self.backward: Any = None
        self.dual_backward: Any = None


class _Returned:
    """What forward returns: its outputs, and the residuals found nowhere else."""

    __slots__ = ("outputs", "rest", "spec")

    def __init__(self, spec: _Spec, outputs: Any, rest: Any) -> None:
        self.spec = spec
        self.outputs = outputs
        self.rest = rest


jtu.register_pytree_node(
    _Returned,
    lambda returned: ((returned.outputs, returned.rest), returned.spec),
    lambda spec, children: _Returned(spec, children[0], children[1]),
)


class Residuals:
    """What forward keeps for one vjp: the arguments and outputs it needs, and a rest.

    `nbytes` counts the rest only; `keeps` holds every array that this keeps alive.
    `dual` tells whether there are duals among them.
    """

    __slots__ = ("args", "dual", "outputs", "rest", "spec")

    def __init__(
        self, spec: _Spec, args: Any, outputs: Any, rest: Any, dual: bool
    ) -> None:
        self.spec = spec
        self.dual = dual
        self.args = args
        self.outputs = outputs
        self.rest = rest

    @property
    def nbytes(self) -> int:
        """Bytes held beyond the arguments and outputs of the call."""
        return 2 * self.spec.nbytes if self.dual else self.spec.nbytes

    @property
    def keeps(self) -> tuple[Any, ...]:
        """Every array that these residuals keep alive."""
        held = (*self.args, *self.outputs, *self.rest)
        return tuple(jtu.tree_leaves(held)) if self.dual else held

    def __repr__(self) -> str:
        return f"Residuals({self.spec.name}, {self.nbytes} bytes of its own)"


class Pair:
    """Forward and vjp of one function for one set of abstract values.

    `out_avals`, `out_tree`, `out_tracked`, `args_kept`, `outputs_kept` (the places of
    arguments and outputs that residuals hold) and `residual_bytes` (what they hold
    beyond these) are known without running anything. `reaches` says for each tracked
    input which tracked outputs depend on it: without a cotangent of one of these its
    own is zero.
    `may_raise` tells that forward holds callbacks or is not jitted; forward and vjp
    then wait for their results, so that what goes wrong is raised there. All of
    its devices are the default one (None): on others a pair is a `Placed`.
    """

    device = None
    in_devices = None
    out_devices = None

    def __init__(
        self,
        fn: Callable[..., Any],
        template: Template,
        avals: tuple[Aval, ...],
        tracked: tuple[bool, ...],
    ) -> None:
        self.name = name_of(fn)
        self.avals = avals
        self.tracked = tracked
        self._argument = template.name
        self._fn = fn  # Its key names its globals and objects by identity.
        compiled: Any = _as_it_is if is_unjitted(fn) else jax.jit
        body = _body(fn, self.name, template, tracked, compiled)
        structs = [aval.struct() for aval in avals]
        self._forward: Any = compiled(body)
        self._dual_forward: Any = compiled(along(self._forward, self.name))
        if is_unjitted(fn):
            spec = jax.eval_shape(body, *structs).spec
            self.may_raise = True
        else:
            traced = self._forward.trace(*structs)
            spec = traced.out_info.spec
            self.may_raise = has_callback(traced.jaxpr)
        self.out_tree: Any = spec.out_tree
        self.out_avals: tuple[Aval, ...] = spec.out_avals
        self.out_tracked: tuple[bool, ...] = spec.out_tracked
        self.residual_bytes: int = spec.nbytes
        self.args_kept: tuple[int, ...] = spec.args_kept
        self.outputs_kept: tuple[int, ...] = spec.outputs_kept
        self.reaches: Reaches = spec.reaches

    def forward(self, args: Sequence[Any]) -> tuple[tuple[Any, ...], Residuals | None]:
        """Run the function on `args`, in order of position.

        Of duals at tracked positions the outputs and residuals are duals as well; at
        others, as where a gradient is stopped, a tangent counts for nothing.

        Returns the outputs in the order of `out_tree` and the residuals; these are None
        when no output is tracked.
        """
        dual = any_dual(args)
        if dual:
            places = zip(args, self.tracked, strict=True)
            args = [arg if tracked else primal_of(arg) for arg, tracked in places]
            dual = any_dual(args)
        try:
            returned = self._dual_forward(*args) if dual else self._forward(*args)
            if self.may_raise or dual:  # Rules of their own may have callbacks in them.
                jax.block_until_ready(returned)
        except (RuntimeError, ValueError, TypeError) as error:
            _refuse_deleted(self.name, self._argument, args, error)
            if dual:
                refuse_no_jvp(self.name, error)
            raise
        spec, outputs = returned.spec, returned.outputs
        if spec.vjp_tree is None:
            return outputs, None
        args_kept = tuple([args[position] for position in spec.args_kept])
        outputs_kept = tuple([outputs[place] for place in spec.outputs_kept])
        held = (args_kept, outputs_kept, returned.rest)
        return outputs, Residuals(spec, *held, dual and any(map(any_dual, held)))

    def vjp(
        self, residuals: Residuals, cotangents: Sequence[Sequence[Any]]
    ) -> tuple[Any, ...]:
        """Carry cotangents of the outputs back to the tracked inputs.

        Args:
            residuals: what `forward` returned; they may be used again.
            cotangents: for each tracked output, in order, 0 to 8 addends of its shape
                and dtype. They are summed left to right; none at all is zero.

        Returns:
            One cotangent for each tracked input, in order of position, as `jax.vjp`
            gives them (for complex values JAX's convention holds). They are duals if a
            residual or a cotangent is.
        """
        spec = residuals.spec
        sums = tuple(map(tuple, cotangents))
        assert len(sums) == sum(spec.out_tracked), (self.name, len(sums))
        assert max(map(len, sums)) <= ADDENDS_MAX, (self.name, list(map(len, sums)))
        held = (residuals.rest, residuals.args, residuals.outputs)
        dual = residuals.dual or any(map(any_dual, sums))
        if spec.may_raise is None and not dual:
            spec.may_raise = has_callback(spec.backward.trace(*held, sums).jaxpr)
        try:
            backward = spec.dual_backward if dual else spec.backward
            gradients: tuple[Any, ...] = backward(*held, sums)
            if spec.may_raise or dual:
                jax.block_until_ready(gradients)
        except (RuntimeError, ValueError, TypeError) as error:
            _refuse_deleted(self.name, "residual {}".format, residuals.keeps, error)
            if dual:
                refuse_no_jvp(self.name, error)
            raise
        return gradients

    def __repr__(self) -> str:
        inputs = ", ".join(map(str, self.avals))
        return f"Pair({self.name}({inputs}) -> {', '.join(map(str, self.out_avals))})"


def _as_it_is(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


def _body(
    fn: Callable[..., Any],
    name: str,
    template: Template,
    tracked: tuple[bool, ...],
    compiled: Callable[..., Any],
) -> Callable[..., _Returned]:
    """Return forward as a function of flat arguments; `compiled` makes its backward."""
    places = tuple(place for place, is_tracked in enumerate(tracked) if is_tracked)

    def body(*args: Any) -> _Returned:
        args = tuple(map(_as_jax, args))
        out_tree: Any = None
        order: tuple[bool, ...] = ()

        def split_outputs(*inexact: Any) -> tuple[list[Any], list[Any]]:
            nonlocal out_tree, order
            values = list(args)
            for place, value in zip(places, inexact, strict=True):
                values[place] = value
            call_args, call_kwargs = template.rebuild(values)
            outputs, out_tree = _outputs(name, fn(*call_args, **call_kwargs))
            order = tuple(bool(places) and aval_of(o).inexact for o in outputs)
            kinds = list(zip(outputs, order, strict=True))
            return [o for o, t in kinds if t], [o for o, t in kinds if not t]

        vjp: Any = None
        if places:
            inputs = [args[place] for place in places]
            smooth, vjp, other = jax.vjp(split_outputs, *inputs, has_aux=True)
        else:
            smooth, other = split_outputs()
        found = (iter(other), iter(smooth))
        outputs = tuple(next(found[is_tracked]) for is_tracked in order)
        spec = _Spec(name, out_tree, tuple(aval_of(output) for output in outputs))
        if not any(order):
            return _Returned(spec, outputs, ())
        spec.out_tracked = order
        spec.reaches = reaches(vjp, len(places), len(smooth))
        rest = _place_residuals(spec, vjp, args, outputs)
        spec.backward = compiled(_backward_of(spec))
        spec.dual_backward = compiled(along(spec.backward, name))
        spec.may_raise = True if compiled is _as_it_is else None
        return _Returned(spec, outputs, rest)

    body.__name__ = name.rpartition(":")[2]
    body.__qualname__ = body.__name__
    return body


def _as_jax(value: Any) -> Any:
    """Take numpy's values as jit would; promotion must not depend on jit."""
    return jnp.asarray(value) if isinstance(value, np.ndarray | np.generic) else value


def _outputs(name: str, tree: Any) -> tuple[list[Any], Any]:
    """Flatten what a function returned to arrays of strong type; duals stay."""
    leaves, out_tree = jtu.tree_flatten(tree, is_leaf=is_dual)
    arrays = []
    for place, leaf in enumerate(leaves):
        if is_dual(leaf):
            arrays.append(leaf)
            continue
        try:
            is_array = isinstance(leaf, jax.Array)
            arrays.append(_strong(leaf if is_array else jnp.asarray(leaf)))
        except (TypeError, ValueError, OverflowError) as error:
            path = jtu.keystr(jtu.tree_flatten_with_path(tree)[0][place][0])
            raise JdagError(
                f"{name} returned {kind_of(leaf)} "
                f"{f'at {path}' if path else 'as its output'}; functions return "
                "arrays, Python scalars, and pytrees of these"
            ) from error
    return arrays, out_tree


def _strong(array: Any) -> Any:
    """Return the array without weak type: that would not survive a wire."""
    if not jax.typeof(array).weak_type:
        return array
    return jax.lax.convert_element_type(array, array.dtype)


def _place_residuals(
    spec: _Spec, vjp: Any, args: tuple[Any, ...], outputs: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Note in `spec` where each leaf of the vjp is to be had; return the rest.

    A source is (0, index in the rest), (1, index in args_kept), (2, in outputs_kept).
    """
    residuals, spec.vjp_tree = jtu.tree_flatten(vjp)
    known = {id(output): (2, place) for place, output in enumerate(outputs)}
    known.update({id(arg): (1, place) for place, arg in enumerate(args)})
    kept: tuple[dict[int, int], ...] = ({}, {}, {})
    rest: list[Any] = []
    sources = []
    for residual in residuals:
        home, place = known.get(id(residual), (0, len(rest)))
        if home == 0:  # JAX itself returns no residual twice.
            rest.append(residual)
        sources.append((home, kept[home].setdefault(place, len(kept[home]))))
    spec.sources = tuple(sources)
    spec.args_kept = tuple(kept[1])
    spec.outputs_kept = tuple(kept[2])
    spec.nbytes = sum(aval_of(residual).nbytes for residual in rest)
    return tuple(rest)


def _backward_of(spec: _Spec) -> Callable[..., tuple[Any, ...]]:
    avals = [
        aval
        for aval, is_tracked in zip(spec.out_avals, spec.out_tracked, strict=True)
        if is_tracked
    ]

    def backward(rest: Any, args: Any, outputs: Any, sums: Any) -> tuple[Any, ...]:
        held = (rest, args, outputs)
        vjp = jtu.tree_unflatten(spec.vjp_tree, [held[h][i] for h, i in spec.sources])
        cotangents = [
            fold(tuple(map(_as_jax, addends)))
            if addends
            else jnp.zeros(aval.shape, aval.dtype)
            for addends, aval in zip(sums, avals, strict=True)
        ]
        return tuple(map(_strong, vjp(cotangents)))

    backward.__name__ = f"vjp_{spec.name.rpartition(':')[2]}"
    backward.__qualname__ = backward.__name__
    return backward


def _refuse_deleted(
    name: str, what: Callable[[int], str], arrays: Sequence[Any], error: Exception
) -> None:
    for place, array in enumerate(arrays):
        if is_deleted(array):
            raise JdagError(
                f"{what(place)} of {name}, {aval_of(array)}, was deleted or donated; "
                "arrays that jdag holds have to live as long as their context"
            ) from error


class _Key(tuple[Hashable, ...]):
    """The key of a pair; what the pair is made from rides along, uncompared."""

    fn: Callable[..., Any]
    template: Template


class PairCache:
    """The pairs made so far, the least recently used dropped first."""

    def __init__(self, pairs_max: int) -> None:
        self.pairs_max = pairs_max
        self._pair = lru_cache(maxsize=pairs_max)(self._make)
        self._keys: OrderedDict[Hashable, dict[int, None]] = OrderedDict()

    def pair(
        self,
        fn: Callable[..., Any],
        template: Template,
        avals: tuple[Aval, ...],
        tracked: tuple[bool, ...],
    ) -> Pair:
        """Return the pair of `fn` for these arguments; see `pair` below."""
        key = _Key(
            (key_of(fn), template, avals, tracked, is_unjitted(fn), configuration())
        )
        key.fn = fn
        key.template = template
        return self._pair(key)

    def __len__(self) -> int:
        return self._pair.cache_info().currsize

    def clear(self) -> None:
        """Forget all pairs."""
        self._pair.cache_clear()
        self._keys.clear()

    def _make(self, key: _Key) -> Pair:
        avals: Any = key[2]
        tracked: Any = key[3]
        assert len(avals) == len(tracked), (avals, tracked)
        for position, aval in enumerate(avals):
            if tracked[position] and not aval.inexact:
                raise JdagError(
                    f"argument {position} of {name_of(key.fn)} is tracked but {aval}; "
                    "only float and complex arrays carry cotangents"
                )
        self._warn_of_functions_made_anew(key)
        return Pair(key.fn, key.template, avals, tracked)

    def _warn_of_functions_made_anew(self, key: _Key) -> None:
        """Warn once of code that came with many closures, defaults or partials."""
        code = code_of(key.fn)
        # Our own, such as an optimizer's step, are partials of what users give.
        if code is None or is_ours(code.co_filename):
            return
        seen = self._keys.setdefault(code, {})
        self._keys.move_to_end(code)
        if len(self._keys) > self.pairs_max:
            self._keys.popitem(last=False)
        if len(seen) >= ANEW_MAX:
            return
        seen[hash(key[0])] = None  # Hashes, since keys would keep closures alive.
        if len(seen) == ANEW_MAX:
            warnings.warn(
                f"{name_of(key.fn)} ({code.co_filename}:{code.co_firstlineno}) was "
                f"compiled for {ANEW_MAX} different closures, defaults or partials: a "
                "function made anew in a loop is compiled anew each time. Define it "
                "once, and pass what changes as an argument: arrays and numbers as "
                "they are, anything else as jdag.static(value)",
                stacklevel=2,
            )


CACHE = PairCache(PAIRS_MAX)


def pair(
    fn: Callable[..., Any],
    template: Template,
    avals: tuple[Aval, ...],
    tracked: tuple[bool, ...],
) -> Pair:
    """Return the forward/vjp pair of `fn`, from the cache of the process or made now.

    Args:
        fn: a pure function of pytrees of arrays and statics.
        template: the structure of its arguments, from `pytrees.split`.
        avals: the abstract value of each position; weak types count.
        tracked: for each position, whether cotangents flow back to it.

    Raises:
        JdagError: a tracked position is not inexact; `fn` returns what is no array.
        Exception: whatever `fn` raises while it is traced, as it is.
    """
    return CACHE.pair(fn, template, avals, tracked)
