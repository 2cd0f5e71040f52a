"""A file of JSON lines that keeps what has been run, so that another call goes on.

The first line says what is run, each other one is a number and what that run gave.
Invariant: one process writes it at a time; a line that was cut off is dropped.
"""

import fcntl
import hashlib
import inspect
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from jdag.errors import ScenarioError, reason, unusable
from jdag.scenario import Scenario

RUNS = "runs.jsonl"


def identity(path: Path, scenario: Scenario) -> dict[str, str]:
    """What a scenario's runs depend on: its file, and its program's module."""
    module = sys.modules[scenario.settings.program.partition(":")[0]]
    source = inspect.getsource(module).encode()
    text = path.read_text(encoding="utf-8-sig")
    return {"scenario": text, "program": hashlib.sha256(source).hexdigest()}


@contextmanager
def journal(
    key: str, folder: Path, about: Mapping[str, Any]
) -> Iterator[tuple[IO[str], dict[int, Any]]]:
    """Yield the file of runs, which no other process writes, and what it has.

    `about` is a table of what JSON can hold.

    Raises:
        ScenarioError: the folder, a setting of this key, is of something else.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        others = sorted(os.listdir(folder))
        if others and RUNS not in others:
            raise OSError(f"this one has {others[0]!r} in it")
        with (folder / RUNS).open("a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.seek(0)
            # A killed process may have left half a line.
            lines = [line for line in file if line.endswith("\n")]
            about = json.loads(json.dumps(about))
            try:
                known, *rows = map(json.loads, lines or [json.dumps(about)])
                differing = [name for name in about if known.get(name) != about[name]]
                done = dict(rows)
            except (AttributeError, TypeError, ValueError, RecursionError) as error:
                raise OSError(f"{RUNS} is not as jdag wrote it: {error}") from error
            if differing:
                raise OSError(f"this one differs in: {', '.join(differing)}")
            file.truncate(sum([len(line.encode()) for line in lines]))
            if not lines:
                file.write(f"{json.dumps(about)}\n")
            yield file, done
    except OSError as error:
        is_locked = isinstance(error, BlockingIOError)
        why = "another process writes it" if is_locked else reason(error)
        allowed = f"a new folder, or that of the same runs; {why}"
        raise ScenarioError(unusable(key, os.fspath(folder), allowed)) from error
