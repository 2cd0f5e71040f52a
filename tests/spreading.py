"""How the suite is spread over processes: what belongs together, and what begins first.

Tests of one file stay together, so that a function is compiled, and a fixture of a
module made, in one process alone; so do those that need worker processes of one kind.
What takes longest begins first, so that no process is left alone at the end.
"""

from typing import Any

from xdist.scheduler import LoadScopeScheduling

# Files whose tests compile the same functions.
TOGETHER = dict.fromkeys(
    [
        f"tests/test_{name}.py"
        for name in ("random", "failures", "hessian", "issuers", "seeds")
    ],
    "random programs",
)
# Drivers of the conformance suite whose workers are processes, kept for the next test.
CARRIERS = ("socket", "grpc")
LONGEST = (
    "tests/test_parallel.py",
    "random programs",
    *CARRIERS,
    "tests/test_driving.py",
    "tests/test_engine_random.py",
    "tests/test_gpu.py",
    "tests/test_failing_workers.py",
    "tests/test_session.py",
    "tests/test_exported.py",
    "tests/test_failing_carriers.py",
    "tests/test_hybrid.py",
    "tests/test_scenarios.py",
)


def group_of(test: str) -> str:
    """Return what a test, by its id, belongs to."""
    file, _, name = test.partition("::")
    if file.startswith("tests/conformance/"):
        for carrier in CARRIERS:
            if f"[{carrier}" in name:
                return carrier
    return TOGETHER.get(file, file)


def place_of(test: str) -> int:
    """Return when a test has its turn: with others of the longest, or after them."""
    group = group_of(test)
    return LONGEST.index(group) if group in LONGEST else len(LONGEST)


class Groups(LoadScopeScheduling):
    """Hands out whole groups, in the order of their first tests."""

    def __init__(self, config: Any, log: Any = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # By their numbers of tests.

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
