"""A change is tested by the tests of its name, its importers and its mutants."""

import subprocess
from pathlib import Path

import pytest

from tests.tools import for_change

FILES = {
    "net/__init__.py": "",
    "net/wire.py": "SIZE = 4\n",
    "net/page.css": "",
    "docs/howto/ray.md": "",
    "scenarios/shapes.py": "",
    "tests/helper.py": "from net.wire import SIZE\n",
    "tests/test_wire.py": "from net.wire import *\ndef test_a(): assert SIZE == 4\n",
    "tests/deep/test_wire.py": "",
    "tests/test_from.py": "from net import wire\n",
    "tests/test_import.py": "def test_a():\n    import net.wire, os\n"
    "    assert os.environ['JDAG_TIER'] == 'first'\n",
    "tests/test_helped.py": "from tests.helper import SIZE\n",
    "tests/test_face.py": "import net\nfrom shapes import chain\n",
    "tests/test_far.py": "def test_b(): pass\n",
    "tests/tools/mutants.toml": """
[[mutant]]
fact = "four"
file = "net/wire.py"
before = "4"
after = "5"
tests = ["tests/test_wire.py::test_a", "tests/test_far.py::test_b"]

[[mutant]]
fact = "three"
file = "net/wire.py"
before = "3"
after = "5"
tests = ["tests/test_face.py"]
retired = "it is four"
""",
}
# In a line each: why it is among the tests of net/wire.py.
OF_WIRE = """\
tests/deep/test_wire.py       named
tests/test_wire.py            named, imports it, mutants
tests/test_from.py            imports it
tests/test_import.py          imports it
tests/test_far.py::test_b     mutants
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def lines_of(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    lines = capsys.readouterr().out.splitlines()
    return dict(line.split(maxsplit=1) for line in lines)


@pytest.mark.parametrize("name", ["net/wire.py", "./net/wire.py", "net.wire", "{}"])
def test_a_module_has_the_tests_of_its_name_of_its_importers_and_of_its_mutants(
    name, tree, capsys
):
    name = name.format(tree / "net" / "wire.py")
    assert for_change.main(["--list", name, "net/wire.py"], tree) == 0
    found = lines_of(capsys)
    expected = dict(line.split(maxsplit=1) for line in OF_WIRE.splitlines())
    assert [*found.items()] == [*expected.items()]


def test_test_files_helpers_packages_and_scenarios_have_tests_too(tree, capsys):
    for name, tests in (
        ("tests/test_helped.py", {"tests/test_helped.py": "named"}),
        ("tests/helper.py", {"tests/test_helped.py": "imports it"}),
        ("net/__init__.py", {"tests/test_face.py": "imports it"}),
        ("scenarios/shapes.py", {"tests/test_face.py": "imports it"}),
    ):
        assert for_change.main(["--list", name], tree) == 0
        assert lines_of(capsys) == tests


@pytest.mark.parametrize(
    ("names", "error"),
    [
        ([], "no files: name what changed"),
        (["net/gone.py"], "net/gone.py does not exist"),
        (["net"], "net is a folder"),
        (["../net/wire.py"], "../net/wire.py is not in "),
        (["net/wire.py", "net/page.css"], "no test of net/page.css"),
    ],
)
def test_files_that_cannot_be_used_are_one_line_of_error(names, error, tree, capsys):
    assert for_change.main(names, tree) == 2
    printed = capsys.readouterr()
    assert not printed.out and printed.err.count("\n") == 1
    assert printed.err.startswith(f"for_change: {error}")


@pytest.mark.second
def test_the_tests_run_then_the_mutants(tree, monkeypatch, capfd):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "xdist.plugin")
    (tree / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider\n")
    subprocess.run(["git", "init", "-q", str(tree)], check=True)
    (tree / "tests/deep/test_wire.py").unlink()  # Two of one name need packages.
    command = ["--mutants", "--tier", "first", "net/wire.py"]
    assert for_change.main(command, tree) == 0
    printed = capfd.readouterr().out
    assert "3 passed" in printed and "1 killed" in printed and "three" not in printed
    text = (tree / "tests/test_import.py").read_text()  # Fails in the whole tier.
    (tree / "tests/test_far.py").write_text(text.replace("test_a", "test_b"))
    assert for_change.main(command, tree) == 2
    (tree / "tests/test_from.py").write_text("from net import wire\nwire.gone\n")
    assert for_change.main(command, tree) == 1
    printed = capfd.readouterr().out
    assert "ERROR tests/test_from.py" in printed and "killed" not in printed


@pytest.mark.second
def test_in_this_tree_files_for_eight_devices_run_through_one_test(capsys):
    assert for_change.main(["--list", "jdag.engine.credit"]) == 0
    assert (
        lines_of(capsys)["tests/unit/engine/test_credit.py"]
        == "named, imports it, mutants"
    )
    assert for_change.main(["--list", "tests/unit/parallel/test_movement.py"]) == 0
    (test,) = lines_of(capsys)
    assert test.startswith("tests/unit/test_parallel.py::test_with_eight_devices[")


def test_a_page_has_the_tests_of_documents(tree, capsys):
    assert for_change.main(["--list", "docs/howto/ray.md"], tree) == 0
    found = lines_of(capsys)
    assert found["tests/docs/test_blocks.py"] == "document" and len(found) == 3
