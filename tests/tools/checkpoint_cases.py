"""Checkpoints by processes that die at any step, or are two at once; their memory.

Run as a script it takes the name of a case and an empty folder.
"""

import os
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open

import jdag
from jdag.processes.net import shared_memory
from jdag.training.checkpoint_file import Saved, write

EVENTS = ("open", "fcntl.flock", "os.rename", "os.mkdir")
ARRAYS = 3
LEAVES, LEAF_BYTES = 8, 1 << 24


def save(path: Path, number: int, step=lambda: None) -> None:
    def array():
        step()
        return np.full(30_000, number, np.int64)

    def check(name):
        step()
        safe_open(name, framework="numpy")

    described = Saved("", "array", "int64", [30_000])
    parts = {str(n): [described] for n in range(ARRAYS)}
    write(path, parts, [array] * ARRAYS, check)


def numbers(path: Path) -> set[int]:
    if not path.exists():
        return set()
    with safe_open(path, framework="numpy") as file:
        arrays = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
    assert len(arrays) == ARRAYS
    return {int(number) for array in arrays for number in np.unique(array)}


def dies_at(last: int, path: Path) -> int:
    """Save in another process, which kills itself at a step; return its exit status."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    steps = 0

    def step(event="open", details=None):
        nonlocal steps
        steps += event in EVENTS
        if steps == last:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(step)
    save(path, 2, step)
    os._exit(0)


def killed(top: Path) -> None:
    for old in (set(), {1}):
        seen = []
        for last in range(1, 100):
            path = top / f"{len(old)}.{last}" / "x.safetensors"
            if old:
                save(path, 1)
            status = dies_at(last, path)
            found = numbers(path)
            assert found in (old, {2}), (last, found)
            seen.append(found == {2})
            save(path, 3)
            assert numbers(path) == {3}
            assert os.listdir(path.parent) == [path.name], last
            if status == 0:
                break
        # First it is the old one, then the new.
        assert status == 0 and seen == sorted(seen)
        assert len(seen) - sum(seen) > 2 * ARRAYS and sum(seen) > 1, seen


def raced(top: Path) -> None:
    path = top / "x.safetensors"
    save(path, 0)
    children = []
    for first in (1, 2):
        children.append(os.fork())
        if not children[-1]:
            for number in range(first, 101, 2):
                save(path, number)
            os._exit(0)
    for _ in range(100):
        assert len(numbers(path)) == 1
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert numbers(path) <= {99, 100}
    assert os.listdir(top) == [path.name]


def left(top: Path) -> None:
    path, beside = top / "x.safetensors", top / ".x.safetensors.0"
    beside.write_bytes(bytes(10_000_000))
    save(path, 1)
    assert numbers(path) == {1}
    save(beside, 2)  # As another saver, which is about to rename it.
    found: list[set[int]] = []

    def rename(event, details):
        if event == "fcntl.flock" and beside.exists() and not found:
            found.append({2})
            os.replace(beside, path)

    sys.addaudithook(rename)
    save(path, 3, lambda: found.append(numbers(path)))
    assert found == [{2}] * (2 + ARRAYS), found
    assert numbers(path) == {3}
    assert os.listdir(top) == [path.name]


def big(number: float) -> jax.Array:
    return jnp.full(LEAF_BYTES // 4, number, jnp.float32)


def peak(top: Path) -> None:
    def high() -> int:
        status = Path("/proc/self/status").read_text().split()
        return int(status[status.index("VmHWM:") + 1]) << 10

    shared_memory.MAPPINGS_MAX = 0  # Those stay for the next values.
    with jdag.launch(["main", "ps"]) as cluster:
        leaves = [cluster.make("ps", big, float(n)) for n in range(LEAVES)]
        cluster.save(top / "x", leaves=leaves[:1])
        Path("/proc/self/clear_refs").write_text("5")  # From now on.
        before = high()
        cluster.save(top / "x", leaves=leaves)
        print((high() - before) / LEAF_BYTES)


CASES = {"killed": killed, "raced": raced, "left": left, "peak": peak}

if __name__ == "__main__":
    CASES[sys.argv[1]](Path(sys.argv[2]))
