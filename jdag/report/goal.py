"""Export of a run in GOAL, the text format that LogGOPSim's `txt2bin` reads.

Each worker is a rank. A job is a `calc` of its duration in nanoseconds. A message is a
`send` and a `recv` of its bytes on the wire, with a unique tag. An operation `requires`
the operations that it waited for. A job also `requires` the previous job of its device.

GOAL cannot represent the following: names of workers, functions and messages; contexts,
passes and paths; start times and durations of messages (LogGOPSim computes them); the
bytes of arrays without headers; drops, resends and crashes. Messages that did not
arrive are left out, since their receives would never complete.

Source: Hoefler, Schneider and Lumsdaine, "LogGOPSim", HPDC 2010.
"""

from collections.abc import Iterable, Sequence

from jdag.report.operations import Operation, without_lost_sends


def goal_of(operations: Iterable[Operation], workers: Sequence[str]) -> str:
    """Return the GOAL text. The rank of a worker is its index in `workers`."""
    rank = {worker: index for index, worker in enumerate(workers)}
    lines: list[list[str]] = [[] for _ in workers]
    completed = tuple(without_lost_sends(operations))
    ids = {operation.id for operation in completed}
    for operation in completed:
        label, block = f"l{operation.id}", lines[rank[operation.worker]]
        block.append(f"{label}: {_statement(operation, rank)}")
        before = () if operation.device is None else (operation.device,)
        needed = dict.fromkeys((*operation.needs, *before))
        block += [f"{label} requires l{id}" for id in needed if id in ids]
    blocks = [
        "\n".join([f"rank {index} {{", *block, "}"])
        for index, block in enumerate(lines)
    ]
    return "\n\n".join([f"num_ranks {len(workers)}", *blocks]) + "\n"


def _statement(operation: Operation, rank: dict[str, int]) -> str:
    kind = operation.kind
    if kind not in ("send", "recv"):
        return f"calc {operation.end_ns - operation.start_ns}"
    preposition, peer = "to" if kind == "send" else "from", rank[operation.peer]
    return f"{kind} {operation.wire_bytes}b {preposition} {peer} tag {operation.pair}"
