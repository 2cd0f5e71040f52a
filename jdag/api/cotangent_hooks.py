"""Cotangent hooks in plain JAX: where hooks meet cotangents on one machine.

A program runs twice there. What has hooks is known after the first run, and what was
computed from what. In the second each such value goes, when it is made, through an
identity whose cotangent is the complete one of the value: the hooks that the second
run attached make of it what goes on. What comes to a second argument, a zero, tells
what came out in the end.

Invariant: a hook is applied once, when what it hooks is reached from the roots; also
where JAX knows the cotangent to be zero and would not come by.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdag.compute.hooks import hooked, seen
from jdag.engine.protocol import Hook, Key
from jdag.runtime.failures import remote_error

Placed = tuple[Hook, str]  # A hook, and the worker of what it hooks.


def _applied(hook: Hook, worker: str, cotangent: Any) -> Any:
    """Apply a hook; an error of its function names the hook."""
    try:
        return (hooked if hook.replaces else seen)(hook.function, cotangent)
    except Exception as error:
        raise remote_error(error, hook.function, worker, hook.call_site) from error


class CotangentHooks:
    """The hooks of one run of a program, by hooked value.

    Args:
        zeros: for each value that has hooks a zero like it, which is differentiated by.
            None: this is the first run.
    """

    def __init__(self, zeros: dict[Key, Any] | None = None) -> None:
        self._zeros = zeros or {}
        self._hooks: dict[Key, list[Placed]] = {}
        self._calls: list[tuple[tuple[Key, ...], tuple[Key, ...]]] = []

    def attach(self, key: Key, worker: str, hook: Hook) -> None:
        """Attach a hook; hooks of one value keep program order."""
        attached = [*self._hooks.get(key, []), (hook, worker)]
        self._hooks[key] = sorted(attached, key=lambda one: one[0].path)

    def called(self, inputs: Sequence[Key], outputs: Sequence[Key]) -> None:
        """Record a call: its tracked arguments and its tracked results."""
        if inputs and outputs:
            self._calls.append((tuple(inputs), tuple(outputs)))

    def reached(self, roots: Sequence[Key]) -> list[Key]:
        """Return hooked values that the roots depend on, sibling results included."""
        found = dict.fromkeys(roots)
        for inputs, outputs in reversed(self._calls):
            if any(key in found for key in outputs):
                found.update(dict.fromkeys((*outputs, *inputs)))
        return [key for key in self._hooks if key in found]

    def on(self, key: Key, value: Any) -> Any:
        """Return the value; if it has hooks, its cotangent goes through them."""
        if key not in self._zeros:
            return value

        def back(_: None, cotangent: Any) -> tuple[Any, Any]:
            for hook, worker in self._hooks[key]:
                if hook.replaces:
                    cotangent = _applied(hook, worker, cotangent)
            return cotangent, cotangent

        tapped = jax.custom_vjp(lambda value, _: value)
        tapped.defvjp(lambda value, _: (value, None), back)
        return tapped(value, self._zeros[key])

    def show(self, gradients: dict[Key, Any]) -> None:
        """Call gradient hooks with the gradients, in program order."""
        shown = [
            (hook, worker, gradient)
            for key, gradient in gradients.items()
            for hook, worker in self._hooks[key]
            if not hook.replaces
        ]
        for hook, worker, gradient in sorted(shown, key=lambda one: one[0].path):
            _applied(hook, worker, gradient)


def nothing_of(values: Sequence[Any]) -> Any:
    """Return 0 as a function of the values, so that they get cotangents of zeros."""
    return sum((0 * jnp.sum(jnp.real(value)) for value in values), start=0)
