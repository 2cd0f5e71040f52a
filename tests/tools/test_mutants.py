"""The list of faults matches the sources, and the runner's verdicts are right."""

import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests import ROOT
from tests.tools import mutants

# A tree with one function and a test that covers half of it.
SOURCE = "def halved(number):\n    return number // 2\n"
TEST = """
from halves import halved


def test_six_is_halved():
    assert halved(6) == 3
"""
LIST = """
[[mutant]]
fact = "a half, not a third"
file = "halves.py"
before = "// 2"
after = "// 3"
tests = ["test_halves.py"]

[[mutant]]
fact = "odd numbers are rounded down"
file = "halves.py"
before = "number // 2"
after = "-(-number // 2)"
tests = ["test_halves.py"]

[[mutant]]
fact = "it ends"
file = "halves.py"
before = "    return"
after = "    while number == 6: pass\\n    return"
tests = ["test_halves.py"]

[[mutant]]
fact = "a text that is gone"
file = "halves.py"
before = "number / 2"
after = "number"
tests = ["test_halves.py"]

[[mutant]]
fact = "no Python"
file = "halves.py"
before = "return"
after = "return return"
tests = ["test_halves.py"]

[[mutant]]
fact = "what was given up"
file = "halves.py"
before = "long gone"
after = ""
tests = []
retired = "thirds are not asked for"
"""
# The first tier has one of its tests, and of its second file none.
TIERS = {
    "conftest.py": """
import os

assert "PYTHONDONTWRITEBYTECODE" not in os.environ  # It makes each run slower.


def pytest_collection_modifyitems(items):
    if os.environ["JDAG_TIER"] == "first":
        items[:] = [item for item in items if "second" not in item.name]
""",
    "test_halves.py": f"{TEST}\n\ndef test_second():\n    assert halved(8) == 4\n",
    "test_whole.py": """
from halves import halved


def test_second_of_five():
    assert halved(5) == 2
""",
    "tests/tools/mutants.toml": """
[[mutant]]
fact = "six"
file = "halves.py"
before = "number // 2"
after = "number // 3"
tests = ["test_halves.py"]

[[mutant]]
fact = "eight"
file = "halves.py"
before = "number // 2"
after = "min(number, 7) // 2"
tests = ["test_halves.py"]

[[mutant]]
fact = "five"
file = "halves.py"
before = "number // 2"
after = "-(-number // 2)"
tests = ["test_whole.py"]

[[mutant]]
fact = "ten"
file = "halves.py"
before = "number // 2"
after = "min(number, 9) // 2"
tests = ["test_halves.py", "test_whole.py"]
""",
}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # None is needed.
    made = tmp_path / "tree"
    (made / "tests" / "tools").mkdir(parents=True)
    (made / "halves.py").write_text(SOURCE)
    (made / "test_halves.py").write_text(TEST)
    (made / "tests" / "tools" / "mutants.toml").write_text(LIST)
    (made / "pytest.ini").write_text("[pytest]\n")
    subprocess.run(["git", "init", "-q", str(made)], check=True)
    return made


@pytest.fixture
def tiers(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    for name, text in TIERS.items():
        (tree / name).write_text(text)
    return tree


def exists(test: str) -> bool:
    file, _, name = test.partition("[")[0].partition("::")
    path = ROOT / file
    return path.exists() and (not name or f"def {name}(" in path.read_text())


def test_every_fault_of_the_list_can_be_applied_and_names_existing_tests():
    listed = mutants.listed(ROOT)
    facts = Counter(mutant.fact for mutant in listed)
    assert [fact for fact, count in facts.items() if count > 1] == []
    wrong = []
    for mutant in listed:
        files = [test.partition("::")[0] for test in mutant.tests]
        wrong += [test for test in mutant.tests if not exists(test)]
        if not mutant.retired:
            assert files, mutant.fact
            try:
                mutant.mutated(ROOT)
            except ValueError as error:
                wrong.append(f"{mutant.fact}: {error}")
    assert wrong == []


def test_killed_and_surviving_faults_are_reported_and_the_tree_is_unchanged(
    tree, capsys
):
    assert mutants.main(["--only", "half, not"], tree) == 0
    said = capsys.readouterr().out.splitlines()
    number, verdict, seconds, unit, fact = said[0].split(maxsplit=4)
    assert (number, verdict, fact) == ("1", "killed", "a half, not a third")
    assert 0 <= int(seconds) < 60 and unit == "s"
    assert said[1].strip() == "test_halves.py::test_six_is_halved"
    assert said[2] == "1 killed"
    assert mutants.main(["--only", "rounded"], tree) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].split()[1] == "SURVIVED" and said[2] == "1 SURVIVED"
    assert (tree / "halves.py").read_text() == SOURCE


