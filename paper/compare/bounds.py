"""What bounds each row of the comparison on our side.

`paper.compare.costs` measures it in the same run: whose time it is, how many calls of
Python functions and messages, and which parts of jdag they are in. What can be said
beside these numbers is here.
"""

from collections.abc import Mapping
from typing import Any

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
_MEMORY = (
    "JAX's own memory before the first call, then weights and gradients, XLA's "
    "temporaries, and memory that is kept to be received into again."
)

# For each row why, and what of `costs` it is made of.
_WHY = {
    "add 3x3, reply fetched": (_CALL, "add"),
    "identity 64 KiB": (_CALL, "identity 64 KiB"),
    "identity 1 MiB": (f"{_CALL} {_LARGE}", "identity 1 MiB"),
    "identity 16 MiB": (_LARGE, "identity 16 MiB"),
    "identity 64 MiB": (_LARGE, "identity 64 MiB"),
    **{
        f"chain of {trips}, {way}": (_HOP, "round trip of a chain of 100, both ways")
        for trips in (1, 10, 100)
        for way in ("forward", "backward")
    },
    **{
        f"fan-out of 64, {way}": (_FAN_OUT, "call of a fan-out of 64, both ways")
        for way in ("forward", "backward")
    },
    "1,000 retained passes": (_PASS, "retained pass"),
    **{
        f"step of MLP {width} wide": (_STEP, f"step of MLP {width} wide")
        for width in (256, 1024, 4096)
    },
    "peak memory of a worker": (_MEMORY, None),
}


def bound(row: str, costs: Mapping[str, Mapping[str, Any]]) -> str:
    """Say what bounds a row, with what was measured of it: what `costs` prints."""
    why, name = _WHY[row]
    if ("memory" not in costs) if name is None else (name not in costs.get("rows", ())):
        return f"{why} Its costs were not measured."
    if name is None:
        peak, start, values, shared = (
            costs["memory"][kind] / 1e6
            for kind in ("peak", "start", "values", "shared")
        )
        return (
            f"{why} Of {peak:.0f} MB in the run that measures costs {start:.0f} were "
            f"there before the first call, values took at most {values:.0f}, and "
            f"{shared:.0f} were shared memory."
        )
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
