"""The error texts that tests pin: `tests/errors/ROOM.toml` has a key for each.

A text is the whole message unless it begins or ends with `*`. In between `*` stands for
anything on one line, `{n}` for a number. To reword an error, edit its text there.
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
    text = re.escape(texts(room)[name]).replace(r"\{n\}", r"\d+")
    middle = text.removeprefix(r"\*").removesuffix(r"\*").replace(r"\*", ".*")
    return (
        ("" if text.startswith(r"\*") else r"\A")
        + middle
        + ("" if text.endswith(r"\*") else r"\Z")
    )


def fails_with(error: type[E] | tuple[type[E], ...], key: str) -> pytest.RaisesExc[E]:
    """As `pytest.raises`; the message must be the text at `ROOM.KEY`."""
    return pytest.raises(error, match=pattern(key))


def warns_with(warning: type[Warning], key: str) -> pytest.WarningsRecorder:
    """As `pytest.warns`; the message must be the text at `ROOM.KEY`."""
    return pytest.warns(warning, match=pattern(key))
