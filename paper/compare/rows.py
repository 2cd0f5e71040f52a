"""What both sides measure: the rows, their sizes and targets, and how one is timed.

It knows numpy alone, so that either side's Python can import it. A `Side` does the
work; `measure` asks the same of each, in the same order, and times it the same way.
What a side returns or yields is ready. A row with phases is a generator: what it does
up to a `yield` is one phase, and what comes before the first or after the last is not
timed.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

WORKERS = ("w0", "w1", "w2")
BYTES = {"64 KiB": 1 << 16, "1 MiB": 1 << 20, "16 MiB": 1 << 24, "64 MiB": 1 << 26}
TRIPS = (1, 10, 100)
CALLS = 64
PASSES = 1_000
WIDTHS = (256, 1024, 4096)
STAGES = 4
BATCH = 128
LEARNING_RATE = 0.5

BYTES_LARGE = 1 << 24  # From here on copies are what takes the time.
# At most this ratio of jdag's figure to the peer's, with the socket carrier.
TARGETS = {
    "add 3x3, reply fetched": 1.0,
    **{
        f"identity {size}": 0.7 if nbytes >= BYTES_LARGE else 1.0
        for size, nbytes in BYTES.items()
    },
    **{
        f"chain of {trips}, {way}": 1.0
        for trips in TRIPS
        for way in ("forward", "backward")
    },
    "fan-out of 64, forward": 1.0,
    "fan-out of 64, backward": 0.7,
    "1,000 retained passes": 1.0,
    "step of MLP 256 wide": 1.0,
    "step of MLP 1024 wide": 0.7,
    "step of MLP 4096 wide": 0.7,
    "peak memory of a worker": 1.0,
}
# At most this ratio of a plan's figure to the peer's, with which forward and backward
# are one row here; None: no target.
PLANS = {
    "add 3x3, reply fetched": 0.4,
    **dict.fromkeys(f"identity {size}" for size in BYTES),
    "chain of 1": 0.4,
    "chain of 10": None,
    "chain of 100": 0.3,
    "fan-out of 64": 0.05,
    "1,000 retained passes": 0.3,
    "step of MLP 256 wide": 0.45,
    "step of MLP 1024 wide": None,
    "step of MLP 4096 wide": 0.6,
    "peak memory of a worker": None,
}
# Rows beside Ray's Compiled Graph, forward alone: the bytes of a float32 array, and how
# many workers in turn multiply it by a constant; none: it goes to one and comes back.
GRAPHS = {
    "graph: echo 36 bytes": (36, 0),
    "graph: echo 1 MiB": (1 << 20, 0),
    **{f"graph: chain of {trips}": (36, trips) for trips in TRIPS},
}
GRAPH_TARGET = 0.5  # At most this ratio of a plan's time to Ray's.


class Repeats(NamedTuple):
    """How often rows are measured: those of some 100 us, and longer ones."""

    short: int
    middle: int
    long: int
    longest: int


FULL = Repeats(short=300, middle=60, long=15, longest=3)
QUICK = Repeats(short=10, middle=4, long=2, longest=1)

Phases = Iterator[Any]


class Side(Protocol):
    """One of the two systems: a caller here, and `WORKERS`, a process each."""

    def array(self, value: np.ndarray) -> Any:
        """Return it as an array of this system."""

    def add(self, one: Any, other: Any) -> Any:
        """Add two arrays on a worker; return the sum."""

    def identity(self, value: Any) -> Any:
        """Send an array to a worker and back."""

    def chain(self, trips: int) -> Phases:
        """Multiply a leaf by each `factor` on a worker, and have it back each time.

        Yields None in a context, then the sum of the last product, and after the
        backward pass the gradient of the leaf.
        """

    def fan_out(self, calls: int) -> Phases:
        """Multiply a leaf by each `factor`, on all workers; sum all products here.

        Yields None in a context, then the sum, and after the pass the gradient.
        """

    def retained(self, passes: int) -> Phases:
        """A chain of one, but so many passes over the one graph.

        Yields None after forward, and after all passes the accumulated gradient.
        """

    def prepare(self, width: int) -> None:
        """Put the stages of `weights(width)` on their workers, with SGD for each."""

    def gradients(self, width: int) -> list[np.ndarray]:
        """Return the gradient of the weight of each stage, without a step."""

    def step(self, width: int) -> float:
        """Train one step on `batch(width)`; return the loss before it.

        The new weights are ready then, and the context has been left.
        """

    def memory(self) -> list[int]:
        """Return the peak resident size of each worker so far, in bytes."""


# ------------------------------------------------------------------- what is computed


def leaf() -> np.ndarray:
    """The leaf of chains and fan-outs: (3, 3), float32."""
    return np.linspace(0.5, 1.5, 9, dtype=np.float32).reshape(3, 3)


def factor(number: int) -> np.ndarray:
    """The constant of call `number`: (3, 3), float32, near 1."""
    return np.full((3, 3), 1 + (number % 7 - 3) / 1024, dtype=np.float32)


def weights(width: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The stages of the MLP: float32, a weight (width, width) and a bias (width,)."""
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
    """Inputs and targets: (BATCH, width), float32."""
    drawn = np.random.default_rng(width + 1)
    x = drawn.standard_normal((BATCH, width), dtype=np.float32)
    return x, np.tanh(np.roll(x, 1, axis=1))


