"""Checkpoints: leaves, states of optimizers and plain values in a file, and back.

`jdag.training.checkpoint_file` has the file. A checkpoint knows nothing of workers:
what was saved is restored wherever its leaves are now. Invariants: `save` keeps the
versions that all leaves have as it begins, on their workers, and fetches one at a time;
`load_checkpoint` changes no leaf before all that was asked for has been found, read and
checked.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.dtypes import canonicalize_dtype

from jdag.compute.avals import KEYS, aval_of
from jdag.compute.pytrees import flatten, is_static, paths
from jdag.compute.refs import is_ref
from jdag.context.leaves import Assignments
from jdag.context.refs import Ref
from jdag.engine.arrays import DTYPES
from jdag.engine.protocol import Failure
from jdag.errors import JdagError, WorkerLost, reason
from jdag.runtime.failures import exception_of
from jdag.training.checkpoint_file import (
    ARRAY,
    NUMBERS_BY_NAME,
    STATIC,
    Saved,
    read_array,
    read_parts,
    write,
)

_SUFFIX = ".safetensors"

FilePath = str | os.PathLike[str]


class _Entry(NamedTuple):
    """One leaf of the pytree of a part."""

    part: str
    path: str
    value: Any

    def __str__(self) -> str:
        held = f" ({self.value.leaf})" if is_ref(self.value) else ""
        return f"{self.part}{self.path}{held}"


def save(assignments: Assignments, path: FilePath, parts: Mapping[str, Any]) -> None:
    """Write a checkpoint; see `Cluster.save`."""
    where, library = _ready(assignments, "cluster.save", path, parts)
    counts = {name: held.steps for name, held in _optimizers(parts).items()}
    for name in counts:
        if name in parts:
            raise JdagError(f"cluster.save: {name!r} is the count of an optimizer")
    entries = _entries(assignments, {**parts, **counts})
    beside = {entry.part for entry in entries if not is_static(entry.value)}
    described: dict[str, list[Saved]] = {part: [] for part in (*parts, *counts)}
    for entry in entries:
        described[entry.part].append(_described(entry, entry.part in beside))
    values = _values(assignments, entries)
    try:
        write(where, described, values, partial(library.safe_open, framework="numpy"))
    except (OSError, ValueError, library.SafetensorError) as error:
        said = f"no checkpoint can be written to {str(where)!r}"
        raise JdagError(f"{said}: {error}") from error
    finally:
        del values
        assignments.forget()


def load_checkpoint(
    assignments: Assignments, path: FilePath, parts: Mapping[str, Any]
) -> dict[str, Any]:
    """Restore from a checkpoint; see `Cluster.load`."""
    where, library = _ready(assignments, "cluster.load", path, parts)
    entries = _entries(assignments, parts)
    file, described = _opened(where, library)
    optimizers = _optimizers(parts)
    counts = {name: 0 for name in optimizers if name in described}
    parts = {**parts, **counts}
    entries += [_Entry(name, "", 0) for name in counts]
    _compare(where, described, entries, parts)
    of = {(part, one.path): one for part in parts for one in described[part]}
    found = [of[entry.part, entry.path] for entry in entries]
    values = [
        _restored(assignments, where, entry, saved, file)
        for entry, saved in zip(entries, found, strict=True)
    ]
    rows = {
        place: (entry.value, values[place], not saved.untracked)
        for place, (entry, saved) in enumerate(zip(entries, found, strict=True))
        if saved.kind != STATIC and isinstance(entry.value, Ref | str)
    }
    refs = assignments.write(*zip(*rows.values(), strict=True)) if rows else []
    for place, ref in zip(rows, refs, strict=True):
        values[place] = ref
    rest, given = iter(values), {}
    for part, held in parts.items():
        tree = _tree(held)
        new = jax.tree.map(lambda _: next(rest), tree)
        given[part] = new if tree is held else held
    for name in counts:
        optimizers[name].resumed(given.pop(name))
    return given


def _ready(
    assignments: Assignments, what: str, path: object, parts: Mapping[str, Any]
) -> tuple[Path, Any]:
    """Return the file's path and the library, if what is asked for can be done."""
    if not isinstance(path, str | os.PathLike):
        raise JdagError(f"{what} takes the path of a file first, not {path!r}")
    if assignments.state.abstract:
        raise JdagError(
            f"{what} on {assignments.state}, whose values are abstract: it has shapes "
            "and no numbers; make it with values='real'"
        )
    if not parts:
        raise JdagError(f"{what} needs something by name, such as params=refs")
    try:
        import safetensors  # noqa: PLC0415 - an extra.
    except ImportError as error:
        said = f"{what} needs safetensors, which is not here"
        raise JdagError(f"{said}: pip install 'jdag[safetensors]'") from error
    where = os.path.expanduser(path)
    try:
        where = os.path.realpath(where if where.endswith(_SUFFIX) else where + _SUFFIX)
    except ValueError as error:
        raise JdagError(f"{what}, {where!r}: {reason(error)}") from error
    return Path(where), safetensors


