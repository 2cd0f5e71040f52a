"""Many random programs, in processes that do not live long.

An executable holds six memory maps and a process may have 65,530, so that near 10,900
executables it dies: each process takes a few hundred programs.

    python -m tests.tools.random_long FIRST COUNT SEEDS

prints how often each feature was there. It ends with an error that names the program
when one goes wrong.
"""

import os
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

import jax

from tests.tools.random_features import features, table
from tests.tools.random_hooks import numbered
from tests.tools.random_runs import hold

CHUNK = 200


def chunk(first: int, count: int, seeds: int) -> Counter[str]:
    jax.config.update("jax_enable_x64", True)
    spread: Counter[str] = Counter()
    for number in range(first, first + count):
        try:
            ended = hold(number, seeds).passes
            spread += features(numbered(number))
        except Exception as error:
            raise AssertionError(f"program {number}: {error}") from error
        spread.update(f"passes that are {one.outcome}" for one in ended)
    return spread


def many(first: int, count: int, seeds: int) -> Counter[str]:
    """The same in processes of their own, as many at once as there are cores.

    Raises:
        AssertionError: a program went wrong; says which, and how.
    """
    spread: Counter[str] = Counter()
    spawning = get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), spawning, max_tasks_per_child=1) as pool:
        chunks = [
            pool.submit(chunk, start, min(CHUNK, first + count - start), seeds)
            for start in range(first, first + count, CHUNK)
        ]
        for done in as_completed(chunks):
            spread += done.result()
            print(f"{spread.total()} features so far", flush=True)
    return spread


if __name__ == "__main__":
    first, count, seeds = map(int, sys.argv[1:])
    print(table(many(first, count, seeds)))
