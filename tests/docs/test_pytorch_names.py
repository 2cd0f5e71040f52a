"""Each name of jdag in the table for users of PyTorch exists, with its keywords."""

import inspect
import re
from functools import reduce
from typing import Any

import pytest

import jdag
from jdag.sim.settings import SimSettings
from tests import ROOT

# What the short names of the table are.
KNOWN: dict[str, Any] = {
    "jdag": jdag,
    "cluster": jdag.Cluster,
    "ctx": jdag.Context,
    "ref": jdag.Ref,
    "optimizer": jdag.Optimizer,
}


def rows() -> list[list[str]]:
    page = (ROOT / "docs" / "howto" / "pytorch-names.md").read_text(encoding="utf-8")
    lines = page.partition("\n## ")[0].splitlines()
    table = [line for line in lines if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def code(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def missing(text: str) -> list[str]:
    lacking = []
    for span in code(text):
        for name, given in re.findall(r"((?<![\w.])\w+(?:\.\w+)+)(?=(\(.*\))?)", span):
            first, *rest = name.split(".")
            try:
                called = reduce(attribute, rest, KNOWN.get(first))
                if given and called is not None:
                    check_keywords(called, re.findall(r"(\w+)=", given))
            except AttributeError as error:
                lacking.append(f"{span}: {error}")
    return lacking


def attribute(owner: Any, name: str) -> Any:
    """An attribute; None where no class has its value, or of what is not ours."""
    if owner is None or name in getattr(owner, "__annotations__", ()):
        return None
    return getattr(owner, name)


def check_keywords(called: Any, keywords: list[str]) -> None:
    """Raise AttributeError where it does not take one of the keywords."""
    taken = dict(inspect.signature(called).parameters)
    if called is jdag.simulate:  # It hands its settings on to the driver.
        del taken["settings"]
        taken.update(inspect.signature(SimSettings).parameters)
    if any(each.kind is each.VAR_KEYWORD for each in taken.values()):
        return
    for keyword in keywords:
        if keyword not in taken:
            raise AttributeError(f"{called} takes no {keyword}")


def test_each_of_our_names_for_those_of_pytorch_exists():
    assert len(rows()) > 20
    spans = [span for _, ours, differs in rows() for span in code(ours + differs)]
    named = [span for span in spans if span.lstrip("@").split(".")[0] in KNOWN]
    assert len(named) > 20
    for theirs, ours, differs in rows():
        assert not missing(ours + differs), theirs


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
