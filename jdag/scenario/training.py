"""A player for programs that open their own contexts, such as training loops."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import jax

from jdag.api.cluster import Cluster
from jdag.scenario import player
from jdag.scenario.player import Figures, Run, Traces, bits, difference, worst

_OF_CASES = ("seeds", "arrival_orders", *player.SENT, *player.LEFT_OVER, "digest")
_FIGURES: Mapping[str, str] = {
    "gradient_difference": "max|g - g*| / max|g*| of the worst leaf; g* by plain JAX",
    "gradient_checks": "number of gradients compared with plain JAX's",
    "gradient_bits": "hash of the bits of these gradients",
    "bit_patterns": "number of bitwise different gradients over the seeds",
    "virtual_time_ns": "virtual time of the training",
    "wall_time_ns": "time of the training by the clock of this host",
    **{name: player.FIGURES[name] for name in _OF_CASES},
}


@dataclass(frozen=True, slots=True)
class Training:
    """A player that calls `train`, which opens its own contexts, once for each seed.

    Args:
        train: a function of a `Run` and a cluster. It returns its figures, and pairs of
            pytrees (gradient, gradient by plain JAX). The bits of a gradient must not
            depend on timing.
        own: a description of each figure that `train` returns, by name.
    """

    train: Callable[[Run, Cluster], tuple[Figures, Sequence[tuple[Any, Any]]]]
    own: Mapping[str, str]

    @property
    def figures(self) -> Mapping[str, str]:
        return {"outcome": "how the training ended", **self.own, **_FIGURES}

    def play(self, run: Run) -> Figures:
        patterns: list[str] = []
        traces = Traces()
        first: Figures = {}
        for seed in run.seeds:
            cluster, kept = run.cluster(seed), run.kept
            begun_ns = cluster.now_ns
            # Later seeds get a copy of the run, so that their `run.keep` and `run.draw`
            # have no effect.
            figures, checks = self.train(copy(run) if first else run, cluster)
            gradients, truth = [g for g, _ in checks], [g for _, g in checks]
            patterns.append(bits(jax.tree.leaves(gradients)))
            traces.add(cluster)
            if not first:
                if run.kept is kept:
                    run.keep(cluster, (begun_ns, cluster.now_ns))
                differences = jax.tree.map(difference, gradients, truth)
                first = {**figures}
                first["gradient_difference"] = worst(jax.tree.leaves(differences))
                first |= {"gradient_checks": len(checks), "gradient_bits": patterns[0]}
                first |= player.time_of(run, cluster.now_ns - begun_ns)
                first |= {**player.sent(cluster), **player.left_over(run, cluster)}
        counts = {"seeds": len(patterns), "bit_patterns": len(set(patterns))}
        return {"outcome": "finished", **first, **counts, **traces.figures}
