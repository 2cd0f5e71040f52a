"""Cotangent hooks in plain JAX, for the oracle.

The oracle runs a program twice. The first run finds which values have hooks, and what
was computed from what. In the second run each such value passes an identity with a vjp
of its own, which is given the complete cotangent and applies the hooks that this run
attached. The cotangent of its second argument, a zero, is what they made of it.

Invariant: a hook is applied once, if the roots depend on its value; also where JAX
knows the cotangent to be zero and would skip it.
"""

from collections.abc import Sequence
from typing import Any

import jax

from jdag.compute.hooks import hooked, seen
from jdag.engine.protocol import Hook, Key
from jdag.runtime.failures import remote_error

_Placed = tuple[Hook, str]  # A hook, and the worker of what it hooks.


def _applied(hook: Hook, worker: str, cotangent: Any) -> Any:
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
        self._hooks: dict[Key, list[_Placed]] = {}
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
