"""Choose and run the tests of a change.

Run as `python -m tests.tools.for_change jdag/sim/network.py ...`. The tests of a file
are

    named       every test_network.py under tests/; a test file stands for itself
    imports it  the test files that import the module, other than through a helper
    document    for a page of docs/ and README.md, the tests of documents
    mutants     what the faults of this file in tests/tools/mutants.toml must make fail

Files are named by path, from the root of the tree or absolute, or as in an import. With
--mutants, the faults of these files are tried once the tests have passed. Exit codes:
pytest's, or that of the faults; 2, and one line on stderr, where a file cannot be used.
"""

import argparse
import ast
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests import ROOT
from tests.tools import mutants
from tests.tools.mutants import Mutant
from tests.unit.test_parallel import PARTS

DOCUMENTS = ("blocks", "commands", "reference")  # Tests of tests/docs/.
PARALLEL = Path(
    "tests", "unit", "parallel"
)  # Run by test_parallel.py, with eight devices.
FOLDERS = ("", "scenarios")  # Where imports are looked up.
Tests = dict[str, list[str]]  # Arguments of pytest: why each is among them.


def located(tree: Path, name: str) -> Path:
    """Return a file's path from the root of the tree; ValueError if there is none."""
    root = tree.resolve()
    path = (root / name).resolve()
    if not path.exists() and name.replace(".", "_").isidentifier():
        dotted = root.joinpath(*name.split("."))
        modules = (dotted.with_suffix(".py"), dotted / "__init__.py")
        path = next((module for module in modules if module.exists()), path)
    if not path.is_relative_to(root):
        raise ValueError(f"{name} is not in {root}: name files of this tree")
    if path.is_dir():
        raise ValueError(f"{name} is a folder: name the changed files in it")
    if not path.exists():
        raise ValueError(f"{name} does not exist: name it as jdag/sim/network.py")
    return path.relative_to(root)


def module_of(file: Path) -> str:
    """Return the name by which a Python file is imported; "" for other files."""
    if file.suffix != ".py":
        return ""
    parts = file.with_suffix("").parts
    if parts[0] in FOLDERS:
        parts = parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_by(tree: Path, test: Path) -> frozenset[str]:
    modules: list[str] = []
    for node in ast.walk(ast.parse((tree / test).read_text(), str(test))):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                modules.append(inner if is_module(tree, inner) else node.module)
    return frozenset(modules)


def is_module(tree: Path, name: str) -> bool:
    paths = [tree.joinpath(folder, *name.split(".")) for folder in FOLDERS]
    return any(
        path.with_suffix(".py").exists() or (path / "__init__.py").exists()
        for path in paths
    )


def argument_of(test: Path) -> str:
    """Return the argument of pytest by which a test file runs."""
    if test.parent != PARALLEL:
        return test.as_posix()
    name = test.stem.removeprefix("test_")
    for part, names in PARTS.items():
        if name in names:
            return f"tests/unit/test_parallel.py::test_with_eight_devices[{part}]"
    return "tests/unit/test_parallel.py"  # It fails if a file is in no part.


def faults_of(tree: Path, files: Sequence[Path]) -> list[Mutant]:
    names = [file.as_posix() for file in files]
    listed = mutants.listed(tree)
    return [each for each in listed if each.file in names and not each.retired]


def documents_of(file: Path) -> list[str]:
    """Return the tests of a page; [] for other files."""
    is_page = file.suffix == ".md" and file.parts[0] in ("docs", "README.md")
    return [f"tests/docs/test_{name}.py" for name in DOCUMENTS if is_page]


def chosen(tree: Path, files: Sequence[Path]) -> Tests:
    """Return the tests of the files; ValueError for a file that has none."""
    paths = sorted((tree / "tests").rglob("test_*.py"))
    test_files = [path.relative_to(tree) for path in paths]
    imports = {test: imported_by(tree, test) for test in test_files}
    reasons: Tests = {}
    for file in files:
        stem = file.parent.name if file.stem == "__init__" else file.stem.strip("_")
        module = module_of(file)
        named = [test for test in test_files if test.name == f"test_{stem}.py"]
        importing = [test for test in test_files if module in imports[test]]
        if file in test_files:
            named, importing = [file], []
        faults = [test for each in faults_of(tree, [file]) for test in each.tests]
        pages = documents_of(file)
        if not (named or importing or faults or pages):
            raise ValueError(
                f"no test of {file}: there is no test_{stem}.py, no test file imports "
                "it and no mutant is in it; name its test files, or run make test-all"
            )
        found = [("named", argument_of(test)) for test in named]
        found += [("imports it", argument_of(test)) for test in importing]
        found += [("document", test) for test in pages]
        for reason, test in found + [("mutants", test) for test in faults]:
            if reason not in reasons.setdefault(test, []):
                reasons[test].append(reason)
    return merged(reasons)


def merged(reasons: Tests) -> Tests:
    """Return the tests without the ids of files that are among them as a whole."""
    kept: Tests = {}
    for test, why in reasons.items():
        file = test.partition("::")[0]
        known = kept.setdefault(file if file in reasons else test, [])
        known += [reason for reason in why if reason not in known]
    return kept


def tested(tree: Path, tests: Sequence[str], tier: str) -> int:
    # A second process costs seconds, and one file stays in one process.
    jobs = "2" if len({test.partition("::")[0] for test in tests}) > 2 else "0"
    command = [sys.executable, "-m", "pytest", "-q", "-n", jobs, *tests]
    environ = {**os.environ, "JDAG_TIER": tier}
    return subprocess.run(command, cwd=tree, env=environ, check=False).returncode


def main(arguments: Sequence[str] | None = None, tree: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.for_change")
    parser.add_argument("files", nargs="*", help="changed files, by path or module")
    parser.add_argument("--list", action="store_true", help="print, do not run")
    parser.add_argument("--mutants", action="store_true", help="then try their faults")
    parser.add_argument("--tier", choices=[*mutants.TIERS], default="all")
    wanted = parser.parse_args(arguments)
    tree = tree.resolve()
    try:
        if not wanted.files:
            raise ValueError("no files: name what changed, such as jdag/sim/network.py")
        files = list(dict.fromkeys(located(tree, name) for name in wanted.files))
        tests = chosen(tree, files)
    except (ValueError, SyntaxError) as error:
        print(f"for_change: {error}", file=sys.stderr)
        return 2
    width = max(map(len, tests))
    lines = [f"{test:{width}}  {', '.join(why)}" for test, why in tests.items()]
    print("\n".join(lines), flush=True)
    faults = faults_of(tree, files) if wanted.mutants else []
    if wanted.list:
        for fault in faults:
            print(f"mutant {fault.number:4} {fault.file}: {fault.fact}")
        return 0
    code = tested(tree, [*tests], wanted.tier)
    if code or not faults:
        return code
    # They need no clean run: in the whole tier, their tests have just passed.
    return mutants.run(tree, faults, mutants.Options(clean=wanted.tier != "all"))


if __name__ == "__main__":
    sys.exit(main())
