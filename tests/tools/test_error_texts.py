"""Pinned error texts: what a text means, and that each is used."""

import re

import pytest

from tests import ROOT
from tests.tools import error_texts
from tests.tools.error_texts import FOLDER, pattern, texts


@pytest.mark.parametrize(
    ("text", "matches", "others"),
    [
        ("a.b", ["a.b"], ["axb", "a.bc", "ca.b"]),
        (
            "*of *, {n} times",
            ["one of a, 2 times", "of b, 30 times"],
            ["of a, x times"],
        ),
        ("one*two*", ["one, two, three"], ["one\ntwo", "zero, one, two"]),
    ],
)
def test_a_star_is_anything_on_one_line_and_n_a_number(
    text, matches, others, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(error_texts, "texts", lambda room: {"key": text})
    assert all(re.search(pattern("room.key"), message) for message in matches)
    assert not any(re.search(pattern("room.key"), message) for message in others)


def test_every_pinned_text_is_used():
    files = [*(ROOT / "tests").rglob("*.py")]
    sources = "".join([path.read_text(encoding="utf-8") for path in files])
    rooms = [path.stem for path in sorted(FOLDER.glob("*.toml"))]
    keys = [f"{room}.{name}" for room in rooms for name in texts(room)]
    assert [key for key in keys if f'"{key}"' not in sources] == []
