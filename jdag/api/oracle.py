"""The oracle: the same program in plain JAX on one machine.

The unchanged program runs inside of `jax.value_and_grad`, in a context whose calls are
executed immediately. The engine and recorded vjps are not used.

A program may branch on fetched values, which tracers do not allow. So it runs twice:
the first run, without tracers, records fetched values and results of unjitted
functions. The second run, under `jax.value_and_grad`, gets these values back in the
same order, as constants. They are also constants if the oracle itself is differentiated
by `jax.jvp`, as tests of `jdag.hvp` do.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jdag.api.cotangent_hooks import CotangentHooks
from jdag.collectives import oracle_replicas as plain
from jdag.compute.avals import aval_of, frozen
from jdag.compute.devices import split_place
from jdag.compute.pytrees import (
    Split,
    argument_numbers,
    flatten,
    indices_of_arrays,
    paths,
    unflatten,
)
from jdag.compute.refs import is_ref
from jdag.compute.tracing import on_home_device, strong
from jdag.context.context import Context
from jdag.context.program_frame import FramePhase
from jdag.context.refs import Ref, fetch
from jdag.context.tasks import Task
from jdag.engine.functions import call_site, is_unjitted, name_of
from jdag.engine.protocol import Hook, Key, LeafId, LeafKey, OutputKey, Path
from jdag.errors import ContextError, JdagError, RootError, kind_of, no_arrays
from jdag.runtime.failures import remote_error

HERE = "home"


class OracleRun:
    """One run of a program: the values of its refs, and the fetched values.

    The refs of the run have this object as their `holder` and as their `state`.
    """

    closed = True
    is_plain = True
    schedule = None
    is_named = is_given = staticmethod(is_ref)

    def __init__(self, recorded: Sequence[Any] | None, hooks: CotangentHooks) -> None:
        self.values: dict[Key, Any] = {}
        self.hooks = hooks
        self.fetched: list[Any] = []
        self._recorded = recorded
        self._leaves = 0

    def beside(self, _: object) -> str:
        return "a run of the oracle"

    @property
    def workers(self) -> tuple[str, ...]:
        raise ContextError(
            "ctx.workers inside of a program that the oracle runs: it has no workers; "
            "pass their names to the program"
        )

    @property
    def state(self) -> "OracleRun":
        return self

    def place(self, place: object, what: str) -> tuple[str, str | None]:
        if not isinstance(place, str):
            raise JdagError(
                f"the worker comes first, as its name: {what}('a', ...), not {place!r}"
            )
        return split_place(place)

    def read(self, refs: Sequence[Ref]) -> list[Any]:
        return self._recall(len(refs), lambda: [self.values[ref.key] for ref in refs])

    def returned(self, run: Callable[[], Any]) -> Any:
        return self._recall(1, lambda: [run()])[0]

    def _recall(self, count: int, read: Callable[[], list[Any]]) -> list[Any]:
        first = len(self.fetched)
        if self._recorded is None:
            values = read()
        else:
            values = list(self._recorded[first : first + count])
        if len(values) < count:
            raise ContextError(
                f"the program fetched {first + len(values)} values in its first run, "
                "and more in its second: it must do the same each time it runs"
            )
        self.fetched += values
        return values

    def put(self, value: Any, worker: str, device: str | None, tracked: bool) -> Ref:
        value = strong(jnp.asarray(value))
        self._leaves += 1
        key = LeafKey(None, LeafId(worker, self._leaves), 0)
        tracked = tracked and aval_of(value).inexact
        return self.ref(key, value, worker, device, tracked)

    def ref(
        self, key: Key, value: Any, worker: str, device: str | None, tracked: bool
    ) -> Ref:
        self.values[key] = self.hooks.hooked(key, value)
        return Ref(self, key, worker, aval_of(value).on(device), tracked)

    def use(self, ref: Ref) -> Any:
        if ref.holder is not self:
            raise ContextError(
                f"{ref!r} belongs to a cluster, or to another run of an oracle: pass "
                "everything that the program reads as arguments of the oracle"
            )
        value = self.values[ref.key]
        return value if ref.tracked else jax.lax.stop_gradient(value)


class OracleFrame:
    """The frame of one program in a run, in place of a `ProgramFrame`.

    Calls and programs run immediately, and their errors are raised at once.
    """

    replicas = plain
    phase = FramePhase.OPEN
    tag = None

    def __init__(self, run: OracleRun, prefix: Path, here: str) -> None:
        self.state = run
        self.prefix = prefix
        self.here = here
        self.calls = 0
        self.admit = run.use

    def check(self, what: str) -> None:
        if what in ("ctx.backward", "ctx.gradient", "ctx.gradients", "ctx.graph"):
            raise ContextError(
                f"{what} inside of a program that the oracle runs: a program only "
                "returns its loss; jdag.oracle(program) computes value and gradients"
            )

    def issue(
        self, worker: str, device: str | None, fn: Callable[..., Any], parts: Split
    ) -> Any:
        run = self.state
        for position, value in parts.constants:
            parts.aval(position, value)
        constants = [(index, jnp.asarray(value)) for index, value in parts.constants]
        args, kwargs = parts.filled(
            [(index, run.use(ref)) for index, ref in parts.refs] + constants
        )
        try:
            result = partial(fn, *args, **kwargs)
            outputs, treedef = flatten(
                run.returned(result) if is_unjitted(fn) else result(),
                what=f"the result of {name_of(fn)}",
            )
            outputs = on_home_device(
                [strong(jnp.asarray(output)) for output in outputs]
            )
        except Exception as error:
            raise remote_error(error, fn, worker, call_site()) from error
        self.calls += 1
        path = (*self.prefix, self.calls)
        inputs = [ref.key for _, ref in parts.refs if ref.tracked]
        refs = []
        for index, output in enumerate(outputs):
            tracked = bool(inputs) and aval_of(output).inexact
            key = OutputKey(None, path, index)
            refs.append(run.ref(key, output, worker, device, tracked))
        run.hooks.called(inputs, [ref.key for ref in refs if ref.tracked])
        return unflatten(treedef, refs)

    def start(self, worker: str, fn: Callable[..., Any], parts: Split) -> Task:
        for _, ref in parts.refs:
            self.admit(ref)
        args, kwargs = parts.filled((*parts.refs, *parts.constants))
        self.calls += 1
        inner = OracleFrame(self.state, (*self.prefix, self.calls), worker)
        result = fn(Context(inner), *args, **kwargs)
        task = Task(self, worker, name_of(fn), str(call_site()))
        task.end = task.value = (result,)
        return task

    def attach(self, ref: Ref, hook: Hook) -> None:
        self.state.hooks.attach(ref.key, ref.worker, hook)


def oracle(
    program: Callable[..., Any],
    *,
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """Return a function that computes a program's value and gradients in plain JAX.

    This is `jax.value_and_grad` of the whole program on one machine, the reference for
    distributed runs. Outputs of calls have strong types, as on a cluster.

    Args:
        program: as for `jdag.value_and_grad`.
        argnums: as for `jdag.value_and_grad`.
        has_aux: as for `jdag.value_and_grad`.
        allow_int: as for `jdag.value_and_grad`.

    Returns:
        A function of the arguments after the context that returns the results of
        `jdag.value_and_grad`. Refs of a cluster among the arguments are fetched.

    Raises:
        JdagError: the program is not callable.
        RootError: the program returns no loss of size 1.
        RemoteError: a function in the program raised an exception.
    """
    if not callable(program):
        raise JdagError(f"jdag.oracle takes a function of a context, not {program!r}")

    def rooted(*args: Any) -> tuple[list[Any], Any]:
        result = program(*args)
        return ([result[0]], result[1]) if has_aux else ([result], ())

    def run(*args: Any) -> Any:
        numbers = argument_numbers(argnums, len(args))
        (value,), aux, trees = _differentiated(rooted, args, numbers, None, allow_int)
        value = (value, aux) if has_aux else value
        return value, trees[0] if isinstance(argnums, int) else trees

    return run


def pullback(program: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes the gradients of a pass from several roots.

    Args:
        program: takes a context first, then parameters and arguments; returns a list of
            refs, the roots. A root that occurs twice counts twice.

    Returns:
        A function `(params, *args, cotangents=None)` that returns the roots' values and
        the gradient of each parameter, an array. Cotangents are one array for each
        root, of its shape and dtype, or None for ones.
    """

    def rooted(*args: Any) -> tuple[list[Any], Any]:
        return list(program(*args)), ()

    def run(*args: Any, cotangents: Sequence[Any] | None = None) -> Any:
        values, _, (gradients,) = _differentiated(rooted, args, (0,), cotangents, False)
        return values, gradients

    return run


