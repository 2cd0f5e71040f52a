"""The library has one name for one thing."""

from tests import ROOT
from tests.tools.defined_twice import REASONS, defined_twice


def test_a_name_that_two_modules_define_has_a_reason():
    twice = defined_twice(ROOT / "jdag")
    assert twice.keys() == REASONS.keys()


def test_a_planted_pair_is_found_and_private_names_are_not(tmp_path):
    (tmp_path / "room").mkdir()
    (tmp_path / "one.py").write_text("class Call: ...\n_N = 1\nA = 1\ndef f(): B = 1\n")
    (tmp_path / "room/other.py").write_text("Call: type = int\n_N = 2\nB = 2\n")
    assert defined_twice(tmp_path) == {"Call": ["one.py", "room/other.py"]}
