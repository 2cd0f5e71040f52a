"""Figures as people read them: units from the end of the name, few digits."""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

_TIMES = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us"), (1, "ns"))
_SIZES = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))


def shown(name: str, value: Any) -> str:
    """Write one figure: 1352036 of `..._ns` is 1.352 ms."""
    if isinstance(value, Mapping):
        return "  ".join(f"{key} {shown(name, one)}" for key, one in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(shown(name, one) for one in value)
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, int):
        return _whole(name, value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if name.startswith("bubble"):
        return (
            f"{float(Fraction(value)):.1%} ({value})"
            if len(value) < 16
            else (f"{float(Fraction(value)):.1%}")
        )
    return str(value)


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
