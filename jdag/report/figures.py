"""Figures as people read them: units from the ends of their names."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

_TIMES = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us"), (1, "ns"))
_BYTES = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))
_ITEMS_MAX = 8
_SHARES = ("bubble", "accuracy")


def time_said(time_ns: float) -> str:
    """A time with the unit that suits it: 1234 is 1.234 us."""
    return _scaled(time_ns, _TIMES)


def bytes_said(size_bytes: float) -> str:
    """A size with the unit that suits it: 2048 is 2 KiB."""
    return _scaled(size_bytes, _BYTES)


def _scaled(value: float, units: Sequence[tuple[int, str]]) -> str:
    for size, unit in units:
        if abs(value) >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value:g} {units[-1][1]}"


def shown(name: str, value: Any) -> str:
    """A figure's value as text: `_ns` and `_bytes` get units, shares are percent."""
    match value:
        case None:
            return "none"
        case bool():
            return "yes" if value else "no"
        case Mapping():
            return _joined([f"{key} {shown(name, item)}" for key, item in value.items()])
        case list() | tuple():
            return _joined([shown(name, item) for item in value])
        case int() | float():
            return _number(name, value)
        case str() if _is_share(name) and "/" in value:
            return f"{value} = {_percent(float(Fraction(value)))}"
        case _:
            return str(value)


def _joined(parts: Sequence[str]) -> str:
    shown_parts = list(parts[:_ITEMS_MAX])
    left_out = len(parts) - len(shown_parts)
    if left_out:
        shown_parts.append(f"and {left_out:,} more")
    return ", ".join(shown_parts)


def _is_share(name: str) -> bool:
    return any(word in name.split("_") for word in _SHARES)


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"


def _number(name: str, value: float) -> str:
    if name.endswith("_ns"):
        return time_said(value)
    if name.endswith("_bytes"):
        return f"{value:,} ({bytes_said(value)})" if value >= 1 << 10 else f"{value:,}"
    if _is_share(name):
        return _percent(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