def test_each_fault_is_tried_in_the_first_tier_then_in_the_whole(
    tiers, tmp_path, capsys
):
    results = tmp_path / "results.jsonl"
    options = ["-n", "2", "--no-clean", "--results", str(results)]
    assert mutants.main(options, tiers) == 1
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert [*lines[0]] == ["number", "fact", "file", "verdict", "seconds", "why"]
    assert [(line["fact"], line["verdict"], line["why"]) for line in lines] == [
        ("six", "killed", "test_halves.py::test_six_is_halved"),
        ("eight", "second", "test_halves.py::test_second"),
        ("five", "second", "test_whole.py::test_second_of_five"),
        ("ten", "SURVIVED", "test_halves.py test_whole.py"),
    ]
    assert all(line["file"] == "halves.py" and line["seconds"] > 0 for line in lines)
    counts, closing, bound = capsys.readouterr().out.splitlines()[-3:]
    assert counts == "1 SURVIVED, 1 killed, 2 second"
    assert closing.startswith("first tier killed 1 of 4 (25.0%), the whole 3 of 4; ")
    assert "nine in ten" in bound


def test_the_first_tier_must_kill_nine_in_ten_of_the_whole_list():
    counts = Counter(killed=372, second=19, retired=1)
    assert mutants.summed_up(counts, 2467.4, True) == (
        [
            "372 killed, 1 retired, 19 second",
            "first tier killed 372 of 391 (95.1%), the whole 391 of 391; "
            "41 minutes 7 seconds",
        ],
        0,
    )
    nine, eight = Counter(killed=9, second=1), Counter(killed=8, second=1)
    assert mutants.summed_up(nine, 1, True)[1] == 0
    assert mutants.summed_up(eight, 1, True)[1] == 1
    assert mutants.summed_up(eight, 1, False)[1] == 0
    for verdict in ("SURVIVED", "STALE", "BROKEN"):
        assert mutants.summed_up(nine + Counter([verdict]), 1, False)[1] == 1


@pytest.mark.second
def test_a_fault_whose_tests_hang_counts_as_killed(tree, capsys):
    assert mutants.main(["--only", "it ends", "--limit", "3"], tree) == 0
    assert "killed" in (said := capsys.readouterr().out) and "hang" in said


def test_stale_and_broken_entries_fail_the_run_and_retired_ones_do_not(tree, capsys):
    assert mutants.main(["--only", "gone"], tree) == 1
    assert "STALE" in capsys.readouterr().out
    assert mutants.main(["--only", "no Python"], tree) == 1
    assert "BROKEN" in capsys.readouterr().out
    assert mutants.main(["--only", "given up"], tree) == 0
    assert "1 retired" in capsys.readouterr().out


@pytest.mark.second
def test_tests_that_fail_without_a_fault_end_the_run(tiers, capsys):
    text = (tiers / "test_halves.py").read_text()
    (tiers / "test_halves.py").write_text(text.replace("== 4", "== 5"))
    assert mutants.main(["--only", "eight"], tiers) == 2
    assert "fail without a fault" in capsys.readouterr().out
    assert mutants.main(["--only", "eight", "--no-clean"], tiers) == 0
    assert "1 second" in capsys.readouterr().out
