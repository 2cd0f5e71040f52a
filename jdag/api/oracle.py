"""The oracle: the same program through plain JAX on one machine.

A program runs as it is, on a context of this module in place of a cluster's, inside of
`jax.value_and_grad`. Nothing of the engine, and no recorded vjp, takes part.

What a program fetches it may branch on, which JAX's tracers do not allow: so it runs
once plainly, what it fetched is recorded, and the run under `jax.value_and_grad` is
given that back, in the same order. It is a constant there, also to a `jax.jvp` around
the oracle: that of its gradients is what `jdag.hvp` is held against.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from jdag.api.cotangent_hooks import CotangentHooks, Hooking, nothing_of
from jdag.api.device_placement import move, refuse_device
from jdag.api.refs import Ref, fetch
from jdag.api.roots import check_hook
from jdag.compute.avals import aval_of, frozen
from jdag.compute.callables import called
from jdag.compute.devices import parsed
from jdag.compute.pytrees import (
    argument_numbers,
    flatten,
    indices_of_arrays,
    no_gradient,
    paths,
    split,
    unflatten,
)
from jdag.compute.refs import is_ref
from jdag.compute.tracing import settled
from jdag.engine.functions import call_site, is_program, name_of
from jdag.engine.protocol import Failure, Key, LeafId, LeafKey, OutputKey, Path
from jdag.errors import ContextError, JdagError, RootError, kind_of, no_arrays
from jdag.parallel import plain
from jdag.parallel.routes import How
from jdag.runtime.failures import exception_of, remote_error

HERE = "home"


class OracleRun:
    """One run of a program: the values of its refs, and what it has fetched.

    It holds refs, and is the state that they belong to.
    """

    def __init__(self, recorded: Sequence[Any] | None, hooks: CotangentHooks) -> None:
        self.values: dict[Key, Any] = {}
        self.hooks = hooks
        self.fetched: list[Any] = []
        self._recorded = recorded
        self._leaves = 0

    def __str__(self) -> str:
        return "a run of the oracle"

    @property
    def state(self) -> "OracleRun":
        """Refs belong to the run that made them."""
        return self

    def check_readable(self, ref: Ref) -> None:
        """All values of a run are there as long as it is."""

    def seen(self, failure: Failure) -> JdagError:
        """Never needed, as a call that fails raises at once; here for the protocol."""
        return exception_of(failure)

    def read(self, refs: Sequence[Ref]) -> list[Any]:
        """Return the values, in a second run those that the first one read."""
        values = []
        for ref in refs:
            place = len(self.fetched)
            if self._recorded is None:
                value = self.values[ref.key]
            elif place < len(self._recorded):
                value = self._recorded[place]
            else:
                raise ContextError(
                    f"the program fetched {place} values when it ran first, and now "
                    "more: programs have to do the same each time they run"
                )
            self.fetched.append(value)
            values.append(value)
        return values

    def put(self, value: Any, worker: str, device: str | None) -> Ref:
        """Return a ref to an input of the program."""
        value = _strong(jnp.asarray(value))
        self._leaves += 1
        key = LeafKey(None, LeafId(worker, self._leaves), 0)
        return self.ref(key, value, (worker, device), tracked=aval_of(value).inexact)

    def ref(
        self, key: Key, value: Any, place: tuple[str, str | None], tracked: bool
    ) -> Ref:
        """Hold a value and return a ref to it, on a worker and a device of it."""
        self.values[key] = self.hooks.on(key, value)
        worker, device = place
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


def _refusing(what: str) -> Callable[..., NoReturn]:
    def refuse(self: "OracleContext", *args: object, **options: object) -> NoReturn:
        raise ContextError(
            f"ctx.{what} inside of a program that the oracle runs: the program returns "
            "its loss, and jdag.oracle(program) gives value and gradients"
        )

    return refuse


class OracleContext:
    """The part of `jdag.Context` that programs use, on one machine.

    Calls run at once, one operation after the other; what they raise is raised there.
    """

    __jdag_context__ = True

    def __init__(self, run: OracleRun, path: Path, here: str) -> None:
        self._run = run
        self._path = path
        self._here = here
        self._calls = 0

    @property
    def here(self) -> str:
        """The name of the worker on which the program would run."""
        return self._here

    def call(
        self, place: str, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a function or a program; see `jdag.Context.call`."""
        if not isinstance(place, str):
            raise JdagError(
                f"the worker comes first, as its name: ctx.call('a', fn, ...), "
                f"not {place!r}"
            )
        worker, device = parsed(place)
        fn, args, own = called(fn, args)
        parts = split(args, kwargs, is_ref, own)
        path = (*self._path, self._calls + 1)
        values: list[Any] = [None] * parts.size
        site = call_site()
        if is_program(fn):
            refuse_device(fn, place, device)
            for position, value in (*parts.refs, *parts.constants):
                values[position] = value
            for _, ref in parts.refs:
                self._run.use(ref)
            args, kwargs = parts.template.rebuild(values)
            self._calls += 1
            return fn(OracleContext(self._run, path, worker), *args, **kwargs)
        for position, ref in parts.refs:
            values[position] = self._run.use(ref)
        for position, value in parts.constants:
            parts.aval(position, value)
            values[position] = jnp.asarray(value)
        args, kwargs = parts.template.rebuild(values)
        try:
            outputs, treedef = flatten(
                fn(*args, **kwargs), what=f"what {name_of(fn)} returned"
            )
            outputs = settled([_strong(jnp.asarray(output)) for output in outputs])
        except Exception as error:
            raise remote_error(error, fn, worker, site) from error
        self._calls += 1
        tracked = any(ref.tracked for _, ref in parts.refs)
        refs = []
        for index, output in enumerate(outputs):
            key = OutputKey(None, path, index)
            edge = tracked and aval_of(output).inexact
            refs.append(self._run.ref(key, output, (worker, device), edge))
        given = [ref.key for _, ref in parts.refs if ref.tracked]
        self._run.hooks.called(given, [ref.key for ref in refs if ref.tracked])
        return unflatten(treedef, refs)

    def move(self, worker: str, refs: Any) -> Any:
        """Move arrays to a worker; see `jdag.Context.move`."""
        return move(self.call, worker, refs)

    def replicate(self, workers: Sequence[str], refs: Any, how: How = "owner") -> Any:
        """Copy arrays to several workers; see `jdag.Context.replicate`."""
        return plain.replicate(self, workers, refs, how)

    def all_reduce(self, refs_by_worker: Mapping[str, Any], how: How = "owner") -> Any:
        """Add up equal pytrees; see `jdag.Context.all_reduce`."""
        return plain.all_reduce(self, refs_by_worker, how)

    def on_cotangent(self, ref: Ref, fn: Callable[[Any], Any]) -> None:
        """Hook the cotangent of a ref; see `jdag.Context.on_cotangent`."""
        self._hook("ctx.on_cotangent", ref, fn, replaces=True)

    def on_gradient(self, leaf: Ref, fn: Callable[[Any], Any]) -> None:
        """Have the gradient of a leaf seen; see `jdag.Context.on_gradient`."""
        self._hook("ctx.on_gradient", leaf, fn, replaces=False)

    def _hook(self, what: str, ref: Ref, fn: Any, *, replaces: bool) -> None:
        check_hook(what, ref, fn, self._run.use, replaces=replaces)
        self._calls += 1
        path = (*self._path, self._calls)
        hook = Hooking(path, fn, replaces, ref.worker, call_site())
        self._run.hooks.attach(ref.key, hook)

    backward = _refusing("backward")
    gradient = _refusing("gradient")
    gradients = _refusing("gradients")


