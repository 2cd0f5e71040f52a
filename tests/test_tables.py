"""Tables of TOML files: a mistake is said with key, value and what is allowed."""

import os
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import ValidationError

from jdag.errors import ScenarioError
from jdag.runtime.tables import (
    BYTES_MAX,
    COUNT,
    FLAG,
    TEXT,
    Table,
    is_path,
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
        (
            b"# One\n# caf\xe9\n",
            "this is not UTF-8, by byte 0xe9 in line 2: save it as UTF-8; allowed is a"
            " cluster's file",
        ),
        (
            "# One".encode("utf-16"),
            "this is not UTF-8, by byte 0xff in line 1: save it as UTF-8; allowed is a"
            " cluster's file",
        ),
        (
            b"# One\n" + "# Two".encode("utf-16-le"),
            "this is not TOML: Found invalid character '\\x00' (at line 2, column 2)",
        ),
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


@pytest.mark.parametrize("text", [f"a = {'9' * 5000}", f"a = {'[' * 100_000}"])
def test_a_file_that_python_cannot_read_is_no_toml(tmp_path: Path, text: str):
    path = tmp_path / "some.toml"
    path.write_text(text)
    with pytest.raises(ScenarioError, match="this is not TOML: "), wrong(path):
        read(path, "a file")


def test_a_file_without_an_end_or_of_more_than_a_mebibyte_is_not_read(tmp_path: Path):
    large = tmp_path / "large.toml"
    large.write_text("#" * (BYTES_MAX + 5))
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    size = "this has more than 1,048,576 bytes, the most allowed"
    other = "this is no regular file"
    for path, why in ((large, size), (Path("/dev/zero"), other), (pipe, other)):
        with pytest.raises(ScenarioError, match=f"{path}: {why}"), wrong(path):
            read(path, "a file")
    large.write_text("a = 1".ljust(BYTES_MAX))
    assert read(large, "a file")[1] == {"a": 1}


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path):
    path = tmp_path / "some.toml"
    path.write_bytes(b"\xef\xbb\xbf# Is it so?\r\na = 1\r\n")
    assert read(path, "a file") == ("# Is it so?\na = 1\n", {"a": 1})


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_a_path_that_no_file_can_have_is_named_as_it_can_be_seen(name: str):
    with pytest.raises(ScenarioError) as caught, wrong(Path(name)):
        read(Path(name), "a cluster's file")
    said = str(caught.value)
    assert said.startswith(f"{name!r}: no file can have this name: ")
    assert said.endswith("; allowed is a cluster's file")


def test_what_may_be_a_path():
    assert all(map(is_path, ("a", Path("a"))))
    assert not any(map(is_path, (None, 3, b"a", ["a"], "", "a\0b", Path("a\0b"))))
