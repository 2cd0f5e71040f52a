"""The list of faults matches the sources, and the runner's verdicts are right."""

import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests import mutants

pytestmark = pytest.mark.once

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


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # None is needed.
    made = tmp_path / "tree"
    (made / "tests").mkdir(parents=True)
    (made / "halves.py").write_text(SOURCE)
    (made / "test_halves.py").write_text(TEST)
    (made / "tests" / "mutants.toml").write_text(LIST)
    (made / "pytest.ini").write_text("[pytest]\n")
    subprocess.run(["git", "init", "-q", str(made)], check=True)
    return made


def test_every_fault_of_the_list_can_be_applied_and_names_existing_tests():
    listed = mutants.listed(mutants.ROOT)
    facts = Counter(mutant.fact for mutant in listed)
    assert [fact for fact, count in facts.items() if count > 1] == []
    wrong = []
    for mutant in listed:
        files = [test.partition("::")[0] for test in mutant.tests]
        wrong += [file for file in files if not (mutants.ROOT / file).exists()]
        if not mutant.retired:
            assert files, mutant.fact
            try:
                mutant.mutated(mutants.ROOT)
            except ValueError as error:
                wrong.append(f"{mutant.fact}: {error}")
    assert wrong == []


def test_killed_and_surviving_faults_are_reported_and_the_tree_is_unchanged(
    tree, capsys
):
    assert mutants.main(["--only", "half, not"], tree) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].split(maxsplit=2) == ["1", "killed", "a half, not a third"]
    assert said[1].strip() == "test_halves.py::test_six_is_halved"
    assert said[2] == "1 killed"
    assert mutants.main(["--only", "rounded"], tree) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].split()[1] == "SURVIVED" and said[-1] == "1 SURVIVED"
    assert (tree / "halves.py").read_text() == SOURCE


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


def test_tests_that_fail_without_a_fault_end_the_run(tree, capsys):
    (tree / "test_halves.py").write_text(TEST.replace("== 3", "== 4"))
    assert mutants.main(["--only", "half, not"], tree) == 2
    assert "fail without a fault" in capsys.readouterr().out
