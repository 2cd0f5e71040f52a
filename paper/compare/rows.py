"""Defines the rows of the comparison, their targets, and how they are timed.

This module imports only numpy and `pinning`, so that each system's Python can import
it. A `Side` does the work of one system; `measure` times all sides in the same way. A
side returns or yields values when they are ready. A row with phases is a generator: the
work between two `yield`s is one phase. Work before the first `yield` and after the last
is not timed.
"""

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from paper.compare import pinning
from paper.compare.pinning import APART, CALLER, held

# The systems. jdag's eager calls are named by the mode of passes. FAST has targets.
PEER, PLAN, RAY = "peer", "plan", "Ray"
EAGER = {(JUDGED := "FAST"): "fast", "SMART": "smart"}
SYSTEMS = (PEER, *EAGER, PLAN, RAY)
WORKERS = ("w0", "w1", "w2")
BYTES = {
    "36 bytes": 36,
    "64 KiB": 1 << 16,
    "1 MiB": 1 << 20,
    "16 MiB": 1 << 24,
    "64 MiB": 1 << 26,
}
TRIPS = (1, 10, 100)
CALLS = 64
PASSES = 1_000
WIDTHS = (256, 1024, 4096)
STAGES = 4
BATCH = 128
LEARNING_RATE = 0.5

MEMORY = "peak memory of a worker"
RETAINED, REPEATED = f"{PASSES:,} retained passes", f"{PASSES:,} passes, both ways"
# Rows compared with Ray's Compiled Graph, only forward: the bytes of a float32 array,
# and the number of multiplications by alternating workers; 0: only an echo.
GRAPHS = {
    "graph: echo 36 bytes": (36, 0),
    "graph: echo 1 MiB": (1 << 20, 0),
    **{f"graph: chain of {trips}": (36, trips) for trips in TRIPS},
}
# The rows, with maximum ratios of eager calls and plans to the peer (for graphs, Ray).
# None: no target. A plan runs both ways at once, and retains no graph.
TARGETS: dict[str, dict[str, float | None]] = {
    "add 3x3, reply fetched": {JUDGED: 1.0, PLAN: 0.35},
    "identity 36 bytes": {JUDGED: None, PLAN: 0.16},
    "identity 64 KiB": {JUDGED: None, PLAN: 0.35},
    "identity 1 MiB": {JUDGED: None, PLAN: 0.8},
    "identity 16 MiB": {JUDGED: 0.7, PLAN: None},
    "identity 64 MiB": {JUDGED: 0.7, PLAN: 0.6},
    "chain of 1, forward": {JUDGED: 1.0},
    "chain of 1, backward": {JUDGED: 1.0},
    "chain of 1, both ways": {JUDGED: None, PLAN: 0.4},
    "chain of 10, forward": {JUDGED: 1.0},
    "chain of 10, backward": {JUDGED: 1.0},
    "chain of 10, both ways": {JUDGED: None, PLAN: 0.3},
    "chain of 100, forward": {JUDGED: 1.0},
    "chain of 100, backward": {JUDGED: 1.0},
    "chain of 100, both ways": {JUDGED: None, PLAN: 0.3},
    "fan-out of 64, forward": {JUDGED: None},
    "fan-out of 64, backward": {JUDGED: 0.7},
    "fan-out of 64, both ways": {JUDGED: None, PLAN: 0.05},
    RETAINED: {JUDGED: 1.3},
    REPEATED: {JUDGED: None, PLAN: 0.4},
    "step of MLP 256 wide": {JUDGED: 1.1, PLAN: 0.47},
    "step of MLP 1024 wide": {JUDGED: 0.7, PLAN: 0.65},
    "step of MLP 4096 wide": {JUDGED: 0.7, PLAN: 0.62},
    MEMORY: {JUDGED: None, PLAN: None},
    **{row: {PLAN: 1.0 if "MiB" in row else 0.5} for row in GRAPHS},
}
ON_ONE = ", one core"  # The suffix of rows whose processes share a core.


def of(system: str) -> list[str]:
    """Return the names of the rows that a system runs."""
    if system == RAY:
        return list(GRAPHS)
    kind = PLAN if system == PLAN else JUDGED
    return [row for row, targets in TARGETS.items() if kind in targets]


def on_one(row: str) -> bool:
    """Return whether a row is also measured on one core: messages dominate its time."""
    return row != MEMORY and "MLP" not in row


def of_both() -> list[str]:
    """Return the names of all rows, on separate cores and on one core."""
    both = [(row, f"{row}{ON_ONE}") if on_one(row) else (row,) for row in TARGETS]
    return [name for names in both for name in names]


class Repeats(NamedTuple):
    """Numbers of repeats of a row, by its duration; `short` means some 100 us."""

    short: int
    middle: int
    long: int
    longest: int


FULL = Repeats(short=300, middle=60, long=15, longest=3)
QUICK = Repeats(short=10, middle=4, long=2, longest=1)

Phases = Iterator[Any]
# Yields (seconds or bytes by row, numbers that the rows computed).
Part = Iterator[tuple[dict[str, float], dict[str, Any]]]


