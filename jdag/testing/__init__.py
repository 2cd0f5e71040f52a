"""Property tests of distributed programs: Hypothesis strategies and a pytest plugin.

    from hypothesis import given
    from jdag.testing import assert_equals_oracle, programs

    @given(programs())
    def test_no_order_of_events_changes_a_gradient(program):
        assert_equals_oracle(program)

The strategies need `jdag[testing]`. Names are imported at first use.
"""

from importlib import import_module
from typing import Any

from jdag.errors import ScenarioError

_HOMES = {
    **dict.fromkeys(["assert_equals_oracle", "Violation"], "jdag.testing.checks"),
    "Program": "jdag.testing.drawn",
    **dict.fromkeys(
        ["clusters", "faults", "fault_budgets", "networks", "orders", "programs"],
        "jdag.testing.strategies",
    ),
    "schedules": "jdag.testing.strategies",
}
__all__ = [*_HOMES]  # noqa: PLE0604 - All of them are strings.


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        message = f"jdag.testing.{name} needs Hypothesis: pip install 'jdag[testing]'"
        raise ScenarioError(message) from error
    return globals().setdefault(name, value)
