"""Measures the backward of a leaf that is used many times, one use after another.

    python -m paper.many_uses

A chain of calls on one worker, each with the same weight, in the simulator with
abstract values: no arithmetic, so the time is that of engine and simulator. Each chain
runs once in turn, three times; seconds are CPU time of the backward, medians, with
their ratio to the shortest chain. `waiting` is the largest number of cotangents of the
weight that were held at once. `paper/results/many_uses.json` has the rows.
"""

import json
import statistics
import time
from typing import Any

import jax.numpy as jnp

import jdag
from paper.figures import RESULTS, machine

USES = (2_000, 8_000, 32_000)
RUNS = 3
WEIGHT = jnp.zeros(1 << 20, jnp.int8).view(jnp.float32)  # 1 MiB, all else is 4 bytes.


def use(w: Any, x: Any) -> Any:
    """A call whose vjp makes a cotangent of the weight and keeps nothing."""
    return x + jnp.sum(w)


def measured(uses: int) -> tuple[float, int]:
    """Return seconds of a backward over a chain, and the cotangents that waited."""
    with jdag.simulate(["a"], seed=0, values="abstract", trace=False) as cluster:
        w = cluster.put("a", WEIGHT)
        with cluster.context() as ctx:
            x = ctx.call("a", use, w, jnp.float32(0))
            for _ in range(uses - 1):
                x = ctx.call("a", use, w, x)
            x.fetch()
            before = cluster.info()["a"]["bytes_peak"]
            began = time.process_time()
            ctx.backward(x)
            took = time.process_time() - began
        more = cluster.info()["a"]["bytes_peak"] - before
    return took, round(more / WEIGHT.nbytes)


def main() -> None:
    """Measure all rows, and write them."""
    taken: dict[int, list[tuple[float, int]]] = {uses: [] for uses in USES}
    for _ in range(RUNS):
        for uses, found in taken.items():
            found.append(measured(uses))
    rows = {}
    for uses, found in taken.items():
        seconds = statistics.median([took for took, _ in found])
        rows[uses] = {"backward_cpu_s": seconds, "waiting": found[0][1]}
        ratio = seconds / rows[USES[0]]["backward_cpu_s"]
        rows[uses]["ratio"], rows[uses]["uses_ratio"] = ratio, uses / USES[0]
        print(uses, rows[uses])
    text = {"what": __doc__.partition("\n")[0], "rows": rows, "machine": machine()}
    (RESULTS / "many_uses.json").write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()
