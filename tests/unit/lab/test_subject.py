"""What is explored, and what is refused before the first run."""

from functools import partial
from typing import Any

import jax
import pytest

from jdag.errors import ScenarioError
from jdag.lab.subject import Subject


def of_context(ctx, params):
    return ctx.call("b", abs, params["w"])


def of_cluster(cluster, scale=1.0):
    return cluster, scale


def subject(program: Any) -> Subject:
    return Subject(program, ["a", "b"], "real", {})


@pytest.mark.parametrize("program", [of_context, lambda: None, jax.jit(of_context)])
def test_a_function_that_does_not_take_a_cluster_alone_is_refused(program):
    said = (
        "program = .*a function with one argument, a cluster; wrap a program of "
        r"\(ctx, params\) in jdag\.scenario\.Case\(program, params, place"
    )
    with pytest.raises(ScenarioError, match=said):
        subject(program)


@pytest.mark.parametrize(
    "program", [of_cluster, partial(of_context, params={}), lambda *given: given, dict]
)
def test_a_function_that_can_take_a_cluster_alone_is_not_refused(program):
    assert subject(program).program is program
