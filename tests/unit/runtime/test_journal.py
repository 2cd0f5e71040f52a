"""The order of an engine's inputs as a file."""

import json
import logging
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from jdag.engine.protocol import (
    Acknowledged,
    Arrived,
    Computed,
    ContextId,
    Failure,
    Joined,
    Left,
    Lost,
    Release,
)
from jdag.errors import ScenarioError
from jdag.runtime.journal import (
    Journal,
    check_journals,
    entry,
    head_of,
    read_journals,
)
from tests.tools.error_texts import fails_with

CONTEXT = ContextId(1, 2, 0)
WORKERS = ("a", "b")
OK = '["j",1,"ok"]'


def journal(folder: Path, worker: str, bytes_max: int = 10_000) -> Journal:
    path = folder / f"{worker}.journal"
    return Journal(path, head_of(worker, WORKERS, "train.py"), bytes_max)


def written(folder: Path, *, jobs: int = 3, ends: bool = True) -> None:
    for worker in WORKERS:
        made = journal(folder, worker)
        for number in range(jobs):
            made.note((Computed(number, None), ()))
            made.flush()
        if ends:
            made.close()


@pytest.mark.parametrize(
    ("event", "causes", "line"),
    [
        (Acknowledged("b", 2), (7,), "a b 2"),
        (Arrived("b", Release(CONTEXT, (), False)), (8,), "m b 8 Release 1.2 0 ()"),
        (Computed(4, None), (), "j 4 ok"),
        (
            Computed(4, Failure("ValueError", "no", "a", (1,), "f")),
            (),
            "j 4 ValueError",
        ),
        (Left(9, CONTEXT), (), "p Left 1.2 0 ()"),
        (Lost("b", "killed"), (), "l b"),
        (Joined("b", 2), (), "J b#2"),
    ],
)
def test_a_line_says_which_input_it_is_and_no_value(event: Any, causes: Any, line: str):
    assert entry(event, causes) == line


def test_what_was_written_is_read(tmp_path: Path):
    written(tmp_path)
    found = read_journals(tmp_path, WORKERS, "train.py")
    assert found["b"].lines == ["j 0 ok", "j 1 ok", "j 2 ok"]
    assert found["b"].end == "end"
    check_journals(tmp_path)


def test_lines_are_in_the_file_once_they_are_flushed(tmp_path: Path):
    made = journal(tmp_path, "a")
    made.note((Computed(1, None), ()))
    made.flush()
    assert (tmp_path / "a.journal").read_text().endswith(f"\n{OK}\n")


@pytest.mark.parametrize("bytes_max", range(40, 60))
def test_a_journal_that_is_full_ends_with_a_whole_line_and_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, bytes_max: int
):
    head = len(json.dumps(head_of("a", WORKERS, "train.py")) + "\n")
    made = journal(tmp_path, "a", head + bytes_max)
    for number in range(100):
        made.note((Computed(number, Failure("Büro", "", "a", (), "")), ()))
        if number % 3 == 0:
            made.flush()
    made.close()
    path = tmp_path / "a.journal"
    *lines, end, nothing = path.read_text().split("\n")
    assert (end, nothing) == ("full", "")
    assert lines[1:] == [f'["j",{number},"Büro"]' for number in range(len(lines) - 1)]
    # No other line would have had room.
    assert 0 <= head + bytes_max - path.stat().st_size < len('["j",0,"Büro"]\n') + 1
    assert "it has reached journal_bytes; its lines can be replayed" in caplog.text


def test_a_journal_that_has_no_room_for_its_head_has_it_alone(tmp_path: Path):
    made = journal(tmp_path, "a", 20)
    for number in range(100):  # More than the head is too long.
        made.note((Computed(number, None), ()))
    made.close()
    assert (tmp_path / "a.journal").read_text().split("\n")[1:] == ["full", ""]


def test_what_comes_after_the_end_of_a_journal_is_not_kept(tmp_path: Path):
    made = journal(tmp_path, "a")
    made.close()
    made.note((Computed(1, None), ()))
    assert not made._noted