def _opened(where: Path, library: Any) -> tuple[Any, dict[str, list[Saved]]]:
    """Open a checkpoint; return the file, and the description in it."""
    folders = [one for one in (where, where.with_suffix("")) if one.is_dir()]
    if folders and not where.is_file():
        raise JdagError(
            f"{str(folders[0])!r} is a folder, and a checkpoint is one file now: load "
            "what Orbax wrote with the version of jdag that saved it; save here what "
            "jdag.fetch gives there"
        )
    try:
        file = library.safe_open(where, framework="numpy")
        return file, read_parts(file)
    except Exception as error:  # What is there may be anything.
        said = f"no checkpoint can be read from {str(where)!r}"
        raise JdagError(f"{said}: {error}") from error


def _tree(part: Any) -> Any:
    """Return the pytree of a part: of an `Optimizer`, its states."""
    leaves, _ = flatten(part, what="a part of a checkpoint")
    is_tree = len(leaves) != 1 or leaves[0] is not part  # A module may have `states`.
    return part if is_tree or not hasattr(part, "states") else part.states


def _optimizers(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optimizers, by the names of the parts that have their steps."""
    return {f"{part}.steps": h for part, h in parts.items() if _tree(h) is not h}


def _entries(assignments: Assignments, parts: Mapping[str, Any]) -> list[_Entry]:
    """Return the leaves of all parts; raise JdagError for a ref that is no leaf."""
    entries = []
    for part, held in parts.items():
        tree = _tree(held)
        for path, leaf in zip(paths(tree), flatten(tree)[0], strict=True):
            if is_ref(leaf):
                assignments.leaf(leaf)
            entries.append(_Entry(part, path, leaf))
    return entries


def _described(entry: _Entry, beside: bool) -> Saved:
    """Return the description of a value; its type is known before it is fetched.

    A static is a mistake where there is nothing else `beside` it.
    """
    value = entry.value
    kind = type(value).__name__
    if NUMBERS_BY_NAME.get(kind) is type(value):
        return Saved(entry.path, kind, text=repr(value))
    if is_static(value) and beside:
        return Saved(entry.path, STATIC)
    try:
        aval = aval_of(value.aval if is_ref(value) else value)
        dtype = str(aval.dtype)
        if dtype not in DTYPES:
            raise JdagError(f"its dtype is {dtype}; allowed are {', '.join(DTYPES)}")
    except JdagError as error:
        raise JdagError(
            f"{entry} cannot be in a checkpoint: {error}; what is saved are leaves, "
            "arrays, Python numbers, and optimizers"
        ) from error
    untracked = is_ref(value) and value.leaf.id.untracked
    return Saved(entry.path, ARRAY, dtype, list(aval.shape), untracked=untracked)


def _values(
    assignments: Assignments, entries: Sequence[_Entry]
) -> list[Callable[[], Any]]:
    """Return for each entry what gives its value, of a leaf the version of now.

    Leaves of our own keep these versions, the same arrays on their workers, by one
    message to each worker.
    """
    refs = [entry.value for entry in entries if is_ref(entry.value)]
    try:
        rest = iter(assignments.keep(refs, apart=True))
    except WorkerLost:  # To fetch it says of which leaf.
        rest = iter(refs)
    kept = [next(rest) if is_ref(entry.value) else None for entry in entries]

    def value_of(entry: _Entry, ref: Ref | None) -> Any:
        value = entry.value if ref is None else assignments.state.read([ref])[0]
        if isinstance(value, Failure):
            error = exception_of(value)
            raise type(error)(f"{entry} cannot be saved: {error}") from error.__cause__
        return value

    return [partial(value_of, *one) for one in zip(entries, kept, strict=True)]


def _compare(
    where: Path,
    described: Mapping[str, Sequence[Saved]],
    entries: Sequence[_Entry],
    parts: Iterable[str],
) -> None:
    """Raise where what was saved has another structure than what is asked for."""
    for part in parts:
        said = f"the checkpoint {str(where)!r} has"
        if part not in described:
            has = ", ".join(map(repr, described))
            raise JdagError(f"{said} no {part!r}; it has {has}")
        wanted = [entry.path for entry in entries if entry.part == part]
        found = [saved.path for saved in described[part]]
        both = f"of {part} it has {_called(found)}, and wanted is {_called(wanted)}"
        for path in (*wanted, *found):
            if path not in found:
                raise JdagError(f"{said} no {part}{path}; {both}")
            if path not in wanted:
                raise JdagError(f"{said} {part}{path}, which has no place; {both}")


def _called(paths: Iterable[str]) -> str:
    """Say what there is of a part; what is no pytree has no path."""
    return ", ".join(path or "a single value" for path in paths) or "nothing"


def _restored(
    assignments: Assignments, where: Path, entry: _Entry, saved: Saved, file: Any
) -> Any:
    """Return a value as it was saved, bit by bit; JdagError if it does not fit."""
    value = entry.value
    if isinstance(value, str) and saved.kind != STATIC:
        assignments.state.place(value, f"cluster.load, {entry}")
    wanted, at = _wanted(entry, saved), f"the checkpoint {str(where)!r}"
    if wanted != str(saved):
        raise JdagError(f"{entry} is {saved} in {at}, and wanted is {wanted}")
    if saved.kind == STATIC:
        return value
    if saved.kind in NUMBERS_BY_NAME:
        is_bool = saved.kind == "bool"
        return (
            saved.text == "True" if is_bool else NUMBERS_BY_NAME[saved.kind](saved.text)
        )
    try:
        array = read_array(file, entry.part + entry.path, saved)
    except Exception as error:  # What is there may be anything.
        raise JdagError(f"{entry} cannot be restored from {at}: {error}") from error
    kind = type(value)
    return kind(array) if kind in NUMBERS_BY_NAME.values() else array


def _wanted(entry: _Entry, saved: Saved) -> str:
    """Return what has to be saved for this place, in the words of `Saved`."""
    value = entry.value
    if not isinstance(value, str):
        wanted = _described(entry, True)
        if wanted.kind not in NUMBERS_BY_NAME:
            return str(wanted)
        # An array of one number is a Python number where one is wanted.
        is_one = saved.shape == [] and saved.dtype.strip("0123456789") == wanted.kind
        fits = saved.kind == wanted.kind or is_one
        return str(saved) if fits else f"a Python {wanted.kind}"
    if saved.kind in NUMBERS_BY_NAME:
        return f"an array, to be put on {value!r}"
    is_plain = saved.kind == ARRAY and saved.dtype not in KEYS
    if is_plain and canonicalize_dtype(saved.dtype).name != saved.dtype:
        return f"at most 32 bits without jax_enable_x64, to be put on {value!r}"
    return str(saved)
