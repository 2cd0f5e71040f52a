"""Every Python block of README.md and docs/ runs alone, and prints what is shown."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests import ROOT
from tests.tools.documents import Block, Ran, blocks_of, difference, documents, runnable

WIDTH_MAX = 90  # Of code; furo shows 84 columns.
PAGES = [path for path in documents() if runnable(path)]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def ran() -> dict[str, Ran]:
    """What all blocks printed, by place. They run in one process, as users run them."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    environ.pop("XLA_FLAGS", None)  # The first tier's compile to other last bits.
    command = [sys.executable, "-m", "tests.tools.documents", "--json"]
    done = subprocess.run(
        [*command, *map(str, PAGES)],
        cwd=ROOT, env=environ, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    pages = [json.loads(line) for line in done.stdout.splitlines()]
    return {each["place"]: Ran(**each) for page in pages for each in page}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_its_blocks_run_alone_and_print_what_is_shown(page: Path, ran: dict[str, Ran]):
    wrong = [difference(each, ran[str(each)]) for each in runnable(page)]
    assert not any(wrong), "\n\n".join(filter(None, wrong))


@pytest.mark.parametrize("page", documents(), ids=name_of)
def test_its_toml_can_be_read(page: Path):
    for each in blocks_of(page):
        if each.language == "toml":
            tomllib.loads(each.text)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_its_code_fits_the_page(page: Path):
    for each in runnable(page):
        wide = [line for line in each.text.splitlines() if len(line) > WIDTH_MAX]
        assert not wide, f"{each}: more than {WIDTH_MAX} columns: {wide[0]}"


@pytest.mark.parametrize("page", documents(), ids=name_of)
def test_a_block_that_is_not_run_says_why(page: Path):
    for each in blocks_of(page):
        assert each.not_run is None or len(each.not_run) > 10, each


def a_block(output: str | None) -> Block:
    return Block("x.md", 3, "python", "print(1)\n", (0, 0), output=output)


def test_a_wrong_output_an_error_and_a_hidden_output_are_noticed():
    came = Ran("x.md:3", "1\n", None)
    assert difference(a_block("1\n"), came) is None
    assert "shows\n2" in (difference(a_block("2\n"), came) or "")
    assert "does not show" in (difference(a_block(None), came) or "")
    assert "oh" in (difference(a_block("1\n"), Ran("x.md:3", "1\n", "oh")) or "")


def test_blocks_are_found_with_their_outputs_and_marks(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A\n\n```python\nprint(1)\n```\n\n```text\n1\n```\n\n"
        "<!-- not run: needs hosts -->\n```python\nx\n```\n\n"
        "Words.\n\n```text\n2\n```\n"
    )
    first, _, second, _ = blocks_of(page, tmp_path)
    assert (first.line, first.text, first.output) == (3, "print(1)\n", "1\n")
    assert (second.not_run, second.output) == ("needs hosts", None)
