"""Taps: where hooks meet cotangents when a program runs on one machine.

A program runs twice there. What has hooks is known after the first run, and what was
computed from what. In the second each such value goes, when it is made, through an
identity whose cotangent is the complete one of the value: the hooks that the second
run attached make of it what goes on. What comes to a second argument, a zero, tells
what came out in the end.

Invariant: a hook is applied once, when what it hooks is reached from the roots; also
where JAX knows the cotangent to be zero and would not come by.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdag.api.failures import remote_error
from jdag.compute.hooks import hooked, seen
from jdag.engine.vocabulary import Key, Path


class Hooking(NamedTuple):
    """A hook, where it is applied, and who attached it."""

    path: Path
    function: Callable[[Any], Any]
    replaces: bool
    worker: str
    call_site: object

    def __call__(self, cotangent: Any) -> Any:
        """Apply it; what it raises is an error that names it."""
        try:
            return (hooked if self.replaces else seen)(self.function, cotangent)
        except Exception as error:
            raise remote_error(
                error, self.function, self.worker, self.call_site
            ) from error


class Taps:
    """The hooks of one run of a program, and the values that they are on.

    Args:
        zeros: for each value that has hooks a zero like it, which is differentiated by.
            None: this is the first run.
    """

    def __init__(self, zeros: dict[Key, Any] | None = None) -> None:
        self._zeros = zeros or {}
        self._hooks: dict[Key, list[Hooking]] = {}
        self._calls: list[tuple[tuple[Key, ...], tuple[Key, ...]]] = []

    def attach(self, key: Key, hook: Hooking) -> None:
        """Note a hook; those of one value are in the order of the program."""
        attached = [*self._hooks.get(key, []), hook]
        self._hooks[key] = sorted(attached, key=lambda one: one.path)

    def called(self, inputs: Sequence[Key], outputs: Sequence[Key]) -> None:
        """Note a call: its tracked arguments, and its tracked results."""
        if inputs and outputs:
            self._calls.append((tuple(inputs), tuple(outputs)))

    def reached(self, roots: Sequence[Key]) -> list[Key]:
        """What has hooks and the roots were computed from, results beside included."""
        found = dict.fromkeys(roots)
        for inputs, outputs in reversed(self._calls):
            if any(key in found for key in outputs):
                found.update(dict.fromkeys((*outputs, *inputs)))
        return [key for key in self._hooks if key in found]

    def on(self, key: Key, value: Any) -> Any:
        """Return the value; if it has hooks, by way of them."""
        if key not in self._zeros:
            return value

        def back(_: None, cotangent: Any) -> tuple[Any, Any]:
            for hook in self._hooks[key]:
                cotangent = hook(cotangent) if hook.replaces else cotangent
            return cotangent, cotangent

        tapped = jax.custom_vjp(lambda value, _: value)
        tapped.defvjp(lambda value, _: (value, None), back)
        return tapped(value, self._zeros[key])

    def show(self, gradients: dict[Key, Any]) -> None:
        """Let hooks see gradients, in the order of the program."""
        shown = [
            (hook, gradient)
            for key, gradient in gradients.items()
            for hook in self._hooks[key]
            if not hook.replaces
        ]
        for hook, gradient in sorted(shown, key=lambda pair: pair[0].path):
            hook(gradient)


def nothing_of(values: Sequence[Any]) -> Any:
    """Return 0, so that what it is added to has a cotangent of zeros for these."""
    return sum((0 * jnp.sum(jnp.real(value)) for value in values), start=0)