def _strong(array: Any) -> Any:
    if not aval_of(array).weak:
        return array
    return jax.lax.convert_element_type(array, array.dtype)


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
        program: takes a context first, then arguments; returns a ref to its loss, an
            inexact value of size 1, or with `has_aux` (loss, pytree of refs).
        argnums: which arguments after the context to differentiate by.
        has_aux: whether the program returns more than its loss.
        allow_int: whether arguments that are differentiated may have arrays without
            gradients in them.

    Returns:
        A function of the arguments after the context. Refs of a cluster among them
        stand for their values; arguments that are differentiated are pytrees of refs or
        of inexact arrays. It gives (value, gradients), or ((value, aux), gradients),
        where gradients are arrays in the structure of the arguments; None for statics
        and Python numbers inside a pytree, and with `allow_int` zeros of float0 for
        what has none.

    Raises:
        JdagError: the program is none.
        RootError: the program returns no loss of size 1.
        RemoteError: a function in it raised.
    """
    if not callable(program):
        raise JdagError(f"jdag.oracle takes a function of a context, not {program!r}")

    def run(*args: Any) -> Any:
        numbers = argument_numbers(argnums, len(args))

        def roots_of(result: Any) -> tuple[list[Any], Any]:
            return ([result[0]], result[1]) if has_aux else ([result], ())

        found = _differentiate(program, args, numbers, roots_of, None, allow_int)
        values, aux, gradients = found
        value = (values[0], aux) if has_aux else values[0]
        return value, gradients[0] if isinstance(argnums, int) else gradients

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

    def run(*args: Any, cotangents: Sequence[Any] | None = None) -> Any:
        def roots_of(result: Any) -> tuple[list[Any], Any]:
            return list(result), ()

        found = _differentiate(program, args, (0,), roots_of, cotangents)
        values, _, gradients = found
        return values, gradients[0]

    return run


def _differentiate(
    program: Callable[..., Any],
    args: Sequence[Any],
    argnums: tuple[int, ...],
    roots_of: Callable[[Any], tuple[list[Any], Any]],
    cotangents: Sequence[Any] | None,
    allow_int: bool = False,
) -> tuple[list[Any], Any, tuple[Any, ...]]:
    """Run the program twice; return root values, aux values, and gradients."""
    arguments = [
        _Argument(argument, number, allow_int if number in argnums else None)
        for number, argument in enumerate(args)
    ]

    def total(smooth: Sequence[Any], hooks: CotangentHooks, recorded: Any) -> Any:
        run = OracleRun(recorded, hooks)
        given = dict(zip(argnums, smooth, strict=True))
        bound = [a.bound(run, given.get(n, ())) for n, a in enumerate(arguments)]
        roots, aux = roots_of(program(OracleContext(run, (), HERE), *bound))
        values = [_root(run, root, n) for n, root in enumerate(roots)]
        sums = [
            _inner(value, None if cotangents is None else cotangents[n])
            for n, value in enumerate(values)
        ]
        leaves, treedef = flatten(aux, what="what the program returned")
        held = [run.values[leaf.key] if is_ref(leaf) else leaf for leaf in leaves]
        reached = hooks.reached([root.key for root in roots])
        hooked = {key: run.values[key] for key in reached}
        sums.append(nothing_of(tuple(hooked.values())))
        values_and_aux = values, unflatten(treedef, held)
        return sum(sums[1:], sums[0]), (values_and_aux, hooked, run.fetched)

    smooth = [arguments[number].smooth for number in argnums]
    # Apart from any jvp around it, so that what is fetched is constant there too.
    plain = [jax.lax.stop_gradient(s) for s in smooth]
    _, (_, hooked, fetched) = total(plain, CotangentHooks(), None)
    zeros = {key: jnp.zeros_like(value) for key, value in hooked.items()}

    def again(smooth: Sequence[Any], zeros: dict[Key, Any]) -> Any:
        hooks = CotangentHooks(zeros)
        found, (values_and_aux, _, _) = total(smooth, hooks, fetched)
        return found, (values_and_aux, hooks)

    differentiated = jax.value_and_grad(again, argnums=(0, 1), has_aux=True)
    (_, ((values, aux), hooks)), (gradients, seen) = differentiated(smooth, zeros)
    hooks.show(seen)
    trees = [
        arguments[number].unflatten(gradient)
        for number, gradient in zip(argnums, gradients, strict=True)
    ]
    return values, aux, tuple(trees)


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
    """One argument of a program: its pytree, with values in the place of refs.

    `allow_int` is None where it is not differentiated by.
    """

    def __init__(self, tree: Any, number: int, allow_int: bool | None) -> None:
        what = f"argument {number}"
        self._leaves, self._treedef = flatten(tree, what=what)
        self._values = list(flatten(fetch(tree))[0])
        leaves = enumerate(self._leaves)
        self._places = [place for place, leaf in leaves if is_ref(leaf)]
        self._smooth: list[int] = []  # Where there are values that have gradients.
        if allow_int is None:
            return
        self._places = list(indices_of_arrays(what, tree, self._leaves))
        if not self._places:
            raise no_arrays(what)
        for place in self._places:
            value = self._values[place] = frozen(self._values[place])
            if aval_of(value).inexact:
                self._smooth.append(place)
            elif not allow_int:
                raise JdagError(
                    f"{what}{paths(tree)[place]} is {aval_of(value)}, which has no "
                    "gradient; differentiate by float and complex arrays, or say "
                    "allow_int=True"
                )

    @property
    def smooth(self) -> list[Any]:
        """The values that have gradients, in order."""
        return [self._values[place] for place in self._smooth]

    def bound(self, run: OracleRun, smooth: Sequence[Any]) -> Any:
        """Return the argument with refs of this run; `smooth` as the values above."""
        given = dict(zip(self._smooth, smooth, strict=True))
        bound = list(self._leaves)
        for place in self._places:
            leaf = bound[place]
            where = (leaf.worker, leaf.device) if is_ref(leaf) else (HERE, None)
            bound[place] = run.put(given.get(place, self._values[place]), *where)
        return unflatten(self._treedef, bound)

    def unflatten(self, gradients: Sequence[Any]) -> Any:
        """Return the gradients in the structure of the argument."""
        found: list[Any] = [None] * len(self._values)
        smooth = dict(zip(self._smooth, gradients, strict=True))
        for place in self._places:
            aval = aval_of(self._values[place])
            is_smooth = place in smooth
            found[place] = smooth[place] if is_smooth else no_gradient(aval, False)
        return unflatten(self._treedef, found)
