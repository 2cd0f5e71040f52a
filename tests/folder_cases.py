"""Replacements of a folder by processes that die at any step, or that are two at once.

Run as a script it takes the name of a case and an empty folder.
"""

import os
import sys
from pathlib import Path
from typing import Any

from jdag.api import folders
from jdag.api.folders import reading, replacing

NAMES = ("a.txt", "b.txt", "tree")
STEPS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")


def nothing(folder: Path) -> list[str]:
    """What was written in a folder before there were markers."""
    return []


def write(folder: Path, text: str, names=NAMES, **settings) -> None:
    """Replace the content of a folder: some files, and a folder with one in it."""
    with replacing(folder, "test", NAMES, nothing, **settings) as made:
        for name in names:
            if name == "tree":
                (made / name).mkdir()
            path = made / name / "c.txt" if name == "tree" else made / name
            path.write_text(text)


def content(folder: Path) -> dict[str, str]:
    """What there is of it: the texts of files by names."""
    with reading(folder):
        paths = {name: folder / name for name in NAMES}
        paths["tree"] /= "c.txt"
        return {name: one.read_text() for name, one in paths.items() if one.exists()}


def dies_at(step: int, folder: Path, text: str, names) -> int:
    """Write in another process, which ends itself at a step; return its exit status."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    steps = 0

    def count(event, details):
        nonlocal steps
        if event in STEPS:
            steps += 1
            if steps == step:
                os._exit(9)

    sys.addaudithook(count)
    write(folder, text, names)
    os._exit(0)


def killed(top: Path) -> None:
    """Die at each step; the content is the old or the new, and can be replaced."""
    for names in (NAMES, ("b.txt", "tree"), ("a.txt",)):
        for has_old in (False, True):
            seen: list[bool] = []
            for step in range(1, 500):
                folder = top / f"{len(names)}{has_old}" / str(step)
                status = killed_at(step, folder, names, has_old, seen)
                if status == 0:
                    break
            # First it is the old content, then the new, and each at several steps.
            assert status == 0
            assert seen == sorted(seen) and 5 < sum(seen) < len(seen) - 5, seen


def killed_at(step: int, folder: Path, names, has_old: bool, seen: list[bool]) -> int:
    """Die at one step of one case, and look at what there is then and later."""
    old = dict.fromkeys(NAMES, "old") if has_old else {}
    new = dict.fromkeys(names, "new")
    folder.mkdir(parents=True)
    if has_old:
        write(folder, "old")
        (folder / "mine").write_text("mine")
    status = dies_at(step, folder, "new", names)
    found = content(folder)
    assert found in (old, new), (step, found)
    seen.append(found == new)
    write(folder, "newer", ("a.txt", "tree"))
    assert content(folder) == {"a.txt": "newer", "tree": "newer"}, step
    there = [".jdag", "a.txt", *["mine"] * has_old, "tree"]
    assert sorted(os.listdir(folder)) == there
    assert sorted(os.listdir(folder / ".jdag")) == ["lock", "marker.json"]
    return status


def raced(top: Path) -> None:
    """Replace a folder by two processes at once, while a third reads it."""
    folders.WAIT_S = 600.0
    folder = top / "raced"
    write(folder, "0")
    (folder / "mine").write_text("mine")
    children = []
    for first in (1, 2):
        children.append(os.fork())
        if not children[-1]:
            for number in range(first, 41, 2):
                write(folder, str(number))
            os._exit(0)
    for _ in range(40):
        found = content(folder)
        assert len(found) == 3 and len(set(found.values())) == 1, found
        assert (folder / "mine").read_text() == "mine"
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert content(folder)["tree"] in ("39", "40")


def left(top: Path) -> None:
    """Lock a folder in the instant in which another leaves it, with its lock."""
    locks: list[Any] = []

    def leave(event, details):
        if event == "fcntl.flock" and not locks:
            locks.append(top / ".jdag" / "lock")
            locks[0].unlink()

    sys.addaudithook(leave)
    write(top, "new")
    assert sorted(os.listdir(top / ".jdag")) == ["lock", "marker.json"]
    assert locks


if __name__ == "__main__":
    {"killed": killed, "raced": raced, "left": left}[sys.argv[1]](Path(sys.argv[2]))
