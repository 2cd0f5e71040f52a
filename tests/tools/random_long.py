"""Many random programs, in processes that do not live long.

An executable holds six memory maps and a process may have 65,530, so that near 10,900
executables it dies: each process takes a few hundred programs and says how they spread.

    python -m tests.tools.random_long FIRST COUNT SEEDS

prints a line for each process, then how often each feature was there. It ends with 1,
and names the program, when one goes wrong.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax

from tests.tools.random_features import features, table
from tests.tools.random_hooks import numbered
from tests.tools.random_runs import hold

CHUNK = 200


def chunk(first: int, count: int, seeds: int) -> Counter[str]:
    """Hold these programs; return how they spread, and how their FAST passes ended."""
    spread: Counter[str] = Counter()
    for number in range(first, first + count):
        try:
            ended = hold(number, seeds).passes
        except Exception as error:
            error.add_note(f"program {number}")
            raise
        spread += features(numbered(number))
        spread.update(f"passes that are {one.outcome}" for one in ended)
    return spread


def many(first: int, count: int, seeds: int) -> Counter[str]:
    """The same in processes of their own, as many at once as there are cores.

    What they compile they find again, on disk.

    Raises:
        AssertionError: a program went wrong; says which, and how.
    """
    starts = range(first, first + count, CHUNK)
    sizes = [min(CHUNK, first + count - start) for start in starts]
    spread: Counter[str] = Counter()
    wrong: list[str] = []
    with (
        tempfile.TemporaryDirectory() as compiled,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        run = partial(_process, seeds, compiled)
        for start, size, ended in zip(
            starts, sizes, pool.map(run, starts, sizes), strict=True
        ):
            said = "wrong" if isinstance(ended, str) else "right"
            print(f"programs {start} to {start + size - 1}: {said}", flush=True)
            if isinstance(ended, str):
                wrong.append(ended)
            else:
                spread += ended
    assert not wrong, "\n".join(wrong)
    return spread


def _process(seeds: int, compiled: str, first: int, count: int) -> Counter[str] | str:
    """One process: how its programs spread, or how one went wrong."""
    environment = {
        "JAX_COMPILATION_CACHE_DIR": compiled,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        **os.environ,
    }
    arguments = [*map(str, (first, count, seeds)), "alone"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.tools.random_long", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    if done.returncode != 0:
        return done.stderr[-10_000:]  # All that failed before, too.
    return Counter(json.loads(done.stdout))


def main(first: str, count: str, seeds: str, *alone: str) -> int:
    """Run, in this process alone if so told; the exit status."""
    jax.config.update("jax_enable_x64", True)
    numbers = int(first), int(count), int(seeds)
    if alone:
        print(json.dumps(chunk(*numbers)))
        return 0
    try:
        print(table(many(*numbers)))
    except AssertionError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
