"""A training: a program that opens contexts of its own, played with each seed."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import jax

from jdag.api.cluster import Cluster
from jdag.scenario import case
from jdag.scenario.case import Figures, Run, Traces, bits, difference, worst

_OF_CASES = ("seeds", "arrival_orders", *case.SENT, *case.LEFT_OVER, "digest")
_FIGURES: Mapping[str, str] = {
    "gradient_difference": "max|g - g*| / max|g*|, the worst leaf; g* by plain JAX",
    "gradient_checks": "gradients that were held against plain JAX's",
    "gradient_bits": "a hash of these gradients, bit by bit",
    "bit_patterns": "different such gradients, bit by bit, over the seeds",
    "virtual_time_ns": "of the whole training",
    "wall_time_ns": "of the whole training, on this host's clock",
    **{name: case.FIGURES[name] for name in _OF_CASES},
}


@dataclass(frozen=True, slots=True)
class Training:
    """A program with contexts of its own, played on a cluster for each seed.

    Args:
        train: takes a `Run` and a cluster; returns figures of its own, and gradients
            that no timing may change, each with what it is by plain JAX: two pytrees.
        own: the meaning of its own figures, by name.
    """

    train: Callable[[Run, Cluster], tuple[Figures, Sequence[tuple[Any, Any]]]]
    own: Mapping[str, str]

    @property
    def figures(self) -> Mapping[str, str]:
        """The meaning of all figures."""
        return {"outcome": "how the training ended", **self.own, **_FIGURES}

    def play(self, run: Run) -> Figures:
        """Play with each seed; the first one is reported."""
        patterns: list[str] = []
        traces = Traces()
        first: Figures = {}
        for seed in run.seeds:
            cluster, kept = run.cluster(seed), run.kept
            begun_ns = cluster.now_ns
            # What later seeds keep and draw is not reported.
            own, checks = self.train(copy(run) if first else run, cluster)
            gradients, truth = [g for g, _ in checks], [g for _, g in checks]
            patterns.append(bits(jax.tree.leaves(gradients)))
            traces.add(cluster)
            if not first:
                if run.kept is kept:
                    run.keep(cluster, (begun_ns, cluster.now_ns))
                apart = jax.tree.leaves(jax.tree.map(difference, gradients, truth))
                first = {**own, "gradient_difference": worst(apart)}
                first |= {"gradient_checks": len(checks), "gradient_bits": patterns[0]}
                first |= case.time_of(run, cluster.now_ns - begun_ns)
                first |= {**case.sent(cluster), **case.left_over(run, cluster)}
        counts = {"seeds": len(patterns), "bit_patterns": len(set(patterns))}
        return {"outcome": "finished", **first, **counts, **traces.figures}
