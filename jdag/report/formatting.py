"""Figures with units, by the end of their name, and few digits."""

from collections.abc import Mapping, Sequence
from typing import Any

_TIMES = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us"), (1, "ns"))
_SIZES = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))
_SHARES = ("bubble", "accuracy")
_ITEMS_MAX = 12


def formatted(name: str, value: Any) -> str:
    """Return a figure as text: 1352036 of `..._ns` is 1.352 ms, a share is in %."""
    if isinstance(value, Mapping):
        return _listed([f"{key}: {formatted(name, one)}" for key, one in value.items()])
    if isinstance(value, list | tuple):
        return _listed([formatted(name, one) for one in value])
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, int | float) and _is_share(name):
        return f"{100 * value:.2f} %"
    if isinstance(value, int):
        return _whole(name, value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _is_share(name: str) -> bool:
    return any(part in _SHARES for part in name.split("_"))


def _listed(parts: Sequence[str]) -> str:
    more = len(parts) - _ITEMS_MAX
    ending = [f"and {more} more"] if more > 0 else []
    return ", ".join([*parts[:_ITEMS_MAX], *ending])


def _whole(name: str, value: int) -> str:
    if name.endswith("_ns"):
        return _scaled(value, _TIMES)
    if name.endswith("_bytes"):
        return _scaled(value, _SIZES)
    return f"{value:,}"


def _scaled(value: int, units: tuple[tuple[int, str], ...]) -> str:
    for size, unit in units:
        if abs(value) >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value} {units[-1][1]}"
