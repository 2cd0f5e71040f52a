"""Expectations of a scenario, and whether its figures meet them.

[expect]
outcome = "finished"                       # equal
gradient_difference = { max = 1e-12 }      # min, max, above, below
bubble_max = "3/11"                        # a fraction, exactly
bubble = { below = 0.5 }                   # of each worker
owed_functions = { contains = "product" }  # part of it, or one of its items
"""

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from jdag import errors
from jdag.errors import JdagError, ScenarioError, meant, unusable

OUTCOMES = ("finished", "failed", "stuck")
ERRORS = tuple(
    name
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, JdagError)
)

# The possible values of a figure, where they are known.
POSSIBLE: Mapping[str, tuple[str, ...]] = {"outcome": OUTCOMES, "error": ERRORS}


class Judged(NamedTuple):
    """One expectation: the figure, the wanted value, its value, whether it is met."""

    figure: str
    wanted: str
    got: Any
    met: bool


# Raised by conversion to a number: of "x", of inf, of "1/0".
_NO_NUMBER = (TypeError, ValueError, OverflowError, ZeroDivisionError)


def _number(value: Any) -> Fraction:
    if isinstance(value, bool):
        raise TypeError(f"{value!r} is no number")
    return Fraction(value)


def _contains(got: Any, wanted: Any) -> bool:
    items = got if isinstance(got, list | tuple) else [got]
    return any(wanted == item or str(wanted) in str(item) for item in items)


COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    "min": lambda got, wanted: _number(got) >= _number(wanted),
    "max": lambda got, wanted: _number(got) <= _number(wanted),
    "above": lambda got, wanted: _number(got) > _number(wanted),
    "below": lambda got, wanted: _number(got) < _number(wanted),
    "contains": _contains,
}


def refuse_unknown(expect: Mapping[str, Any], figures: Mapping[str, str]) -> None:
    """Refuse expectations of unknown figures or by unknown comparisons.

    Raises:
        ScenarioError: there are none, or one of no figure, or by no comparison.
    """
    if not expect:
        raise ScenarioError(
            f"expect is empty: allowed is something of the figures {', '.join(figures)}"
        )
    for name, wanted in expect.items():
        if name not in figures:
            raise ScenarioError(
                f"expect.{name} = {wanted!r}: there is no such figure"
                f"{meant(name, figures)}: allowed is one of {', '.join(figures)}"
            )
        if name in POSSIBLE and wanted not in POSSIBLE[name]:
            allowed = f"one of {', '.join(POSSIBLE[name])}"
            raise ScenarioError(unusable(f"expect.{name}", wanted, allowed))
        if isinstance(wanted, Mapping):
            for how, bound in wanted.items():
                _refuse_bound(f"expect.{name}.{how}", how, bound)
            if not wanted:
                raise ScenarioError(
                    f"expect.{name} = {{}}: it says nothing: allowed is a value, or "
                    f"some of {', '.join(COMPARE)}"
                )


def _refuse_bound(key: str, how: str, bound: Any) -> None:
    if how not in COMPARE:
        raise ScenarioError(
            f"{key} = {bound!r}: there is no such comparison: allowed is one of "
            f"{', '.join(COMPARE)}"
        )
    if how == "contains":
        return
    try:
        _number(bound)
    except _NO_NUMBER as error:
        allowed = "a number, or a fraction such as '3/11'"
        raise ScenarioError(unusable(key, bound, allowed)) from error


def judge(expect: Mapping[str, Any], figures: Mapping[str, Any]) -> list[Judged]:
    """Compare figures with their expectations; a missing figure is None.

    Whoever says nothing of the outcome expects it to be "finished".
    """
    judged = []
    for name, wanted in {"outcome": "finished", **expect}.items():
        got = figures.get(name)
        bounds = wanted if isinstance(wanted, Mapping) else {"": wanted}
        for how, bound in bounds.items():
            met = _compare(how, got, bound)
            judged.append(Judged(name, f"{how} {bound}".lstrip(), got, met))
    return judged


def _compare(how: str, got: Any, bound: Any) -> bool:
    if isinstance(got, Mapping):
        return bool(got) and all(_compare(how, one, bound) for one in got.values())
    try:
        return COMPARE[how](got, bound) if how else _equal(got, bound)
    except _NO_NUMBER:
        return False  # There is no such number: the pass did not get that far.


def _equal(got: Any, wanted: Any) -> bool:
    if isinstance(wanted, list):
        return list(got) == wanted if isinstance(got, list | tuple) else False
    if isinstance(got, bool) or isinstance(wanted, bool):
        return got is wanted
    try:
        return _number(got) == _number(wanted)
    except _NO_NUMBER:
        return bool(got == wanted)
