"""What the README prints runs as printed."""

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import jdag
from jdag.playing import play
from jdag.scenario import load
from jdag.sim.simulation import Simulation

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


# ----------------------------------------------------------- the table of names

# What the README's short names are.
KNOWN: dict[str, Any] = {
    "jdag": jdag,
    "cluster": jdag.Cluster,
    "ctx": jdag.Context,
    "ref": jdag.Ref,
    "optimizer": jdag.Optimizer,
}


def rows() -> list[list[str]]:
    """The rows of the table of PyTorch's names: theirs, ours, what differs."""
    section = README.read_text().partition("## Coming from PyTorch")[2]
    section = section.partition("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def code(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def tree_of(span: str) -> ast.expr | None:
    """A span of code as an expression, None if it is not one of ours."""
    span = re.sub(r"=(?=[,)])", "=None", span.lstrip("@"))
    try:
        return ast.parse(span, mode="eval").body
    except SyntaxError:
        return None


def found(node: ast.expr) -> Any:
    """What a dotted name that begins with one of ours is; None for other names.

    Raises:
        AttributeError: there is no such thing.
    """
    match node:
        case ast.Name(id=name):
            return KNOWN.get(name)
        case ast.Attribute(value=value, attr=attr):
            owner = found(value)
            return None if owner is None else getattr(owner, attr)
    return None


def missing(text: str) -> list[str]:
    """The names of ours, and the keywords of calls, that are not there."""
    lacking = []
    for span in code(text):
        tree = tree_of(span)
        for node in [] if tree is None else ast.walk(tree):
            try:
                if isinstance(node, ast.Attribute):
                    found(node)
                elif isinstance(node, ast.Call) and found(node.func) is not None:
                    check_keywords(found(node.func), node)
            except AttributeError as error:
                lacking.append(f"{span}: {error}")
    return lacking


def check_keywords(called: Any, call: ast.Call) -> None:
    """Raise AttributeError where it does not take one of the keywords."""
    taken = dict(inspect.signature(called).parameters)
    if called is jdag.simulate:  # It hands its settings on to the driver.
        del taken["settings"]
        taken.update(inspect.signature(Simulation).parameters)
    if any(each.kind is each.VAR_KEYWORD for each in taken.values()):
        return
    for keyword in call.keywords:
        if keyword.arg not in taken:
            raise AttributeError(f"{called} takes no {keyword.arg}")


def test_each_of_our_names_for_those_of_pytorch_exists():
    assert len(rows()) > 50
    spans = [span for _, ours, differs in rows() for span in code(ours + differs)]
    named = [span for span in spans if span.lstrip("@").split(".")[0] in KNOWN]
    assert len(named) > 50
    for theirs, ours, differs in rows():
        if "to come" not in ours:
            assert not missing(ours + differs), theirs


def test_what_is_to_come_is_not_there_yet():
    coming = [ours for _, ours, _ in rows() if "to come" in ours]
    assert coming
    for ours in coming:
        assert len(missing(ours)) == len(code(ours)), f"{ours}: it is there now"


@pytest.mark.parametrize(
    "text",
    [
        "`cluster.putt(worker)`",
        "`ctx.backward(loss, retain=True)`",
        "`@jdag.programme`",
        "`jdag.Optimizer(tx, leaves, clip=1.0)`",
        "`ctx.call(ref.owned, fn)`",
    ],
)
def test_a_name_that_does_not_exist_is_noticed(text: str):
    assert missing(text)