def _differentiated(
    rooted: Callable[..., tuple[list[Any], Any]],
    args: Sequence[Any],
    argnums: tuple[int, ...],
    cotangents: Sequence[Any] | None,
    allow_int: bool,
) -> tuple[list[Any], Any, tuple[Any, ...]]:
    """Run a program twice; return the roots' values, aux, and gradients by argument.

    `rooted` runs the program and returns the list of its roots, and aux.
    """
    arguments = [
        _Argument(argument, number, allow_int if number in argnums else None)
        for number, argument in enumerate(args)
    ]

    def total(arrays: Sequence[Any], hooks: CotangentHooks, recorded: Any) -> Any:
        run = OracleRun(recorded, hooks)
        by_number = dict(zip(argnums, arrays, strict=True))
        bound = [
            argument.bound(run, by_number.get(number, argument.arrays))
            for number, argument in enumerate(arguments)
        ]
        roots, aux = rooted(Context(OracleFrame(run, (), HERE)), *bound)
        values = [_root(run, root, n) for n, root in enumerate(roots)]
        sums = [
            _inner(value, None if cotangents is None else cotangents[n])
            for n, value in enumerate(values)
        ]
        leaves, treedef = flatten(aux, what="the result of the program")
        aux_values = [run.values[leaf.key] if is_ref(leaf) else leaf for leaf in leaves]
        reached = hooks.reached([root.key for root in roots])
        hooked = {key: run.values[key] for key in reached}
        # Add zero times each hooked value, so that each has a cotangent.
        sums += [0 * _real_sum(value) for value in hooked.values()]
        values_and_aux = values, unflatten(treedef, aux_values)
        return sum(sums[1:], sums[0]), (values_and_aux, hooked, run.fetched)

    arrays = [arguments[number].arrays for number in argnums]
    # Values that the first run fetches are constants for a surrounding jvp too.
    constant = jax.tree.map(jax.lax.stop_gradient, arrays)
    _, (_, hooked, fetched) = total(constant, CotangentHooks(), None)
    zeros = {key: jnp.zeros_like(value) for key, value in hooked.items()}

    def again(arrays: Sequence[Any], zeros: dict[Key, Any]) -> Any:
        hooks = CotangentHooks(zeros)
        result, (values_and_aux, _, _) = total(arrays, hooks, fetched)
        return result, (values_and_aux, hooks)

    differentiated = jax.value_and_grad(
        again, argnums=(0, 1), has_aux=True, allow_int=True
    )
    (_, ((values, aux), hooks)), (gradients, seen) = differentiated(arrays, zeros)
    hooks.show(seen)
    differentiated_by = [arguments[number] for number in argnums]
    return values, aux, tuple(map(_Argument.filled, differentiated_by, gradients))


