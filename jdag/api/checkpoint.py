"""Checkpoints: leaves, states of optimizers and plain values in a folder, and back.

A checkpoint is a folder of `jdag.api.folders` with a description, `about.json`, and the
arrays, which Orbax writes. It knows nothing of workers: what was saved is restored
wherever its leaves are now. Invariant: `load` changes no leaf before all that was asked
for has been found, read and checked.
"""

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import canonicalize_dtype
from msgspec import Struct, convert, to_builtins
from msgspec.structs import replace

from jdag.api.folders import reading, replacing
from jdag.api.leaves import Assignments
from jdag.api.refs import Ref
from jdag.compute.avals import aval_of
from jdag.compute.pytrees import NUMBERS as NUMBER_TYPES
from jdag.compute.pytrees import flatten, is_static, paths, unflatten
from jdag.compute.refs import is_ref
from jdag.engine.protocol import Failure
from jdag.errors import JdagError
from jdag.runtime.failures import exception_of

FORMAT = 2
NUMBERS = {kind.__name__: kind for kind in NUMBER_TYPES}
# What Orbax cannot write, a byte each, goes as plain bytes.
AS_BYTES = ("uint2", "uint4", "float8_e4m3")
KIND = "checkpoint"
ABOUT, ARRAYS = "about.json", "arrays"
# Format 1 had a numbered folder for each checkpoint, with these names in it.
OLD_NAMES = ("_CHECKPOINT_METADATA", "commit_success.txt", "about", ARRAYS)
OLD_ABOUT = "about/metadata"

Folder = str | os.PathLike[str]


class Entry(NamedTuple):
    """One leaf of the pytree of a part."""

    part: str
    path: str
    value: Any

    def __str__(self) -> str:
        held = f" ({self.value.leaf})" if is_ref(self.value) else ""
        return f"{self.part}{self.path}{held}"


class Saved(Struct, frozen=True, forbid_unknown_fields=True):
    """The description of one leaf in a checkpoint.

    `kind` is "array", the name of a key's implementation, the type of a Python number,
    which `text` then holds, or "static", of which nothing is kept but that it is one.
    `name` is that of its array, "" where there is none; format 1 had no `digest`.
    """

    path: str
    kind: str
    dtype: str
    shape: list[int]
    text: str = ""
    name: str = ""
    digest: int | None = None
    untracked: bool = False

    def __str__(self) -> str:
        if self.kind == "static":
            return "a static"
        if self.kind in NUMBERS:
            return f"the {self.kind} {self.text}"
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def save(assignments: Assignments, folder: Folder, parts: Mapping[str, Any]) -> None:
    """Write a checkpoint; see `Cluster.save`."""
    where, stored = _ready(assignments, "cluster.save", folder, parts)
    counts = {name: held.steps for name, held in _optimizers(parts).items()}
    for name in counts:
        if name in parts:
            raise JdagError(f"cluster.save: {name!r} is the count of an optimizer")
    parts = {**parts, **counts}
    entries = _entries(assignments, parts)
    about: dict[str, list[Saved]] = {part: [] for part in parts}
    beside = {entry.part: True for entry in entries if not is_static(entry.value)}
    arrays: dict[str, np.ndarray] = {}
    for entry, value in zip(entries, _values(assignments, entries), strict=True):
        saved, array = _taken_apart(entry, value, entry.part in beside)
        if array.size:  # Orbax writes no empty ones.
            name = str(len(arrays))
            saved = replace(saved, name=name, digest=_digest(array))
            arrays[name] = array
        if is_ref(entry.value) and entry.value.leaf.id.untracked:
            saved = replace(saved, untracked=True)
        about[entry.part].append(saved)
    said = to_builtins(about)
    described = {"jdag": FORMAT, "digest": _digest(said), "parts": said}
    try:
        with replacing(Path(where), KIND, (ABOUT, ARRAYS), _unmarked) as made:
            (made / ABOUT).write_text(json.dumps(described), encoding="utf-8")
            if arrays:
                stored.write(made / ARRAYS, arrays)
    except (OSError, RuntimeError, ValueError) as error:
        raise JdagError(
            f"no checkpoint can be written to {where!r}: {error}; what was there is "
            "as it was"
        ) from error


