"""A file of JSON lines with finished runs. A later call continues after these runs.

The first line describes the runs; each further line is a run's number and result.
Invariant: one process writes the file at a time; an incomplete last line is dropped.
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
    """Return what identifies a scenario: its file's text, and a hash of its program."""
    module = sys.modules[scenario.settings.program.partition(":")[0]]
    source = inspect.getsource(module).encode()
    text = path.read_text(encoding="utf-8-sig")
    return {"scenario": text, "program": hashlib.sha256(source).hexdigest()}


@contextmanager
def journal(
    key: str, folder: Path, about: Mapping[str, Any]
) -> Iterator[tuple[IO[str], dict[int, Any]]]:
    """Lock a folder's file of runs; yield the file, and the results in it by number.

    `about` is a JSON table that describes the runs. Raises ScenarioError if the folder
    is unusable or contains other runs; the error calls the folder `key`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = sorted(os.listdir(folder))
        if names and RUNS not in names:
            raise OSError(f"this folder contains {names[0]!r}")
        with (folder / RUNS).open("a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.seek(0)
            # A killed process may have written half a line.
            lines = [line for line in file if line.endswith("\n")]
            about = json.loads(json.dumps(about))
            try:
                saved, *rows = map(json.loads, lines or [json.dumps(about)])
                differing = [name for name in about if saved.get(name) != about[name]]
                done = dict(rows)
            except (AttributeError, TypeError, ValueError, RecursionError) as error:
                raise OSError(f"{RUNS} was changed: {error}") from error
            if differing:
                raise OSError(f"this folder differs in: {', '.join(differing)}")
            file.truncate(sum([len(line.encode()) for line in lines]))
            if not lines:
                file.write(f"{json.dumps(about)}\n")
            yield file, done
    except OSError as error:
        is_locked = isinstance(error, BlockingIOError)
        cause = "another process writes to it" if is_locked else reason(error)
        allowed = f"a new folder, or one with the same runs; {cause}"
        raise ScenarioError(unusable(key, os.fspath(folder), allowed)) from error
