"""What systems print in a comparison, made up."""

import os
from typing import Any

from paper.compare import costs, pinning, rows


def system(name: str, how: str = "apart") -> dict[str, Any]:
    """What a system prints last: the peer takes twice as long as ours."""
    unit = 2e-3 if name in (rows.PEER, rows.RAY) else 1e-3
    end = "" if how == pinning.APART else rows.ON_ONE
    kept = [row for row in rows.of(name) if not end or rows.on_one(row)]
    caller, workers = pinning.cores_of(how, os.sched_getaffinity(0))
    cores = {how: {"caller": caller, **dict.fromkeys(rows.WORKERS, workers)}}
    settings = {"ray": "2.60.0"} if name == rows.RAY else {"torch": "2.13.0"}
    figures = {f"{row}{end}": unit for row in kept}
    numbers = {} if name == rows.RAY else {f"add{end}": [1.0, 2.0, 3.0]}
    return {"rows": figures, "numbers": numbers, "settings": settings, "cores": cores}


def in_full(name: str) -> dict[str, Any]:
    one, other = (system(name, how) for how in pinning.WAYS)
    return {kind: {**part, **other[kind]} for kind, part in one.items()}


def one_round(peer: float, mine: float) -> dict[str, Any]:
    names = rows.of_both()
    missed = {rows.RETAINED: 0.5 * mine}
    return {
        "load": 0.0,
        rows.PEER: {"rows": dict.fromkeys(names, peer) | missed},
        **{name: {"rows": dict.fromkeys(names, mine)} for name in rows.EAGER},
        rows.PLAN: {"rows": dict.fromkeys(names, 0.2 * mine)},
        rows.RAY: {"rows": dict.fromkeys(names, 2 * peer)},
    }


def made_up_costs() -> dict[str, Any]:
    shares = {**dict.fromkeys(costs.PARTS, 0.1), "engine": 0.3, "the rest": 0.1}
    one = {**dict.fromkeys(costs.COLUMNS, 1234.0), "shares": shares}
    names = ["add", "retained pass", "pass, both ways"]
    names += [
        "round trip of a chain of 100, both ways",
        "call of a fan-out of 64, both ways",
    ]
    names += [f"identity {size}" for size in rows.BYTES]
    names += [f"step of MLP {width} wide" for width in rows.WIDTHS]
    return {"rows": dict.fromkeys(names, one)}
