"""Checkpoints of leaves, optimizer states and plain values.

`jdag.training.checkpoint_file` reads and writes the file. The file does not name
workers: values are restored wherever the leaves are. Invariants: `save` writes the
versions that all leaves have at its start, which workers keep until they are fetched,
one at a time; `load_checkpoint` reads and checks all values before it changes a leaf.
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
        leaf = f" ({self.value.leaf})" if is_ref(self.value) else ""
        return f"{self.part}{self.path}{leaf}"


def save(assignments: Assignments, path: FilePath, parts: Mapping[str, Any]) -> None:
    file_path, library = _checked(assignments, "cluster.save", path, parts)
    counts = {name: optimizer.steps for name, optimizer in _optimizers(parts).items()}
    for name in counts:
        if name in parts:
            raise JdagError(f"cluster.save: {name!r} is the count of an optimizer")
    entries = _entries(assignments, {**parts, **counts})
    with_values = {entry.part for entry in entries if not is_static(entry.value)}
    described: dict[str, list[Saved]] = {part: [] for part in (*parts, *counts)}
    for entry in entries:
        described[entry.part].append(_described(entry, entry.part in with_values))
    values = _values(assignments, entries)
    check = partial(library.safe_open, framework="numpy")
    try:
        write(file_path, described, values, check)
    except (OSError, ValueError, library.SafetensorError) as error:
        text = f"no checkpoint can be written to {str(file_path)!r}"
        raise JdagError(f"{text}: {error}") from error
    finally:
        del values
        assignments.forget()


def load_checkpoint(
    assignments: Assignments, path: FilePath, parts: Mapping[str, Any]
) -> dict[str, Any]:
    file_path, library = _checked(assignments, "cluster.load", path, parts)
    entries = _entries(assignments, parts)
    file, described = _opened(file_path, library)
    optimizers = _optimizers(parts)
    counts = {name: 0 for name in optimizers if name in described}
    parts = {**parts, **counts}
    entries += [_Entry(name, "", 0) for name in counts]
    _compare(file_path, described, entries, parts)
    by_path = {(part, leaf.path): leaf for part in parts for leaf in described[part]}
    saved_leaves = [by_path[entry.part, entry.path] for entry in entries]
    values = [
        _restored(assignments, file_path, entry, saved, file)
        for entry, saved in zip(entries, saved_leaves, strict=True)
    ]
    rows = {
        index: (entry.value, values[index], not saved.untracked)
        for index, (entry, saved) in enumerate(zip(entries, saved_leaves, strict=True))
        if saved.kind != STATIC and isinstance(entry.value, Ref | str)
    }
    refs = assignments.write(*zip(*rows.values(), strict=True)) if rows else []
    for index, ref in zip(rows, refs, strict=True):
        values[index] = ref
    rest, loaded = iter(values), {}
    for name, part in parts.items():
        tree = _tree(part)
        new = jax.tree.map(lambda _: next(rest), tree)
        loaded[name] = new if tree is part else part
    for name in counts:
        optimizers[name].resumed(loaded.pop(name))
    return loaded


def _checked(
    assignments: Assignments, what: str, path: object, parts: Mapping[str, Any]
) -> tuple[Path, Any]:
    if not isinstance(path, str | os.PathLike):
        raise JdagError(f"{what} takes a path as first argument, not {path!r}")
    if assignments.state.abstract:
        raise JdagError(
            f"{what} on {assignments.state}, which computes only shapes: expected a "
            "cluster made with values='real'"
        )
    if not parts:
        raise JdagError(f"{what} takes keyword arguments, such as params=refs")
    try:
        import safetensors  # noqa: PLC0415 - an extra.
    except ImportError as error:
        text = f"{what} needs safetensors, which is not installed"
        raise JdagError(f"{text}: pip install 'jdag[safetensors]'") from error
    file = os.path.expanduser(path)
    try:
        file = os.path.realpath(file if file.endswith(_SUFFIX) else file + _SUFFIX)
    except ValueError as error:
        raise JdagError(f"{what}, {file!r}: {reason(error)}") from error
    return Path(file), safetensors


def _opened(where: Path, library: Any) -> tuple[Any, dict[str, list[Saved]]]:
    folders = [path for path in (where, where.with_suffix("")) if path.is_dir()]
    if folders and not where.is_file():
        raise JdagError(
            f"{str(folders[0])!r} is a folder, but a checkpoint is a file: load an "
            "Orbax checkpoint with the version of jdag that saved it, fetch its values "
            "by jdag.fetch, and save them with this version"
        )
    try:
        file = library.safe_open(where, framework="numpy")
        return file, read_parts(file)
    except Exception as error:  # The file may contain anything.
        text = f"no checkpoint can be read from {str(where)!r}"
        raise JdagError(f"{text}: {error}") from error


def _tree(part: Any) -> Any:
    """Return the pytree of a part; for an `Optimizer`, its states."""
    leaves, _ = flatten(part, what="a part of a checkpoint")
    is_tree = len(leaves) != 1 or leaves[0] is not part  # A module may have `states`.
    return part if is_tree or not hasattr(part, "states") else part.states


def _optimizers(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optimizers, by the names of the parts that hold their step counts."""
    return {f"{name}.steps": p for name, p in parts.items() if _tree(p) is not p}


