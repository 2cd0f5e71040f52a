"""The oracle: the same program through plain JAX on one machine.

A program runs as it is, in a context whose calls run at once, inside of
`jax.value_and_grad`. Nothing of the engine, and no recorded vjp, takes part.

What a program fetches it may branch on, which JAX's tracers do not allow: so it runs
once plainly, what it fetched, and what unjitted functions returned, is recorded, and
the run under `jax.value_and_grad` is given that back, in the same order. It is a
constant there, also to a `jax.jvp` around the oracle: that of its gradients is what
`jdag.hvp` is held against.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jdag.api.cotangent_hooks import CotangentHooks
from jdag.collectives import oracle_replicas as plain
from jdag.compute.avals import aval_of, frozen
from jdag.compute.devices import parsed_place
from jdag.compute.pytrees import (
    Split,
    argument_numbers,
    flatten,
    indices_of_arrays,
    paths,
    unflatten,
)
from jdag.compute.refs import is_ref
from jdag.compute.tracing import settled, strong
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
    """One run of a program: the values of its refs, and what it has fetched.

    It holds refs, and is the state that they belong to.
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
        """Return the name of this run in a message that also names a cluster."""
        return "a run of the oracle"

    @property
    def workers(self) -> tuple[str, ...]:
        """A run on one machine knows none."""
        raise ContextError(
            "ctx.workers inside of a program that the oracle runs: it has no workers; "
            "hand their names to the program"
        )

    @property
    def state(self) -> "OracleRun":
        """Refs belong to the run that made them."""
        return self

    def place(self, place: object, what: str) -> tuple[str, str | None]:
        """Return a worker and a device of it; here all names are workers."""
        if not isinstance(place, str):
            raise JdagError(
                f"the worker comes first, as its name: {what}('a', ...), not {place!r}"
            )
        return parsed_place(place)

    def read(self, refs: Sequence[Ref]) -> list[Any]:
        """Return the values, in a second run those that the first one read."""
        return self._once(len(refs), lambda: [self.values[ref.key] for ref in refs])

    def returned(self, run: Callable[[], Any]) -> Any:
        """Return what an unjitted function returned in the first run."""
        return self._once(1, lambda: [run()])[0]

    def _once(self, count: int, read: Callable[[], list[Any]]) -> list[Any]:
        first = len(self.fetched)
        if self._recorded is None:
            values = read()
        else:
            values = list(self._recorded[first : first + count])
        if len(values) < count:
            raise ContextError(
                f"the program fetched {first + len(values)} values when it ran first, "
                "and now more: programs have to do the same each time they run"
            )
        self.fetched += values
        return values

    def put(self, value: Any, worker: str, device: str | None, tracked: bool) -> Ref:
        """Return a ref to an input of the program; `tracked` if its dtype allows it."""
        value = strong(jnp.asarray(value))
        self._leaves += 1
        key = LeafKey(None, LeafId(worker, self._leaves), 0)
        tracked = tracked and aval_of(value).inexact
        return self.ref(key, value, worker, device, tracked)

    def ref(
        self, key: Key, value: Any, worker: str, device: str | None, tracked: bool
    ) -> Ref:
        """Hold a value and return a ref to it, on a worker and a device of it."""
        self.values[key] = self.hooks.on(key, value)
        return Ref(self, key, worker, aval_of(value).on(device), tracked)

    def use(self, ref: Ref) -> Any:
        """Return the value of an argument; no gradient flows into an untracked one.

        Raises:
            ContextError: the ref is not of this run.
        """
        if ref.holder is not self:
            raise ContextError(
                f"{ref!r} is of a cluster, or of another run of an oracle: hand the "
                "oracle everything that the program reads as arguments"
            )
        value = self.values[ref.key]
        return value if ref.tracked else jax.lax.stop_gradient(value)


class OracleFrame:
    """One program in a run: in a `Context`, what a `ProgramFrame` is on a cluster.

    Calls and programs run at once, one after the other; errors are raised there.
    """

    replicas = plain
    phase = FramePhase.OPEN
    tag = None  # Says nothing here.

    def __init__(self, run: OracleRun, prefix: Path, here: str) -> None:
        self.state = run
        self.prefix = prefix
        self.here = here
        self.calls = 0
        self.admit = run.use

    def check(self, what: str) -> None:
        """Raise ContextError where that takes a cluster."""
        if what in ("ctx.backward", "ctx.gradient", "ctx.gradients", "ctx.graph"):
            raise ContextError(
                f"{what} inside of a program that the oracle runs: the program returns "
                "its loss, and jdag.oracle(program) gives value and gradients"
            )

    def issue(
        self, worker: str, device: str | None, fn: Callable[..., Any], parts: Split
    ) -> Any:
        """Call a function; return refs in the structure of its result."""
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
                what=f"what {name_of(fn)} returned",
            )
            outputs = settled([strong(jnp.asarray(output)) for output in outputs])
        except Exception as error:
            raise remote_error(error, fn, worker, call_site()) from error
        self.calls += 1
        path = (*self.prefix, self.calls)
        given = [ref.key for _, ref in parts.refs if ref.tracked]
        refs = []
        for index, output in enumerate(outputs):
            tracked = bool(given) and aval_of(output).inexact
            key = OutputKey(None, path, index)
            refs.append(run.ref(key, output, worker, device, tracked))
        run.hooks.called(given, [ref.key for ref in refs if ref.tracked])
        return unflatten(treedef, refs)

    def start(self, worker: str, fn: Callable[..., Any], parts: Split) -> Task:
        """Run a program at once, in a frame of its own."""
        for _, ref in parts.refs:
            self.admit(ref)
        args, kwargs = parts.filled((*parts.refs, *parts.constants))
        self.calls += 1
        inner = OracleFrame(self.state, (*self.prefix, self.calls), worker)
        result = fn(Context(inner), *args, **kwargs)
        task = Task(self, worker, name_of(fn), str(call_site()))
        task.end = task.given = (result,)
        return task

    def attach(self, ref: Ref, hook: Hook) -> None:
        """Attach a hook to a value."""
        self.state.hooks.attach(ref.key, ref.worker, hook)


