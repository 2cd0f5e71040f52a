"""Random programs as `jdag.compile` takes them: what it refuses made harmless."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdag import fetch
from tests.tools.random_programs import Pass, Plan
from tests.tools.random_runs import arrays, weighted
from tests.tools.random_source import Record, Source, main_of


class Flat:
    """A context on which programs are called as functions; the rest it hands on."""

    def __init__(self, ctx: Any, bodies: list[Any]) -> None:
        self.ctx, self.bodies = ctx, bodies

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)

    def call(self, worker: str, fn: Any, *args: Any) -> Any:
        return (
            fn(self, *args) if fn in self.bodies else self.ctx.call(worker, fn, *args)
        )

    def start(self, worker: str, fn: Any, *args: Any) -> Any:
        return Done(fn(self, *args))


class Done:
    def __init__(self, value: Any) -> None:
        self.value = value

    def result(self) -> Any:
        return self.value


def loss_of(plan: Plan, source: Source) -> Callable[..., Any]:
    """A program of the leaves that are floats; its gradients are those of all passes.

    Programs are called as functions, what would be fetched is zeros, and nothing is
    hooked.
    """
    inexact = [leaf.inexact for leaf in plan.leaves]
    ints = [np.array(leaf.values) for leaf in plan.leaves if not leaf.inexact]

    def program(ctx: Any, params: Any) -> Any:
        bodies: list[Any] = []
        losses: list[Any] = []

        def backward(_: Any, number: int, roots: list[Any]) -> None:
            step: Pass = source.passes[number]
            given = arrays(step.cotangents)
            losses.append(ctx.call(plan.home, weighted, given, roots))

        def called(fn: Any) -> Any:
            bodies.append(fn)
            return fn

        others = {"program": called, "fetch": lambda _: np.zeros(3)}
        main = main_of(source, Record(), backward, lambda: False, others)
        refs, others_of = iter(params), iter(ints)
        leaves = [
            next(refs) if of else ctx.call(leaf.worker, jnp.array, next(others_of))
            for of, leaf in zip(inexact, plan.leaves, strict=True)
        ]
        main(Flat(ctx, bodies), *leaves)
        return losses

    return program


def put(cluster: Any, plan: Plan) -> list[Any]:
    return [
        cluster.put(leaf.worker, leaf.array) for leaf in plan.leaves if leaf.inexact
    ]


def eager(cluster: Any, program: Any, params: Any, *args: Any) -> Any:
    with cluster.context() as ctx:
        losses = program(ctx, params, *args)
        ctx.backward(*losses)
        found = ctx.gradients()
        refs = jax.tree.leaves(params)
        gradients = [
            found[ref].fetch() if ref in found else np.zeros(ref.shape, ref.dtype)
            for ref in refs
        ]
        return fetch(losses), gradients
