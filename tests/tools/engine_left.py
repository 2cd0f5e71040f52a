"""What is left in engines and their stores, and what is taken from there."""

from collections.abc import Container, Mapping
from typing import Any

from jdag.engine.protocol import AnyKey, Key, LeafId, Return


def leftovers(places: Mapping[str, Any], dropped: Container[LeafId]) -> list[str]:
    """What living workers hold although nothing is going on; leaves may stay.

    But for those that were dropped.
    """
    found: list[str] = []
    for name, place in places.items():
        engine: Any = place.engine
        state = engine._state
        kept = {
            "contexts": state.contexts,
            "passes": engine.live_passes,
            "jobs": state.jobs,
            "soon": state.soon,
            "effects": state.out,
            "requests": engine._reads._requests,
            "after": state.after,
            "held": engine._frames._held,
            "unacknowledged": state.assignments,
            "programs": place.running,
            "values": [
                key for key in place.values if key.kind != "leaf" or key.name in dropped
            ],
        }
        found.extend(f"{name}: {what} {it}" for what, it in kept.items() if it)
    return found


def taken(store: dict[Key, Any], result: Any) -> Any:
    """What a program is resumed with; values that it fetched are taken at once."""
    match result:
        case (Return(result=made, failure=failure),):  # News of a program.
            return made, failure
        case tuple():
            pass
        case _:
            return result
    taken = tuple(store[what] if isinstance(what, AnyKey) else what for what in result)
    for what in result:
        if isinstance(what, AnyKey) and what.kind == "reading":
            del store[what]
    return taken
