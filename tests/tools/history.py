"""The last ten runs of `tests.tools.suite`, in a file of the user's cache folder.

Tests that failed and then passed alone are counted over these runs, since each run by
itself looks harmless.
"""

import os
import shutil
import subprocess
from pathlib import Path

import msgspec

from tests.tools.outcomes import Failure

RUNS_MAX = 10


class Run(msgspec.Struct):
    when: str  # ISO 8601, UTC.
    commit: str
    python: str
    tier: str
    unstable: list[Failure]
    failed: list[Failure]


def default_path() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "jdag-tests", "unstable.json")


def commit_of(root: Path) -> str:
    """Return the short hash of the commit, or "" where git knows none."""
    if not shutil.which("git"):
        return ""
    command = ["git", "rev-parse", "--quiet", "--verify", "--short", "HEAD"]
    git = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return git.stdout.strip()


def read(path: Path) -> list[Run]:
    """Return the runs of the file; none, and a line that says why, if it is damaged."""
    if not path.exists():
        return []
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Run])
    except msgspec.MsgspecError as error:
        print(f"{path} is damaged and begun anew: {error}")
        return []


def add(path: Path, run: Run) -> list[Run]:
    """Append a run to the file, if it can be written; return the last ten runs."""
    runs = [*read(path), run][-RUNS_MAX:]
    new = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_bytes(msgspec.json.format(msgspec.json.encode(runs)) + b"\n")
        os.replace(new, path)
    except OSError as error:
        print(f"this run is not kept for the next ones: {error}")
    return runs


def summary(runs: list[Run], path: Path) -> str:
    count = len({failure.test for run in runs for failure in run.unstable})
    tests = "none" if count == 0 else f"{count} test{'s' * (count > 1)}, in {path}"
    return f"unstable in the last ten runs: {tests}"
