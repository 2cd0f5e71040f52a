"""The order of an engine's inputs in a process, as a file from which to replay the run.

An engine is a pure state machine: the order and contents of its inputs decide all its
effects. The contents follow from the effects of all engines and from the programs. So
the order of inputs on each worker decides the run; how the inputs of several workers
interleave does not matter, since no engine sees it.

A journal has a head, one line for each input, and a line with the reason for its end.
An input is a JSON list; in this text form, spaces separate its parts:

    m SENDER NUMBER KIND CONTEXT PASS PATH  a message, by its number on its link
    a SENDER COUNT                          the acknowledgement of so many messages
    j NUMBER OUTCOME                        the end of a job: ok, or its error
    p KIND CONTEXT PASS PATH                an event of a program, or of an alarm
    l WORKER, J WORKER                      that incarnation is lost, or has joined

Inputs:  events from a node's WorkerRuntime, each before its engine handles it.
Outputs: the file, written before the effects of an input leave the process, or within a
         second.
Invariants: every line is complete, except possibly the last; at most `bytes_max` bytes
are written, including the last line, if the head fits.
"""

import json
import logging
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from errno import ENOSPC
from pathlib import Path
from typing import Any

from msgspec.json import Encoder

from jdag.engine.protocol import (
    Acknowledged,
    Arrived,
    Computed,
    ContextId,
    Joined,
    Lost,
    incarnated,
)
from jdag.errors import ScenarioError, reason, repr_of
from jdag.runtime.recorder import HAS
from jdag.runtime.versions import version_of

_FORMAT = 4
SUFFIX = ".journal"
END, FULL = "end", "full"
JOURNAL_BYTES_MAX = 1 << 30

_LINE = re.compile(
    r"m \S+ \d+ \w+ \S+ \d+ \([\d, ]*\)|a \S+ [1-9]\d*"
    r"|j \d+ \S+|p \w+ \S+ \d+ \([\d, ]*\)|l \S+|J [^#/\s]+#[1-9]\d*"
)

Input = tuple[Any, tuple[int, ...]]  # An event, and its causes.

_encode, _encode_lines = Encoder().encode, Encoder().encode_lines

_log = logging.getLogger(__name__)


def rows(inputs: Iterable[Input]) -> list[tuple[Any, ...]]:
    """Return the lines of inputs.

    The cause of a message is its number on its link. The loop is hot, so it calls no
    functions.
    """
    lines: list[tuple[Any, ...]] = []
    for event, causes in inputs:
        kind = event.__class__
        row: tuple[Any, ...]
        if kind is Arrived:
            message, sender = event.message, event.sender
            number = causes[0] if causes else 0
            kind = message.__class__
            has_context, has_number, has_path = HAS[kind]
            row = (
                "m",
                sender,
                number,
                kind.__name__,
                message.context if has_context else None,
                message.number if has_number else 0,
                message.path if has_path else (),
            )
        elif kind is Acknowledged:
            row = "a", event.sender, event.count
        elif kind is Computed:
            failure = event.failure
            row = "j", event.job, "ok" if failure is None else failure.error
        elif kind is Lost:
            row = "l", event.worker
        elif kind is Joined:
            row = "J", incarnated(event.name, event.incarnation)
        else:
            has_context, has_number, has_path = HAS[kind]
            row = (
                "p",
                kind.__name__,
                event.context if has_context else None,
                event.number if has_number else 0,
                event.path if has_path else (),
            )
        lines.append(row)
    return lines


def entry(event: Any, causes: tuple[int, ...] = ()) -> str:
    return _text(json.loads(_encode(rows([(event, causes)])[0])))


def _text(row: Any) -> str:
    if row[0] in ("m", "p"):
        *row, context, number, path = row
        context = "-" if context is None else str(ContextId(*context))
        row += context, number, tuple(path)
    return " ".join(map(str, row))


