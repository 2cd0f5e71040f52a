"""How the suite is spread over processes: what belongs together, and what begins first.

Tests of one file stay together, so that a function is compiled, and a fixture of a
module made, in one process alone; so do those that need worker processes of one kind.
What takes longest begins first, so that no process is left alone at the end.
"""

from typing import Any

from xdist.scheduler import LoadScopeScheduling

from tests.unit.test_parallel import PARTS

# The driver of the conformance suite whose workers are processes, kept for other tests.
REAL = "socket"
# Files whose tests compile the same functions, or use these processes.
TOGETHER = {
    f"tests/{path}.py": group
    for group, paths in {
        "random programs": ("properties/test_random", "properties/test_plan_runs"),
        REAL: (
            "unit/scenarios/test_compiled_scenarios",
            "unit/api/test_drivers",
            "unit/scenario/test_driving",
            "unit/runtime/test_sizes",
        ),
    }.items()
    for path in paths
}
# Files each of whose tests is a process of its own.
APART = ("tests/unit/test_parallel.py",)
LONGEST = (
    *[
        f"tests/unit/test_parallel.py::test_with_eight_devices[{part}]"
        for part in PARTS
    ],
    "random programs",
    REAL,
    "tests/properties/test_engine_random.py",
    "tests/docs/test_blocks.py",
    "tests/unit/paper/test_gpu.py",
    "tests/processes/test_failing_workers.py",
    "tests/unit/processes/launch/test_main_session.py",
    "tests/unit/compute/test_exported.py",
    "tests/unit/scenarios/test_hybrid.py",
    "tests/unit/scenarios/test_scenarios.py",
)


def group_of(test: str) -> str:
    file, _, name = test.partition("::")
    if file.startswith("tests/conformance/") and f"[{REAL}" in name:
        return REAL
    return test if file in APART else TOGETHER.get(file, file)


def place_of(test: str) -> int:
    """Return when a test has its turn: with others of the longest, or after them."""
    group = group_of(test)
    return LONGEST.index(group) if group in LONGEST else len(LONGEST)


class Groups(LoadScopeScheduling):
    def __init__(self, config: Any, log: Any = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # By their numbers of tests.

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)

    def remove_node(self, node: Any) -> str | None:
        """Return the test in which a process has crashed; others take over the rest.

        xdist (3.8) would run this test again, and hand out finished groups, for which
        no report comes, so that it would wait for ever.
        """
        groups = self.assigned_work.pop(node)
        pending = [
            (group, test)
            for group, tests in groups.items()
            for test, is_done in tests.items()
            if not is_done
        ]
        if not pending:
            return None
        group, crashed = pending[0]
        groups[group][crashed] = True
        for group, tests in groups.items():
            if not all(tests.values()):
                self.workqueue[group] = tests
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed

    def schedule(self) -> None:
        """Give two groups also to a process that replaces a crashed one.

        A process begins its last test only when it knows that no other follows.
        """
        is_first = self.collection is None
        super().schedule()
        if not is_first:
            for node in self.nodes:
                self._reschedule(node)
