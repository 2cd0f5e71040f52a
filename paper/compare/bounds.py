"""Explains what limits jdag in each row of the comparison.

`paper.compare.costs` measures CPU times, Python calls and messages in the same run.
This module describes these numbers in words.
"""

from collections.abc import Mapping
from typing import Any

from paper.compare.rows import ON_ONE

_CALL = (
    "Python code runs first at the caller until the bytes are sent, then at the "
    "worker, then at the caller again."
)
_HOP = (
    "Python code at both ends. A round trip is a call and a move, each of which takes "
    "a request, an acknowledgement and a reply."
)
_FAN_OUT = (
    "Python code at the caller: each call is a separate message with an "
    "acknowledgement. The peer's caller waits in C++."
)
_PASS = (
    "Two exchanges of messages where the peer needs one: cotangents, then End. End is "
    "acknowledged, so that no worker keeps state of the pass."
)
_LARGE = "Copies into and out of shared memory, and the first use of its pages."
_STEP = "Messages, as in a chain; from 1,024 wide on, XLA's computation on the workers."
# For rows with targets, by the beginning of their names: the explanation, and the name
# of the row of `costs`, if it differs.
_WHY: dict[str, tuple[str, str]] = {
    "add": (_CALL, "add"),
    "identity": (_LARGE, ""),
    "chain": (_HOP, "round trip of a chain of 100, both ways"),
    "fan-out": (_FAN_OUT, "call of a fan-out of 64, both ways"),
    "1,000 retained": (_PASS, "retained pass"),
    "step": (_STEP, ""),
}


def bound(row: str, costs: Mapping[str, Mapping[str, Any]]) -> str:
    """Explain what limits jdag in a row, with results of `paper.compare.costs`."""
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
