"""Measures the backward pass of a chain of calls that all use the same leaf.

    python -m paper.many_uses

The program is a chain of calls on one worker, each with the same weight. It runs in the
simulator with abstract values, without arithmetic, so the measured time is that of the
engine and the simulator. In each of three rounds every chain runs once. `seconds` is
the median CPU time of the backward, and `ratio` its ratio to the shortest chain.
`waiting` is the maximum number of cotangents of the weight in memory at the same time.
`paper/results/many_uses.json` contains the rows.
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
WEIGHT = jnp.zeros(1 << 20, jnp.int8).view(jnp.float32)  # 1 MiB; others have 4 bytes.


def use(w: Any, x: Any) -> Any:
    """Use all of `w`. The vjp makes a cotangent of `w`, and needs no residuals."""
    return x + jnp.sum(w)


def measured(uses: int) -> tuple[float, int]:
    """Return the CPU seconds of a chain's backward, and the cotangents in memory."""
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
    """Measure chains of all lengths, and write the results."""
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
