"""Files of TOML: what cannot be read is one line with the file and why."""

import os
from pathlib import Path

import pytest

from jdag.errors import ScenarioError
from jdag.settings.toml_files import TOML_BYTES_MAX, read_toml, wrong
from tests.tools.error_texts import fails_with


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file or directory; expected a cluster's file"),
        (
            b"# One\n# caf\xe9\n",
            "this is not UTF-8 because of byte 0xe9 in line 2: save the file as UTF-8; "
            "expected a"
            " cluster's file",
        ),
        (
            "# One".encode("utf-16"),
            "this is not UTF-8 because of byte 0xff in line 1: save the file as UTF-8; "
            "expected a"
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
        read_toml(path, "a cluster's file")
    assert str(caught.value) == f"{path}: {words}"


@pytest.mark.parametrize("text", [f"a = {'9' * 5000}", f"a = {'[' * 100_000}"])
def test_a_file_that_python_cannot_read_is_no_toml(tmp_path: Path, text: str):
    path = tmp_path / "some.toml"
    path.write_text(text)
    with fails_with(ScenarioError, "settings.this_is_not_toml"), wrong(path):
        read_toml(path, "a file")


def test_a_file_without_an_end_or_of_more_than_a_mebibyte_is_not_read(tmp_path: Path):
    large = tmp_path / "large.toml"
    large.write_text("#" * (TOML_BYTES_MAX + 5))
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    size = "this file has more than 1,048,576 bytes, the maximum"
    other = "this is not a regular file"
    for path, why in ((large, size), (Path("/dev/zero"), other), (pipe, other)):
        with pytest.raises(ScenarioError, match=f"{path}: {why}"), wrong(path):
            read_toml(path, "a file")
    large.write_text("a = 1".ljust(TOML_BYTES_MAX))
    assert read_toml(large, "a file")[1] == {"a": 1}


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path):
    path = tmp_path / "some.toml"
    path.write_bytes(b"\xef\xbb\xbf# Is it so?\r\na = 1\r\n")
    assert read_toml(path, "a file") == ("# Is it so?\na = 1\n", {"a": 1})


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_a_path_that_no_file_can_have_is_named_as_it_can_be_seen(name: str):
    with pytest.raises(ScenarioError) as caught, wrong(Path(name)):
        read_toml(Path(name), "a cluster's file")
    message = str(caught.value)
    assert message.startswith(f"{name!r}: no file can have this name: ")
    assert message.endswith("; expected a cluster's file")
