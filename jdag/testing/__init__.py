"""Property tests of programs over workers: Hypothesis strategies, and a pytest plugin.

    from hypothesis import given
    from jdag.testing import assert_equals_oracle, programs

    @given(programs())
    def test_no_order_of_events_changes_a_gradient(program):
        assert_equals_oracle(program)

The strategies need `jdag[testing]`, and names are imported at their first use.
"""

from importlib import import_module
from typing import Any

from jdag.errors import ScenarioError

_OF = {
    **dict.fromkeys(["assert_equals_oracle", "Violation"], "jdag.testing.checks"),
    "Program": "jdag.testing.drawn",
    **dict.fromkeys(
        ["clusters", "faults", "fault_budgets", "networks", "orders", "programs"],
        "jdag.testing.strategies",
    ),
    "schedules": "jdag.testing.strategies",
}
__all__ = [*_OF]  # noqa: PLE0604 - All of them are texts.


def __getattr__(name: str) -> Any:
    if name not in _OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found = getattr(import_module(_OF[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        said = f"jdag.testing.{name} needs Hypothesis: pip install 'jdag[testing]'"
        raise ScenarioError(said) from error
    return globals().setdefault(name, found)
