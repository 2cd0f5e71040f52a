"""The blocks of code in README.md and docs/, and what they print.

Each ```python block runs alone: in a fresh namespace and an empty folder, with JAX as
users have it (float32, compiled with all passes). The ```text block directly after it
is what it prints. Blocks that start processes run as a script; all others share one
process. A comment `<!-- not run: WHY -->` on the line before a block leaves it out.

    python -m tests.tools.documents docs/tour.md           # runs and compares
    python -m tests.tools.documents --write docs/tour.md   # writes what came
    python -m tests.tools.documents --json FILES           # for the tests
"""

import argparse
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from types import ModuleType

from jdag.errors import PortabilityWarning
from tests import ROOT

_FENCE = re.compile(r"^```(?P<language>[^\n`]*)\n(?P<text>.*?)^```$", re.DOTALL | re.M)
_NOT_RUN = re.compile(r"<!-- not run: (.+) -->\n\Z")
_PROCESSES = ("jdag.launch(",)
_SECONDS_MAX = 120


@dataclass(frozen=True)
class Block:
    """A block of code: where it is, and what the document says that it prints."""

    file: str
    line: int
    language: str
    text: str
    span: tuple[int, int]
    not_run: str | None = None
    output: str | None = None
    output_span: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Ran:
    """What a block printed, or the traceback of its error."""

    place: str
    printed: str
    error: str | None


def documents(root: Path = ROOT) -> list[Path]:
    """Return README.md and all pages of docs/ that are not generated."""
    pages = sorted((root / "docs").rglob("*.md"))
    generated = ("_generated", "results")
    return [
        root / "README.md",
        *[page for page in pages if page.parent.name not in generated],
    ]


def blocks_of(path: Path, root: Path = ROOT) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    found = list(_FENCE.finditer(text))
    file = path.relative_to(root).as_posix()
    blocks = []
    for match, later in zip_longest(found, found[1:]):
        output, span = None, (0, 0)
        if (
            later is not None
            and later["language"] == "text"
            and not text[match.end() : later.start()].strip()
        ):
            output, span = later["text"], later.span("text")
        not_run = _NOT_RUN.search(text[: match.start()])
        blocks.append(
            Block(
                file=file,
                line=text.count("\n", 0, match.start()) + 1,
                language=match["language"],
                text=match["text"],
                span=match.span(),
                not_run=not_run and not_run[1],
                output=output,
                output_span=span,
            )
        )
    return blocks


def block(page: str, language: str, *words: str) -> str:
    """Return the one block of a page, in a language, that has all words."""
    matching = [
        each.text
        for each in blocks_of(ROOT / page)
        if each.language == language and all(word in each.text for word in words)
    ]
    assert len(matching) == 1, f"{page}: {len(matching)} blocks of {language}: {words}"
    return matching[0]


def run_all(blocks: Sequence[Block]) -> Iterator[Ran]:
    for each in blocks:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            starts = any(word in each.text for word in _PROCESSES)
            yield (_in_a_script if starts else _here)(each)


def _here(each: Block) -> Ran:
    """Run a block as the main module of this process, which is then another one."""
    printed, error = io.StringIO(), None
    script = _script(each)
    main = ModuleType("__main__")
    main.__file__ = str(script)
    replaced, sys.modules["__main__"] = sys.modules["__main__"], main
    try:
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            exec(compile(each.text, str(script), "exec"), vars(main))
    except Exception:
        error = traceback.format_exc()
    finally:
        sys.modules["__main__"] = replaced
    return Ran(str(each), printed.getvalue(), error)


def _script(each: Block) -> Path:
    script = Path("script.py").absolute()
    script.write_text(each.text, encoding="utf-8")
    return script


def _in_a_script(each: Block) -> Ran:
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", str(_script(each))],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False, timeout=_SECONDS_MAX,
    )  # fmt: skip
    return Ran(str(each), done.stdout, done.stderr if done.returncode else None)


def difference(each: Block, ran: Ran) -> str | None:
    """Return what is wrong with a block that has run; None: nothing."""
    if ran.error is not None:
        return f"{each} raises\n{ran.error}"
    if each.output is not None and ran.printed.rstrip() != each.output.rstrip():
        return f"{each} prints\n{ran.printed}\nand the document shows\n{each.output}"
    # What JAX prints by itself need not be shown.
    if each.output is None and "print(" in each.text and ran.printed.strip():
        return f"{each} prints this, which the document does not show:\n{ran.printed}"
    return None


def _write(path: Path, blocks: Sequence[Block], all_ran: Sequence[Ran]) -> None:
    """Replace the outputs of a document by what came; add those that are missing."""
    text = path.read_text(encoding="utf-8")
    for each, ran in reversed([*zip(blocks, all_ran, strict=True)]):
        printed = ran.printed.rstrip() + "\n"
        if ran.error is None and each.output is not None:
            start, end = each.output_span
            text = text[:start] + printed + text[end:]
        elif ran.error is None and "print(" in each.text and printed.strip():
            end = each.span[1]
            text = f"{text[:end]}\n\n```text\n{printed}```{text[end:]}"
    path.write_text(text, encoding="utf-8")


def runnable(path: Path) -> list[Block]:
    blocks = [each for each in blocks_of(path) if each.language == "python"]
    return [each for each in blocks if each.not_run is None]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.documents")
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--write", action="store_true", help="write what came")
    parser.add_argument("--json", action="store_true", help="print what came as JSON")
    wanted = parser.parse_args()
    warnings.simplefilter("error", UserWarning)
    # A block may simulate what processes would refuse.
    warnings.simplefilter("ignore", PortabilityWarning)
    failures = 0
    for path in [file.resolve() for file in wanted.files] or documents():
        blocks = runnable(path)
        all_ran = list(run_all(blocks))
        if wanted.json:
            print(json.dumps([asdict(ran) for ran in all_ran]), flush=True)
            continue
        if wanted.write:
            _write(path, blocks, all_ran)
            blocks = runnable(path)
        for each, ran in zip(blocks, all_ran, strict=True):
            if (wrong := difference(each, ran)) is not None:
                failures += 1
                print(wrong)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
