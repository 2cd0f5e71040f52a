"""Functions applied side by side, each to its own input on its own device.

All functions are dispatched before any result is awaited. If some raise, the others
still complete; then the error of the first such replica is raised. A forward and its
vjp are one compiled call each (`jdag.compute.pairs`). Residuals stay on their devices.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import compress, islice
from operator import not_
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu

from jdag.compute.avals import all_there, aval_of
from jdag.compute.callables import JITTED, called
from jdag.compute.moves import array_behind, home_of, transferred
from jdag.compute.pairs import Pair, pair
from jdag.compute.pytrees import (
    Static,
    Template,
    flatten,
    is_static,
    template_of,
    template_of_arrays,
)
from jdag.engine.arrays import HOLE
from jdag.engine.functions import is_unjitted, name_of
from jdag.errors import JdagError, kind_of
from jdag.parallel.devices import Device, devices_of
from jdag.parallel.movement import array_at


def parallel_apply(
    fns: Sequence[Callable[..., Any]],
    inputs: Sequence[Any],
    devices: Sequence[Device] | None = None,
) -> list[Any]:
    """Apply each function to its own input in parallel.

    Differentiable by `jax.grad` and `jax.vjp`. All functions complete before the
    exception of the first failed replica is raised.

    Args:
        fns: pure functions of pytrees of arrays and statics; they are jitted.
        inputs: one argument per function; a tuple holds all arguments.
        devices: one device per function, for its computation and outputs. None: the
            device on which the input's committed arrays live.

    Returns:
        The output pytree of each function.

    Raises:
        JdagError: the numbers of functions, inputs and devices differ; an output is not
            an array; a device is unusable; one input lives on two devices.
        Exception: raised by a function, with a note that names the replica.
    """
    what = "parallel_apply"
    fns, inputs = _listed(fns, "fns"), _listed(inputs, "inputs")
    if len(inputs) != len(fns):
        raise JdagError(
            f"{what}: {len(fns)} functions and {len(inputs)} inputs: each function "
            "takes one input"
        )
    targets: Sequence[Any] = [None] * len(fns)
    if devices is not None:
        targets = devices_of(devices, what)
        if len(targets) != len(fns):
            raise JdagError(
                f"{what}: {len(fns)} functions and {len(targets)} devices: each "
                "function has one device, or all have none (devices=None)"
            )
    calls = [
        call_of(fn, given if type(given) is tuple else (given,), what)
        for fn, given in zip(fns, inputs, strict=True)
    ]
    args, homes = [], []
    pairs: list[Any] = []
    for number, (call, target) in enumerate(zip(calls, targets, strict=True)):
        home = target or _home(call.arrays, number)
        args.append(transferred(call.arrays, [home] * len(call.arrays)))
        homes.append(home)
        pairs.append(_pair_or_error(call, args[-1]))
    outputs = _applied(pairs, args)
    return [
        jtu.tree_unflatten(made.out_tree, transferred(values, [home] * len(values)))
        for made, values, home in zip(pairs, outputs, homes, strict=True)
    ]


class DeviceCall(NamedTuple):
    """A function and its array arguments; `template` holds the other arguments."""

    fn: Callable[..., Any]
    template: Template
    arrays: list[Any]


def call_of(fn: Callable[..., Any], args: tuple[Any, ...], what: str) -> DeviceCall:
    """Split a call into function, template and arrays.

    A callable pytree becomes an argument of its own call. `HOLE` as an argument stands
    for an array that is supplied later.
    """
    fn, args, own = called(fn, args)
    if is_unjitted(fn):
        raise JdagError(
            f"{what}: {name_of(fn)} is marked by jdag.unjitted, which is for ctx.call; "
            "leave the mark out: what moves arrays is not jitted anyway"
        )
    _refuse_tracers(fn, what)
    leaves, treedef = flatten((args, {}), what=f"{what}: this")
    if all_there(leaves):
        template = template_of_arrays(treedef, own)
        if template is not None:
            return DeviceCall(fn, template, leaves)
    arrays = []
    for index, leaf in enumerate(leaves):
        if is_static(leaf):
            leaves[index] = leaf.value if isinstance(leaf, Static) else leaf
        elif leaf is not HOLE:
            arrays.append(array_at(args, index, leaf, what))
            leaves[index] = HOLE
    return DeviceCall(fn, template_of(treedef, leaves, own), arrays)


def _refuse_tracers(fn: Callable[..., Any], what: str) -> None:
    is_plain = type(fn) is FunctionType
    if is_plain and not (fn.__closure__ or fn.__defaults__ or fn.__kwdefaults__):
        return  # Fast path: most functions capture nothing.
    if any([isinstance(one, jax.core.Tracer) for one in held_by(fn)]):
        raise JdagError(
            f"{what}: {name_of(fn)} closes over a tracer, or has one as a default or "
            "in a partial. A function is compiled and kept by what it closes over, and "
            "nothing flows back to that: hand it over as an argument, or within params"
        )


def held_by(fn: Any) -> list[Any]:
    """Return the leaves captured by a function's closure, defaults and partials."""
    found: list[Any] = []
    waiting, seen = [fn], set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        match one:
            case FunctionType():
                waiting.extend(filter(None, [one.__defaults__, one.__kwdefaults__]))
                for cell in one.__closure__ or ():
                    with suppress(ValueError):  # An empty cell.
                        waiting.append(cell.cell_contents)
            case MethodType():
                waiting.extend([one.__func__, one.__self__])
            case partial():
                waiting.extend([one.func, one.args, one.keywords])
            case _:
                for leaf in flatten(one, what="what a function holds")[0]:
                    if isinstance(leaf, FunctionType | MethodType | partial):
                        waiting.append(leaf)
                    elif type(leaf) is JITTED:
                        waiting.append(leaf.__wrapped__)
                    else:
                        found.append(leaf)
    return found


