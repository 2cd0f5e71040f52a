"""Folders that jdag writes: one writer at a time, replaced as a whole or not at all.

Each has a hidden folder `.jdag` in it, with a lock, which the system frees when its
holder dies; a marker, which tells the kind of the folder and the names in it that jdag
wrote; and `next`, where the next content is written. A marker in `next` commits that
content: the next holder of the lock moves it into place, and removes a `next` without
one. Invariants: a name that no marker lists is never moved, written or removed; links
are replaced or removed, never followed.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import msgspec

from jdag.errors import reason
from jdag.runtime import signals

WAIT_S = 30.0
_POLL_S = 0.02
_ABANDONED_MAX = 10  # Attempts: files may appear while others are removed.
_OWN, _LOCK, _NEXT, _MARKER = ".jdag", "lock", "next", "marker.json"


class FolderError(OSError):
    """Why a folder cannot be used; the caller adds its name."""


class Marker(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What jdag wrote in a folder, and what it had written there before that.

    `files` are those in folders among the names; older markers do not have them.
    """

    kind: str
    names: list[str]
    former: list[str]
    files: list[str] | None = None


@contextmanager
def replacing(
    folder: Path,
    kind: str,
    names: Sequence[str],
    unmarked: Callable[[Path], list[str]],
    keep: Sequence[str] = (),
) -> Iterator[Path]:
    """An empty folder, whose content replaces at the end what jdag wrote in `folder`.

    Args:
        folder: it is made if it is not there. If something is raised, all stays as is.
        kind: what it holds; a folder of another kind is refused.
        names: all that may be written; files of others with such names are refused.
        unmarked: gives what jdag wrote there before it left markers.
        keep: those names that stay as they are, if jdag wrote them.

    Raises:
        FolderError: it has something else in it, or is in use for more than `WAIT_S`.
        OSError: it cannot be written.
    """
    try:
        folder = Path(os.path.realpath(folder))
    except ValueError as error:
        raise FolderError(reason(error)) from error
    own = folder / _OWN
    absent = [one for one in (folder, *folder.parents) if not one.exists()]
    inside = []
    with suppress(FileNotFoundError):
        inside = os.listdir(own)
    if own.is_symlink() or (inside and _LOCK not in inside):
        raise FolderError(f"it has {_OWN!r} in it, which jdag did not write")
    undo = partial(_abandon, folder, absent)
    with _locked(own, fcntl.LOCK_EX):
        try:
            _settle(folder)
            marker = _marker(own / _MARKER) or Marker(kind, unmarked(folder), [])
            _refuse_others(folder, marker, kind, names)
            then, made = own / _NEXT, own / _NEXT / "new"
            made.mkdir(parents=True)
            (then / "old").mkdir()
            signals.undo.append(undo)
            yield made
            written = sorted(os.listdir(made))
            _refuse_others(folder, marker, kind, written)
            kept = [n for n in marker.names if n in keep and n not in written]
            files = [*_files(made, written), *_files(folder, kept)]
            next_one = Marker(kind, [*written, *kept], marker.names, files)
            (then / "marker").write_bytes(msgspec.json.encode(next_one))
            os.rename(then / "marker", then / _MARKER)
        finally:
            with suppress(ValueError):  # A command that finishes forgets it.
                signals.undo.remove(undo)
            _settle(folder)
            _remove_unused(own, absent)


def _remove_unused(own: Path, absent: Sequence[Path]) -> None:
    """Remove what was made for a content that never came; `absent` was not there."""
    if (own / _MARKER).exists():
        return
    (own / _LOCK).unlink()
    own.rmdir()
    with suppress(OSError):  # Another process has begun to use it.
        for one in absent:
            one.rmdir()


