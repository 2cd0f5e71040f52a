"""Functions applied side by side, each to its own input on its own device.

All functions are dispatched before any result is awaited. If some raise, the others
still complete; then the error of the first such replica is raised. Each function is
compiled once (`jdag.compute.pairs`), and JAX differentiates it as it does any jitted
function, so residuals stay on their devices.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu

from jdag.compute.avals import all_there, aval_of
from jdag.compute.callables import JITTED, called
from jdag.compute.moves import Target, home_of, moved_arrays
from jdag.compute.pairs import Pair, pair
from jdag.compute.pytrees import Template, flatten, split, template_of_arrays
from jdag.engine.arrays import HOLE
from jdag.engine.functions import is_unjitted, name_of
from jdag.errors import JdagError, kind_of
from jdag.parallel.devices import Device, resolved_devices
from jdag.parallel.movement import as_array


def parallel_apply(
    fns: Sequence[Callable[..., Any]],
    inputs: Sequence[Any],
    devices: Sequence[Device] | None = None,
) -> list[Any]:
    """Apply each function to its own input in parallel.

    Differentiable by JAX. All functions complete before the exception of the first
    failed replica is raised.

    Args:
        fns: pure functions of pytrees of arrays and statics; they are jitted.
        inputs: one argument per function; a tuple holds all arguments.
        devices: one device per function, of one kind or several, for its computation
            and outputs. None: the device on which the input's committed arrays live.

    Returns:
        The output pytree of each function.

    Raises:
        JdagError: the numbers of functions, inputs and devices differ; an output is not
            an array; a device is unusable.
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
        targets = resolved_devices(devices, what)
        if len(targets) != len(fns):
            raise JdagError(
                f"{what}: {len(fns)} functions and {len(targets)} devices: each "
                "function has one device, or all have none (devices=None)"
            )
    calls = [
        call_of(fn, given if type(given) is tuple else (given,), what)
        for fn, given in zip(fns, inputs, strict=True)
    ]
    outputs = applied(calls, targets)
    return [jtu.tree_unflatten(made.out_tree, values) for made, values in outputs]


class DeviceCall(NamedTuple):
    """A function and its array arguments; `template` holds the other arguments."""

    fn: Callable[..., Any]
    template: Template
    arrays: list[Any]


def applied(
    calls: Sequence[DeviceCall], targets: Sequence[Target]
) -> list[tuple[Pair, list[Any]]]:
    """Run each call on its target; return its compiled function and its outputs.

    None as a target: where its arrays are.
    """
    places = [home for call, home in zip(calls, targets, strict=True) for _ in call[2]]
    there = iter(moved_arrays([array for call in calls for array in call[2]], places))

    def run(number: int) -> tuple[Pair, list[Any]]:
        fn, template, given = calls[number]
        arrays, target = moved[number], targets[number]
        made = pair(fn, template, tuple(map(aval_of, given)), (False,) * len(given))
        with _working(made, target or next(map(home_of, arrays), None)):
            outputs = list(made.forward(arrays)[0])
        homes = [home_of(array) or target for array in outputs]
        return made, moved_arrays(outputs, [target] * len(outputs), homes)

    moved = [[next(there) for _ in call.arrays] for call in calls]
    return _all_ended(run, len(calls))


def call_of(fn: Callable[..., Any], args: tuple[Any, ...], what: str) -> DeviceCall:
    """Split a call into function, template and arrays.

    A callable pytree becomes an argument of its own call. `HOLE` as the last argument
    stands for an array that is supplied later.
    """
    fn, args, own = called(fn, args)
    if is_unjitted(fn):
        raise JdagError(
            f"{what}: {name_of(fn)} is marked by jdag.unjitted, which is for ctx.call; "
            "leave the mark out: what moves arrays is not jitted anyway"
        )
    if any([isinstance(one, jax.core.Tracer) for one in _held_by(fn)]):
        raise JdagError(
            f"{what}: {name_of(fn)} closes over a tracer, or has one as a default or "
            "in a partial. A function is compiled and kept by what it closes over, and "
            "nothing flows back to that: hand it over as an argument, or within params"
        )
    try:
        leaves, treedef = flatten((args, {}))
        template = template_of_arrays(treedef, own) if all_there(leaves) else None
        if template is not None:  # Most calls: arrays in plain containers.
            return DeviceCall(fn, template, leaves)
        found = split(args, {}, _is_given, own)
    except JdagError as error:
        raise JdagError(f"{what}: {error}") from None
    arrays = dict([*found.refs, *found.constants])
    given = [arrays[n] for n in range(found.size) if arrays[n] is not HOLE]
    return DeviceCall(fn, found.template, list(map(as_array, given)))


def _held_by(fn: Any) -> list[Any]:
    """Return what a function's closure, defaults and partials hold, leaf by leaf."""
    waiting, seen = [fn], set()
    for one in waiting:  # It grows.
        if id(one) in seen:
            continue
        seen.add(id(one))
        match one:
            case FunctionType():
                waiting += filter(None, [one.__defaults__, one.__kwdefaults__])
                for cell in one.__closure__ or ():
                    with suppress(ValueError):  # An empty cell.
                        waiting.append(cell.cell_contents)
            case MethodType():
                waiting += [one.__func__, one.__self__]
            case partial():
                waiting += [one.func, one.args, one.keywords]
            case _ if type(one) is JITTED:
                waiting.append(one.__wrapped__)
            case _:
                waiting += flatten(one, what="what a function holds")[0]
    return waiting


def _is_given(leaf: Any) -> bool:
    return leaf is HOLE or isinstance(leaf, jax.core.Tracer)


def tracked_of(arrays: Sequence[Any]) -> tuple[bool, ...]:
    """For each array, whether it may get a cotangent: a float or complex tracer."""
    return tuple(
        [isinstance(a, jax.core.Tracer) and aval_of(a).inexact for a in arrays]
    )


def _all_ended(run: Callable[[int], Any], count: int) -> list[Any]:
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


def _working(made: Pair, home: Target) -> AbstractContextManager[Any]:
    """Make a device the default for new arrays of an unjitted function."""
    is_one = made.source.unjitted and isinstance(home, jax.Device)
    return jax.default_device(home) if is_one else nullcontext()


def _listed(given: Any, name: str) -> Sequence[Any]:
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise JdagError(
            f"parallel_apply: {name} is {kind_of(given)}; it takes a list, with one "
            "for each replica"
        )
    return given
