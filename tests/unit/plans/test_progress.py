"""The bar of what takes long: drawn on a terminal alone, and only once it is slow."""

import os
import sys

import pytest

from jdag.plans import progress
from jdag.plans.progress import Bar


def drawn(monkeypatch: pytest.MonkeyPatch, after_s: float) -> bytes:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "SHOWN_S", after_s)
    master, terminal = os.openpty()
    with os.fdopen(terminal, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        with Bar("compiling network", 4) as bar:
            for done in range(5):
                bar.show(done)
        stderr.write("over")
        stderr.flush()
        seen = b""
        while not seen.endswith(b"over"):  # A terminal hands over piece by piece.
            seen += os.read(master, 1 << 16)
    os.close(master)
    return seen


def test_a_slow_one_is_drawn_and_wiped_off_again(monkeypatch: pytest.MonkeyPatch):
    seen = drawn(monkeypatch, after_s=-1.0)
    assert b"compiling network" in seen and b"100%" in seen
    assert seen.index(b"\x1b[?25l") < seen.index(b"\x1b[?25h")  # The cursor is back.
    wiped = seen[seen.rindex(b"\x1b[2K") :]
    assert wiped.endswith(b"over") and b"compiling" not in wiped


def test_a_quick_one_is_not_drawn(monkeypatch: pytest.MonkeyPatch):
    assert drawn(monkeypatch, after_s=60.0) == b"over"


def test_without_a_terminal_nothing_is_written(capfd: pytest.CaptureFixture[str]):
    with Bar("compiling network", 4) as bar:
        bar.show(4)
    assert capfd.readouterr() == ("", "")
