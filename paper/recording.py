"""Measures how much recording slows down a training step on processes.

    python -m paper.recording [--pairs 200]

The training of `scenarios/digits.toml` runs on two clusters with four workers each, of
which one records. A pair is one step on each cluster, and the order in a pair
alternates. A ratio compares the two steps of a pair. `paper/results/recording.json`
contains the median and the quartiles of the ratios. For comparison, it has the same
numbers for two clusters that do not record, which show the noise of this machine. The
first steps compile, and are discarded.
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
    """Trains the digits on one launched cluster, step by step."""

    def __init__(self, stack: ExitStack, **settings: Any) -> None:
        scenario = load(ROOT / "scenarios" / "digits.toml")
        self._digits = cast(Any, scenario.player)
        names = scenario.settings.names
        made = jdag.launch(names, device="cpu", allow=["digits"], **settings)
        self._cluster = stack.enter_context(made)
        self._refs = self._digits._put(self._cluster, 0)
        self._optimizer = jdag.Optimizer(optax.adam(0.003), self._refs)

    def step(self, number: int) -> int:
        """Train on batch `number`. Returns the duration in ns."""
        batch = self._digits.batch
        first = number * batch % (len(self._digits.images.train_x) - batch)
        rows = np.arange(first, first + batch)
        began_ns = time.perf_counter_ns()
        given = self._cluster, None, self._refs, self._optimizer, rows, False
        self._digits._step(*given)
        return time.perf_counter_ns() - began_ns

    @property
    def records(self) -> int:
        """The number of records in the trace so far; 0 without a trace."""
        return len(self._cluster.trace or ())


def measured(name: str, pairs: int) -> dict[str, Any]:
    """Compare a cluster that records nothing with one that records `name`."""
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
    """Measure each of `ROWS`, and write the results."""
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
