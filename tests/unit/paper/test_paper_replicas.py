"""The figures of replicas over workers: what is committed, and what theory says."""

import json
from typing import Any

import pytest

from jdag.collectives.routes import HOW
from paper import replicas
from paper.figures import RESULTS
from tests.tools import rpc_nodes

COMMITTED = json.loads((RESULTS / "replicas.json").read_text())["rows"]


def committed(what: str) -> list[dict[str, Any]]:
    return [row for row in COMMITTED if row["what"] == what]


def test_there_is_a_row_for_each_number_of_replicas_and_each_size():
    for what in ("replicate", "all_reduce"):
        found = [(row["replicas"], row["payload_bytes"]) for row in committed(what)]
        assert found == [
            (count, size)
            for count in replicas.COUNTS
            for size in replicas.PAYLOADS_BYTES
        ]


def test_what_is_committed_is_what_comes_out():
    small = [row for row in COMMITTED if row["payload_bytes"] == 4096]
    few = [row for row in small if row["replicas"] <= 4]
    assert len(few) == 4
    assert replicas.virtual_rows(counts=(2, 4), sizes=(4096,)) == few


def test_the_bytes_of_an_all_reduce_are_those_of_theory():
    for row in committed("all_reduce"):
        count, size = row["replicas"], row["payload_bytes"]
        assert row["ring"]["link_bytes"] * count == 2 * (count - 1) * size
        assert row["ring"]["out_bytes"] == row["ring"]["link_bytes"]
        assert row["tree"]["link_bytes"] == row["owner"]["link_bytes"] == size
        assert row["owner"]["out_bytes"] == (count - 1) * size


def test_the_bytes_of_replicas_are_those_of_theory():
    for row in committed("replicate"):
        count, size = row["replicas"], row["payload_bytes"]
        assert (
            row["owner"]["out_bytes"] == row["owner"]["back_into_bytes"] == count * size
        )
        assert row["tree"]["out_bytes"] == 2 * size
        assert row["ring"]["out_bytes"] == row["ring"]["back_into_bytes"] == size
        link = max((count - 1) * size, size) // count
        assert row["ring"]["link_bytes"] == row["ring"]["back_link_bytes"] == link


@pytest.mark.parametrize("what", ["replicate", "all_reduce"])
def test_large_arrays_go_fastest_around_a_ring_and_small_ones_slowest(
    what,
):
    for row in committed(what):
        times = {how: row[how]["forward_ns"] for how in HOW}
        if row["payload_bytes"] == max(replicas.PAYLOADS_BYTES):
            assert min(times, key=lambda how: times[how]) == "ring"
        if row["payload_bytes"] == min(replicas.PAYLOADS_BYTES) and row["replicas"] > 2:
            assert max(times, key=lambda how: times[how]) == "ring"


def test_processes_are_measured_each_way(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(replicas, "WARM", 0)
    monkeypatch.setattr(replicas, "REPEATS", 1)
    with rpc_nodes.cluster(("owner", "r0", "r1"), allow=("paper",)) as cluster:
        rows = replicas.on_processes(cluster, ["r0", "r1"], 4096)
    assert [row["what"] for row in rows] == ["replicate", "all_reduce"]
    for row in rows:
        assert all(min(row[how].values()) > 0 for how in HOW)
    text = replicas.tables("Here.", rows)
    assert text.startswith("Here. Each cell: owner / tree / ring.")
    assert text.count("| 2 | 4 KiB | ") == 2
    assert text.count("| replicas | arrays | forward | back |") == 2


def test_the_tables_that_are_committed_are_those_of_the_numbers():
    written = (RESULTS / "replicas.md").read_text()
    assert written.endswith(replicas.tables("", COMMITTED).partition("ring.")[2])


def test_times_are_written_as_people_read_them():
    times = [270_400, 13_432_000, 859_033_000]
    assert [replicas.lasting(ns) for ns in times] == ["270 us", "13.43 ms", "859 ms"]


def test_sizes_are_written_as_people_read_them():
    sizes = [0, 3, 4096, 16 << 20, 31 << 19]
    written = ["0 B", "3 B", "4 KiB", "16 MiB", "15.5 MiB"]
    assert [replicas.sized(size) for size in sizes] == written
