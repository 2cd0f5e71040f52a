"""Replacements of a run's files by processes that die at any step, or are two at once.

Run as a script it takes the name of a case and an empty folder.
"""

import os
import sys
from pathlib import Path

from jdag.cli.run_folder import FolderError, reading, replacing

NAMES = ("a.txt", "b.txt", "c.txt")
STEPS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")


def write(folder: Path, text: str, names=NAMES) -> None:
    with replacing(folder, NAMES) as made:
        for name in names:
            (made / name).write_text(text)


def content(folder: Path) -> dict[str, str]:
    with reading(folder):
        paths = [folder / name for name in NAMES]
        return {one.name: one.read_text() for one in paths if one.exists()}


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
    for names in (NAMES, ("b.txt", "c.txt")):
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
    write(folder, "newer", ("a.txt", "b.txt"))
    assert content(folder) == {"a.txt": "newer", "b.txt": "newer"}, step
    there = [".jdag", "a.txt", "b.txt", *["mine"] * has_old]
    assert sorted(os.listdir(folder)) == there
    assert os.listdir(folder / ".jdag") == ["lock"]
    return status


def raced(top: Path) -> None:
    folder = top / "raced"
    write(folder, "0")
    (folder / "mine").write_text("mine")
    children = []
    for first in (1, 2):
        children.append(os.fork())
        if not children[-1]:
            for number in range(first, 81, 2):
                tried(lambda number=number: write(folder, str(number)))
            os._exit(0)
    read = 0
    while not all(
        [
            os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            for child in children
        ]
    ):
        found = tried(lambda: content(folder))
        if found is not None:
            assert len(found) == 3 and len(set(found.values())) == 1, found
            read += 1
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert read and len(set(content(folder).values())) == 1
    assert (folder / "mine").read_text() == "mine"
    assert os.listdir(folder / ".jdag") == ["lock"]


def tried(act):
    try:
        return act()
    except FolderError as error:
        assert "is writing to" in str(error) or "while it was read" in str(error)


if __name__ == "__main__":
    {"killed": killed, "raced": raced}[sys.argv[1]](Path(sys.argv[2]))
