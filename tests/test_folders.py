"""A folder is replaced as a whole or not at all, and only what jdag wrote there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jdag.api import folders
from jdag.api.folders import FolderError, reading, replacing
from tests.folder_cases import NAMES, content, nothing, write

ROOT = Path(__file__).parent.parent
WHOLE = dict.fromkeys(NAMES, "x")


def played(case: str, folder: Path) -> None:
    """Play a case in a process that may fork."""
    script = [sys.executable, "-m", "tests.folder_cases", case, str(folder)]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_writer_killed_at_any_step_leaves_the_old_or_the_new(tmp_path: Path):
    played("killed", tmp_path)


def test_two_writers_at_once_and_a_reader_leave_each_other_whole(tmp_path: Path):
    played("raced", tmp_path)


def test_a_lock_that_another_writer_has_just_removed_is_no_lock(tmp_path: Path):
    played("left", tmp_path)


def test_what_others_put_in_a_folder_stays_there(tmp_path: Path):
    write(tmp_path, "old")
    (tmp_path / "mine" / "tree").mkdir(parents=True)
    (tmp_path / "mine" / "tree" / "c.txt").write_text("mine")
    write(tmp_path, "x", ("a.txt",))
    assert sorted(os.listdir(tmp_path)) == [".jdag", "a.txt", "mine"]
    # Of the names that may be written jdag wrote a.txt alone: another is not its own.
    (tmp_path / "tree").mkdir()
    with pytest.raises(FolderError, match="it has 'tree' in it, which jdag did not"):
        write(tmp_path, "y", ("a.txt",))
    (tmp_path / "tree").rmdir()
    has_other = pytest.raises(FolderError, match=r"it has 'b\.txt' in it, which jdag")
    with has_other, replacing(tmp_path, "test", NAMES, nothing) as made:
        (made / "b.txt").write_text("y")
        (tmp_path / "b.txt").write_text("mine")
    assert content(tmp_path) == {"a.txt": "x", "b.txt": "mine"}
    assert (tmp_path / "mine" / "tree" / "c.txt").read_text() == "mine"


def test_what_others_put_inside_of_what_jdag_wrote_stays_there(tmp_path: Path):
    write(tmp_path, "x")
    mine = tmp_path / "tree" / "deep" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    has_other = r"it has 'tree/deep/mine\.txt' in it, which jdag did not write"
    for names in (NAMES, ("a.txt",)):
        with pytest.raises(FolderError, match=has_other):
            write(tmp_path, "y", names)
    assert content(tmp_path) == WHOLE
    assert mine.read_text() == "mine"
    mine.unlink()
    write(tmp_path, "y")
    mine.parent.mkdir()
    mine.write_text("mine")
    marker = tmp_path / ".jdag" / "marker.json"
    before = json.loads(marker.read_text())
    assert before.pop("files") == ["tree/c.txt"]
    marker.write_text(json.dumps(before))  # As it was before files were noted.
    write(tmp_path, "x")
    assert content(tmp_path) == WHOLE


def test_a_folder_with_something_else_in_it_is_refused_and_left_as_it_is(
    tmp_path: Path,
):
    for name, inside in (("photos", "cat.png"), ("other", ".jdag/next/cat.png")):
        path = tmp_path / name / inside
        path.parent.mkdir(parents=True)
        path.write_text("cat")
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(FolderError, match=r"in it, which jdag did not write"):
            write(tmp_path / name, "x")
        assert sorted(tmp_path.rglob("*")) == before
    write(tmp_path / "new", "x")
    is_refused = pytest.raises(FolderError, match="it holds a test, no run")
    with is_refused, replacing(tmp_path / "new", "run", NAMES, nothing):
        pass
    assert content(tmp_path / "new") == WHOLE


def test_what_was_written_before_there_were_markers_is_replaced(tmp_path: Path):
    (tmp_path / "a.txt").write_text("old")
    (tmp_path / "mine").write_text("mine")
    with replacing(tmp_path, "test", NAMES, lambda folder: ["a.txt"]) as made:
        (made / "b.txt").write_text("new")
    assert sorted(os.listdir(tmp_path)) == [".jdag", "b.txt", "mine"]


def test_what_is_kept_stays_and_is_still_known_as_written(tmp_path: Path):
    write(tmp_path, "x")
    write(tmp_path, "new", ("b.txt",), keep=("a.txt",))
    assert content(tmp_path) == {"a.txt": "x", "b.txt": "new"}
    write(tmp_path, "x", ("tree",))
    assert content(tmp_path) == {"tree": "x"}


def test_links_are_replaced_and_never_followed(tmp_path: Path):
    outside = tmp_path / "outside"
    write(outside, "x")
    inside = tmp_path / "inside"
    write(inside, "old")
    (inside / "tree" / "c.txt").unlink()
    (inside / "tree").rmdir()
    for name in NAMES[:2]:
        (inside / name).unlink()
    for name in NAMES:
        (inside / name).symlink_to(outside / name)
    write(inside, "new")
    assert content(inside) == dict.fromkeys(NAMES, "new")
    (inside / "a.txt").unlink()
    (inside / "a.txt").symlink_to(outside / "a.txt")
    write(inside, "new", ("b.txt",))
    assert content(inside) == {"b.txt": "new"}
    assert content(outside) == WHOLE
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / ".jdag").symlink_to(outside / ".jdag")
    with pytest.raises(FolderError, match=r"it has '\.jdag' in it, which jdag did not"):
        write(tmp_path / "linked", "new")
    (inside / ".jdag" / "lock").unlink()
    (inside / ".jdag" / "lock").symlink_to(outside / "a.txt")
    with pytest.raises(OSError, match="symbolic links"):
        write(inside, "new")
    assert content(outside) == WHOLE


def test_a_folder_in_use_is_refused_with_the_process_that_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(folders, "WAIT_S", 0.1)
    with replacing(tmp_path, "test", NAMES, nothing) as made:
        (made / "a.txt").write_text("x")
        used = rf"it is in use: process {os.getpid()} writes it; waited for 0\.1 s"
        for use in (write, lambda folder, text: content(folder)):
            with pytest.raises(FolderError, match=used):
                use(tmp_path, "y")
    is_refused = pytest.raises(FolderError, match="it is in use: another reads it")
    with reading(tmp_path), reading(tmp_path), is_refused:
        write(tmp_path, "y")
    assert content(tmp_path) == {"a.txt": "x"}


def test_a_replacement_that_fails_leaves_all_as_it_was(tmp_path: Path):
    for folder in (tmp_path / "new" / "deep", tmp_path / "old"):
        if folder.name == "old":
            write(folder, "x")
        before = sorted(tmp_path.rglob("*"))
        fails = pytest.raises(KeyError)
        with fails, replacing(folder, "test", NAMES, nothing) as made:
            (made / "a.txt").write_text("y")
            raise KeyError
        assert sorted(tmp_path.rglob("*")) == before
    assert content(tmp_path / "old") == WHOLE


@pytest.mark.parametrize(
    "change",
    [
        {"names": ["../precious"]},
        {"names": [".."]},
        {"former": [".jdag"]},
        {"names": [3]},
        {"files": [[]]},
        {"more": 3},
    ],
)
def test_a_marker_that_jdag_did_not_write_is_refused(tmp_path: Path, change):
    (tmp_path / "precious").write_text("mine")
    folder = tmp_path / "folder"
    write(folder, "x")
    path = folder / ".jdag" / "marker.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(FolderError, match=r"marker\.json is not as jdag wrote it: "):
        write(folder, "y")
    assert content(folder) == WHOLE
    assert (tmp_path / "precious").read_text() == "mine"
