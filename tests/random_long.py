"""Many random programs, in processes that do not live long.

An executable holds six memory maps and a process may have 65,530, so that near 10,900
executables it dies: each process takes a few hundred programs and says how they spread.

    python -m tests.random_long FIRST COUNT SEEDS

prints how often each feature was there, as JSON.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from random import Random

import jax

from tests.random_failures import FAILURES, again, beside, crash_somewhere, happen
from tests.random_features import features
from tests.random_programs import draw
from tests.random_runs import hold

CHUNK = 200


# What else happens to a program: one of these each, in turn.
ELSE: dict[str, Callable[[int], object]] = {
    **{what: partial(happen, what) for what in FAILURES},
    **{f"{what} beside it": partial(beside, what) for what in FAILURES},
    "vjps tried again": again,
    "crash": crash_somewhere,
}


def chunk(first: int, count: int, seeds: int) -> Counter[str]:
    """Hold these programs, and something else of each; return how they spread."""
    spread: Counter[str] = Counter()
    kinds = tuple(ELSE)
    for number in range(first, first + count):
        what = kinds[number % len(kinds)]
        try:
            spread += features(draw(Random(number)), hold(number, seeds).passes)
            spread[f"{what}: {ELSE[what](number)}"] += 1
        except Exception as error:
            error.add_note(f"program {number}; {what}")
            raise
    return spread


def many(first: int, count: int, seeds: int) -> Counter[str]:
    """The same in processes of their own, as many at once as there are cores.

    Raises:
        AssertionError: a program went wrong; says which, and how.
    """
    starts = range(first, first + count, CHUNK)
    spread: Counter[str] = Counter()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        sizes = [min(CHUNK, first + count - start) for start in starts]
        for found in pool.map(_process, starts, sizes, [seeds] * len(sizes)):
            spread += found
    return spread


def _process(first: int, count: int, seeds: int) -> Counter[str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.random_long", *map(str, (first, count, seeds))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-10_000:]  # All that failed before, too.
    return Counter(json.loads(done.stdout))


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    print(json.dumps(chunk(*map(int, sys.argv[1:4]))))