class Side(Protocol):
    """A compared system: a caller in this process, and a process for each worker."""

    def array(self, value: np.ndarray) -> Any:
        """Convert a NumPy array to an array of this system."""

    def add(self, one: Any, other: Any) -> Any:
        """Add two arrays on a worker. Returns the sum."""

    def identity(self, value: Any) -> Any:
        """Send an array to a worker, which returns it."""

    def chain(self, trips: int) -> Phases:
        """Multiply a leaf by factors, one call on a worker after another.

        After each call the caller has the product. Yields None in a context, then the
        sum of the last product, and after the backward pass the leaf's gradient.
        """

    def fan_out(self, calls: int) -> Phases:
        """Multiply a leaf by factors on all workers; sum the products at the caller.

        Yields None in a context, then the sum, and after the pass the leaf's gradient.
        """

    def retained(self, passes: int) -> Phases:
        """Run a chain of one call, and `passes` passes over its retained graph.

        Yields None after the forward, and the summed gradient after all passes.
        """

    def prepare(self, width: int) -> None:
        """Put the stages of `weights(width)` on workers; make an SGD optimizer."""

    def gradients(self, width: int) -> list[np.ndarray]:
        """Return the gradient of each stage's weight, without changing weights."""

    def step(self, width: int) -> float:
        """Train one step on `batch(width)`. Returns the loss before the step.

        When it returns, the new weights are ready and the context has been left.
        """

    def memory(self) -> list[int]:
        """Return the peak resident size of each worker so far, in bytes."""

    def cores(self) -> dict[str, list[int]]:
        """Return the cores that each worker may run on."""

    def graph(self, value: Any, calls: int) -> Callable[[Any], Any]:
        """Return a function that runs a row of `GRAPHS` on arrays like `value`."""


# ------------------------------------------------------------------- what is computed


def leaf() -> np.ndarray:
    """Return the leaf of chains and fan-outs, a (3, 3) array of float32."""
    return np.linspace(0.5, 1.5, 9, dtype=np.float32).reshape(3, 3)


def factor(number: int) -> np.ndarray:
    """Return the factor of a call: a (3, 3) array of equal float32 numbers near 1."""
    return np.full((3, 3), 1 + (number % 7 - 3) / 1024, dtype=np.float32)


