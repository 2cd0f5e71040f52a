"""The folder of a run: replaced as a whole or not at all, and only what jdag writes.

It has a hidden folder `.jdag` in it, with a lock, which the system frees when its
holder dies. New files are written to `new` there. `commit.json` beside them commits
them: it has the names that are replaced, and whether there is a new file of each; the
next writer moves them into place. Invariants: no other name is moved, written or
removed; links are replaced or removed, never followed.
"""

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import msgspec

from jdag.errors import reason
from jdag.processes.launch import signals
from jdag.training.checkpoint_file import is_mine

_ABANDONED_MAX = 10  # Attempts: files may appear while others are removed.
_OWN, _LOCK, _NEW, _COMMIT = ".jdag", "lock", "new", "commit.json"


class FolderError(OSError):
    """Why a folder cannot be used; the caller adds its name."""


@contextmanager
def replacing(folder: Path, names: Collection[str]) -> Iterator[Path]:
    """An empty folder, whose files replace at the end those of these names in `folder`.

    Args:
        folder: it is made if it is not there. If something is raised, all stays as is.
        names: of the files that go if there is no new one; others may be written too.

    Raises:
        FolderError: it has something else in it and no run, or is in use.
        OSError: it cannot be written.
    """
    try:
        folder = Path(os.path.realpath(folder))
    except ValueError as error:
        raise FolderError(reason(error)) from error
    absent = [one for one in (folder, *folder.parents) if not one.exists()]
    own = folder / _OWN
    inside = os.listdir(own) if own.is_dir() else []
    if own.is_symlink() or (inside and _LOCK not in inside):
        _refuse([_OWN])
    if not inside and not absent:
        _refuse([name for name in os.listdir(folder) if name != _OWN])
    own.mkdir(parents=True, exist_ok=True)
    undo = partial(_abandon, folder, absent)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    with os.fdopen(os.open(own / _LOCK, flags, 0o666), "r+b") as lock:
        if not is_mine(lock, own / _LOCK):
            raise FolderError("it is in use: another process writes it")
        try:
            _settle(folder)
            new = own / _NEW
            new.mkdir()
            signals.undo.append(undo)
            yield new
            written = os.listdir(new)
            commit = {name: name in written for name in (*names, *written)}
            ours = [folder / name for name in commit]
            _refuse([one.name for one in ours if one.is_dir() and not one.is_symlink()])
            (new / _COMMIT).write_bytes(msgspec.json.encode(commit))
            os.rename(new / _COMMIT, own / _COMMIT)
        finally:
            with suppress(ValueError):  # A command that finishes forgets it.
                signals.undo.remove(undo)
            _leave(folder, absent)


def _refuse(others: Collection[str]) -> None:
    if others:
        raise FolderError(f"it has {min(others)!r} in it, which jdag did not write")


def _leave(folder: Path, absent: Collection[Path]) -> None:
    _settle(folder)
    if os.listdir(folder) == [_OWN]:  # Nothing was written in it.
        (folder / _OWN / _LOCK).unlink()
        with suppress(OSError):  # Another process has begun to use it.
            for one in (folder / _OWN, *absent):
                one.rmdir()


def _abandon(folder: Path, absent: Collection[Path]) -> None:
    """Remove new files that are not committed, while another thread writes them."""
    for _ in range(_ABANDONED_MAX):
        with suppress(OSError):
            return _leave(folder, absent)


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Read a run; first finish what a killed writer has committed.

    Raises:
        FolderError: another process has replaced files meanwhile, or does so now.
        OSError: it cannot be read.
    """
    commit = folder / _OWN / _COMMIT
    if commit.exists():
        with replacing(folder, ()):
            pass
    before = _stamps(folder)
    yield
    if commit.exists() or _stamps(folder) != before:
        raise FolderError("another process has changed it meanwhile")


def _stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Return what of each file changes when another takes its place."""
    files = {one.name: one.lstat() for one in folder.iterdir() if one.name != _OWN}
    return {name: (one.st_ino, one.st_mtime_ns) for name, one in files.items()}


def _settle(folder: Path) -> None:
    """Finish a replacement that was committed, as often as it takes; remove another."""
    commit, new = folder / _OWN / _COMMIT, folder / _OWN / _NEW
    if commit.exists():
        try:
            names = msgspec.json.decode(commit.read_bytes(), type=dict[str, bool])
            if any(
                Path(name).name != name or name in ("", "..", _OWN) for name in names
            ):
                raise ValueError("it names other folders")
        except (ValueError, RecursionError) as error:
            said = f"{commit} is not as jdag wrote it: {error}"
            raise FolderError(said) from error
        for name, is_new in names.items():
            if not is_new:
                (folder / name).unlink(missing_ok=True)
            elif os.path.lexists(new / name):
                os.replace(new / name, folder / name)
        commit.unlink()
    with suppress(FileNotFoundError):
        shutil.rmtree(new)