def _digest(said: Any) -> int:
    """CRC-32 of an array's bytes, or of JSON: any one flipped bit changes it."""
    if isinstance(said, np.ndarray):
        return zlib.crc32(np.ascontiguousarray(said).reshape(-1).view(np.uint8).data)
    return zlib.crc32(json.dumps(said).encode())


def load(
    assignments: Assignments, folder: Folder, parts: Mapping[str, Any]
) -> dict[str, Any]:
    """Restore from a checkpoint; see `Cluster.load`."""
    where, stored = _ready(assignments, "cluster.load", folder, parts)
    entries = _entries(assignments, parts)
    about, arrays = _read(stored, where)
    counts = {name: held for name, held in _optimizers(parts).items() if name in about}
    parts = {**parts, **dict.fromkeys(counts, 0)}
    entries += [Entry(name, "", 0) for name in counts]
    found = _found(where, about, parts, entries)
    values: list[Any] = []
    to_leaves = []
    for entry, saved in zip(entries, found, strict=True):
        if isinstance(entry.value, str) and saved.kind != "static":
            assignments.state.place(entry.value, f"cluster.load, {entry}")
        try:
            value = _restored(where, entry, saved, arrays.get(saved.name))
        except JdagError:
            raise
        except Exception as error:  # A description may say anything.
            said = f"{entry} cannot be restored from the checkpoint {where!r}"
            raise JdagError(f"{said}: {error}") from error
        if saved.kind != "static" and isinstance(entry.value, Ref | str):
            to_leaves.append(len(values))
        values.append(value)
    refs = assignments.write(
        [entries[place].value for place in to_leaves],
        [values[place] for place in to_leaves],
        [not found[place].untracked for place in to_leaves],
    )
    for place, ref in zip(to_leaves, refs, strict=True):
        values[place] = ref
    rest = iter(values)
    given = {}
    for part, held in parts.items():
        tree = _tree(held)
        leaves, treedef = flatten(tree)
        new = unflatten(treedef, [next(rest) for _ in leaves])
        given[part] = new if tree is held else held
    for name, optimizer in counts.items():
        optimizer.resumed(given.pop(name))
    return given


def _ready(
    assignments: Assignments, what: str, folder: object, parts: Mapping[str, Any]
) -> tuple[str, Any]:
    """Return the path and the module of arrays, if what is asked for can be done."""
    if not isinstance(folder, str | os.PathLike):
        raise JdagError(f"{what} takes a folder first, a path, not {folder!r}")
    if assignments.state.abstract:
        raise JdagError(
            f"{what} on {assignments.state}, whose values are abstract: it has shapes "
            "and no numbers; make it with values='real'"
        )
    if not parts:
        raise JdagError(f"{what} needs something by name, such as params=refs")
    try:
        import orbax.checkpoint  # noqa: F401, PLC0415 - an extra, and 0.2 s.

        from jdag.api import checkpoint_arrays as stored  # noqa: PLC0415
    except ImportError as error:
        raise JdagError(
            f"{what} needs Orbax, which is not here: pip install 'jdag[checkpoint]'"
        ) from error
    return str(os.path.abspath(folder)), stored


def _tree(part: Any) -> Any:
    """Return the pytree of a part: of an `Optimizer`, its states."""
    leaves, _ = flatten(part, what="a part of a checkpoint")
    is_tree = len(leaves) != 1 or leaves[0] is not part  # A module may have `states`.
    return part if is_tree or not hasattr(part, "states") else part.states


