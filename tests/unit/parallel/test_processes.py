"""Data parallel over two processes with two devices each, against one device.

The checks are those of `process_checks`. All run in one session of two processes, each
on both of them; a test here is one of the checks.
"""

import ast
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import ROOT
from tests.tools.rpc_cases import free_address

CHECKS = Path(__file__).with_name("process_checks.py")
DEADLINE_S = 900  # For what hangs: with 13 busy processes on 2 cores they take 170 s.
NAMES = [
    node.name.removeprefix("check_")
    for node in ast.parse(CHECKS.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
]


class Ended(NamedTuple):
    said: dict[str, Any]
    code: int
    complaint: str


def session(mode: str) -> list[Ended]:
    port = free_address().port
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": "2", "PYTHONPATH": str(ROOT)}
    start = [sys.executable, "-m", "tests.unit.parallel.process_child", str(port)]
    children = [
        subprocess.Popen(
            [*start, n, mode],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in ("0", "1")
    ]
    ended = []
    for child in children:
        try:
            out, complaint = child.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            for one in children:
                one.kill()
            out, complaint = child.communicate()
        lines = [json.loads(line) for line in out.splitlines() if line[:1] == "{"]
        said = {line["name"]: line for line in lines}
        ended.append(Ended(said, child.returncode, complaint[-3000:]))
    return ended


@pytest.fixture(scope="module")
def both() -> list[Ended]:
    return session("all")


def test_there_is_a_check_of_each_kind():
    assert len(NAMES) >= 9


@pytest.mark.parametrize("name", NAMES)
def test_on_two_processes(name, both):
    for number, ended in enumerate(both):
        assert name in ended.said, f"process {number} hung or died: {ended.complaint}"
        assert not ended.said[name]["wrong"], ended.said[name]["wrong"]
    first, second = [ended.said[name]["value"] for ended in both]
    assert first == second


def test_who_is_killed_is_missed_at_once(both):
    assert both[1].code == -signal.SIGKILL
    assert both[0].code == 0 and not both[0].said["killed"]["wrong"], both[0]


def test_who_has_ended_is_missed_at_once():
    first, second = session("ends")
    assert first.code == 0 and not first.said["ends"]["wrong"], first
    assert second.code == 1 and "KeyError: 'mine'" in second.complaint


@pytest.mark.second
def test_who_does_not_come_is_missed_by_name_and_told_when_it_does():
    for ended in session("waits"):
        assert ended.code == 0 and not ended.said["waits"]["wrong"], ended