def place(number: int) -> str:
    """The worker of a stage, or of a call of a fan-out: in turn."""
    return WORKERS[number % len(WORKERS)]


# -------------------------------------------------------------------- how it is timed


def measure(side: Side, repeats: Repeats) -> Iterator[dict[str, Any]]:
    """All rows of a side, in seconds and bytes, and the numbers that it computed.

    Yields what there is after each row, so that a failure loses no earlier one.
    """
    rows: dict[str, float] = {}
    numbers: dict[str, Any] = {}
    for part in (_calls, _passes, _steps):
        for _ in part(side, repeats, rows, numbers):
            yield {"rows": rows, "numbers": numbers}
    rows["peak memory of a worker"] = max(side.memory())
    yield {"rows": rows, "numbers": numbers}


def measure_graphs(
    side: Any, repeats: Repeats, found: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """The rows of `GRAPHS`, put into `found`, which it yields after each row.

    `side.graph(value, calls)` returns a function of arrays like `side.array(value)`.
    """
    rows, numbers = found.setdefault("rows", {}), found.setdefault("numbers", {})
    for row, (size, calls) in GRAPHS.items():
        value = side.array(np.linspace(0.5, 1.5, size // 4, dtype=np.float32))
        run = side.graph(value, calls)
        numbers[row] = _listed(np.asarray(run(value))[-9:])
        rows[row] = timed(partial(run, value), repeats[TRIPS.index(max(calls, 1))])
        yield found


def _calls(
    side: Side, repeats: Repeats, rows: dict[str, float], numbers: dict[str, Any]
) -> Iterator[None]:
    one, other = side.array(leaf()), side.array(factor(1))
    numbers["add"] = _listed(side.add(one, other))
    rows["add 3x3, reply fetched"] = timed(partial(side.add, one, other), repeats.short)
    yield
    for name, size in BYTES.items():
        sent = np.arange(size // 4, dtype=np.float32)
        value = side.array(sent)
        if not np.array_equal(np.asarray(side.identity(value)), sent):
            raise SystemExit(f"{name} did not come back as they went")
        count = repeats.short if size <= 1 << 20 else repeats.long
        rows[f"identity {name}"] = timed(partial(side.identity, value), count)
        yield


def _passes(
    side: Side, repeats: Repeats, rows: dict[str, float], numbers: dict[str, Any]
) -> Iterator[None]:
    made = {
        f"chain of {trips}": (partial(side.chain, trips), count)
        for trips, count in zip(TRIPS, repeats, strict=False)
    }
    made[f"fan-out of {CALLS}"] = (partial(side.fan_out, CALLS), repeats.middle)
    for name, (make, count) in made.items():
        times, (_, *found) = timed_phases(make, count)
        plan = len(times) == 1  # It yields both results of its one phase at once.
        ways = [name] if plan else [f"{name}, forward", f"{name}, backward"]
        rows.update(zip(ways, times, strict=True))
        numbers[name] = [_listed(one) for one in (found[0] if plan else found)]
        yield
    make = partial(side.retained, PASSES)
    (rows[f"{PASSES:,} retained passes"],), (_, gradient) = timed_phases(
        make, repeats.longest
    )
    numbers["retained"] = _listed(gradient)
    yield


def _steps(
    side: Side, repeats: Repeats, rows: dict[str, float], numbers: dict[str, Any]
) -> Iterator[None]:
    for width, count in zip(WIDTHS, repeats[1:], strict=True):
        side.prepare(width)
        if width < max(WIDTHS):  # To read the widest would be what takes most memory.
            numbers[f"gradients {width}"] = [
                [float(np.linalg.norm(gradient)), *gradient[0, :4].tolist()]
                for gradient in side.gradients(width)
            ]
        losses: list[float] = []
        row = f"step of MLP {width} wide"
        rows[row] = timed(partial(_step, side, width, losses), count)
        numbers[f"losses {width}"] = losses
        yield


def _step(side: Side, width: int, losses: list[float]) -> None:
    losses.append(side.step(width))


def timed(work: Callable[[], Any], repeats: int) -> float:
    """The median time of a call in seconds, after some that do not count."""
    for _ in range(_warm(repeats)):
        work()
    return statistics.median(_seconds(work) for _ in range(repeats))


def timed_phases(
    make: Callable[[], Phases], repeats: int
) -> tuple[list[float], list[Any]]:
    """The median time of each phase in seconds, and what the last run yielded."""
    for _ in range(_warm(repeats)):
        _phases(make())
    runs = [_phases(make()) for _ in range(repeats)]
    columns = zip(*(seconds for seconds, _ in runs), strict=True)
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


# --------------------------------------------------------------------- on either side


def peak_bytes(pid: int | str) -> int:
    """The peak resident size of a process of this machine, in bytes."""
    return memory_of(pid, "VmHWM")


def memory_of(pid: int | str, kind: str) -> int:
    """What the kernel says of a process's memory of a kind, such as VmRSS, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"process {pid} has no {kind}")


def repeats(arguments: Sequence[str]) -> Repeats:
    """How often to measure: `--quick` is only to see that all works."""
    return QUICK if "--quick" in arguments else FULL


def tell(found: dict[str, Any]) -> None:
    """Hand what was found so far to `run.py`, which reads the last line: JSON."""
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
