"""Parallel application of functions, each to its own input on its own device.

All functions are dispatched before any result is awaited. If some raise, the others
still complete; then the error of the first failed replica is raised. Each function is
compiled once (`jdag.compute.pairs`) and differentiated by JAX like any jitted function,
so residuals stay on their devices.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu

from jdag.compute.avals import are_live, aval_of
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

    JAX can differentiate it. All functions complete before the exception of the first
    failed replica is raised.

    Args:
        fns: pure functions of pytrees of arrays and statics; they are jitted.
        inputs: one argument per function; a tuple holds all arguments.
        devices: one device per function, of one kind or several, for its computation
            and outputs. None: the device of the input's committed arrays.

    Returns:
        The output pytree of each function.

    Raises:
        JdagError: the numbers of functions, inputs and devices differ; an output is not
            an array; a device is unusable.
        Exception: raised by a function, with a note that names the replica.
    """
    caller = "parallel_apply"
    fns, inputs = _listed(fns, "fns"), _listed(inputs, "inputs")
    if len(inputs) != len(fns):
        raise JdagError(
            f"{caller}: {len(fns)} functions and {len(inputs)} inputs: pass one "
            "input for each function"
        )
    targets: Sequence[Any] = [None] * len(fns)
    if devices is not None:
        targets = resolved_devices(devices, caller)
        if len(targets) != len(fns):
            raise JdagError(
                f"{caller}: {len(fns)} functions and {len(targets)} devices: pass "
                "one device for each function, or devices=None"
            )
    calls = [
        call_of(fn, args if type(args) is tuple else (args,), caller)
        for fn, args in zip(fns, inputs, strict=True)
    ]
    outputs = applied(calls, targets)
    return [jtu.tree_unflatten(fn.out_tree, values) for fn, values in outputs]


class DeviceCall(NamedTuple):
    """A function and its array arguments; `template` holds the other arguments."""

    fn: Callable[..., Any]
    template: Template
    arrays: list[Any]


def applied(
    calls: Sequence[DeviceCall], targets: Sequence[Target]
) -> list[tuple[Pair, list[Any]]]:
    """Run each call on its target or, if that is None, on its arrays' device."""
    places = [home for call, home in zip(calls, targets, strict=True) for _ in call[2]]
    flat = iter(moved_arrays([array for call in calls for array in call[2]], places))
    moved = [[next(flat) for _ in call.arrays] for call in calls]

    def run(replica: int) -> tuple[Pair, list[Any]]:
        fn, template, arrays = calls[replica]
        avals, target = tuple(map(aval_of, arrays)), targets[replica]
        compiled = pair(fn, template, avals, (False,) * len(avals))
        home = target or next(map(home_of, moved[replica]), None)
        with _default_device(compiled, home):
            outputs = list(compiled.forward(moved[replica])[0])
        homes = [home_of(array) or target for array in outputs]
        return compiled, moved_arrays(outputs, [target] * len(outputs), homes)

    return _run_replicas(run, len(calls))


def call_of(fn: Callable[..., Any], args: tuple[Any, ...], caller: str) -> DeviceCall:
    """Split a call into function, template and arrays.

    A callable pytree becomes an argument of the call. `HOLE` as the last argument is a
    placeholder for an array that is added later.
    """
    fn, args, own = called(fn, args)
    if is_unjitted(fn):
        raise JdagError(
            f"{caller}: {name_of(fn)} is marked by jdag.unjitted, which is for "
            "ctx.call; remove the mark: functions that move arrays are not jitted"
        )
    if any([isinstance(leaf, jax.core.Tracer) for leaf in _captured_by(fn)]):
        raise JdagError(
            f"{caller}: {name_of(fn)} closes over a tracer, or has one as a default or "
            "in a partial. Compiled functions are cached by their closures, and no "
            "gradient flows to these: pass the value as an argument, or in params"
        )
    try:
        leaves, treedef = flatten((args, {}))
        template = template_of_arrays(treedef, own) if are_live(leaves) else None
        if template is not None:  # The common case: all leaves are arrays.
            return DeviceCall(fn, template, leaves)
        parts = split(args, {}, _is_hole_or_tracer, own)
    except JdagError as error:
        raise JdagError(f"{caller}: {error}") from None
    arrays = dict([*parts.refs, *parts.constants])
    arguments = [arrays[n] for n in range(parts.size) if arrays[n] is not HOLE]
    return DeviceCall(fn, parts.template, list(map(as_array, arguments)))


def _captured_by(fn: Any) -> list[Any]:
    values, seen = [fn], set()
    for value in values:  # The loop appends to the list.
        if id(value) in seen:
            continue
        seen.add(id(value))
        match value:
            case FunctionType():
                values += filter(None, [value.__defaults__, value.__kwdefaults__])
                for cell in value.__closure__ or ():
                    with suppress(ValueError):  # An empty cell.
                        values.append(cell.cell_contents)
            case MethodType():
                values += [value.__func__, value.__self__]
            case partial():
                values += [value.func, value.args, value.keywords]
            case _ if type(value) is JITTED:
                values.append(value.__wrapped__)
            case _:
                values += flatten(value, what="the closure of a function")[0]
    return values


def _is_hole_or_tracer(leaf: Any) -> bool:
    return leaf is HOLE or isinstance(leaf, jax.core.Tracer)


def tracked_of(arrays: Sequence[Any]) -> tuple[bool, ...]:
    tracer = jax.core.Tracer
    return tuple([isinstance(a, tracer) and aval_of(a).inexact for a in arrays])


def _run_replicas(run: Callable[[int], Any], count: int) -> list[Any]:
    """Run a function for each replica; raise the first error after all have ended."""
    results, errors = [], dict[int, Exception]()
    for replica in range(count):
        try:
            results.append(run(replica))
        except Exception as error:  # A user's function may raise anything.
            errors[replica] = error
    if not errors:
        return results
    jax.block_until_ready(results)
    first = min(errors)
    if count > 1:
        errors[first].add_note(f"Raised by replica {first} of 0 to {count - 1}.")
    raise errors[first]


def _default_device(fn: Pair, home: Target) -> AbstractContextManager[Any]:
    is_needed = fn.source.unjitted and isinstance(home, jax.Device)
    return jax.default_device(home) if is_needed else nullcontext()


def _listed(values: Any, name: str) -> Sequence[Any]:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise JdagError(
            f"parallel_apply: {name} is {kind_of(values)}; expected a list with one "
            "entry for each replica"
        )
    return values
