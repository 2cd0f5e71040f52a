"""What is said of files of tests is said of files that are there."""

import pytest

from tests import ROOT
from tests.tools.spreading import APART, LONGEST, TOGETHER, group_of, place_of


def test_the_files_that_are_named_are_there_and_their_groups_are_used():
    files = [name for name in (*LONGEST, *TOGETHER) if ".py" in name]
    assert [file for file in files if not (ROOT / file.split("::")[0]).exists()] == []
    assert {*TOGETHER.values()} <= {*LONGEST}
    assert {*APART} <= {test.split("::")[0] for test in LONGEST}


@pytest.mark.parametrize(
    ("test", "group"),
    [
        (
            "tests/unit/wire/test_trees.py::test_it[a-socket]",
            "tests/unit/wire/test_trees.py",
        ),
        ("tests/conformance/test_ids.py::test_it[socket]", "socket"),
        ("tests/conformance/test_ids.py::test_it[socket-3]", "socket"),
        (
            "tests/conformance/test_ids.py::test_it[sim]",
            "tests/conformance/test_ids.py",
        ),
        ("tests/properties/test_plan_runs.py::test_it", "random programs"),
        ("tests/unit/scenario/test_driving.py::test_it[x]", "socket"),
        (
            "tests/unit/test_parallel.py::test_it[x]",
            "tests/unit/test_parallel.py::test_it[x]",
        ),
    ],
)
def test_a_test_belongs_to_its_file_or_to_what_its_file_shares(test: str, group: str):
    assert group_of(test) == group


def test_what_takes_longest_comes_before_the_rest():
    rest = place_of("tests/unit/wire/test_trees.py::test_it")
    assert place_of("tests/properties/test_random.py::test_it") < place_of(
        "tests/unit/paper/test_gpu.py::x"
    )
    assert (
        place_of("tests/unit/paper/test_gpu.py::x")
        < rest
        == place_of("tests/unit/processes/net/test_tls.py::x")
    )
