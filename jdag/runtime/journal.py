"""The order of the inputs of an engine on a process, as a file, to repeat the run.

An engine is a pure state machine: the order of its inputs, and what they are, decide
all its effects. What they are follows from the effects of all engines and from the
programs; so the order of inputs on each worker decides the whole run. How the workers'
inputs interleave does not: no engine sees it.

A journal has a head, one line for each input, and a line that says why it ends. An
input is a JSON list; as text, its parts are separated by spaces:

    m SENDER NUMBER KIND CONTEXT PASS PATH  a message, by its number on its link; of an
                                            acknowledgement the PATH is how many
    j NUMBER OUTCOME                        a job has ended: ok, or its error
    p KIND CONTEXT PASS PATH                an event of a program, or of an alarm
    l WORKER, J WORKER                      that incarnation is lost, or has joined

Inputs:  of a node's host, each event before its engine handles it.
Outputs: the file, written before what an event led to leaves the process, or within a
         second.
Invariants: a line is whole, or it is the last one; at most `bytes_max` are written,
also with the last line, if the head has room in them.
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
    Acknowledge,
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

_FORMAT = 2
SUFFIX = ".journal"
END, FULL = "end", "full"
JOURNAL_BYTES_MAX = 1 << 30

_LINE = re.compile(
    r"m \S+ \d+ (Acknowledge \S+ \d+ \([1-9]\d*,\)|(?!Ack)\w+ \S+ \d+ \([\d, ]*\))"
    r"|j \d+ \S+|p \w+ \S+ \d+ \([\d, ]*\)|l \S+|J [^#/\s]+#[1-9]\d*"
)

Input = tuple[Any, tuple[int, ...]]  # An event, and its causes.

_encode, _encode_lines = Encoder().encode, Encoder().encode_lines

_log = logging.getLogger(__name__)


def rows(inputs: Iterable[Input]) -> list[tuple[Any, ...]]:
    """Return the lines of inputs, to be encoded; of a message, its cause is its number.

    This is the hot loop: it calls no function of Python.
    """
    found: list[tuple[Any, ...]] = []
    for event, causes in inputs:
        kind = event.__class__
        row: tuple[Any, ...]
        if kind is Arrived:
            message, sender = event.message, event.sender
            number = causes[0] if causes else 0
            kind = message.__class__
            if kind is Acknowledge:
                count = (len(message.paths),)
                row = "m", sender, number, "Acknowledge", message.context, 0, count
            else:
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
        found.append(row)
    return found


def entry(event: Any, causes: tuple[int, ...] = ()) -> str:
    """Return the line of an input as text."""
    return _text(json.loads(_encode(rows([(event, causes)])[0])))


def _text(row: Any) -> str:
    """Return a line as text, to compare it and for errors."""
    if row[0] in ("m", "p"):
        *row, context, number, path = row
        context = "-" if context is None else str(ContextId(*context))
        row += context, number, tuple(path)
    return " ".join(map(str, row))


class Journal:
    """Writes the journal of one node.

    `note` takes an input, before its engine handles it. It becomes a line when it is
    written, together with others.

    Raises:
        ScenarioError: the file cannot be made.
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
            said = f"journal: {path} cannot be made: {reason(error)}"
            raise ScenarioError(said) from error
        self._write(json.dumps(head).encode() + b"\n")

    def flush(self) -> None:
        """Write what has been noted, as far as there is room."""
        if not self._noted:
            return
        data = _encode_lines(rows(self._noted))
        self._noted.clear()
        if len(data) > self._left_bytes:
            whole = data.rfind(b"\n", 0, max(self._left_bytes, 0)) + 1
            self._end(data[:whole], FULL)
            why = "it has journal_bytes; what is there can be replayed"
            _log.warning("the journal %s ends: %s", self._path, why)
        else:
            self._write(data)

    def close(self) -> None:
        """Write the rest; the run has ended."""
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
        self.note = deque[Input](maxlen=0).append  # What comes now is not kept.


@dataclass(slots=True)
class Entries:
    """The lines of one worker's journal, and why it ends: "end", "full", "" if lost."""

    worker: str
    lines: list[str]
    end: str


def head_of(worker: str, workers: Sequence[str], program: str) -> dict[str, Any]:
    """Return what the first line of a journal says."""
    names = [*workers]
    made = {"format": _FORMAT, "jdag": version_of("jdag"), "program": program}
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
    home = found[names[0]]
    # As a run ends, workers notice each other's end as a loss; main does not.
    telling = [home] if home.end == END else [*found.values()]
    lost = {line[2:] for one in telling for line in one.lines if line[0] == "l"}
    for name, one in found.items():
        if not one.end and name not in lost:
            raise ScenarioError(
                f"{folder / (name + SUFFIX)} is truncated: it has no last line,"
                f" and no journal says that worker {name!r} was lost during the run"
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
    return Entries(name, [_input(path, *line) for line in enumerate(lines, 2)], end)


def _input(path: Path, number: int, line: str) -> str:
    """Return a line of a journal as text."""
    try:
        if _LINE.fullmatch(text := _text(json.loads(line))):
            return text
    except (ValueError, TypeError, LookupError, RecursionError):
        pass
    raise ScenarioError(f"{path}: line {number} is no input: {repr_of(line)}")


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
