"""Expectations of a scenario and the comparison of its figures with them.

[expect]
outcome = "finished"                       # equal
gradient_difference = { max = 1e-12 }      # min, max, above, below
bubble_max = "3/11"                        # an exact fraction
bubble = { below = 0.5 }                   # for each worker
owed_functions = { contains = "product" }  # a substring, or an item of a list
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

# Figures with a fixed set of values.
POSSIBLE: Mapping[str, tuple[str, ...]] = {"outcome": OUTCOMES, "error": ERRORS}


class Judged(NamedTuple):
    figure: str
    wanted: str
    got: Any
    met: bool


# Raised when "x", inf or "1/0" is converted to a number.
_NO_NUMBER = (TypeError, ValueError, OverflowError, ZeroDivisionError)


def _number(value: Any) -> Fraction:
    if isinstance(value, bool):
        raise TypeError(f"{value!r} is not a number")
    return Fraction(value)


def _contains(got: Any, expected: Any) -> bool:
    items = got if isinstance(got, list | tuple) else [got]
    return any(expected == item or str(expected) in str(item) for item in items)


COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    "min": lambda got, bound: _number(got) >= _number(bound),
    "max": lambda got, bound: _number(got) <= _number(bound),
    "above": lambda got, bound: _number(got) > _number(bound),
    "below": lambda got, bound: _number(got) < _number(bound),
    "contains": _contains,
}


def refuse_unknown(expect: Mapping[str, Any], figures: Mapping[str, str]) -> None:
    if not expect:
        raise ScenarioError(
            f"expect is empty: expected the figures {', '.join(figures)}"
        )
    for name, expected in expect.items():
        if name not in figures:
            raise ScenarioError(
                f"expect.{name} = {expected!r}: there is no such figure"
                f"{meant(name, figures)}: expected one of {', '.join(figures)}"
            )
        if name in POSSIBLE and expected not in POSSIBLE[name]:
            allowed = f"one of {', '.join(POSSIBLE[name])}"
            raise ScenarioError(unusable(f"expect.{name}", expected, allowed))
        if isinstance(expected, Mapping):
            for comparison, bound in expected.items():
                _refuse_bound(f"expect.{name}.{comparison}", comparison, bound)
            if not expected:
                allowed = f"a value, or some of {', '.join(COMPARE)}"
                raise ScenarioError(unusable(f"expect.{name}", expected, allowed))


def _refuse_bound(key: str, comparison: str, bound: Any) -> None:
    if comparison not in COMPARE:
        raise ScenarioError(
            f"{key} = {bound!r}: there is no such comparison: expected one of "
            f"{', '.join(COMPARE)}"
        )
    if comparison == "contains":
        return
    try:
        _number(bound)
    except _NO_NUMBER as error:
        allowed = "a number, or a fraction such as '3/11'"
        raise ScenarioError(unusable(key, bound, allowed)) from error


def judge(expect: Mapping[str, Any], figures: Mapping[str, Any]) -> list[Judged]:
    """Compare figures with their expectations. A missing figure counts as None.

    The default expectation of `outcome` is "finished".
    """
    judged = []
    for name, expected in {"outcome": "finished", **expect}.items():
        got = figures.get(name)
        bounds = expected if isinstance(expected, Mapping) else {"": expected}
        for comparison, bound in bounds.items():
            met = _is_met(comparison, got, bound)
            judged.append(Judged(name, f"{comparison} {bound}".lstrip(), got, met))
    return judged


def _is_met(comparison: str, got: Any, bound: Any) -> bool:
    if isinstance(got, Mapping):
        values = got.values()
        return bool(got) and all(_is_met(comparison, value, bound) for value in values)
    try:
        compare = COMPARE[comparison] if comparison else _is_equal
        return compare(got, bound)
    except _NO_NUMBER:
        return False  # Of a failed pass, a figure may be None.


def _is_equal(got: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return isinstance(got, list | tuple) and list(got) == expected
    if isinstance(got, bool) or isinstance(expected, bool):
        return got is expected
    try:
        return _number(got) == _number(expected)
    except _NO_NUMBER:
        return bool(got == expected)
