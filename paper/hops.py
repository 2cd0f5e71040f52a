"""Counts the files and function calls of jdag in a `ctx.call` and in a backward pass.

    python -m paper.hops [--list]

The measured actions are a `ctx.call` with its fetch, a pass over two calls whose graph
is retained, and a `backward` over two calls on workers, until no more events follow.
The counts are the files of jdag that ran, and the calls of functions in them, on all
threads, greenlets and nodes. Comprehensions and generator expressions are left out,
since newer Pythons inline them. With the simulator the counts are those of one process.
With the real driver they are those of the caller and of its workers together, less the
counts of idle nodes in the same time. All counts are medians of several rounds, after
rounds that fill caches. `paper/results/hops.json` contains the counts, `hops.md` a
table. `--list` prints the calls of the last round of processes by function.
"""

import json
import mmap
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, NamedTuple

import jax
import numpy as np

import jdag

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
JDAG = str(ROOT / "jdag") + os.sep
ROUNDS = 7
WARM = 5  # The first rounds compile and fill caches, and are not counted.
QUIET_S = 0.25
POLL_S = 0.02
INLINED = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")
ROUND = "round"  # A file with one byte: the number of the current round, or 0.


class Counts(NamedTuple):
    """The numbers of files used and of functions called in one round."""

    files: int
    caller: int
    workers: int


Found = dict[int, Counter[str]]  # Calls by "file:function", by process.


class Recorder:
    """Records each call of a function of jdag in this process during a round."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with (folder / ROUND).open("r+b") as file:
            self._round = mmap.mmap(file.fileno(), 1)
        self._found: list[str] = []
        threading.Thread(target=self._write, daemon=True).start()
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        counts = event == "call" and self._round[0] and code.co_name not in INLINED
        if counts and code.co_filename.startswith(JDAG):
            self._found.append(f"{code.co_filename}:{code.co_qualname}")

    def _write(self) -> None:
        """After each round, write its counts to a file."""
        number = 0
        while True:
            time.sleep(POLL_S)
            if number and self._round[0] != number:
                found, self._found = self._found, []
                part = self._folder / f"{number}.{os.getpid()}.part"
                part.write_text(json.dumps(Counter(found)))
                part.rename(part.with_suffix(".json"))
            number = self._round[0]


class Rounds:
    """Starts rounds, and collects the counts of the `Recorder` of each process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / ROUND).write_bytes(b"\0")
        with (folder / ROUND).open("r+b") as file:
            self._round = mmap.mmap(file.fileno(), 1)
        self._number = 0

    def count(self, action: Callable[[], object], processes: int) -> Found:
        """Run the action as a round, after the events of earlier actions."""
        time.sleep(QUIET_S)
        self._number += 1
        self._round[0] = self._number
        action()
        time.sleep(QUIET_S)
        self._round[0] = 0
        files: list[Path] = []
        while len(files) < processes:
            time.sleep(POLL_S)
            files = sorted(self._folder.glob(f"{self._number}.*.json"))
        return {
            int(file.name.split(".")[1]): Counter(json.loads(file.read_text()))
            for file in files
        }


def without(found: Found, idle: Found) -> tuple[Counts, Found]:
    """Subtract the calls of idle nodes. Returns the numbers of files and calls."""
    left = {process: found[process] - idle[process] for process in found}
    files = {place.rpartition(":")[0] for calls in left.values() for place in calls}
    caller = left[os.getpid()].total()
    total = sum([calls.total() for calls in left.values()])
    return Counts(len(files), caller, total - caller), left


@contextmanager
def call(cluster: Any, x: Any) -> Iterator[Callable[[], object]]:
    """Yield a function that makes one call on another worker and fetches its value."""
    w = cluster.put("b", x)
    with cluster.context() as ctx:
        yield lambda: ctx.call("b", _add, w, x).fetch()