def oracle(
    program: Callable[..., Any],
    *,
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """Return a function that gives a program's value and gradients by plain JAX.

    The truth that distributed runs are held against: `jax.value_and_grad` of the whole
    program, on one machine. Outputs of each call lose their weak types, as they do when
    they travel.

    Args:
        program: as for `jdag.value_and_grad`.
        argnums: the same.
        has_aux: the same.
        allow_int: the same.

    Returns:
        A function of the arguments after the context, which gives what that of
        `jdag.value_and_grad` gives. Refs of a cluster among the arguments stand for
        their values.

    Raises:
        JdagError: the program is none.
        RootError: the program returns no loss of size 1.
        RemoteError: a function in it raised.
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
    """Return a function that gives what one pass from several roots should.

    Args:
        program: takes a context first, then parameters and arguments; returns a list of
            refs, the roots. A root that is there twice counts twice.

    Returns:
        A function `(params, *args, cotangents=None)` that gives the roots' values and
        the gradient of each parameter, an array. Cotangents are one array a root, of
        its shape and dtype, or None for ones.
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
    """Run a program of roots and aux twice; return values of these, and gradients."""
    arguments = [
        _Argument(argument, number, allow_int if number in argnums else None)
        for number, argument in enumerate(args)
    ]

    def total(arrays: Sequence[Any], hooks: CotangentHooks, recorded: Any) -> Any:
        run = OracleRun(recorded, hooks)
        given = dict(zip(argnums, arrays, strict=True))
        bound = [a.bound(run, given.get(n, a.arrays)) for n, a in enumerate(arguments)]
        roots, aux = rooted(Context(OracleFrame(run, (), HERE)), *bound)
        values = [_root(run, root, n) for n, root in enumerate(roots)]
        sums = [
            _inner(value, None if cotangents is None else cotangents[n])
            for n, value in enumerate(values)
        ]
        leaves, treedef = flatten(aux, what="what the program returned")
        held = [run.values[leaf.key] if is_ref(leaf) else leaf for leaf in leaves]
        reached = hooks.reached([root.key for root in roots])
        hooked = {key: run.values[key] for key in reached}
        # Nothing of the values, so that all have cotangents.
        sums += [0 * jnp.sum(jnp.real(value)) for value in hooked.values()]
        values_and_aux = values, unflatten(treedef, held)
        return sum(sums[1:], sums[0]), (values_and_aux, hooked, run.fetched)

    arrays = [arguments[number].arrays for number in argnums]
    # Apart from any jvp around it, so that what is fetched is constant there too.
    constant = jax.tree.map(jax.lax.stop_gradient, arrays)
    _, (_, hooked, fetched) = total(constant, CotangentHooks(), None)
    zeros = {key: jnp.zeros_like(value) for key, value in hooked.items()}

    def again(arrays: Sequence[Any], zeros: dict[Key, Any]) -> Any:
        hooks = CotangentHooks(zeros)
        found, (values_and_aux, _, _) = total(arrays, hooks, fetched)
        return found, (values_and_aux, hooks)

    differentiated = jax.value_and_grad(
        again, argnums=(0, 1), has_aux=True, allow_int=True
    )
    (_, ((values, aux), hooks)), (gradients, seen) = differentiated(arrays, zeros)
    hooks.show(seen)
    of = [arguments[number] for number in argnums]
    return values, aux, tuple(map(_Argument.filled, of, gradients))


def _root(run: OracleRun, root: Any, number: int) -> Any:
    if not is_ref(root):
        raise RootError(
            f"root {number} is {kind_of(root)}; a program returns refs, such as "
            "ctx.call gives"
        )
    if not root.aval.inexact:
        raise RootError(f"root {number} is {root.aval}; a root is float or complex")
    return run.use(root)


def _inner(value: Any, cotangent: Any) -> Any:
    """Return the number whose gradient is what flows back from this cotangent."""
    if cotangent is None and value.size != 1:
        raise RootError(
            f"a root of shape {value.shape} needs a cotangent; without one its size "
            "is 1, such as that of a loss"
        )
    weighted = value if cotangent is None else value * cotangent
    return jnp.sum(jnp.real(weighted))


class _Argument:
    """One argument of a program: its pytree, and the arrays in it.

    With `allow_int` None it is not differentiated by, and only its refs name arrays.
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
                    "gradient; differentiate by float and complex arrays, or say "
                    "allow_int=True"
                )

    def bound(self, run: OracleRun, arrays: Sequence[Any]) -> Any:
        """Return the argument with refs of this run to these arrays."""
        bound = list(self._leaves)
        for index, array in zip(self._indices, arrays, strict=True):
            leaf = bound[index]
            where = (HERE, None, True)
            if is_ref(leaf):
                where = (leaf.worker, leaf.device, leaf.tracked)
            bound[index] = run.put(array, *where)
        return unflatten(self._treedef, bound)

    def filled(self, gradients: Sequence[Any]) -> Any:
        """Return gradients in the structure of the argument, None beside them."""
        found: list[Any] = [None] * len(self._leaves)
        for index, gradient in zip(self._indices, gradients, strict=True):
            found[index] = gradient
        return unflatten(self._treedef, found)
