"""The folder of a run: either all of its files are replaced or none is replaced.

The folder contains a hidden folder `.jdag` with a lock file, which the system unlocks
when its holder dies. New files are written to `.jdag/new`. Then `.jdag/commit.json` is
created, which commits them: it maps the name of each replaced file to whether a new
file exists. The new files are then moved into place by this writer or, if it was
killed, by the next writer.

Invariants: no other file is moved, written or removed. Symbolic links are replaced or
removed, not followed.
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
from jdag.training.checkpoint_file import try_lock

_ABANDONED_MAX = 10  # Attempts, as another thread may add files.
_HIDDEN, _LOCK, _NEW, _COMMIT = ".jdag", "lock", "new", "commit.json"


class FolderError(OSError):
    """The reason why a folder cannot be used. Callers add the name of the folder."""


@contextmanager
def replacing(folder: Path, names: Collection[str]) -> Iterator[Path]:
    """Yield an empty folder. At exit, its files replace those in `folder`.

    After an exception, `folder` is unchanged. An old file whose name is in `names` is
    removed if there is no new one. Raises FolderError if the folder is in use, or has
    other files and no run. Raises OSError if the folder cannot be written.
    """
    try:
        folder = Path(os.path.realpath(folder))
    except ValueError as error:
        raise FolderError(reason(error)) from error
    absent = [path for path in (folder, *folder.parents) if not path.exists()]
    hidden = folder / _HIDDEN
    inside = os.listdir(hidden) if hidden.is_dir() else []
    if hidden.is_symlink() or (inside and _LOCK not in inside):
        _refuse([_HIDDEN])
    if not inside and not absent:
        _refuse([name for name in os.listdir(folder) if name != _HIDDEN])
    hidden.mkdir(parents=True, exist_ok=True)
    undo = partial(_abandon, folder, absent)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    with os.fdopen(os.open(hidden / _LOCK, flags, 0o666), "r+b") as lock:
        if not try_lock(lock, hidden / _LOCK):
            raise FolderError("another process is writing to this folder")
        try:
            _settle(folder)
            new = hidden / _NEW
            new.mkdir()
            signals.undo.append(undo)
            yield new
            written = os.listdir(new)
            commit = {name: name in written for name in (*names, *written)}
            paths = [folder / name for name in commit]
            _refuse([p.name for p in paths if p.is_dir() and not p.is_symlink()])
            (new / _COMMIT).write_bytes(msgspec.json.encode(commit))
            os.rename(new / _COMMIT, hidden / _COMMIT)
        finally:
            with suppress(ValueError):  # `signals.finish` may have removed it already.
                signals.undo.remove(undo)
            _leave(folder, absent)


def _refuse(names: Collection[str]) -> None:
    if names:
        raise FolderError(f"the folder contains {min(names)!r}, which is not from jdag")


def _leave(folder: Path, absent: Collection[Path]) -> None:
    _settle(folder)
    if os.listdir(folder) == [_HIDDEN]:  # No file was written.
        (folder / _HIDDEN / _LOCK).unlink()
        with suppress(OSError):  # Another process has started to use the folder.
            for path in (folder / _HIDDEN, *absent):
                path.rmdir()


def _abandon(folder: Path, absent: Collection[Path]) -> None:
    """Remove uncommitted new files, even while another thread writes to them."""
    for _ in range(_ABANDONED_MAX):
        with suppress(OSError):
            return _leave(folder, absent)


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Finish the commit of a killed writer, then yield to code that reads the run.

    Raises FolderError at exit if another process has replaced files meanwhile.
    """
    commit = folder / _HIDDEN / _COMMIT
    if commit.exists():
        with replacing(folder, ()):
            pass
    before = _stamps(folder)
    yield
    if commit.exists() or _stamps(folder) != before:
        raise FolderError("another process changed the folder while it was read")


def _stamps(folder: Path) -> dict[str, tuple[int, int]]:
    files = {
        path.name: path.lstat() for path in folder.iterdir() if path.name != _HIDDEN
    }
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in files.items()}


def _settle(folder: Path) -> None:
    """Finish a committed replacement and remove uncommitted files. Idempotent."""
    commit, new = folder / _HIDDEN / _COMMIT, folder / _HIDDEN / _NEW
    if commit.exists():
        try:
            names = msgspec.json.decode(commit.read_bytes(), type=dict[str, bool])
            for name in names:
                if Path(name).name != name or name in ("", "..", _HIDDEN):
                    raise ValueError(f"{name!r} is not a file name")
        except (ValueError, RecursionError) as error:
            raise FolderError(f"{commit} was changed: {error}") from error
        for name, is_new in names.items():
            if not is_new:
                (folder / name).unlink(missing_ok=True)
            elif os.path.lexists(new / name):
                os.replace(new / name, folder / name)
        commit.unlink()
    with suppress(FileNotFoundError):
        shutil.rmtree(new)
