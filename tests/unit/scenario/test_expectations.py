"""Expectations are compared exactly, say what they miss, and never name nothing."""

from fractions import Fraction

import pytest

from jdag.errors import ScenarioError
from jdag.scenario.expectations import judge, refuse_unknown

FIGURES = {"outcome": "", "loss": "", "bubble": "", "names": "", "same": ""}


def met(expect, **figures):
    judged = judge(expect, {"outcome": "finished", **figures})
    return [one.met for one in judged if one.figure != "outcome"]


@pytest.mark.parametrize(
    ("wanted", "got", "is_met"),
    [
        ({"min": 1}, 1, True),
        ({"min": 1}, 0.999, False),
        ({"max": 1}, 1, True),
        ({"above": 1}, 1, False),
        ({"below": 1}, 0.5, True),
        ({"below": 1}, 1, False),
        ({"min": 1, "max": 2}, 3, False),
        (1, 1, True),
        (1, 1.0, True),
        (1, True, False),
        (True, True, True),
        ("3/11", Fraction(3, 11), True),
        ("3/11", 3 / 11, False),
        ({"max": "3/11"}, Fraction(4, 11), False),
        ({"max": 1e-5}, float("nan"), False),
        ({"max": 1e-5}, float("inf"), False),
        ({"min": 1e-5}, None, False),
        ("x", "x", True),
        (["x"], ("x",), True),
        (["x"], ("x", "y"), False),
        ({"contains": "x"}, ("a:x", "b"), True),
        ({"contains": "x"}, "a:x", True),
        ({"contains": "x"}, (), False),
    ],
)
def test_a_figure_is_compared(wanted, got, is_met):
    assert all(met({"loss": wanted}, loss=got)) is is_met


def test_a_figure_by_worker_is_compared_for_each():
    third = {"a": Fraction(1, 3), "b": Fraction(1, 3)}
    assert met({"bubble": "1/3"}, bubble=third) == [True]
    assert met({"bubble": "1/3"}, bubble={**third, "b": Fraction(1, 2)}) == [False]
    assert met({"bubble": {"max": 0.4}}, bubble={**third, "b": 0.5}) == [False]
    assert met({"bubble": {"max": 0.4}}, bubble={}) == [False]


def test_a_figure_that_is_not_there_is_not_met():
    judged = judge({"loss": {"max": 1}}, {"outcome": "failed"})
    assert [(one.figure, one.got, one.met) for one in judged] == [
        ("outcome", "failed", False),
        ("loss", None, False),
    ]


def test_who_says_nothing_of_the_outcome_expects_it_finished():
    assert not all(
        one.met for one in judge({"loss": 1}, {"outcome": "stuck", "loss": 1})
    )
    stuck = judge({"outcome": "stuck"}, {"outcome": "stuck"})
    assert [one.met for one in stuck] == [True]


@pytest.mark.parametrize(
    ("expect", "said"),
    [
        ({}, "expect is empty: expected the figures outcome, loss"),
        ({"los": 1}, r"there is no such figure \(did you mean loss\?\): expected one"),
        ({"loss": {}}, "expected a value, or some of min, max"),
        ({"loss": {"least": 1}}, "no such comparison: expected one of min, max"),
        ({"loss": {"min": "x"}}, "expect.loss.min = 'x': expected a number"),
        ({"loss": {"min": "1/0"}}, "expected a number"),
        ({"loss": {"min": float("inf")}}, "expected a number"),
        ({"loss": {"min": True}}, "expected a number"),
        ({"outcome": "done"}, "expected one of finished, failed, stuck"),
    ],
)
def test_an_expectation_that_names_nothing_is_refused(expect, said):
    with pytest.raises(ScenarioError, match=said):
        refuse_unknown(expect, FIGURES)