def tracked_of(arrays: Sequence[Any]) -> tuple[bool, ...]:
    """For each array, whether it may get a cotangent: a float or complex tracer."""
    return tuple(
        [isinstance(a, jax.core.Tracer) and aval_of(a).inexact for a in arrays]
    )


def _home(arrays: Sequence[Any], number: int) -> Any:
    """Return the device of an input; None if unknown or sharded over several."""
    behind = list(map(array_behind, arrays))
    put = [index for index, one in enumerate(behind) if one is not None]
    put = [index for index in put if behind[index].committed]
    for index in put:
        if behind[index].devices() != behind[put[0]].devices():
            raise JdagError(
                f"parallel_apply: array {put[0]} of input {number} lives on "
                f"{home_of(behind[put[0]])} and array {index} on "
                f"{home_of(behind[index])}: put them on one device, or say where it "
                "runs (devices=)"
            )
    home = home_of(arrays[put[0] if put else 0]) if arrays else None
    return home if isinstance(home, jax.Device) else None  # None: JAX places it.


def _applied(pairs: Sequence[Any], args: Sequence[Sequence[Any]]) -> Any:
    """Return the flat outputs of each pair; they are differentiable."""

    def forward(arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        waiting = iter(arrays)
        return forward_all(pairs, [list(islice(waiting, len(one))) for one in args])

    def vjp(residuals: Any, cotangents: Any) -> list[Any]:
        found = vjp_all(pairs, residuals, cotangents)
        both = zip(found, pairs, strict=True)
        return [ct for cts, made in both for ct in cts or [None] * sum(made.tracked)]

    flat = [array for one in args for array in one]
    return differentiable(forward, vjp, tracked_of(flat), flat)


def _pair_or_error(call: DeviceCall, arrays: Sequence[Any]) -> Pair | Exception:
    try:
        avals = tuple(map(aval_of, arrays))
        return pair(call.fn, call.template, avals, tracked_of(arrays))
    except Exception as error:  # A user's function may raise whatever it likes.
        return error


def differentiable(
    forward: Callable[[Sequence[Any]], tuple[Any, Any]],
    vjp: Callable[[Any, Any], Any],
    tracked: Sequence[bool],
    arrays: Sequence[Any],
) -> Any:
    """Return the outputs of `forward`, differentiated by `vjp`.

    Args:
        forward: maps the arrays to outputs and residuals.
        vjp: maps residuals and output cotangents to a cotangent for each tracked array,
            or None if all are zero.
        tracked: for each array, whether it has a cotangent.
        arrays: the arguments of `forward`.
    """
    if True not in tracked:
        return forward(arrays)[0]

    def ran(smooth: Any, rest: Any) -> Any:
        found = iter(rest), iter(smooth)
        return forward([next(found[is_tracked]) for is_tracked in tracked])

    outputs = jax.custom_vjp(lambda *parts: ran(*parts)[0])
    outputs.defvjp(ran, lambda residuals, cts: (vjp(residuals, cts), None))
    smooth = [*compress(arrays, tracked)]
    return outputs(smooth, [*compress(arrays, map(not_, tracked))])


def forward_all(
    pairs: Sequence[Any], args: Sequence[Sequence[Any]]
) -> tuple[list[Any], list[Any]]:
    """Run the forward of each pair; return outputs and residuals of each."""

    def run(number: int) -> Any:
        made = pairs[number]
        if isinstance(made, Exception):
            raise made
        with working(made, args[number]):
            return made.forward(args[number])

    found = all_ended(run, len(pairs))
    return [outputs for outputs, _ in found], [residuals for _, residuals in found]


def vjp_all(
    pairs: Sequence[Pair], residuals: Sequence[Any], cotangents: Sequence[Sequence[Any]]
) -> list[Any]:
    """Run the vjp of each pair; return the cotangents of its tracked arguments.

    None stands for a zero cotangent, and for all cotangents of a pair without
    residuals.
    """

    def run(number: int) -> Any:
        held, made = residuals[number], pairs[number]
        if held is None:
            return None
        both = zip(cotangents[number], made.out_tracked, strict=True)
        given = [() if ct is None else (ct,) for ct, is_tracked in both if is_tracked]
        with working(made, held.keeps):
            return list(made.vjp(held, given))

    return all_ended(run, len(pairs))


def all_ended(run: Callable[[int], Any], count: int) -> list[Any]:
    """Run a function for each replica; raise the first error once all have ended."""
    found, failed = [], {}
    for number in range(count):
        try:
            found.append(run(number))
        except Exception as error:  # A user's function may raise whatever it likes.
            failed[number] = error
    if not failed:
        return found
    jax.block_until_ready(found)
    first = min(failed)
    if count > 1:
        noted = f"It was raised by replica {first} of 0 to {count - 1}."
        failed[first].add_note(noted)
    raise failed[first]


def working(made: Any, arrays: Sequence[Any]) -> AbstractContextManager[Any]:
    """Make the arguments' device the default for new arrays of an unjitted function."""
    if not made.source.unjitted:
        return nullcontext()
    home = next(map(home_of, arrays), None)
    is_one = isinstance(home, jax.Device)
    return jax.default_device(home) if is_one else nullcontext()


def _listed(given: Any, name: str) -> Sequence[Any]:
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise JdagError(
            f"parallel_apply: {name} is {kind_of(given)}; it takes a list, with one "
            "for each replica"
        )
    return given
