"""The error texts that tests pin: `tests/errors/ROOM.toml` has a key for each.

In a text `*` stands for anything. A text is the whole message unless it begins or ends
with `*`. To reword an error, edit its text there.
"""

import re
import tomllib
from functools import cache
from typing import TypeVar

import pytest

from tests import ROOT

FOLDER = ROOT / "tests" / "errors"

E = TypeVar("E", bound=BaseException)


@cache
def texts(room: str) -> dict[str, str]:
    return tomllib.loads((FOLDER / f"{room}.toml").read_text(encoding="utf-8"))


def pattern(key: str) -> str:
    room, _, name = key.partition(".")
    parts = texts(room)[name].split("*")
    return r"(?s)\A" + ".*".join(re.escape(part) for part in parts) + r"\Z"


def fails_with(error: type[E] | tuple[type[E], ...], key: str) -> pytest.RaisesExc[E]:
    """As `pytest.raises`; the message must be the text at `ROOM.KEY`."""
    return pytest.raises(error, match=pattern(key))


def warns_with(warning: type[Warning], key: str) -> pytest.WarningsRecorder:
    """As `pytest.warns`; the message must be the text at `ROOM.KEY`."""
    return pytest.warns(warning, match=pattern(key))
