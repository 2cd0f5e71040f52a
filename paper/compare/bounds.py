"""What bounds each row of the comparison on our side.

`paper.compare.costs` measures it in the same run: whose time it is, how many calls of
Python functions and messages, and which parts of jdag they are in. What can be said
beside these numbers is here.
"""

from collections.abc import Mapping
from typing import Any

from paper.compare.rows import ON_ONE

_CALL = (
    "Plain Python, one step after the other: the caller until bytes leave, the worker, "
    "the caller again."
)
_HOP = (
    "Plain Python at both ends. A round trip is a call and a move, of which each is "
    "told, acknowledged and answered by a message."
)
_FAN_OUT = (
    "Plain Python at the caller: each call is a message of its own and its "
    "acknowledgement, where the peer's caller waits in C++."
)
_PASS = (
    "Two exchanges in a row where the peer has one: cotangents, then End, which is "
    "acknowledged so that nothing is left of a pass anywhere."
)
_LARGE = "Copies into and out of shared memory, and its pages while there is none."
_STEP = "Messages, as in a chain; from 1,024 wide on what XLA computes on the workers."
# By how rows that have targets begin: why, and what of `costs` they are made of, if it
# has not their own name.
_WHY: dict[str, tuple[str, str]] = {
    "add": (_CALL, "add"),
    "identity": (_LARGE, ""),
    "chain": (_HOP, "round trip of a chain of 100, both ways"),
    "fan-out": (_FAN_OUT, "call of a fan-out of 64, both ways"),
    "1,000 retained": (_PASS, "retained pass"),
    "step": (_STEP, ""),
}


def bound(row: str, costs: Mapping[str, Mapping[str, Any]]) -> str:
    """Say what bounds a row, with what was measured of it: what `costs` prints."""
    row = row.removesuffix(ON_ONE)
    why, name = next(said for begins, said in _WHY.items() if row.startswith(begins))
    name = name or row
    if name not in costs.get("rows", ()):
        return f"{why} Its costs were not measured."
    cost = costs["rows"][name]
    parts = sorted(cost["shares"].items(), key=lambda part: -part[1])
    most = ", ".join(f"{part} {share:.0%}" for part, share in parts[:4])
    return (
        f"{why} One {name}: {cost['wall_us']:,.0f} us, of which the caller's threads "
        f"run {cost['caller_us']:,.0f}, those of w0 {cost['worker_us']:,.0f} (looking "
        f"out for an answer included) and jobs of all workers {cost['jobs_us']:,.0f}; "
        f"{cost['calls']:,.0f} calls of Python functions at the caller, whose own time "
        f"is in: {most}; {cost['messages']:.0f} messages."
    )
