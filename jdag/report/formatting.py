"""Formatting of metrics: few digits, and the unit in which the metric's name ends."""

from collections.abc import Mapping, Sequence
from typing import Any

_UNITS = {
    "_ns": ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us"), (1, "ns")),
    "_bytes": ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B")),
}
_SHARES = frozenset(["bubble", "accuracy"])
_ITEMS_MAX = 12


def formatted(name: str, value: Any) -> str:
    """Format a metric. Its name determines the unit: 1352036 of `x_ns` is 1.352 ms."""
    if isinstance(value, Mapping):
        return _listed([f"{key}: {formatted(name, v)}" for key, v in value.items()])
    if isinstance(value, list | tuple):
        return _listed([formatted(name, item) for item in value])
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, int | float) and not _SHARES.isdisjoint(name.split("_")):
        return f"{100 * value:.2f} %"
    if isinstance(value, int):
        for ending, units in _UNITS.items():
            if name.endswith(ending):
                return _scaled(value, units)
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def shortened(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _listed(parts: Sequence[str]) -> str:
    more = len(parts) - _ITEMS_MAX
    ending = [f"and {more} more"] if more > 0 else []
    return ", ".join([*parts[:_ITEMS_MAX], *ending])


def _scaled(value: int, units: tuple[tuple[int, str], ...]) -> str:
    for size, unit in units:
        if abs(value) >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value} {units[-1][1]}"
