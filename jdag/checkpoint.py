"""Checkpoints: leaves, states of optimizers and plain values in a folder, and back.

A checkpoint is written by Orbax beside the former one, takes its name by one rename and
only then replaces it; what a crash leaves unfinished is never read. It knows nothing of
workers: what was saved is restored wherever its leaves are now. Invariant: `load`
changes no leaf before all that was asked for has been found, read and checked.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import canonicalize_dtype

from jdag.assignments import Assignments
from jdag.compute.avals import aval_of
from jdag.compute.pytrees import flatten, is_static, paths, unflatten
from jdag.engine.vocabulary import Failure
from jdag.errors import JdagError
from jdag.failures import exception_of
from jdag.ref import Reader, Ref, is_ref

FORMAT = 1
NUMBERS = {kind.__name__: kind for kind in (bool, int, float, complex)}
# What Orbax cannot write, a byte each, goes as plain bytes.
AS_BYTES = ("uint2", "uint4", "float8_e4m3")
# What a folder of checkpoints has in it, and what one of these has in it.
UNFINISHED = ".orbax-checkpoint-tmp"
WRITTEN = ("_CHECKPOINT_METADATA", "commit_success.txt", "about", "arrays")

Folder = str | os.PathLike[str]


@runtime_checkable
class Stateful(Protocol):
    """What keeps leaves of its own beside those of users: an `Optimizer`."""

    @property
    def states(self) -> Any:
        """A pytree of refs to them."""


class Entry(NamedTuple):
    """One leaf of the pytree that is given for a part."""

    part: str
    path: str
    value: Any

    def __str__(self) -> str:
        held = f" ({self.value.leaf})" if is_ref(self.value) else ""
        return f"{self.part}{self.path}{held}"


class Saved(NamedTuple):
    """What a checkpoint says of one leaf.

    `kind` is "array", the name of a key's implementation, the type of a Python number,
    which `text` then holds, or "static", of which nothing is kept but that it is one.
    """

    path: str
    kind: str
    dtype: str
    shape: list[int]
    text: str = ""

    def __str__(self) -> str:
        if self.kind == "static":
            return "a static"
        if self.kind in NUMBERS:
            return f"the {self.kind} {self.text}"
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def save(
    assignments: Assignments, reader: Reader, folder: Folder, parts: Mapping[str, Any]
) -> None:
    """Write a checkpoint; see `Cluster.save`."""
    where = _path(folder, "cluster.save")
    orbax = _ready(assignments, "cluster.save", parts)
    entries = [entry for part in parts for entry in _entries(part, parts[part])]
    _refuse_what_is_not_ours(where)
    about: dict[str, list[Saved]] = {part: [] for part in parts}
    beside = {entry.part: True for entry in entries if not is_static(entry.value)}
    arrays = {"": np.zeros(1, np.int8)}  # Orbax writes neither none at all nor empty.
    for entry, value in zip(
        entries, _values(assignments, reader, entries), strict=True
    ):
        saved, array = _taken_apart(entry, value, entry.part in beside)
        if array.size:
            arrays[_name(entry.part, len(about[entry.part]))] = array
        about[entry.part].append(saved)
    said = {part: [entry._asdict() for entry in those] for part, those in about.items()}
    content = orbax.args.Composite(
        about=orbax.args.JsonSave({"jdag": FORMAT, "parts": said}),
        arrays=orbax.args.PyTreeSave(arrays),
    )
    try:
        with _manager(orbax, where, create=True) as manager:
            manager.save((manager.latest_step() or 0) + 1, args=content, force=True)
    except (OSError, ValueError) as error:
        raise JdagError(
            f"no checkpoint can be written to {where!r}: {error}; what was there is "
            "as it was"
        ) from error


def _path(folder: object, what: str) -> str:
    if not isinstance(folder, str | os.PathLike):
        raise JdagError(f"{what} takes a folder first, a path, not {folder!r}")
    return str(os.path.abspath(folder))


def load(
    assignments: Assignments, folder: Folder, parts: Mapping[str, Any]
) -> dict[str, Any]:
    """Restore from a checkpoint; see `Cluster.load`."""
    where = _path(folder, "cluster.load")
    orbax = _ready(assignments, "cluster.load", parts)
    entries = [entry for part in parts for entry in _entries(part, parts[part])]
    for entry in entries:
        if is_ref(entry.value):
            assignments.leaf(entry.value)
    about, arrays = _read(orbax, where)
    places = _places(where, about, parts, entries)
    values = []
    to_leaves = []
    for entry, place in zip(entries, places, strict=True):
        saved = about[entry.part][place]
        _check(where, entry, saved)
        if saved.kind == "static":
            values.append(entry.value)
            continue
        if isinstance(entry.value, str):
            assignments.home.place(entry.value, f"cluster.load, {entry}")
        if is_ref(entry.value) or isinstance(entry.value, str):
            to_leaves.append(len(values))
        values.append(_put_together(saved, arrays.get(_name(entry.part, place))))
    refs = assignments.write(
        [entries[place].value for place in to_leaves],
        [values[place] for place in to_leaves],
    )
    for place, ref in zip(to_leaves, refs, strict=True):
        values[place] = ref
    rest = iter(values)
    given = {}
    for part, tree in parts.items():
        leaves, treedef = flatten(_tree(tree))
        found = [next(rest) for _ in leaves]
        given[part] = tree if _is_stateful(tree) else unflatten(treedef, found)
    return given


# ------------------------------------------------------------------- what is asked for


def _ready(assignments: Assignments, what: str, parts: Mapping[str, Any]) -> Any:
    """Return Orbax, if there is something to do and it can be done."""
    assignments.home.check_open(what)
    if assignments.home.abstract:
        raise JdagError(
            f"{what} on {assignments.home}, whose values are abstract: it has shapes "
            "and no numbers; make it with values='real'"
        )
    if not parts:
        raise JdagError(f"{what} needs something by name, such as params=refs")
    try:
        import orbax.checkpoint as orbax  # noqa: PLC0415 - an extra, and 0.2 s.
    except ImportError as error:
        raise JdagError(
            f"{what} needs Orbax, which is not here: pip install 'jdag[checkpoint]'"
        ) from error
    return orbax


def _is_stateful(part: Any) -> bool:
    """Whether this is no pytree, but keeps one: a module may have `states` too."""
    leaves, _ = flatten(part)
    return len(leaves) == 1 and leaves[0] is part and isinstance(part, Stateful)


def _tree(part: Any) -> Any:
    return part.states if _is_stateful(part) else part


def _entries(part: str, given: Any) -> list[Entry]:
    tree = _tree(given)
    leaves, _ = flatten(tree)
    return [
        Entry(part, path, leaf) for path, leaf in zip(paths(tree), leaves, strict=True)
    ]


def _name(part: str, place: int) -> str:
    return f"{part}.{place}"


def _values(
    assignments: Assignments, reader: Reader, entries: Sequence[Entry]
) -> list[Any]:
    """Return each entry's value: all leaves are read by one request."""
    refs: list[Ref] = [entry.value for entry in entries if is_ref(entry.value)]
    for ref in refs:
        assignments.leaf(ref)
    read = iter(reader.read(refs))
    values = []
    for entry in entries:
        value = next(read) if is_ref(entry.value) else entry.value
        if isinstance(value, Failure):
            error = exception_of(value)
            raise type(error)(f"{entry} cannot be saved: {error}") from error.__cause__
        values.append(value)
    return values