class Journal:
    """Writes the journal of a node. Raises ScenarioError if it cannot create the file.

    `note` records an input, before its engine handles it; `flush` writes the recorded
    inputs.
    """

    def __init__(self, path: Path, head: dict[str, Any], bytes_max: int) -> None:
        self._path = path
        self._left_bytes = bytes_max - len(f"{FULL}\n")
        self._noted: list[Input] = []
        self.note: Callable[[Input], object] = self._noted.append
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except OSError as error:
            text = f"journal: {path} cannot be created: {reason(error)}"
            raise ScenarioError(text) from error
        self._write(json.dumps(head).encode() + b"\n")

    def flush(self) -> None:
        if not self._noted:
            return
        data = _encode_lines(rows(self._noted))
        self._noted.clear()
        if len(data) > self._left_bytes:
            end = data.rfind(b"\n", 0, max(self._left_bytes, 0)) + 1
            self._end(data[:end], FULL)
            why = "it has reached journal_bytes; its lines can be replayed"
            _log.warning("the journal %s ends: %s", self._path, why)
        else:
            self._write(data)

    def close(self) -> None:
        self.flush()
        if self._file >= 0:
            self._end(b"", END)

    def _end(self, data: bytes, why: str) -> None:
        self._write(data + f"{why}\n".encode())
        if self._file >= 0:
            self._stop()

    def _write(self, data: bytes) -> None:
        self._left_bytes -= len(data)
        try:
            if os.write(self._file, data) < len(data):
                raise OSError(ENOSPC, os.strerror(ENOSPC))
        except OSError as error:
            _log.warning("the journal %s ends: %s", self._path, reason(error))
            self._stop()

    def _stop(self) -> None:
        os.close(self._file)
        self._file = -1
        self.note = deque[Input](maxlen=0).append  # Discards later inputs.


@dataclass(slots=True)
class Entries:
    """A worker's journal: its lines, and its last line ("end", "full"; "" if lost)."""

    worker: str
    lines: list[str]
    end: str


def head_of(worker: str, workers: Sequence[str], program: str) -> dict[str, Any]:
    run = {"format": _FORMAT, "jdag": version_of("jdag"), "program": program}
    return {**run, "worker": worker, "workers": [*workers]}


def read_journals(
    folder: Path, workers: Sequence[str], program: str
) -> dict[str, Entries]:
    """Read the journals of a run of these workers by this program.

    Incarnations that joined again are included.

    Raises:
        ScenarioError: a journal is missing, truncated, damaged, or of another program
            or version.
    """
    journals: dict[str, Entries] = {}
    names = [*workers]
    for name in names:  # Incarnations that joined again are appended.
        journals[name] = journal = _read(folder, name, workers, program)
        joined = [line[2:] for line in journal.lines if line[0] == "J"]
        names += [worker for worker in joined if worker not in names]
    main = journals[names[0]]
    # When a run ends, workers record the end of other workers as losses. Main does not.
    sources = [main] if main.end == END else [*journals.values()]
    lost = {line[2:] for each in sources for line in each.lines if line[0] == "l"}
    for name, journal in journals.items():
        if not journal.end and name not in lost:
            raise ScenarioError(
                f"{folder / (name + SUFFIX)} is truncated: its last line is missing,"
                f" and no journal records the loss of worker {name!r} during the run"
            )
    return journals


def check_journals(folder: Path) -> None:
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        head, _ = _parts(path)
        read_journals(folder, head.get("workers", ()), head.get("program", ""))
        return
    raise ScenarioError(f"{folder} contains no journal of jdag.launch(journal=)")


def _read(folder: Path, name: str, workers: Sequence[str], program: str) -> Entries:
    path = folder / (name + SUFFIX)
    head, lines = _parts(path)
    for key, expected in head_of(name, workers, program).items():
        if head.get(key) != expected:
            raise ScenarioError(
                f"{path} has {key} = {head.get(key)!r}; the replay needs {expected!r}"
            )
    lines.pop()  # The text after the last newline: empty, or a part of a line.
    end = lines.pop() if lines and lines[-1] in (END, FULL) else ""
    return Entries(name, [_input(path, *line) for line in enumerate(lines, 2)], end)


def _input(path: Path, number: int, line: str) -> str:
    try:
        if _LINE.fullmatch(text := _text(json.loads(line))):
            return text
    except (ValueError, TypeError, LookupError, RecursionError):
        pass
    raise ScenarioError(f"{path}: line {number} is not an input: {repr_of(line)}")


def _parts(path: Path) -> tuple[dict[str, Any], list[str]]:
    try:
        first, *lines = path.read_text(encoding="utf-8").split("\n")
        head = json.loads(first)
        if all([isinstance(worker, str) for worker in head["workers"]]):
            return head, lines
    except OSError as error:
        raise ScenarioError(f"{path}: {reason(error)}") from error
    except (ValueError, KeyError, TypeError):
        pass
    raise ScenarioError(f"{path} is not a journal of jdag.launch(journal=)")
