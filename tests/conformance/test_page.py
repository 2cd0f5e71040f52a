"""The page of facts names tests that exist, and every test of the suite is on it."""

import ast
import re
from pathlib import Path

from tests import conformance

HERE = Path(__file__).parent


def on_the_page() -> list[str]:
    assert conformance.__doc__
    return re.findall(r"^    (\w+\.\w+)$", conformance.__doc__, re.MULTILINE)


def written() -> list[str]:
    """Each test of the suite as file.function, this file's left out."""
    return [
        f"{path.stem}.{node.name}".replace("test_", "", 1).replace(".test_", ".")
        for path in sorted(HERE.glob("test_*.py"))
        if path != Path(__file__)
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


def test_every_fact_has_its_tests_and_every_test_its_fact():
    assert len(on_the_page()) > 60
    assert sorted(on_the_page()) == sorted(written())


def test_every_line_of_the_page_that_states_a_fact_is_followed_by_a_test():
    assert conformance.__doc__
    facts = re.split(r"^- ", conformance.__doc__, flags=re.MULTILINE)[1:]
    assert len(facts) > 35
    for fact in facts:
        assert re.search(r":\n    \w+\.\w+$", fact, re.MULTILINE), fact
