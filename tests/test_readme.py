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


def block(language: str, word: str) -> str:
    """The one block of code in a language that has this word in it."""
    (found,) = [block for block in blocks(language) if word in block]
    return found


def test_the_examples_run_as_printed(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    space: dict[str, object] = {}

    def printed(word: str) -> str:
        exec(compile(block("python", word), "README.md", "exec"), space)
        return capsys.readouterr().out

    assert printed("ctx.gradient(w0)").endswith(" (8, 16)\n")
    assert printed("halve") == "0.8125 ps1 0.0625\n"
    assert printed("jdag.hvp(") == "[(8, 16), (16, 1)]\n"
    said, found = printed("cluster.run").splitlines()
    assert said == "trainer1 made contexts 3.1 to 3.50" and found == "[ 1. -2.  3.]"
    assert printed("cluster.save").endswith(" True\n")
    assert printed("on_cotangent") == "w0 gained 2.0 on ps0\n"
    first, second, third = printed("timeout_s").splitlines()
    assert first.startswith("500000000 pass 1 took longer than timeout_s=0.5")
    assert second.startswith("  call 1: trainer -> ps0, sent for ")
    assert third.startswith("[0.5403023")


def test_the_scenario_is_met_with_the_program_beside_it(tmp_path: Path):
    (tmp_path / "lossy.toml").write_text(blocks("toml")[0])
    (tmp_path / "mine.py").write_text(block("python", "Case("))
    answer = play(load(tmp_path / "lossy.toml"), lambda done, total, numbers: None)
    assert answer.met, answer.judged
    assert answer.figures["resends"], answer.figures


def test_what_it_links_to_is_there():
    for target in re.findall(r"\]\(([^)#]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target
