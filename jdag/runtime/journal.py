"""The order of the inputs of an engine on a process, as a file, to repeat the run.

An engine is a pure state machine: the order of its inputs, and what they are, decide
all its effects. What they are follows from the effects of all engines and from the
programs; so the order of inputs on each worker decides the whole run. How the workers'
inputs interleave does not: no engine sees it.

A journal has a head, one line for each input, and a line that says why it ends:

    m SENDER NUMBER KIND CONTEXT PASS PATH  a message, by its number on its link; of an
                                            acknowledgement the PATH is how many
    j NUMBER OUTCOME                        a job has ended: ok, or its error
    p KIND CONTEXT PASS PATH                an event of a program, or of an alarm
    l WORKER, J WORKER                      that incarnation is lost, or has joined

Inputs:  of a node's host, each event before its engine handles it.
Outputs: the file, written before what an event led to leaves the process, or within a
         second.
Invariants: a line is whole, or it is the last one; at most `bytes_max` are written.
"""

import json
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jdag.engine.protocol import (
    Acknowledge,
    Arrived,
    Computed,
    Joined,
    Lost,
    incarnated,
)
from jdag.errors import ScenarioError, reason, repr_of
from jdag.runtime.recorder import NO_CAUSE, Recorder, said

FORMAT = 1
SUFFIX = ".journal"
END, FULL = "end", "full"
BYTES_MAX = 1 << 30

_LINE = re.compile(
    r"m \S+ \d+ (Acknowledge \S+ \d+ \([1-9]\d*,\)|(?!Ack)\w+ \S+ \d+ \([\d, ]*\))"
    r"|j \d+ \S+|p \w+ \S+ \d+ \([\d, ]*\)|l \S+|J [^#/\s]+#[1-9]\d*"
)

_log = logging.getLogger(__name__)


def entry(event: Any, causes: tuple[int, ...] = ()) -> str:
    """Return the line of an input; of a message, the cause is its number."""
    kind = event.__class__
    if kind is Arrived:
        number = causes[0] if causes else 0
        message = event.message
        name, context, of, path = said(message)
        if message.__class__ is Acknowledge:
            path = (len(message.paths),)
        return f"m {event.sender} {number} {name} {context or '-'} {of} {path}"
    if kind is Computed:
        failure = event.failure
        return f"j {event.job} {'ok' if failure is None else failure.error}"
    if kind is Lost:
        return f"l {event.worker}"
    if kind is Joined:
        return f"J {incarnated(event.name, event.incarnation)}"
    name, context, number, path = said(event)
    return f"p {name} {context or '-'} {number} {path}"


class Journal:
    """Writes the journal of one node; stands before its recorder, if there is one.

    Raises:
        ScenarioError: the file cannot be made.
    """

    def __init__(
        self,
        path: Path,
        head: dict[str, Any],
        bytes_max: int,
        recorder: Recorder | None,
    ) -> None:
        self.recorder = recorder
        self._path = path
        self._left_bytes = bytes_max
        self._lines: list[str] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except OSError as error:
            said = f"journal: {path} cannot be made: {reason(error)}"
            raise ScenarioError(said) from error
        self._write(json.dumps(head) + "\n")

    def input(
        self,
        worker: str,
        event: Any,
        causes: tuple[int, ...],
        keys: Sequence[Any],
        told: tuple[Any, ...],
    ) -> int:
        """Note an event of an engine; see `Recorder.input`."""
        if self._file >= 0:
            self._lines.append(entry(event, causes))
        if self.recorder is None:
            return NO_CAUSE
        return self.recorder.input(worker, event, causes, keys, told)

    def effect(self, worker: str, effect: Any, cause: int) -> int:
        """Pass an effect on; see `Recorder.effect`."""
        if self.recorder is None:
            return cause
        return self.recorder.effect(worker, effect, cause)

    def flush(self) -> None:
        """Write what has been noted, as far as there is room."""
        if not self._lines:
            return
        text = "\n".join(self._lines) + "\n"
        self._lines.clear()
        if len(text) > self._left_bytes:
            whole = text.rfind("\n", 0, self._left_bytes) + 1
            self._end(text[:whole] + FULL)
            why = "it has journal_bytes; what is there can be replayed"
            _log.warning("the journal %s ends: %s", self._path, why)
        else:
            self._write(text)

    def close(self) -> None:
        """Write the rest; the run has ended."""
        self.flush()
        if self._file >= 0:
            self._end(END)

    def _end(self, text: str) -> None:
        self._write(text + "\n")
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, text: str) -> None:
        data = text.encode()
        self._left_bytes -= len(data)
        try:
            os.write(self._file, data)
        except OSError as error:
            _log.warning("the journal %s ends: %s", self._path, reason(error))
            os.close(self._file)
            self._file = -1