def _root(run: OracleRun, root: Any, number: int) -> Any:
    if not is_ref(root):
        raise RootError(
            f"root {number} is {kind_of(root)}; a program must return refs, such as "
            "the result of ctx.call"
        )
    if not root.aval.inexact:
        raise RootError(f"root {number} is {root.aval}; expected float or complex")
    return run.use(root)


def _inner(value: Any, cotangent: Any) -> Any:
    """Return a scalar. Its gradient is the vjp of the root, applied to `cotangent`."""
    if cotangent is None and value.size != 1:
        raise RootError(
            f"a root of shape {value.shape} needs a cotangent; only a root of size 1, "
            "such as a loss, needs none"
        )
    return _real_sum(value if cotangent is None else value * cotangent)


def _real_sum(value: Any) -> Any:
    real = jnp.real(value) if jnp.iscomplexobj(value) else value
    return jnp.sum(real) if jnp.ndim(real) else real  # JAX would compile a sum.


class _Argument:
    """One argument of a program: its pytree, and the arrays in it.

    If `allow_int` is None, the program is not differentiated by this argument; then
    only the refs in the argument count as arrays.
    """

    def __init__(self, tree: Any, number: int, allow_int: bool | None) -> None:
        what = f"argument {number}"
        self._leaves, self._treedef = flatten(tree, what=what)
        values = flatten(fetch(tree))[0]
        self._indices = [i for i, leaf in enumerate(self._leaves) if is_ref(leaf)]
        if allow_int is not None:
            self._indices = indices_of_arrays(what, tree, self._leaves)
            if not self._indices:
                raise no_arrays(what)
        self.arrays = [frozen(values[index]) for index in self._indices]
        for index, array in zip(self._indices, self.arrays, strict=True):
            if allow_int is False and not aval_of(array).inexact:
                raise JdagError(
                    f"{what}{paths(tree)[index]} is {aval_of(array)}, which has no "
                    "gradient; differentiate by float and complex arrays, or set "
                    "allow_int=True"
                )

    def bound(self, run: OracleRun, arrays: Sequence[Any]) -> Any:
        bound = list(self._leaves)
        for index, array in zip(self._indices, arrays, strict=True):
            leaf = bound[index]
            place = (HERE, None, True)
            if is_ref(leaf):
                place = (leaf.worker, leaf.device, leaf.tracked)
            bound[index] = run.put(array, *place)
        return unflatten(self._treedef, bound)

    def filled(self, gradients: Sequence[Any]) -> Any:
        leaves: list[Any] = [None] * len(self._leaves)
        for index, gradient in zip(self._indices, gradients, strict=True):
            leaves[index] = gradient
        return unflatten(self._treedef, leaves)