def _optimizers(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optimizers, by the names of the parts that have their steps."""
    return {f"{part}.steps": h for part, h in parts.items() if _tree(h) is not h}


def _entries(assignments: Assignments, parts: Mapping[str, Any]) -> list[Entry]:
    """Return the leaves of all parts; raise JdagError for a ref that is no leaf."""
    entries = []
    for part, held in parts.items():
        tree = _tree(held)
        for path, leaf in zip(paths(tree), flatten(tree)[0], strict=True):
            if is_ref(leaf):
                assignments.leaf(leaf)
            entries.append(Entry(part, path, leaf))
    return entries


def _values(assignments: Assignments, entries: Sequence[Entry]) -> list[Any]:
    """Return each entry's value: all leaves are read by one request."""
    refs: list[Ref] = [entry.value for entry in entries if is_ref(entry.value)]
    read = iter(assignments.state.read(refs))
    values = []
    for entry in entries:
        value = next(read) if is_ref(entry.value) else entry.value
        if isinstance(value, Failure):
            error = exception_of(value)
            raise type(error)(f"{entry} cannot be saved: {error}") from error.__cause__
        values.append(value)
    return values


def _taken_apart(entry: Entry, value: Any, beside: bool) -> tuple[Saved, np.ndarray]:
    """Return the description of a value in a checkpoint, and its elements.

    A static is a mistake where there is nothing else `beside` it.
    """
    kind = type(value).__name__
    if NUMBERS.get(kind) is type(value):
        return Saved(entry.path, kind, "", [], repr(value)), np.zeros(0)
    if is_static(value) and beside:
        return Saved(entry.path, "static", "", []), np.zeros(0)
    try:
        aval = aval_of(value)
    except JdagError as error:
        raise JdagError(
            f"{entry} cannot be saved: {error}; what is saved are leaves, arrays, "
            "Python numbers, and optimizers"
        ) from error
    kind, shape, dtype = "array", list(aval.shape), str(aval.dtype)
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        kind, value = str(jax.random.key_impl(value)), jax.random.key_data(value)
    array = np.asarray(value, aval.dtype if kind == "array" else None)
    array = array.view(np.uint8) if dtype in AS_BYTES else array
    return Saved(entry.path, kind, dtype, shape), array


def _numbered(folder: Path) -> list[str]:
    """The checkpoints of format 1 in a folder, by their own descriptions."""
    found = []
    for one in folder.iterdir():
        with suppress(OSError, ValueError, RecursionError, TypeError, KeyError):
            about = json.loads((one / OLD_ABOUT).read_text(encoding="utf-8"))
            if one.name.isdecimal() and about["jdag"] == 1:
                found.append(one.name)
    return found


def _unmarked(folder: Path) -> list[str]:
    """What jdag wrote in a folder before it left markers there."""
    return [
        name
        for name in _numbered(folder)
        if all(one in OLD_NAMES for one in os.listdir(folder / name))
    ]


def _read(stored: Any, where: str) -> tuple[dict[str, list[Saved]], Mapping[str, Any]]:
    """Return the description of the newest checkpoint in a folder, and its arrays."""
    folder = Path(where)
    if not folder.is_dir():
        there = "that is a file" if folder.exists() else "there is no such folder"
        raise JdagError(f"no checkpoint in {where!r}: {there}")
    try:
        with reading(folder):
            about = folder / ABOUT
            if not about.exists():
                numbers = _numbered(folder)
                if not numbers:
                    raise ValueError("nothing in it is a finished checkpoint")
                folder /= max(numbers, key=int)
                about = folder / OLD_ABOUT
            parts = _described(about)
            has_arrays = any(saved.name for those in parts.values() for saved in those)
            return parts, stored.read(folder / ARRAYS) if has_arrays else {}
    except Exception as error:  # What is there may be anything.
        raise JdagError(f"no checkpoint can be read from {where!r}: {error}") from error


def _described(path: Path) -> dict[str, list[Saved]]:
    """Read a description; raise ValueError if it is not as jdag wrote it."""
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        is_old = about["jdag"] == 1
        if not is_old and about["jdag"] != FORMAT:
            raise ValueError(f"its format is {about['jdag']!r}, not {FORMAT}")
        if not is_old and about["digest"] != _digest(about["parts"]):
            raise ValueError("its digest is another")
        parts = convert(about["parts"], dict[str, list[Saved]])
        if is_old:
            parts = {part: _named(part, those) for part, those in parts.items()}
        return parts
    except Exception as error:
        said = f"its description, {path.name}, is not as jdag wrote it: {error}"
        raise ValueError(said) from error


def _named(part: str, those: Sequence[Saved]) -> list[Saved]:
    """Return descriptions of format 1 with the names of their arrays."""
    return [
        saved
        if saved.kind in ("static", *NUMBERS)
        else replace(saved, name=f"{part}.{place}")
        for place, saved in enumerate(those)
    ]


def _stored(saved: Saved) -> tuple[tuple[int, ...], np.dtype]:
    shape = tuple(saved.shape)
    if saved.kind == "array":
        dtype = "uint8" if saved.dtype in AS_BYTES else saved.dtype
        return shape, np.dtype(dtype)
    like = jax.random.key_data(jax.random.key(0, impl=saved.kind))
    return (*shape, *like.shape), np.dtype(like.dtype)


def _found(
    where: str,
    about: Mapping[str, Sequence[Saved]],
    parts: Mapping[str, Any],
    entries: Sequence[Entry],
) -> list[Saved]:
    """Return what was saved for each entry; raise where structures differ."""
    for part in parts:
        if part not in about:
            has = ", ".join(map(repr, about))
            raise JdagError(f"the checkpoint {where!r} has no {part!r}; it has {has}")
        wanted = [entry.path for entry in entries if entry.part == part]
        found = [saved.path for saved in about[part]]
        for path in (path for path in wanted if path not in found):
            raise JdagError(
                f"the checkpoint {where!r} has no {part}{path}; of {part} it has "
                f"{_called(found)}, and wanted is {_called(wanted)}"
            )
        for path in (path for path in found if path not in wanted):
            raise JdagError(
                f"the checkpoint {where!r} has {part}{path}, for which there is no "
                f"place; wanted is {_called(wanted)}"
            )
    saved_of = {(part, one.path): one for part in parts for one in about[part]}
    return [saved_of[entry.part, entry.path] for entry in entries]


def _called(paths: Sequence[str]) -> str:
    """Say what there is of a part; what is no pytree has no path."""
    return ", ".join(path or "a single value" for path in paths) or "nothing"


def _restored(where: str, entry: Entry, saved: Saved, array: Any) -> Any:
    """Return a value as it was saved, bit by bit; JdagError if it does not fit."""
    wanted = _wanted(entry.value, saved)
    if wanted != str(saved):
        raise JdagError(
            f"{entry} is {saved} in the checkpoint {where!r}, and wanted is {wanted}"
        )
    if saved.kind not in ("static", *NUMBERS):
        value = _array(saved, array)
    elif saved.name:
        raise ValueError(f"{saved} has an array")
    else:
        value = entry.value if saved.kind == "static" else _number(saved)
    kind = type(entry.value)
    return kind(value) if kind in NUMBERS.values() else value


def _array(saved: Saved, array: Any) -> Any:
    """Return an array as it was before it was taken apart; empty ones have none."""
    shape, dtype = _stored(saved)
    if isinstance(array, BaseException):
        raise array
    if array is None and 0 in shape:
        array = np.zeros(shape, dtype)
    if array is None or (array.shape, array.dtype) != (shape, dtype):
        found = "none" if array is None else f"{array.dtype}{list(array.shape)}"
        raise ValueError(f"its array is {found}, and {saved} in the description")
    if saved.digest not in (None, _digest(array)):
        raise ValueError("its array has another digest than when it was saved")
    if saved.kind == "array":
        return jnp.asarray(array.view(saved.dtype))
    return jax.random.wrap_key_data(jnp.asarray(array), impl=saved.kind)


def _wanted(value: Any, saved: Saved) -> str:
    """Return what has to be saved for this place, in the words of `Saved`."""
    kind = type(value).__name__
    if NUMBERS.get(kind) is type(value):
        # Numbers inside pytrees were leaves once, and so saved as arrays.
        was_leaf = saved.shape == [] and saved.dtype.strip("0123456789") == kind
        return str(saved) if saved.kind == kind or was_leaf else f"a Python {kind}"
    if is_static(value) and not isinstance(value, str):
        return "a static"
    if not isinstance(value, str):
        aval = aval_of(value.aval if is_ref(value) else value)
        return str(Saved("", "array", str(aval.dtype), list(aval.shape)))
    if saved.kind == "static":
        return str(saved)
    if saved.kind in NUMBERS:
        return f"an array, to be put on {value!r}"
    if saved.kind == "array" and canonicalize_dtype(saved.dtype).name != saved.dtype:
        return f"at most 32 bits without jax_enable_x64, to be put on {value!r}"
    return str(saved)


def _number(saved: Saved) -> Any:
    text = saved.text
    return text == "True" if saved.kind == "bool" else NUMBERS[saved.kind](text)