@dataclass(slots=True)
class Entries:
    """The lines of one worker's journal, and why it ends: "end", "full", "" if lost."""

    worker: str
    lines: list[str]
    end: str


def head_of(worker: str, workers: Sequence[str], program: str) -> dict[str, Any]:
    """Return what the first line of a journal says."""
    names = [*workers]
    made = {"format": FORMAT, "jdag": version("jdag"), "program": program}
    return {**made, "worker": worker, "workers": names}


def read_journals(
    folder: Path, workers: Sequence[str], program: str
) -> dict[str, Entries]:
    """Read the journals of a run of these workers by this program, incarnations too.

    Raises:
        ScenarioError: one is missing, truncated, damaged, or of another program or
            version.
    """
    found: dict[str, Entries] = {}
    names = [*workers]
    for name in names:  # Those that have joined again follow.
        found[name] = one = _read(folder, name, workers, program)
        again = [line[2:] for line in one.lines if line[0] == "J"]
        names += [worker for worker in again if worker not in names]
    lost = {line[2:] for one in found.values() for line in one.lines if line[0] == "l"}
    for name, one in found.items():
        if not one.end and name not in lost:
            raise ScenarioError(
                f"{folder / (name + SUFFIX)} is truncated: it has no last line,"
                f" and no journal says that worker {name!r} was lost"
            )
    return found


def check_journals(folder: Path) -> None:
    """Check the journals of a folder, before what is to replay them is known.

    Raises:
        ScenarioError: there are none; one is missing, truncated, or of another version.
    """
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        head, _ = _parts(path)
        read_journals(folder, head.get("workers", ()), head.get("program", ""))
        return
    raise ScenarioError(f"{folder} has no journal of jdag.launch(journal=)")


def _read(folder: Path, name: str, workers: Sequence[str], program: str) -> Entries:
    path = folder / (name + SUFFIX)
    head, lines = _parts(path)
    for key, wanted in head_of(name, workers, program).items():
        if head.get(key) != wanted:
            said = f"{path} is of {key} = {head.get(key)!r}"
            raise ScenarioError(f"{said}; what would replay it has {wanted!r}")
    lines.pop()  # What follows the last line's end: nothing, or a part of a line.
    end = lines.pop() if lines and lines[-1] in (END, FULL) else ""
    for number, line in enumerate(lines, 2):
        if not _LINE.fullmatch(line):
            raise ScenarioError(f"{path}: line {number} is no input: {repr_of(line)}")
    return Entries(name, lines, end)


def _parts(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the head of a journal, and all else between the ends of lines."""
    try:
        first, *lines = path.read_text(encoding="utf-8").split("\n")
        head = json.loads(first)
        if all([isinstance(one, str) for one in head["workers"]]):
            return head, lines
    except OSError as error:
        raise ScenarioError(f"{path}: {reason(error)}") from error
    except (ValueError, KeyError, TypeError):
        pass
    raise ScenarioError(f"{path} is no journal of jdag.launch(journal=)")