@contextmanager
def backward(cluster: Any, x: Any) -> Iterator[Callable[[], object]]:
    """Make calls on two workers. Yields a function that runs their backward pass."""
    w = cluster.put("b", x)
    with cluster.context() as ctx:
        loss = ctx.call("c", _sum, ctx.call("b", _add, w, x))
        loss.fetch()
        time.sleep(QUIET_S)
        yield lambda: ctx.backward(loss)


@contextmanager
def retained(cluster: Any, x: Any) -> Iterator[Callable[[], object]]:
    """Make calls on two workers. Yields a function that runs another pass over them."""
    w = cluster.put("b", x)
    with cluster.context() as ctx:
        loss = ctx.call("a", _sum, ctx.call("b", _add, w, x))
        ctx.backward(loss, retain_graph=True)
        yield lambda: ctx.backward(loss, retain_graph=True)


@contextmanager
def step(cluster: Any, x: Any) -> Iterator[Callable[[], object]]:
    """Compile a call on another worker. Yields a function that runs a step of it."""
    w = cluster.put("b", x)
    compiled = jdag.compile(_program, cluster)
    for _ in range(WARM):
        compiled(w, x)
    yield lambda: compiled(w, x)


def _program(ctx: Any, w: Any, x: Any) -> Any:
    return ctx.call("b", _add, w, x)


ACTIONS = {
    "call and fetch": call,
    "retained pass": retained,
    "backward over two calls": backward,
    "compiled step": step,
}


def _add(w: Any, x: Any) -> Any:
    return w + x


def _sum(x: Any) -> Any:
    return x.sum()


def measured(
    cluster: Any, rounds: Rounds, processes: int, listed: bool = False
) -> dict[str, Counts]:
    """Return the median counts of each action. `listed`: print those of a round."""
    x = np.ones((3, 3), np.float32)
    found: dict[str, Counts] = {}
    for name, prepared in ACTIONS.items():
        counts: list[Counts] = []
        left: Found = {}
        for number in range(WARM + ROUNDS):
            with prepared(cluster, x) as action:
                if number < WARM:
                    action()
                    continue
                idle = rounds.count(lambda: None, processes)
                these, left = without(rounds.count(action, processes), idle)
                counts.append(these)
        columns = zip(*counts, strict=True)
        found[name] = Counts(*(int(median(column)) for column in columns))
        for process, calls in left.items() if listed else ():
            print(f"{name}, {'caller' if process == os.getpid() else 'worker'}")
            for place, count in calls.most_common():
                print(f"{count:5} {place.removeprefix(JDAG)}")
    return found


def table(results: dict[str, dict[str, Counts]]) -> str:
    """Return the results as a table in Markdown."""
    lines = [
        "| driver | action | files | calls of the caller | calls of workers |",
        "| --- | --- | --- | --- | --- |",
    ]
    for driver, rows in results.items():
        for name, counts in rows.items():
            lines.append(f"| {driver} | {name} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


def main() -> None:
    """Count with both drivers, print the table and write the results."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rounds = Rounds(folder)
        (folder / "sitecustomize.py").write_text(
            f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
            "from pathlib import Path\nfrom paper.hops import Recorder\n"
            f"Recorder(Path({name!r}))\n"
        )
        Recorder(folder)
        workers = ["a", "b", "c"]
        results = {}
        with jdag.simulate(workers, seed=0) as cluster:
            results["simulator"] = measured(cluster, rounds, 1)
        paths = os.pathsep.join((name, str(ROOT)))
        env, allow = {"PYTHONPATH": paths}, ("paper.hops",)
        with jdag.launch(workers, env=env, allow=allow) as cluster:
            listed = "--list" in sys.argv
            results["processes"] = measured(cluster, rounds, len(workers), listed)
    written = table(results)
    print(written)
    versions = f"Python {sys.version.split()[0]}, JAX {jax.__version__}"
    RESULTS.joinpath("hops.json").write_text(
        json.dumps({"versions": versions, "counts": results}, indent=1) + "\n"
    )
    RESULTS.joinpath("hops.md").write_text(f"{versions}\n\n{written}\n")


if __name__ == "__main__":
    from paper import hops  # Workers cannot import functions of __main__.

    hops.main()
