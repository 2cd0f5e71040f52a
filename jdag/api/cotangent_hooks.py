"""Cotangent hooks in plain JAX, for the oracle.

The oracle runs a program twice. The first run records which values have hooks, and
which calls compute these values. In the second run each value with hooks passes through
an identity with a custom vjp, which applies the hooks of this run to the complete
cotangent. The identity has a second argument, a zero, whose cotangent is the result of
the hooks.

Invariant: if the roots depend on a value, each of its hooks is applied once, even if
JAX knows that the cotangent is zero and would skip the vjp.
"""

from collections.abc import Sequence
from typing import Any

import jax

from jdag.compute.hooks import hooked, seen
from jdag.engine.protocol import Hook, Key
from jdag.runtime.failures import remote_error

_Placed = tuple[Hook, str]  # A hook, and the worker of its value.


def _applied(hook: Hook, worker: str, cotangent: Any) -> Any:
    try:
        return (hooked if hook.replaces else seen)(hook.function, cotangent)
    except Exception as error:
        raise remote_error(error, hook.function, worker, hook.call_site) from error


class CotangentHooks:
    """The hooks of one run of a program, stored by the key of the value.

    Args:
        zeros: for each value with hooks, zeros of its shape and dtype. The second run
            is differentiated by these zeros. None in the first run.
    """

    def __init__(self, zeros: dict[Key, Any] | None = None) -> None:
        self._zeros = zeros or {}
        self._hooks: dict[Key, list[_Placed]] = {}
        self._calls: list[tuple[tuple[Key, ...], tuple[Key, ...]]] = []

    def attach(self, key: Key, worker: str, hook: Hook) -> None:
        """Attach a hook to a value. Hooks of one value are applied in program order."""
        attached = [*self._hooks.get(key, []), (hook, worker)]
        self._hooks[key] = sorted(attached, key=lambda placed: placed[0].path)

    def called(self, inputs: Sequence[Key], outputs: Sequence[Key]) -> None:
        if inputs and outputs:
            self._calls.append((tuple(inputs), tuple(outputs)))

    def reached(self, roots: Sequence[Key]) -> list[Key]:
        """Return the hooked values of all calls that the roots depend on."""
        reached = dict.fromkeys(roots)
        for inputs, outputs in reversed(self._calls):
            if any(key in reached for key in outputs):
                reached.update(dict.fromkeys((*outputs, *inputs)))
        return [key for key in self._hooks if key in reached]

    def hooked(self, key: Key, value: Any) -> Any:
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
        calls = [
            (hook, worker, gradient)
            for key, gradient in gradients.items()
            for hook, worker in self._hooks[key]
            if not hook.replaces
        ]
        for hook, worker, gradient in sorted(calls, key=lambda call: call[0].path):
            _applied(hook, worker, gradient)
