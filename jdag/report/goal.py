"""A run in GOAL, the text that LogGOPSim's `txt2bin` reads.

A worker is a rank; a job is a `calc` of its nanoseconds; a message is a `send` and a
`recv` of its bytes on the wire, with a tag of its own. An operation requires what it
waited for, and a job the job that ran before it on the device.

Source: Hoefler, Schneider and Lumsdaine, "LogGOPSim", HPDC 2010.

GOAL cannot say: names of workers, functions and messages; passes, paths and contexts;
when something began, and how long a message took (the simulator computes that); bytes
of arrays apart from headers; drops, resends, crashes; and messages that did not arrive,
which are left out since their receive would wait for ever.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jdag.errors import JdagError
from jdag.report.operations import Operation, delivered


def goal_of(operations: Iterable[Operation], workers: Sequence[str]) -> str:
    """Return the text; the rank of a worker is its place among `workers`."""
    rank = {worker: place for place, worker in enumerate(workers)}
    lines: list[list[str]] = [[] for _ in workers]
    kept = tuple(delivered(operations))
    ids = {one.id for one in kept}
    for one in kept:
        mine = lines[rank[one.worker]]
        mine.append(f"l{one.id}: {_said(one, rank)}")
        before = () if one.device is None else (one.device,)
        needed = dict.fromkeys((*one.needs, *before))
        mine += [f"l{one.id} requires l{id}" for id in needed if id in ids]
    blocks = [
        "\n".join([f"rank {place} {{", *block, "}"])
        for place, block in enumerate(lines)
    ]
    return "\n\n".join([f"num_ranks {len(workers)}", *blocks]) + "\n"


def _said(one: Operation, rank: dict[str, int]) -> str:
    if one.kind not in ("send", "recv"):
        assert one.end_ns is not None
        return f"calc {one.end_ns - one.start_ns}"
    way = "to" if one.kind == "send" else "from"
    return f"{one.kind} {one.wire_bytes}b {way} {rank[one.peer]} tag {one.pair}"


class GoalOperation(NamedTuple):
    """A line of GOAL: `size` is nanoseconds of a calc, bytes of a message."""

    rank: int
    kind: str
    size: int
    peer: int
    tag: int
    requires: tuple[int, ...]


_OPERATION = re.compile(
    r"l(\d+): (?:(calc) (\d+)|(send|recv) (\d+)b (?:to|from) (\d+) tag (\d+))"
)
_REQUIRES = re.compile(r"l(\d+) requires l(\d+)")
_RANK = re.compile(r"rank (\d+) \{")


def read_goal(text: str) -> dict[int, GoalOperation]:
    """Return the operations of a GOAL text by the number of their label.

    Raises:
        JdagError: a line is none of those that `goal_of` writes; names the line.
    """
    found: dict[int, GoalOperation] = {}
    rank = -1
    for place, line in enumerate(text.splitlines(), 1):
        if one := _OPERATION.fullmatch(line):
            id, calc, ns, kind, size, peer, tag = one.groups()
            said = ("calc", int(ns), -1, -1) if calc else None
            said = said or (kind, int(size), int(peer), int(tag))
            found[int(id)] = GoalOperation(rank, *said, ())
        elif (needs := _REQUIRES.fullmatch(line)) and int(needs[1]) in found:
            held = found[int(needs[1])]
            requires = (*held.requires, int(needs[2]))
            found[int(needs[1])] = held._replace(requires=requires)
        elif block := _RANK.fullmatch(line):
            rank = int(block[1])
        elif line not in ("", "}") and not re.fullmatch(r"num_ranks \d+", line):
            raise JdagError(
                f"line {place} of GOAL is {line!r}; allowed are num_ranks, rank, calc,"
                " send, recv and requires"
            )
    return found
