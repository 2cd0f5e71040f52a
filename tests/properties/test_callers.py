"""The program of many contexts of several callers."""

from callers import callers
from jdag.errors import ScenarioError
from tests.tools.error_texts import fails_with


def test_a_server_alone_has_no_callers():
    with fails_with(ScenarioError, "properties.a_callers_needs_a_server"):
        callers(["a"])
