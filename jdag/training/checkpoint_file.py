"""The file of a checkpoint: arrays in the format safetensors, and their description.

The header names each array. Its metadata have the description of all leaves, with a
digest of each array, and a digest of that description. Arrays of dtypes that only some
readers have are bytes, with an axis for those of an element; keys are uint32.

Invariants: arrays are made and written one at a time. A name has the former file or the
new one, whole: this is written beside it, flushed, and takes its place.
"""

import fcntl
import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from msgspec.structs import replace

from jdag.compute.avals import KEYS
from jdag.compute.pytrees import NUMBERS as NUMBER_TYPES
from jdag.engine.arrays import DTYPES

_FORMAT = "3"  # 1 and 2 were folders that Orbax wrote.
NUMBERS_BY_NAME = {kind.__name__: kind for kind in NUMBER_TYPES}
ARRAY, STATIC = "array", "static"
# The names in the format of the dtypes that all of its readers have.
NATIVE = {"bool": "BOOL", "bfloat16": "BF16", "complex64": "C64"} | {
    f"{kind}{bits}": f"{kind[0].upper()}{bits}"
    for kind in ("int", "uint", "float")
    for bits in (8, 16, 32, 64)
}
NO_DIGEST = "0" * 8
SAVERS_MAX = 100  # At once, of one checkpoint.

Parts = Mapping[str, Sequence["Saved"]]


class Saved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The description of one leaf of a part.

    `kind` is "array", the type of a Python number, which `text` then holds, or
    "static", of which nothing is kept but that it is one.
    """

    path: str
    kind: str
    dtype: str = ""
    shape: list[int] = []
    text: str = ""
    digest: str = NO_DIGEST
    untracked: bool = False

    def __str__(self) -> str:
        if self.kind == STATIC:
            return "a static"
        if self.kind in NUMBERS_BY_NAME:
            return f"the {self.kind} {self.text}"
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def write(
    path: Path, parts: Parts, values: Sequence[Callable[[], Any]], check: Any
) -> None:
    """Write a checkpoint, which replaces the one at `path`, whole or not at all.

    Args:
        path: of the file; missing folders are made.
        parts: the description of each leaf; digests are found here.
        values: for each leaf a function that gives its array, JAX's or numpy's.
        check: opens the file before it replaces another; raises if it is damaged.

    Raises:
        OSError, ValueError: it cannot be written. What `values` and `check` raise.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    rest = iter(values)
    with _beside(path) as (file, name):
        file.write(_header(parts))
        written = {
            part: [_written(file, saved, next(rest)) for saved in leaves]
            for part, leaves in parts.items()
        }
        file.seek(0)
        file.write(_header(written))
        file.flush()
        os.fsync(file.fileno())
        check(name)
        os.replace(name, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def _beside(path: Path) -> Iterator[tuple[IO[bytes], Path]]:
    """Give an empty hidden file beside another; it goes if it has not replaced that."""
    for number in range(SAVERS_MAX):
        name = path.parent / f".{path.name}.{number}"
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        with os.fdopen(os.open(name, flags, 0o666), "r+b") as file:
            if not is_mine(file, name):
                continue
            try:
                file.truncate()
                yield file, name
            except BaseException:
                if is_mine(file, name):  # Else it is in its place.
                    name.unlink()
                raise
            return
    raise FileExistsError(f"{SAVERS_MAX} others are saving there now")


def is_mine(file: IO[bytes], name: Path) -> bool:
    """Lock a file until it is closed; return False if another process holds it."""
    with suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A writer that has just finished has renamed or removed it.
        return os.path.samestat(os.fstat(file.fileno()), name.stat())
    return False


def _header(parts: Parts) -> bytes:
    """Return what precedes the arrays; digests do not change how long it is."""
    text = msgspec.json.encode(parts).decode()
    metadata = {"jdag": _FORMAT, "digest": _digest(text.encode()), "parts": text}
    header: dict[str, Any] = {"__metadata__": metadata}
    begin = 0
    for part, leaves in parts.items():
        for saved in [one for one in leaves if one.kind == ARRAY]:
            name = part + saved.path
            if name in header:
                raise ValueError(f"two arrays have the name {name!r}")
            end = begin + math.prod(saved.shape) * DTYPES[saved.dtype]
            header[name] = {**_form(saved), "data_offsets": [begin, end]}
            begin = end
    data = json.dumps(header).encode()
    data += b" " * (-len(data) % 8)
    return len(data).to_bytes(8, "little") + data


def _form(saved: Saved) -> dict[str, Any]:
    """Return the dtype and shape that an array has in the file."""
    nbytes = DTYPES[saved.dtype]
    if saved.dtype in NATIVE:
        return {"dtype": NATIVE[saved.dtype], "shape": saved.shape}
    dtype, count = ("U32", nbytes // 4) if saved.dtype in KEYS else ("U8", nbytes)
    return {"dtype": dtype, "shape": [*saved.shape, *[count] * (count > 1)]}


def _written(file: IO[bytes], saved: Saved, value: Callable[[], Any]) -> Saved:
    """Write the elements of a leaf, if it is an array; return it with its digest."""
    if saved.kind != ARRAY:
        return saved
    is_key = saved.dtype in KEYS
    array = jax.random.key_data(value()) if is_key else np.asarray(value(), saved.dtype)
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    file.write(data)
    return replace(saved, digest=_digest(data))


def _digest(data: bytes | memoryview) -> str:
    """CRC-32 in hexadecimal digits: any one flipped bit changes it."""
    return f"{zlib.crc32(data):08x}"


def read_parts(file: Any) -> dict[str, list[Saved]]:
    """Return the description in an open file.

    Raises:
        ValueError: it is not as jdag wrote it.
    """
    metadata = {"jdag": "none", **(file.metadata() or {})}
    if metadata["jdag"] != _FORMAT:
        raise ValueError(f"its format of jdag is {metadata['jdag']}, not {_FORMAT}")
    text = metadata["parts"]
    if metadata["digest"] != _digest(text.encode()):
        raise ValueError("its description has another digest than when it was saved")
    return msgspec.json.decode(text, type=dict[str, list[Saved]])


def read_array(file: Any, name: str, saved: Saved) -> Any:
    """Return an array of an open file as it was when it was saved, bit by bit.

    Raises:
        ValueError: its digest or size is another. What the library raises, and others.
    """
    data = np.ascontiguousarray(file.get_tensor(name)).reshape(-1).view(np.uint8)
    if _digest(data.data) != saved.digest:
        raise ValueError("its array has another digest than when it was saved")
    if saved.dtype not in KEYS:
        return jnp.asarray(data.view(saved.dtype).reshape(saved.shape))
    keys = data.view(np.uint32).reshape(_form(saved)["shape"])
    return jax.random.wrap_key_data(jnp.asarray(keys), impl=KEYS[saved.dtype])
