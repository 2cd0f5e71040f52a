"""The table of a sweep as a Parquet file, by pyarrow: the extra `jdag[sweep]`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jdag.errors import ScenarioError

try:
    import pyarrow
    from pyarrow import parquet
except ImportError:
    pyarrow = None


def need_pyarrow(what: str) -> None:
    """Raise ScenarioError if pyarrow is not installed; `what` needs it."""
    if pyarrow is None:
        said = f"{what} needs pyarrow, which is not here: pip install 'jdag[sweep]'"
        raise ScenarioError(said)


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows; a column of values of several types is one of texts.

    Raises:
        OSError: the file cannot be written.
    """
    columns = {}
    for name in dict.fromkeys([name for row in rows for name in row]):
        cells = [row.get(name) for row in rows]
        try:
            columns[name] = pyarrow.array(cells)
        except (pyarrow.ArrowException, OverflowError):
            texts = [None if cell is None else str(cell) for cell in cells]
            columns[name] = pyarrow.array(texts)
    parquet.write_table(pyarrow.table(columns), path)
