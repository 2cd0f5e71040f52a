"""Arrays in a folder, as Orbax writes and reads them.

By itself Orbax closes its event loop when the first of several arrays fails, while the
others are still on their way: each of these prints a traceback later. Here all arrays
are waited for, whatever becomes of one. What Orbax logs it also raises.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as orbax


class _Settled(orbax.type_handlers.NumpyHandler):  # type: ignore[misc]
    """Orbax's way to keep arrays, with what fails as a result like any other."""

    def __init__(self) -> None:
        super().__init__()
        self.failed: list[Exception] = []

    async def _open_and_write(self, *args: Any, **settings: Any) -> None:
        try:
            await super()._open_and_write(*args, **settings)
        except Exception as error:
            self.failed.append(error)

    async def deserialize(self, infos: Any, args: Any = None) -> list[Any]:
        read = super().deserialize
        reads = [read([info], args and [args[n]]) for n, info in enumerate(infos)]
        found = await asyncio.gather(*reads, return_exceptions=True)
        return [one[0] if isinstance(one, list) else one for one in found]


def write(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays, none of them empty, into a new folder; OSError or ValueError."""
    settled = _Settled()
    folder.mkdir()
    with _unlogged():
        try:
            _trees(settled).save(folder, args=orbax.args.PyTreeSave(arrays))
        finally:
            if settled.failed:
                raise settled.failed[0]


def read(folder: Path) -> Mapping[str, np.ndarray | BaseException]:
    """Return the arrays of a folder, with errors in place of unreadable ones.

    Raises:
        OSError, ValueError: none can be read.
    """
    with _unlogged():
        found: Mapping[str, Any] = _trees(_Settled()).restore(folder)
    return found


def _trees(settled: _Settled) -> Any:
    types = orbax.type_handlers
    registry = types.create_type_handler_registry(
        (np.ndarray, settled), (jax.Array, types.ArrayHandler())
    )
    return orbax.PyTreeCheckpointHandler(
        use_ocdbt=False, type_handler_registry=registry
    )


@contextmanager
def _unlogged() -> Iterator[None]:
    log = logging.getLogger("absl")

    def is_kept(record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname

    log.addFilter(is_kept)
    try:
        yield
    finally:
        log.removeFilter(is_kept)