def weights(width: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return each stage of the MLP: its weight (width, width) and bias (width,)."""
    drawn = np.random.default_rng(width)
    scale = np.float32(width**-0.5)
    return [
        (
            drawn.standard_normal((width, width), dtype=np.float32) * scale,
            np.zeros(width, dtype=np.float32),
        )
        for _ in range(STAGES)
    ]


def batch(width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets, both (BATCH, width) in float32."""
    drawn = np.random.default_rng(width + 1)
    x = drawn.standard_normal((BATCH, width), dtype=np.float32)
    return x, np.tanh(np.roll(x, 1, axis=1))


def place(number: int) -> str:
    """Return the worker of stage or call `number`; the workers alternate."""
    return WORKERS[number % len(WORKERS)]


# -------------------------------------------------------------------- how it is timed


def measure(
    side: Any, repeats: Repeats, wanted: Iterable[str], how: str = APART
) -> Iterator[dict[str, Any]]:
    """Measure the `wanted` rows of a side.

    The side needs only the methods of `Side` that these rows use. After each row this
    yields all results so far, so that a failure does not lose them: seconds (or bytes),
    and computed numbers. The last result also has the cores of all processes.
    """
    rows: dict[str, float] = {}
    numbers: dict[str, Any] = {}
    kept = [row for row in wanted if how == APART or on_one(row)]
    end = "" if how == APART else ON_ONE
    for part in (_calls, _passes, _steps, _graphs, _memory):
        for figures, computed in part(side, repeats, kept):
            rows |= {f"{row}{end}": figure for row, figure in figures.items()}
            numbers |= {f"{key}{end}": value for key, value in computed.items()}
            yield {"rows": rows, "numbers": numbers}
    cores = {how: {CALLER: held(), **side.cores()}}
    yield {"rows": rows, "numbers": numbers, "cores": cores}


def _calls(side: Side, repeats: Repeats, wanted: Sequence[str]) -> Part:
    if (row := "add 3x3, reply fetched") in wanted:
        add = partial(side.add, side.array(leaf()), side.array(factor(1)))
        computed = {"add": _listed(add())}
        yield {row: timed(add, repeats.short)}, computed
    for name, size in BYTES.items():
        if (row := f"identity {name}") not in wanted:
            continue
        sent = np.arange(size // 4, dtype=np.float32)
        value = side.array(sent)
        if not np.array_equal(np.asarray(side.identity(value)), sent):
            raise SystemExit(f"{name} were returned with different values")
        count = repeats.short if size <= 1 << 20 else repeats.long
        yield {row: timed(partial(side.identity, value), count)}, {}


def _passes(side: Side, repeats: Repeats, wanted: Sequence[str]) -> Part:
    sizes = [("chain", *one) for one in zip(TRIPS, repeats, strict=False)]
    for kind, size, count in (*sizes, ("fan-out", CALLS, repeats.middle)):
        name = f"{kind} of {size}"
        rows = [row for row in wanted if row.startswith(f"{name},")]
        if rows:
            make = partial(side.chain if kind == "chain" else side.fan_out, size)
            times, (_, *found) = timed_phases(make, count)
            computed = {name: [_listed(one) for one in _results(found)]}
            yield dict(zip(rows, times[-len(rows) :], strict=True)), computed
    for row in (RETAINED, REPEATED):
        if row in wanted:
            way = side.retained if row == RETAINED else partial(repeated, side)
            make = partial(way, PASSES)
            times, (_, gradient) = timed_phases(make, repeats.longest)
            yield {row: times[-1]}, {row: _listed(gradient)}


def _results(found: Any) -> Any:
    """Return (sum, gradient) of a row. A plan yields both as a pair, in one phase."""
    return found if len(found) == 2 else found[0]


def repeated(side: Any, passes: int) -> Phases:
    """Run `passes` chains of one call each. Yields the sum of their gradients."""
    total = np.zeros_like(leaf())
    yield None
    for _ in range(passes):
        _, *found = side.chain(1)
        total += np.asarray(_results(found)[1])
    yield total


def _steps(side: Side, repeats: Repeats, wanted: Sequence[str]) -> Part:
    for width, count in zip(WIDTHS, repeats[1:], strict=True):
        if (row := f"step of MLP {width} wide") not in wanted:
            continue
        side.prepare(width)
        computed: dict[str, Any] = {}
        if width < max(WIDTHS):  # Reading the largest would change the peak memory.
            computed[f"gradients {width}"] = [
                [float(np.linalg.norm(gradient)), *gradient[0, :4].tolist()]
                for gradient in side.gradients(width)
            ]
        losses: list[float] = []
        row_s = timed(partial(_step, side, width, losses), count)
        yield {row: row_s}, {**computed, f"losses {width}": losses}


def _step(side: Side, width: int, losses: list[float]) -> None:
    losses.append(side.step(width))


def _graphs(side: Side, repeats: Repeats, wanted: Sequence[str]) -> Part:
    for row, (size, calls) in GRAPHS.items():
        if row in wanted:
            value = side.array(np.linspace(0.5, 1.5, size // 4, dtype=np.float32))
            run = partial(side.graph(value, calls), value)
            computed = {row: _listed(np.asarray(run())[-9:])}
            count = repeats[TRIPS.index(max(calls, 1))]
            yield {row: timed(run, count)}, computed


def _memory(side: Side, repeats: Repeats, wanted: Sequence[str]) -> Part:
    if MEMORY in wanted:
        yield {MEMORY: max(side.memory())}, {}


def timed(work: Callable[[], Any], repeats: int) -> float:
    """Return the median seconds of a call, after some calls that do not count."""
    for _ in range(_warm(repeats)):
        work()
    return statistics.median(_seconds(work) for _ in range(repeats))


def timed_phases(
    make: Callable[[], Phases], repeats: int
) -> tuple[list[float], list[Any]]:
    """Return median seconds of each phase and of their sum, and the last results."""
    for _ in range(_warm(repeats)):
        _phases(make())
    runs = [_phases(make()) for _ in range(repeats)]
    columns = zip(*([*seconds, sum(seconds)] for seconds, _ in runs), strict=True)
    return [statistics.median(column) for column in columns], runs[-1][1]


def _warm(repeats: int) -> int:
    return max(2, repeats // 5)


def _seconds(work: Callable[[], Any]) -> float:
    start_ns = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - start_ns) / 1e9


def _phases(phases: Phases) -> tuple[list[float], list[Any]]:
    values, seconds = [next(phases)], []
    start_ns = time.perf_counter_ns()
    for value in phases:
        seconds.append((time.perf_counter_ns() - start_ns) / 1e9)
        values.append(value)
        start_ns = time.perf_counter_ns()
    return seconds, values


def _listed(array: Any) -> list[Any]:
    found: list[Any] = np.asarray(array).tolist()
    return found


# ------------------------------------------------------------------------- utilities


def peak_bytes(pid: int | str) -> int:
    """Return the peak resident size of a local process, in bytes."""
    (line,) = re.findall("VmHWM.*", Path(f"/proc/{pid}/status").read_text())
    return int(line.split()[1]) * 1024


def asked(about: str) -> argparse.Namespace:
    """Parse the arguments of a system's script, and pin its process to cores.

    `about` is the script's docstring. `--quick` only tests the script.
    """
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--pin", choices=pinning.WAYS, default=APART)
    parser.add_argument("--mode", choices=EAGER.values(), default="smart")
    given = parser.parse_args()
    given.repeats = QUICK if given.quick else FULL
    pinning.begin(given.pin)
    return given


def tell(found: dict[str, Any]) -> None:
    """Print the results so far as a line of JSON. `run.py` uses the last line."""
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
