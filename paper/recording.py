"""Measures what it costs a step on processes to record it.

    python -m paper.recording [--pairs 200]

The training of `scenarios/digits.toml` runs on two clusters of the same four workers,
of which one records. They take steps in turn, the first of each pair in turn too; a
ratio is of the two steps of a pair. `paper/results/recording.json` has the median of
the ratios with its quartiles, and the same of two clusters that record nothing, which
says how well this machine can tell. The first steps, which compile, do not count.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import numpy as np
import optax

import jdag
from jdag.scenario import load
from paper.figures import RESULTS, machine

ROOT = Path(__file__).parent.parent
WARM = 15
ROWS = ("nothing", "trace", "journal")


class Training:
    """The steps of digits on one cluster."""

    def __init__(self, stack: ExitStack, **settings: Any) -> None:
        scenario = load(ROOT / "scenarios" / "digits.toml")
        self._digits = cast(Any, scenario.player)
        names = scenario.settings.names
        made = jdag.launch(names, device="cpu", allow=["digits"], **settings)
        self._cluster = stack.enter_context(made)
        self._refs = self._digits._put(self._cluster, 0)
        self._optimizer = jdag.Optimizer(optax.adam(0.003), self._refs)

    def step(self, number: int) -> int:
        """Take a step; return how long it took, in ns."""
        batch = self._digits.batch
        first = number * batch % (len(self._digits.images.train_x) - batch)
        rows = np.arange(first, first + batch)
        began_ns = time.perf_counter_ns()
        given = self._cluster, None, self._refs, self._optimizer, rows, False
        self._digits._step(*given)
        return time.perf_counter_ns() - began_ns

    @property
    def records(self) -> int:
        """How many records its trace has."""
        return len(self._cluster.trace or ())


def measured(name: str, pairs: int) -> dict[str, Any]:
    """Return the figures of one row."""
    with ExitStack() as stack:
        settings: dict[str, Any] = {"trace": True} if name == "trace" else {}
        if name == "journal":
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            settings["journal"] = Path(folder) / "journal"
        plain, other = Training(stack), Training(stack, **settings)
        ratios, steps_ns = [], []
        for number in range(WARM + pairs):
            order = (plain, other) if number % 2 else (other, plain)
            took = {id(one): one.step(number) for one in order}
            if number >= WARM:
                ratios.append(took[id(other)] / took[id(plain)])
                steps_ns.append(took[id(plain)])
        low, middle, high = statistics.quantiles(ratios, n=4)
        return {
            "ratio": round(middle, 4),
            "quartiles": [round(low, 4), round(high, 4)],
            "step_ns": round(statistics.median(steps_ns)),
            "records_per_step": round(other.records / (WARM + pairs)),
        }


def main() -> None:
    """Measure all rows, and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=200)
    asked = parser.parse_args()
    rows = {}
    for name in ROWS:
        rows[name] = measured(name, asked.pairs)
        print(name, rows[name], file=sys.stderr)
    found = {"what": __doc__.partition("\n")[0], "pairs": asked.pairs, "rows": rows}
    text = json.dumps({**found, "machine": machine()}, indent=1)
    (RESULTS / "recording.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
