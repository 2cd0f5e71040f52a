"""The file of a checkpoint: arrays in safetensors format, and their description.

The header names each array. Its metadata contain the description of all leaves, with a
digest of each array, and a digest of the description. Arrays of dtypes that some
readers do not know are stored as bytes, with an additional axis for the bytes of an
element. PRNG keys are stored as uint32.

Invariants: arrays are fetched and written one at a time. The file is replaced
atomically: a new file in the same folder is written, flushed, and renamed.
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

_FORMAT = "3"  # Formats 1 and 2 were folders that Orbax wrote.
NUMBERS_BY_NAME = {kind.__name__: kind for kind in NUMBER_TYPES}
ARRAY, STATIC = "array", "static"
# The safetensors names of the dtypes that all readers know.
NATIVE = {"bool": "BOOL", "bfloat16": "BF16", "complex64": "C64"} | {
    f"{kind}{bits}": f"{kind[0].upper()}{bits}"
    for kind in ("int", "uint", "float")
    for bits in (8, 16, 32, 64)
}
NO_DIGEST = "0" * 8
SAVERS_MAX = 100  # Processes that save the same checkpoint at the same time.

Parts = Mapping[str, Sequence["Saved"]]


class Saved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The description of one leaf of a part.

    `kind` is "array", "static" or the type of a Python number. `text` is the value of a
    Python number. The value of a static is not saved.
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
    """Write a checkpoint, which replaces the file at `path` atomically.

    Args:
        path: the file; missing folders are made.
        parts: the description of each leaf, without digests.
        values: one function for each leaf. It returns the leaf's JAX or numpy array.
        check: opens the new file before the old file is replaced; raises if damaged.

    Raises:
        OSError, ValueError: the file cannot be written. Also the errors of `values`
            and `check`.
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
    """Yield an empty hidden file in the folder of `path`; delete it on errors."""
    for number in range(SAVERS_MAX):
        name = path.parent / f".{path.name}.{number}"
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        with os.fdopen(os.open(name, flags, 0o666), "r+b") as file:
            if not try_lock(file, name):
                continue
            try:
                file.truncate()
                yield file, name
            except BaseException:
                if try_lock(file, name):  # Otherwise the file was renamed.
                    name.unlink()
                raise
            return
    raise FileExistsError(f"{SAVERS_MAX} processes are already saving to this file")


def try_lock(file: IO[bytes], name: Path) -> bool:
    """Lock a file until it is closed. Return False if it is locked or was renamed."""
    with suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another process may have renamed or removed it since it was opened.
        return os.path.samestat(os.fstat(file.fileno()), name.stat())
    return False


def _header(parts: Parts) -> bytes:
    """Return the bytes before the arrays; their number does not depend on digests."""
    text = msgspec.json.encode(parts).decode()
    metadata = {"jdag": _FORMAT, "digest": _digest(text.encode()), "parts": text}
    header: dict[str, Any] = {"__metadata__": metadata}
    begin = 0
    for part, leaves in parts.items():
        for saved in [leaf for leaf in leaves if leaf.kind == ARRAY]:
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
    nbytes = DTYPES[saved.dtype]
    if saved.dtype in NATIVE:
        return {"dtype": NATIVE[saved.dtype], "shape": saved.shape}
    dtype, count = ("U32", nbytes // 4) if saved.dtype in KEYS else ("U8", nbytes)
    return {"dtype": dtype, "shape": [*saved.shape, *[count] * (count > 1)]}


def _written(file: IO[bytes], saved: Saved, value: Callable[[], Any]) -> Saved:
    if saved.kind != ARRAY:
        return saved
    is_key = saved.dtype in KEYS
    array = jax.random.key_data(value()) if is_key else np.asarray(value(), saved.dtype)
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    file.write(data)
    return replace(saved, digest=_digest(data))


def _digest(data: bytes | memoryview) -> str:
    return f"{zlib.crc32(data):08x}"


def read_parts(file: Any) -> dict[str, list[Saved]]:
    """Return the description in an open file. Raise ValueError if it is damaged."""
    metadata = {"jdag": "none", **(file.metadata() or {})}
    if metadata["jdag"] != _FORMAT:
        raise ValueError(f"its format version is {metadata['jdag']}, not {_FORMAT}")
    text = metadata["parts"]
    if metadata["digest"] != _digest(text.encode()):
        raise ValueError("its description is damaged: the digest differs")
    return msgspec.json.decode(text, type=dict[str, list[Saved]])


def read_array(file: Any, name: str, saved: Saved) -> Any:
    """Return an array of an open file, with its saved bits. Raise if it is damaged."""
    data = np.ascontiguousarray(file.get_tensor(name)).reshape(-1).view(np.uint8)
    if _digest(data.data) != saved.digest:
        raise ValueError("its array is damaged: the digest differs")
    if saved.dtype not in KEYS:
        return jnp.asarray(data.view(saved.dtype).reshape(saved.shape))
    keys = data.view(np.uint32).reshape(_form(saved)["shape"])
    return jax.random.wrap_key_data(jnp.asarray(keys), impl=KEYS[saved.dtype])
