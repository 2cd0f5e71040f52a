"""`Case`, the object that most scenarios' programs return: calls of one context.

A scenario names its program as `module:function`. jdag calls the function with the
names of the workers, and with the scenario's `[settings]` as keyword arguments:

    from jdag.scenario import Case

    def chain(workers, *, length: int = 4) -> Case:
        def program(ctx, params):
            ...                      # calls, as in any context
            return loss              # a ref, or a list of refs: the roots

        return Case(program, params={"w": array}, placement={"w": workers[1]})

jdag runs a `Case` with each seed, compares its gradients with the oracle's and counts
messages. A program that needs more control returns a `Player`: an object with `figures`
(descriptions by name) and `play(run)`, which returns the figures' values, as in
`scenarios/digits.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import wraps
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jdag.api.cluster import Cluster
from jdag.api.oracle import pullback
from jdag.compute.pytrees import NUMBERS
from jdag.context.refs import Ref, fetch
from jdag.errors import (
    ContextError,
    JdagError,
    RootError,
    ScenarioError,
    UnusedSendError,
    unusable,
)
from jdag.scenario.player import (
    FIGURES,
    Figures,
    Run,
    Traces,
    bits,
    difference,
    ended,
    left_over,
    sent,
    time_of,
    worst,
)


@dataclass(frozen=True, slots=True)
class CaseResult:
    error: JdagError | None
    gradients: tuple[Any, ...] | None
    loss: float | None
    window: tuple[int, int]
    cluster: Cluster


@dataclass(frozen=True, slots=True)
class Case:
    """A program of one context, its parameters and their placement.

    Args:
        program: takes a context and the parameters; returns a ref or a list of refs,
            the roots of the pass.
        params: arrays, or pytrees of arrays, by name. Abstract runs need only
            `jax.ShapeDtypeStruct`s.
        placement: the worker of each parameter, by name.
        passes: number of backward passes over the same graph.
        mode: mode of the passes, "smart" or "fast".
        figures: descriptions of all figures, by name.
        more: a function that computes more figures from the first seed's cluster.
    """

    program: Callable[[Any, Any], Any]
    params: Mapping[str, Any]
    placement: Mapping[str, str]
    passes: int = 1
    mode: Literal["smart", "fast"] = "smart"
    figures: Mapping[str, str] = field(default_factory=lambda: FIGURES)
    more: Callable[[Cluster], Figures] = lambda cluster: {}
    compiles: ClassVar[bool] = True

    def put(self, cluster: Cluster) -> dict[str, Any]:
        """Put the parameters on their workers. Returns their refs by name."""
        placed = self.placement
        return {k: cluster.put(placed[k], value) for k, value in self.params.items()}

    def roots(self, ctx: Any, params: Any) -> list[Ref]:
        result = self.program(ctx, params)
        return list(result) if isinstance(result, list | tuple) else [result]

    def backward(self, ctx: Any, roots: Sequence[Ref]) -> None:
        """Run all passes. The graph is retained until the last pass."""
        for number in range(self.passes):
            ctx.backward(*roots, retain_graph=number + 1 < self.passes, mode=self.mode)

    def gradients(self, ctx: Any, refs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Fetch the gradient of each leaf, or None if no root depends on the leaf."""
        by_ref, leaves = ctx.gradients(), jax.tree.leaves(refs)
        return tuple(fetch(by_ref[ref]) if ref in by_ref else None for ref in leaves)

    def play(self, run: Run) -> Figures:
        """Run with each seed. Returns the figures, most of them of the first seed.

        Raises:
            RootError: the program returned values that cannot be roots of a pass.
        """
        patterns: dict[str, None] = {}
        traces = Traces()
        first: CaseResult | None = None
        counts: Figures = {}
        for number, seed in enumerate(run.seeds):
            played = self._once(run, seed, clean=False)
            if played.gradients is not None:
                patterns[bits(played.gradients)] = None
            traces.add(played.cluster)
            if first is None:
                first = played
                run.keep(played.cluster, played.window)
                counts = {**_counts(run, first), **left_over(run, first.cluster)}
                counts |= self.more(first.cluster)
            run.progress(number + 1, len(run.seeds))
        assert first is not None, run.seeds
        return {
            **self._outcome(first),
            **self._compared(first.gradients),
            **counts,
            "seeds": len(run.seeds),
            "bit_patterns": len(patterns),
            "same_bits_as_clean": self._same_as_clean(run, first),
            **traces.figures,
        }

    def _once(self, run: Run, seed: int, *, clean: bool) -> CaseResult:
        cluster = run.cluster(seed, clean=clean)
        refs = self.put(cluster)
        error: JdagError | None = None
        gradients = loss = None
        opened_ns = ended_ns = cluster.now_ns
        try:
            if run.compile:
                loss, gradients = self._compiled(run, cluster, refs)
                window = opened_ns, cluster.now_ns
                return CaseResult(None, gradients, loss, window, cluster)
            with cluster.context() as ctx:
                try:
                    roots = self.roots(ctx, refs)
                    self.backward(ctx, roots)
                finally:
                    ended_ns = cluster.now_ns
                    if not clean and seed == run.seeds[0]:
                        run.draw(ctx.graph())
                if not run.abstract:
                    gradients = self.gradients(ctx, refs)
                    loss = _total([root.fetch() for root in roots])
        except RootError:
            raise
        except JdagError as raised:
            if run.compile and isinstance(raised, ScenarioError):
                raise  # The program cannot be recorded.
            error = raised
        return CaseResult(error, gradients, loss, (opened_ns, ended_ns), cluster)

    def _compiled(
        self, run: Run, cluster: Cluster, refs: Any
    ) -> tuple[float | None, tuple[Any, ...] | None]:
        """Run all passes as steps of one plan. Returns the loss and the gradients."""

        @wraps(self.program)
        def program(ctx: Any, params: Any) -> list[Ref]:
            return self.roots(ctx, params)

        from jdag.plans.compiling import compile  # noqa: PLC0415 - imports optax.

        step = compile(program, cluster)
        try:
            results = [step.value_and_grad(refs) for _ in range(self.passes)]
        except JdagError as error:
            if type(error) not in (JdagError, ContextError):
                raise
            allowed = f"false for this program; {error}"
            raise ScenarioError(unusable("compile", True, allowed)) from error
        run.draw(step.plan.graph())
        if run.abstract:
            return None, None
        gradients = [jax.tree.leaves(tree) for _, tree in results]
        sums = [sum(terms[1:], terms[0]) for terms in zip(*gradients, strict=True)]
        return _total(results[0][0]), tuple(sums)

    def _outcome(self, played: CaseResult) -> Figures:
        error = played.error
        owed: Any = error.sends if isinstance(error, UnusedSendError) else ()
        return {
            **ended(error),
            "owed_sends": len(owed),
            "owed_functions": [send.function for send in owed],
            "owed_workers": [send.worker for send in owed],
            "owed_call_sites": [send.call_site for send in owed],
            "loss": played.loss,
        }

    def _compared(self, gradients: Sequence[Any] | None) -> Figures:
        if gradients is None:
            return {"gradient_difference": None, "gradient_bits": None}
        pairs = zip(gradients, self.truth(), strict=True)
        return {
            "gradient_difference": worst([difference(*pair) for pair in pairs]),
            "gradient_bits": bits(gradients),
        }

    def truth(self) -> list[Any]:
        """Return the oracle's gradients of the parameters, summed over all passes."""
        params = {  # A number becomes an array: then it is a leaf, as `put` makes it.
            name: jnp.asarray(value) if type(value) in NUMBERS else value
            for name, value in self.params.items()
        }
        gradients = jax.tree.leaves(pullback(self.roots)(params)[1])
        return [np.asarray(gradient) * self.passes for gradient in gradients]

    def _same_as_clean(self, run: Run, played: CaseResult) -> bool | None:
        if played.gradients is None or not (run.troubled and run.virtual):
            return None
        clean = self._once(run, run.seeds[0], clean=True)
        assert clean.gradients is not None, clean.error
        same = bits(clean.gradients) == bits(played.gradients)
        clean.cluster.close()
        return same


def _total(roots: Sequence[Any]) -> float:
    # Each root has one element. Numpy adds them, since JAX would compile each sum.
    return float(np.real(sum([np.asarray(root).reshape(()) for root in roots])))


def _counts(run: Run, played: CaseResult) -> Figures:
    start_ns, end_ns = played.window
    elapsed_ns = end_ns - start_ns
    counts = {**sent(played.cluster), **time_of(run, elapsed_ns)}
    if run.virtual:
        bubbles = {  # Nothing was computed before the context was opened.
            name: Fraction(elapsed_ns - int(worker["busy_ns"]), elapsed_ns or 1)
            for name, worker in played.cluster.info().items()
        }
        counts["bubble"] = bubbles
        counts["bubble_min"] = min(bubbles.values())
        counts["bubble_max"] = max(bubbles.values())
    return counts
