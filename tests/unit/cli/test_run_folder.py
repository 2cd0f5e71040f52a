"""A run's folder is replaced as a whole or not at all, and only what jdag writes."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from jdag.cli.run_folder import FolderError, reading, replacing
from tests import ROOT
from tests.tools.error_texts import fails_with
from tests.tools.run_folder_cases import NAMES, content, write

WHOLE = dict.fromkeys(NAMES, "x")


def played(case: str, folder: Path) -> None:
    script = [sys.executable, "-m", "tests.tools.run_folder_cases", case, str(folder)]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_writer_killed_at_any_step_leaves_the_old_or_the_new(tmp_path: Path):
    played("killed", tmp_path)


def test_two_writers_at_once_and_a_reader_leave_each_other_whole(tmp_path: Path):
    played("raced", tmp_path)


def test_what_others_put_in_a_folder_stays_there(tmp_path: Path):
    write(tmp_path, "old")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "c.txt").write_text("mine")
    write(tmp_path, "x", ("a.txt",))
    assert sorted(os.listdir(tmp_path)) == [".jdag", "a.txt", "mine"]
    (tmp_path / "b.txt").mkdir()
    for names in (NAMES, ("a.txt",)):
        with fails_with(FolderError, "cli.folder_has_b_txt"):
            write(tmp_path, "y", names)
    assert (tmp_path / "mine" / "c.txt").read_text() == "mine"
    assert (tmp_path / "a.txt").read_text() == "x"


def test_a_folder_with_something_else_in_it_is_refused_and_left_as_it_is(
    tmp_path: Path,
):
    files = ("a", "cat.png"), ("b", ".jdag/next/cat.png"), ("c", "result.json")
    for name, inside in files:
        path = tmp_path / name / inside
        path.parent.mkdir(parents=True)
        path.write_text("cat")
        before = sorted(tmp_path.rglob("*"))
        with fails_with(FolderError, "cli.folder_has_other_files"):
            write(tmp_path / name, "x")
        assert sorted(tmp_path.rglob("*")) == before


def test_links_are_replaced_and_never_followed(tmp_path: Path):
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    write(outside, "x")
    write(inside, "old")
    for name in NAMES:
        (inside / name).unlink()
        (inside / name).symlink_to(outside / name)
    write(inside, "new", ("a.txt", "b.txt"))
    assert content(inside) == {"a.txt": "new", "b.txt": "new"}
    assert not (inside / "c.txt").is_symlink()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / ".jdag").symlink_to(outside / ".jdag")
    with fails_with(FolderError, "cli.folder_has_other_jdag_folder"):
        write(tmp_path / "linked", "new")
    (inside / ".jdag" / "lock").unlink()
    (inside / ".jdag" / "lock").symlink_to(outside / "a.txt")
    with fails_with(OSError, "cli.symbolic_links"):
        write(inside, "new")
    assert content(outside) == WHOLE


def test_a_folder_in_use_is_refused(tmp_path: Path):
    with replacing(tmp_path, NAMES) as made:
        (made / "a.txt").write_text("x")
        with fails_with(FolderError, "cli.folder_is_in_use"):
            write(tmp_path, "y")
    is_refused = fails_with(FolderError, "cli.folder_has_changed")
    with is_refused, reading(tmp_path):
        write(tmp_path, "y")
    assert content(tmp_path) == dict.fromkeys(NAMES, "y")


def test_a_replacement_that_fails_leaves_all_as_it_was(tmp_path: Path):
    for folder in (tmp_path / "new" / "deep", tmp_path / "old"):
        if folder.name == "old":
            write(folder, "x")
        before = sorted(tmp_path.rglob("*"))
        fails = pytest.raises(KeyError)
        with fails, replacing(folder, NAMES) as made:
            (made / "a.txt").write_text("y")
            raise KeyError
        assert sorted(tmp_path.rglob("*")) == before
    assert content(tmp_path / "old") == WHOLE


def test_a_reader_is_refused_while_a_writer_commits(tmp_path: Path):
    write(tmp_path, "x")
    with fails_with(FolderError, "cli.folder_has_changed"), reading(tmp_path):
        (tmp_path / ".jdag" / "commit.json").write_text("{}")  # No file has moved yet.


@pytest.mark.parametrize("name", ["../precious", "..", "", ".jdag", 3])
def test_a_commit_that_jdag_did_not_write_is_refused(tmp_path: Path, name):
    (tmp_path / "precious").write_text("mine")
    folder = tmp_path / "folder"
    write(folder, "x")
    path = folder / ".jdag" / "commit.json"
    path.write_bytes(msgspec.json.encode([name] if name == 3 else {name: False}))
    with fails_with(FolderError, "cli.commit_is_invalid"):
        write(folder, "y")
    path.unlink()
    assert content(folder) == WHOLE
    assert (tmp_path / "precious").read_text() == "mine"
