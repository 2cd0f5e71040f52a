"""Counts the files and function calls of jdag in a `ctx.call` and in a backward pass.

    python -m paper.hops

The two measured actions are a `ctx.call` with its fetch, and a `backward` over two
calls, until no more events follow. The counts are the files of jdag that ran, and the
calls of functions in them, on all threads, greenlets and nodes. Comprehensions and
generator expressions are left out, since newer Pythons inline them. With the simulator
the counts are those of one process. With the real driver they are those of the caller
and its workers, less the counts of idle nodes in the same time. All counts are medians
of several rounds, after rounds that fill caches. `paper/results/hops.json` contains the
counts, `hops.md` a table.
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
    calls: int


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

    def count(self, action: Callable[[], object], processes: int) -> Counter[str]:
        """Run the action as a round. Returns the number of calls by "file:function"."""
        self._number += 1
        self._round[0] = self._number
        action()
        time.sleep(QUIET_S)
        self._round[0] = 0
        found: Counter[str] = Counter()
        files: list[Path] = []
        while len(files) < processes:
            time.sleep(POLL_S)
            files = sorted(self._folder.glob(f"{self._number}.*.json"))
        for file in files:
            found.update(json.loads(file.read_text()))
        return found


def without(found: Counter[str], idle: Counter[str]) -> Counts:
    """Subtract the calls of idle nodes. Returns the numbers of files and calls."""
    left = found - idle
    files = {place.rpartition(":")[0] for place in left}
    return Counts(len(files), left.total())


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


ACTIONS = {"call and fetch": call, "backward over two calls": backward}


def _add(w: Any, x: Any) -> Any:
    return w + x


def _sum(x: Any) -> Any:
    return x.sum()


def measured(cluster: Any, rounds: Rounds, processes: int) -> dict[str, Counts]:
    """Return the median counts of each action."""
    x = np.ones((3, 3), np.float32)
    found: dict[str, Counts] = {}
    for name, prepared in ACTIONS.items():
        counts: list[Counts] = []
        for number in range(WARM + ROUNDS):
            with prepared(cluster, x) as action:
                if number < WARM:
                    action()
                    continue
                idle = rounds.count(lambda: None, processes)
                counts.append(without(rounds.count(action, processes), idle))
        columns = zip(*counts, strict=True)
        found[name] = Counts(*(int(median(column)) for column in columns))
    return found


def table(results: dict[str, dict[str, Counts]]) -> str:
    """Return the results as a table in Markdown."""
    lines = ["| driver | action | files | calls |", "| --- | --- | --- | --- |"]
    for driver, rows in results.items():
        for name, counts in rows.items():
            lines.append(f"| {driver} | {name} | {counts.files} | {counts.calls} |")
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
            results["processes"] = measured(cluster, rounds, len(workers))
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
