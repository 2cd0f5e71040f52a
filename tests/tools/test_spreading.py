"""What is said of files of tests is said of files that are there."""

import pytest

from tests import ROOT
from tests.tools.spreading import APART, LONGEST, TOGETHER, group_of, place_of

TREES, IDS = "tests/unit/wire/test_trees.py", "tests/conformance/test_ids.py"
ALONE = "tests/unit/test_parallel.py::test_it[x]"


def test_the_files_that_are_named_are_there_and_their_groups_are_used():
    files = [name for name in (*LONGEST, *TOGETHER) if ".py" in name]
    assert [file for file in files if not (ROOT / file.split("::")[0]).exists()] == []
    assert {*TOGETHER.values()} <= {*LONGEST}
    assert {*APART} <= {test.split("::")[0] for test in LONGEST}


@pytest.mark.parametrize(
    ("test", "group"),
    [
        (f"{TREES}::test_it[a-socket]", TREES),
        (f"{IDS}::test_it[socket]", "socket"),
        (f"{IDS}::test_it[socket-3]", "socket"),
        (f"{IDS}::test_it[sim]", IDS),
        ("tests/properties/test_plan_runs.py::test_it", "random programs"),
        ("tests/unit/scenario/test_driving.py::test_it[x]", "socket"),
        (ALONE, ALONE),
    ],
)
def test_a_test_belongs_to_its_file_or_to_what_its_file_shares(test: str, group: str):
    assert group_of(test) == group


def test_what_takes_longest_comes_before_the_rest():
    files = ("properties/test_random", "unit/paper/test_gpu", "unit/wire/test_trees")
    first, second, rest = [place_of(f"tests/{file}.py::test_it") for file in files]
    assert first < second < rest == place_of("tests/unit/processes/net/test_tls.py::x")