def _taken_apart(entry: Entry, value: Any, beside: bool) -> tuple[Saved, np.ndarray]:
    """Return what a checkpoint says of a value, and its elements.

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


# ----------------------------------------------------------------------- what is there


def _manager(orbax: Any, where: str, create: bool) -> Any:
    options = orbax.CheckpointManagerOptions(
        max_to_keep=1 if create else None,
        create=create,
        cleanup_tmp_directories=create,
        enable_async_checkpointing=False,
    )
    return orbax.CheckpointManager(where, options=options)


def _refuse_what_is_not_ours(where: str) -> None:
    """Raise JdagError if the folder has in it what is no checkpoint: it might go."""
    try:
        there = sorted(os.listdir(where)) if os.path.lexists(where) else []
        strange = [name for name in there if not _is_ours(where, name)]
    except NotADirectoryError:
        raise JdagError(f"{where!r} is a file; a checkpoint is a folder") from None
    except OSError as error:
        raise JdagError(f"{where!r} cannot be read: {error}") from error
    if strange:
        raise JdagError(
            f"{where!r} has {strange[0]!r} in it, which is no checkpoint of jdag: a "
            "checkpoint needs a folder of its own, a new one or that of a former one"
        )


def _is_ours(where: str, name: str) -> bool:
    inside = os.path.join(where, name)
    if UNFINISHED in name:
        return True
    return (
        name.isdecimal()
        and os.path.isdir(inside)
        and all(each in WRITTEN for each in os.listdir(inside))
    )


def _read(orbax: Any, where: str) -> tuple[dict[str, list[Saved]], Mapping[str, Any]]:
    """Return what the newest checkpoint in a folder says, and its arrays."""
    if not os.path.isdir(where):
        there = "that is a file" if os.path.exists(where) else "there is no such folder"
        raise JdagError(f"no checkpoint in {where!r}: {there}")
    try:
        with _manager(orbax, where, create=False) as manager:
            number = manager.latest_step()
            if number is None:
                raise ValueError("nothing in it is a finished checkpoint")
            found = manager.restore(
                number, args=orbax.args.Composite(about=orbax.args.JsonRestore())
            )
            about = found["about"]
            if about.get("jdag") != FORMAT:
                raise ValueError(f"its format is {about.get('jdag')!r}, not {FORMAT}")
            found = manager.restore(
                number, args=orbax.args.Composite(arrays=orbax.args.PyTreeRestore())
            )
        parts = {
            part: [Saved(**saved) for saved in those]
            for part, those in about["parts"].items()
        }
        return parts, found["arrays"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise JdagError(
            f"{where!r} is no checkpoint that can be read: {error}"
        ) from error


def _places(
    where: str,
    about: Mapping[str, Sequence[Saved]],
    parts: Mapping[str, Any],
    entries: Sequence[Entry],
) -> list[int]:
    """Return where in its part each entry is; raise where structures differ."""
    for part in parts:
        if part not in about:
            has = ", ".join(map(repr, about))
            raise JdagError(f"the checkpoint {where!r} has no {part!r}; it has {has}")
        wanted = [entry.path for entry in entries if entry.part == part]
        found = [saved.path for saved in about[part]]
        for path in wanted:
            if path not in found:
                raise JdagError(
                    f"the checkpoint {where!r} has no {part}{path}; of {part} it has "
                    f"{_called(found)}, and wanted is {_called(wanted)}"
                )
        for path in found:
            if path not in wanted:
                raise JdagError(
                    f"the checkpoint {where!r} has {part}{path}, for which there is no "
                    f"place; wanted is {_called(wanted)}"
                )
    place_of = {
        (part, saved.path): place
        for part in parts
        for place, saved in enumerate(about[part])
    }
    return [place_of[entry.part, entry.path] for entry in entries]


def _called(paths: Sequence[str]) -> str:
    """Say what there is of a part; what is no pytree has no path."""
    return ", ".join(path or "a single value" for path in paths) or "nothing"


def _check(where: str, entry: Entry, saved: Saved) -> None:
    """Raise JdagError unless what is saved fits the place that is given for it."""
    wanted = _wanted(entry.value, saved)
    if wanted != str(saved):
        raise JdagError(
            f"{entry} is {saved} in the checkpoint {where!r}, and wanted is {wanted}"
        )


def _wanted(value: Any, saved: Saved) -> str:
    """What has to be saved for this place, in the words of `Saved`."""
    kind = type(value).__name__
    if NUMBERS.get(kind) is type(value):
        return str(saved) if saved.kind == kind else f"a Python {kind}"
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


def _put_together(saved: Saved, array: Any) -> Any:
    """Return a value as it was before it was taken apart; empty ones have no array."""
    if saved.kind in NUMBERS:
        text = saved.text
        return text == "True" if saved.kind == "bool" else NUMBERS[saved.kind](text)
    if saved.kind == "array":
        if array is None:
            return jnp.zeros(saved.shape, saved.dtype)
        return jnp.asarray(array.view(saved.dtype))
    if array is None:
        like = jax.random.key_data(jax.random.key(0, impl=saved.kind))
        array = jnp.zeros((*saved.shape, *like.shape), like.dtype)
    return jax.random.wrap_key_data(jnp.asarray(array), impl=saved.kind)