def _abandon(folder: Path, absent: Sequence[Path]) -> None:
    """Remove a new content that is not committed, while another thread writes it."""
    for _ in range(_ABANDONED_MAX):
        with suppress(OSError):
            _settle(folder)
            return _remove_unused(folder / _OWN, absent)


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Keep a folder as it is while it is read; finish what a killed writer committed.

    Raises:
        FolderError: it is in use for more than `WAIT_S`.
        OSError: it cannot be read.
    """
    own = folder / _OWN
    while (own / _LOCK).exists():
        with _locked(own, fcntl.LOCK_SH):
            if not (own / _NEXT / _MARKER).exists():
                yield
                return
        with _locked(own, fcntl.LOCK_EX):
            _settle(folder)
    yield


@contextmanager
def _locked(own: Path, how: int) -> Iterator[None]:
    end = time.monotonic() + WAIT_S
    while (descriptor := _try_lock(own, how)) is None:
        if time.monotonic() > end:
            holder = (own / _LOCK).read_text(encoding="utf-8", errors="replace")
            used = f"process {holder} writes it" if holder else "another reads it"
            raise FolderError(f"it is in use: {used}; waited for {WAIT_S:g} s")
        time.sleep(_POLL_S)
    try:
        yield
    finally:
        if how == fcntl.LOCK_EX:
            os.truncate(descriptor, 0)
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # Forked processes may have it too.
        os.close(descriptor)


def _try_lock(own: Path, how: int) -> int | None:
    """Return a descriptor that holds the lock; None if another does."""
    access = os.O_RDONLY
    if how == fcntl.LOCK_EX:
        own.mkdir(parents=True, exist_ok=True)
        access = os.O_RDWR | os.O_CREAT
    with ExitStack() as undo, suppress(BlockingIOError, FileNotFoundError):
        descriptor = os.open(own / _LOCK, access | os.O_NOFOLLOW, 0o666)
        undo.callback(os.close, descriptor)
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        # A folder that is left unused goes with its lock: this may be no lock any more.
        if os.path.samestat(os.fstat(descriptor), (own / _LOCK).stat()):
            if how == fcntl.LOCK_EX:
                os.truncate(descriptor, 0)
                os.write(descriptor, str(os.getpid()).encode())
            undo.pop_all()
            return descriptor
    return None


def _marker(path: Path) -> Marker | None:
    """Return a marker, None if there is none; raise if it is not as jdag writes it."""
    try:
        marker = msgspec.json.decode(path.read_bytes(), type=Marker)
        names = [*marker.names, *marker.former]
        if all(name == Path(name).name not in ("", "..", _OWN) for name in names):
            return marker
        raise ValueError("it names other folders")
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise FolderError(f"{path} is not as jdag wrote it: {error}") from error


def _refuse_others(
    folder: Path, marker: Marker, kind: str, names: Sequence[str]
) -> None:
    """Raise FolderError if a replacement would meet what jdag did not write there."""
    if marker.kind != kind:
        raise FolderError(f"it holds a {marker.kind}, no {kind}")
    others = set(os.listdir(folder)).difference([_OWN, *marker.names])
    if marker.names:
        others.intersection_update(names)
    if marker.files is not None:
        others.update(set(_files(folder, marker.names)).difference(marker.files))
    if others:
        raise FolderError(f"it has {min(others)!r} in it, which jdag did not write")


def _files(folder: Path, names: Iterable[str]) -> list[str]:
    """The files in folders of these names; links are not followed."""
    tops = [folder / name for name in names]
    found = [one for top in tops if not top.is_symlink() for one in top.rglob("*")]
    files = [one for one in found if one.is_symlink() or not one.is_dir()]
    return sorted(str(one.relative_to(folder)) for one in files)


def _settle(folder: Path) -> None:
    """Finish a replacement that was committed, as often as it takes; remove another."""
    own, then = folder / _OWN, folder / _OWN / _NEXT
    if marker := _marker(then / _MARKER):
        for name in dict.fromkeys((*marker.former, *marker.names)):
            here, new = folder / name, then / "new" / name
            is_new = os.path.lexists(new)
            # A file takes the place of another at once; a folder needs it to be free.
            in_the_way = here.is_dir() or new.is_dir()
            if in_the_way if is_new else name not in marker.names:
                with suppress(FileNotFoundError):
                    os.rename(here, then / "old" / name)
            if is_new:
                os.rename(new, here)
        os.replace(then / _MARKER, own / _MARKER)
    with suppress(FileNotFoundError):
        shutil.rmtree(then)
