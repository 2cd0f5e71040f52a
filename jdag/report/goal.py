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

from collections.abc import Iterable, Sequence

from jdag.report.operations import Operation, without_lost_sends


def goal_of(operations: Iterable[Operation], workers: Sequence[str]) -> str:
    """Return the text; the rank of a worker is its place among `workers`."""
    rank = {worker: place for place, worker in enumerate(workers)}
    lines: list[list[str]] = [[] for _ in workers]
    kept = tuple(without_lost_sends(operations))
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
        return f"calc {one.end_ns - one.start_ns}"
    way = "to" if one.kind == "send" else "from"
    return f"{one.kind} {one.wire_bytes}b {way} {rank[one.peer]} tag {one.pair}"