def _entries(assignments: Assignments, parts: Mapping[str, Any]) -> list[_Entry]:
    entries = []
    for name, part in parts.items():
        tree = _tree(part)
        for path, leaf in zip(paths(tree), flatten(tree)[0], strict=True):
            if is_ref(leaf):
                assignments.leaf(leaf)
            entries.append(_Entry(name, path, leaf))
    return entries


def _described(entry: _Entry, allow_static: bool) -> Saved:
    """Return the description of a value, before it is fetched.

    A static is allowed only in a part with other values, such as a module.
    """
    value = entry.value
    kind = type(value).__name__
    if NUMBERS_BY_NAME.get(kind) is type(value):
        return Saved(entry.path, kind, text=repr(value))
    if is_static(value) and allow_static:
        return Saved(entry.path, STATIC)
    try:
        aval = aval_of(value.aval if is_ref(value) else value)
        dtype = str(aval.dtype)
        if dtype not in DTYPES:
            raise JdagError(f"its dtype is {dtype}; expected {', '.join(DTYPES)}")
    except JdagError as error:
        raise JdagError(
            f"{entry} cannot be in a checkpoint: {error}; expected leaves, arrays, "
            "Python numbers, and optimizers"
        ) from error
    untracked = is_ref(value) and value.leaf.id.untracked
    return Saved(entry.path, ARRAY, dtype, list(aval.shape), untracked=untracked)


def _values(
    assignments: Assignments, entries: Sequence[_Entry]
) -> list[Callable[[], Any]]:
    """Return one function for each entry, which fetches its value.

    The value of a leaf is its current version, which a temporary leaf keeps on the
    worker.
    """
    refs = [entry.value for entry in entries if is_ref(entry.value)]
    try:
        rest = iter(assignments.keep(refs, apart=True))
    except WorkerLost:  # The fetch raises it too, and names the leaf.
        rest = iter(refs)
    copies = [next(rest) if is_ref(entry.value) else None for entry in entries]

    def value_of(entry: _Entry, ref: Ref | None) -> Any:
        value = entry.value if ref is None else assignments.state.read([ref])[0]
        if isinstance(value, Failure):
            error = exception_of(value)
            raise type(error)(f"{entry} cannot be saved: {error}") from error.__cause__
        return value

    return [partial(value_of, *item) for item in zip(entries, copies, strict=True)]


def _compare(
    where: Path,
    described: Mapping[str, Sequence[Saved]],
    entries: Sequence[_Entry],
    parts: Iterable[str],
) -> None:
    for part in parts:
        text = f"the checkpoint {str(where)!r} has"
        if part not in described:
            names = ", ".join(map(repr, described))
            raise JdagError(f"{text} no part {part!r}, only {names}")
        expected = [entry.path for entry in entries if entry.part == part]
        saved = [leaf.path for leaf in described[part]]
        both = f"saved in {part}: {_listed(saved)}; expected: {_listed(expected)}"
        for path in (*expected, *saved):
            if path not in saved:
                raise JdagError(f"{text} no {part}{path}; {both}")
            if path not in expected:
                raise JdagError(f"{text} {part}{path}, which is not expected; {both}")


def _listed(paths: Iterable[str]) -> str:
    return ", ".join(path or "a single value" for path in paths) or "nothing"


def _restored(
    assignments: Assignments, where: Path, entry: _Entry, saved: Saved, file: Any
) -> Any:
    value = entry.value
    if isinstance(value, str) and saved.kind != STATIC:
        assignments.state.place(value, f"cluster.load, {entry}")
    expected, source = _expected(entry, saved), f"the checkpoint {str(where)!r}"
    if expected != str(saved):
        raise JdagError(f"{entry} is {saved} in {source}; expected {expected}")
    if saved.kind == STATIC:
        return value
    if saved.kind in NUMBERS_BY_NAME:
        is_bool = saved.kind == "bool"
        return (
            saved.text == "True" if is_bool else NUMBERS_BY_NAME[saved.kind](saved.text)
        )
    try:
        array = read_array(file, entry.part + entry.path, saved)
    except Exception as error:  # The file may contain anything.
        raise JdagError(f"{entry} cannot be restored from {source}: {error}") from error
    kind = type(value)
    return kind(array) if kind in NUMBERS_BY_NAME.values() else array


def _expected(entry: _Entry, saved: Saved) -> str:
    """Return a string that describes a value that would fit the entry."""
    value = entry.value
    if not isinstance(value, str):
        expected = _described(entry, True)
        if expected.kind not in NUMBERS_BY_NAME:
            return str(expected)
        # A saved scalar array may become a Python number.
        is_scalar = (
            saved.shape == [] and saved.dtype.strip("0123456789") == expected.kind
        )
        fits = saved.kind == expected.kind or is_scalar
        return str(saved) if fits else f"a Python {expected.kind}"
    if saved.kind in NUMBERS_BY_NAME:
        return f"an array, to be put on {value!r}"
    is_plain = saved.kind == ARRAY and saved.dtype not in KEYS
    if is_plain and canonicalize_dtype(saved.dtype).name != saved.dtype:
        return f"at most 32 bits without jax_enable_x64, to be put on {value!r}"
    return str(saved)
