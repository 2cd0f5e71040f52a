"""Tables of TOML files: a mistake is said with key, value and what is allowed."""

from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import ValidationError

from jdag.errors import ScenarioError
from jdag.tables import (
    COUNT,
    FLAG,
    TEXT,
    Table,
    number,
    one_of,
    only,
    read,
    said,
    wrong,
)


class Inner(Table):
    colour: Annotated[str, one_of("red", "green")] = "red"
    share: Annotated[float, only("a number from 0 to 1", number(0, 1))] = 0.0


class Outer(Table):
    name: TEXT
    copies: COUNT = 1
    loud: FLAG = False
    inner: Inner = Inner()


WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({}, "name is missing; it has to be there"),
    ({"name": ""}, "name = '': allowed is a text"),
    ({"name": 3}, "name = 3: allowed is a text"),
    ({"name": "x", "copies": 0}, "copies = 0: allowed is an integer >= 1"),
    ({"name": "x", "copies": True}, "copies = True: allowed is an integer >= 1"),
    ({"name": "x", "loud": 1}, "loud = 1: allowed is true or false"),
    ({"name": "x", "inner": 3}, "inner = 3: allowed is a table"),
    (
        {"name": "x", "inner": {"colour": "blue"}},
        "inner.colour = 'blue': allowed is one of red, green",
    ),
    (
        {"name": "x", "inner": {"share": 1.5}},
        "inner.share = 1.5: allowed is a number from 0 to 1",
    ),
    (
        {"name": "x", "copis": 2},
        "copis = 2: allowed is one of the keys name, copies, loud, inner "
        "(do you mean copies?)",
    ),
)


@pytest.mark.parametrize(("table", "words"), WRONG, ids=[words for _, words in WRONG])
def test_a_mistake_is_said_with_its_key_its_value_and_what_is_allowed(table, words):
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(table)
    assert said(caught.value) == words


def test_a_right_table_is_as_it_was_written():
    outer = Outer.model_validate({"name": "x", "copies": 3, "inner": {"share": 1}})
    assert (outer.name, outer.copies, outer.inner.share) == ("x", 3, 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file or directory; allowed is a cluster's file"),
        (b"\xff", "this is no text; allowed is a cluster's file"),
        (b"a = ", "this is not TOML: Invalid value (at end of document)"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text, words):
    path = tmp_path / "some.toml"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(ScenarioError) as caught, wrong(path):
        read(path, "a cluster's file")
    assert str(caught.value) == f"{path}: {words}"
