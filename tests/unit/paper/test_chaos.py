"""Workers that are hurt in every way: what is committed, a dry run, and the proxy."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from jdag.processes.net.loop import clock_ns
from paper import chaos
from paper.chaos_left import opened
from paper.figures import RESULTS
from paper.proxy import Gate, Proxy
from tests import ROOT

DATA = bytes(range(256)) * 400


@contextmanager
def carried() -> Iterator[tuple[Proxy, Gate, socket.socket, socket.socket]]:
    """A stream through a gate: (proxy, gate, the end that dialled, the other one)."""
    proxy = Proxy(0)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port, gate = proxy.before(listening.getsockname()[1])
        with socket.create_connection(("127.0.0.1", port), 30) as dialled:
            other, _ = listening.accept()
            with other:
                other.settimeout(30)
                yield proxy, gate, dialled, other
    proxy.close()


def received(stream: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (came := stream.recv(1 << 16)):
        data += came
    return data


def test_streams_arrive_whole_and_slowly_if_asked():
    with carried() as (proxy, gate, dialled, other):
        proxy.do(gate, delay_s=0.001)
        dialled.sendall(DATA)
        assert received(other, len(DATA)) == DATA
        other.sendall(DATA)
        assert received(dialled, len(DATA)) == DATA


def test_what_is_held_arrives_when_it_is_mended():
    with carried() as (proxy, gate, dialled, other):
        proxy.do(gate, holds=True)
        dialled.sendall(DATA)
        for _ in range(20):
            proxy.do(gate)  # A turn of the loop that reads what is there.
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.recv(1)
        other.settimeout(30)
        proxy.heal([gate])
        assert received(other, len(DATA)) == DATA


def test_a_cut_is_a_reset_of_both_ends_after_so_many_bytes():
    with carried() as (proxy, gate, dialled, other):
        proxy.do(gate, cuts=[1600])
        dialled.sendall(DATA[:1000])
        assert received(other, 1000) == DATA[:1000]
        dialled.sendall(DATA[1000:2000])
        with pytest.raises(ConnectionResetError):
            assert len(received(other, 1000)) <= 600
            other.recv(1)
        with pytest.raises(ConnectionResetError):
            dialled.recv(1)
        assert gate.cut == 1 and not gate.cuts


def test_who_is_refused_sees_a_reset():
    with carried() as (proxy, gate, dialled, _):
        proxy.do(gate, refuses=True)
        with pytest.raises(ConnectionResetError):
            dialled.recv(1)


def test_a_socket_that_is_left_is_named_with_both_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chaos, "LEFT_S", 0.0)
    before = opened()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        found = chaos.left(before)
        assert "1 more socket:[N]" in found
        assert f"tcp 127.0.0.1:{port} -> 00000000:0 LISTEN" in found
    monkeypatch.undo()
    assert not chaos.left(before)


def test_a_worker_may_breathe_between_faults_that_pass():
    said: list[tuple[str, int]] = []

    def freeze(victim: str, rng: Random) -> float:
        said.append(("freezes", clock_ns()))
        return 0.01

    def mend(fault: str, victim: str) -> None:
        said.append(("mends", clock_ns()))

    pool: Any = SimpleNamespace(faults={"freeze": freeze}, mend=mend)
    chaos.Trouble(pool, Random(0), ["freeze"], [0.0] * 3, passes=True).join(30)
    assert [what for what, _ in said] == ["freezes", "mends"] * 3
    pairs = zip(said[1::2], said[2::2], strict=False)
    assert all(later[1] - mended[1] >= 300_000_000 for mended, later in pairs)


@pytest.mark.second
def test_a_dry_run_ends_right(tmp_path: Path):
    options = "--minutes 0.05 --steps 100 --modes tls --programs arrays saving"
    options += f" --seed 45 --out {tmp_path}"  # Its first round cuts streams alone.
    command = [sys.executable, "-W", "ignore", "-m", "paper.chaos", *options.split()]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "chaos.json").read_text())
    assert found["rounds"] and found["steady"]["steps"] == 100
    assert "| tls |" in (tmp_path / "chaos.md").read_text()


def test_what_is_committed_has_all_rounds_right_and_memory_flat():
    found = json.loads((RESULTS / "chaos.json").read_text())
    assert {one["mode"] for one in found["rounds"]} >= {"unix", "tcp", "tls"}
    assert not [one for one in found["rounds"] if one["wrong"]] and not found["left"]
    assert found["steady"]["steps"] == 10_000 and not found["steady"]["wrong"]