def test_a_disk_that_is_full_ends_the_journal_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    made = journal(tmp_path, "a")

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr("os.write", full)
        made.note((Computed(1, None), ()))
        made.flush()
    made.note((Computed(2, None), ()))
    made.close()
    assert "No space left" in caplog.text


def test_a_journal_that_is_there_is_not_written_over(tmp_path: Path):
    written(tmp_path)
    with fails_with(ScenarioError, "runtime.a_journal_cannot_be_made"):
        journal(tmp_path, "a")


def cut(path: Path) -> None:
    path.write_text(path.read_text()[:-6])


def other(text: str, now: str, path: Path) -> None:
    before = path.read_text()
    assert text in before
    path.write_text(before.replace(text, now))


@pytest.mark.parametrize(
    "line",
    [
        "",
        "3",
        "{}",
        "[]",
        "[" * 100_000,
        '["m","b"]',
        '["m","b","x","Release",[0,1,0],0,[]]',
        '["m","b",7,"Release",[0,1],0,[]]',
        '["m","b",7,"Release",[0,1,0],0]',
        '["m","b",7,"Release",[0,1,0],0,3]',
        '["m","b",7,"Release",[0,1,0],0,["a"]]',
        '["a","b",0]',
        '["a","b",-1]',
        '["a","b"]',
        '["a","b",2,1]',
        '["j",4]',
        '["j","x","ok"]',
        '["p","Left",[0,1,0],[]]',
        '["l",""]',
        '["J","b#1 again"]',
        "end",
    ],
)
def test_a_line_that_is_no_input_is_refused(tmp_path: Path, line: str):
    written(tmp_path)
    other(OK, line, tmp_path / "b.journal")
    with fails_with(ScenarioError, "runtime.b_journal_line_3_is"):
        check_journals(tmp_path)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (cut, "b.journal is truncated: its last line is missing"),
        (
            partial(other, f'"{version("jdag")}"', '"0.0.9"'),
            "b.journal has jdag = '0.0.9'; the replay needs",
        ),
        (
            partial(other, '"format": 4', '"format": 1'),
            "b.journal has format = 1; the replay needs 4",
        ),
        (
            partial(other, '"workers": ["a"', '"workers": [3'),
            "b.journal is not a journal",
        ),
        (lambda path: path.unlink(), "b.journal: No such file"),
        (lambda path: path.write_bytes(b"\xff"), "b.journal is not a journal"),
        (lambda path: path.write_text("{}"), "b.journal is not a journal"),
    ],
)
def test_a_journal_that_cannot_be_replayed_is_refused_in_one_line(
    tmp_path: Path, spoil: Any, said: str
):
    written(tmp_path)
    spoil(tmp_path / "b.journal")
    for read in (check_journals, lambda of: read_journals(of, WORKERS, "train.py")):
        with pytest.raises(ScenarioError, match=said) as caught:
            read(tmp_path)
        assert "\n" not in str(caught.value)


def test_a_journal_of_another_program_or_of_other_workers_is_refused(tmp_path: Path):
    written(tmp_path)
    with fails_with(ScenarioError, "runtime.has_program_train_py"):
        read_journals(tmp_path, WORKERS, "test.py")
    with fails_with(ScenarioError, "runtime.has_workers"):
        read_journals(tmp_path, ("a",), "train.py")
    with fails_with(ScenarioError, "runtime.has_no_journal_of_jdag"):
        check_journals(tmp_path / "none")


def test_the_journal_of_a_lost_worker_needs_no_end(tmp_path: Path):
    written(tmp_path, ends=False)
    for worker, lost in (("a", "b"), ("b", "a")):
        with (tmp_path / f"{worker}.journal").open("a") as file:
            file.write(f'["l","{lost}"]\n["j",9,"o')
    assert read_journals(tmp_path, WORKERS, "train.py")["b"].lines[-1] == "l a"
