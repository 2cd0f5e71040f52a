"""What the README prints runs as printed."""

import re
from pathlib import Path

import pytest

from jdag.playing import play
from jdag.scenario import load

README = Path(__file__).parents[1] / "README.md"


def blocks(language: str) -> list[str]:
    """The README's blocks of code in a language."""
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_examples_run_as_printed(capsys: pytest.CaptureFixture[str]):
    first, second, _ = blocks("python")
    space: dict[str, object] = {}
    exec(compile(first, "README.md", "exec"), space)
    assert capsys.readouterr().out.endswith(" (8, 16)\n")
    exec(compile(second, "README.md", "exec"), space)
    assert capsys.readouterr().out == "0.8125 ps1 0.0625\n"


def test_the_scenario_is_met_with_the_program_beside_it(tmp_path: Path):
    (tmp_path / "lossy.toml").write_text(blocks("toml")[0])
    (tmp_path / "mine.py").write_text(blocks("python")[2])
    answer = play(load(tmp_path / "lossy.toml"), lambda done, total, numbers: None)
    assert answer.met, answer.judged
    assert answer.figures["resends"], answer.figures


def test_what_it_links_to_is_there():
    for target in re.findall(r"\]\(([^)#]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target
