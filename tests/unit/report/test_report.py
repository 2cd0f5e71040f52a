"""The report of a run: what its trace says of time, pictures, page and other traces."""

import re
import struct
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from jdag.api.drivers import simulate
from jdag.context.graph import graph_of
from jdag.errors import JdagError
from jdag.report import read_drawings, render
from jdag.report.formatting import formatted
from jdag.report.picture import _laid_out, _left_out, draw_graph
from jdag.report.spans import bubble, spans_of
from jdag.runtime.trace import Trace
from jdag.sim.devices import DeviceModel
from jdag.sim.network import LinkModel
from shapes import pipeline
from tests.tools.error_texts import fails_with

STAGES = ("stage0", "stage1", "stage2", "stage3")
FILES = ("timeline.png", "graph.png", "graph.dot", "graph.json", "index.html")


def play(case, workers, **settings):
    """Run a case once: (trace, drawings, window)."""
    with simulate(workers, seed=0, **settings) as cluster:
        refs = case.put(cluster)
        start_ns = cluster.now_ns
        with cluster.context() as ctx:
            case.backward(ctx, case.roots(ctx, refs))
            return cluster.trace, ctx.graph(), (start_ns, cluster.now_ns)


def result_of(workers, **figures):
    return {
        "name": "a <name> & more",
        "question": "Is 1 < 2 & 3 > 2?",
        "answer": "met",
        "outcome": "finished",
        "seed": 7,
        "workers": list(workers),
        "expect": [
            {"figure": "messages", "wanted": "3", "got": 3, "met": True},
            {"figure": "loss", "wanted": "max 1", "got": 2.5, "met": False},
        ],
        "figures": figures,
        "meaning": {"messages": "protocol messages"},
        "command": "jdag run some.toml --seed 7",
        "versions": {"jdag": "0.1.0"},
        "digest": "abc123",
    }


@pytest.fixture(scope="module")
def piped():
    devices = DeviceModel(forward_ns=1_000, backward_ns=1_000)
    return play(pipeline(STAGES), STAGES, devices=devices)


@pytest.fixture(scope="module")
def slow():
    return play(
        pipeline(STAGES),
        STAGES,
        network=LinkModel(latency_ns=50_000, bandwidth_bytes_per_s=10_000_000),
        devices=DeviceModel(forward_ns=200_000, backward_ns=400_000, sum_ns=20_000),
    )


def total(leaves):
    return sum(leaf.sum() for leaf in leaves)


def graph_with(leaves_n):
    with simulate(["a"], seed=0) as cluster:
        leaves = [cluster.put("a", np.ones(2)) for _ in range(leaves_n)]
        with cluster.context() as ctx:
            ctx.backward(ctx.call("a", total, leaves))
            return graph_of(ctx.graph())


def noted(*events):
    """A trace of (time, kind, worker, detail, causes)."""
    trace = Trace()
    for event in events:
        trace.add(*event)
    return trace


def start(at_ns, worker, job="forward", context="0.1"):
    return (at_ns, "start", worker, (job, context, 1, (1,), "m:f", "", 5), ())


def finish(at_ns, worker, cause, job="forward"):
    detail = (job, "0.1", 1, (1,), "m:f", 5, "", "")
    return (at_ns, "finish", worker, detail, (cause,))


def send(at_ns, source, destination, payload_bytes=8):
    said = ("Primal", "0.1", 0, (2,), payload_bytes, payload_bytes + 40, ())
    return (at_ns, "send", source, (destination, *said), ())


def deliver(at_ns, source, destination, cause):
    return (at_ns, "deliver", destination, (source, "Primal", "0.1", 0, (2,)), (cause,))


# ---------------------------------------------------------------------------- time


def test_a_job_lasts_from_its_start_to_its_finish_and_an_array_till_handed_on():
    trace = noted(
        start(10, "a"),
        send(12, "a", "b"),
        send(13, "a", "b", payload_bytes=0),
        finish(15, "a", 0),
        deliver(30, "a", "b", 1),
        deliver(31, "a", "b", 2),
        start(40, "b", job="vjp"),
        finish(45, "b", 6, job="vjp"),
        start(45, "b", job="fill"),
        finish(46, "b", 8, job="fill"),
        start(46, "b", job="apply"),
        finish(48, "b", 10, job="apply"),
        start(48, "b", context=""),
        finish(49, "b", 12),
        send(50, "a", "b"),  # It does not arrive, so it is not a transfer.
    )
    found = spans_of(trace)
    jobs = [
        (one.start_ns, one.end_ns, one.drawn_as, one.name, one.worker)
        for one in found.jobs
    ]
    assert jobs == [
        (10, 15, "forward", "m:f", "a"),
        (40, 45, "backward", "m:f", "b"),
        (45, 46, "sum", "m:f", "b"),
        (46, 48, "hook", "m:f", "b"),
        (48, 49, "update", "m:f", "b"),
    ]
    one, two = found.transfers
    assert (one.start_ns, one.end_ns, one.worker, one.peer) == (12, 30, "a", "b")
    assert one.payload_bytes and not two.payload_bytes


def test_a_job_that_a_crash_cut_off_ends_with_the_crash():
    trace = noted(
        start(10, "a"),
        start(11, "b"),
        (14, "crash", "a", ("planned",), ()),
        (99, "lost", "b", ("a",), ()),
    )
    assert [(s.worker, s.start_ns, s.end_ns) for s in spans_of(trace).jobs] == [
        ("a", 10, 14),
        ("b", 11, 99),
    ]


def test_a_bubble_counts_what_lies_in_the_window_and_no_transfers():
    trace = noted(
        start(0, "a"),
        finish(10, "a", 0),
        send(10, "a", "b"),
        deliver(30, "a", "b", 2),
    )
    found = bubble(spans_of(trace).jobs, ("a", "b"), (8, 20))
    assert found == {"a": Fraction(10, 12), "b": Fraction(1)}
    assert bubble(spans_of(trace).jobs, ("a",), (20, 30)) == {"a": 1}
    assert bubble(spans_of(trace).jobs, ("a",), (5, 5)) == {"a": 0}


def test_two_actions_that_run_as_one_keep_a_worker_busy_once():
    trace = noted(
        start(0, "a"),
        start(0, "a"),
        finish(10, "a", 0),
        finish(10, "a", 1),
        start(30, "a"),
        finish(50, "a", 4),
    )
    assert bubble(spans_of(trace).jobs, ("a",), (0, 40)) == {"a": Fraction(1, 2)}


def test_a_window_keeps_what_overlaps_it(slow):
    trace, _, _ = slow
    inside = spans_of(trace).within((1_000_000, 2_000_000))
    assert inside.jobs
    assert inside.transfers
    found: list[Any] = [*inside.jobs, *inside.transfers]
    assert all(one.start_ns <= 2_000_000 for one in found)
    assert all(one.end_ns >= 1_000_000 for one in found)
    assert len(inside.jobs) < len(spans_of(trace).jobs)


# ------------------------------------------------------------- pictures and the page


def _size(png):
    data = png.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", data[16:24])


def test_a_report_is_made_whole_and_made_again_to_the_same_bytes(slow, tmp_path):
    trace, drawings, window = slow
    result = result_of(STAGES, messages=3, bubble=dict.fromkeys(STAGES, 1 / 3))
    render(tmp_path, result, trace, drawings, window=window)
    made = sorted(path.name for path in tmp_path.iterdir())
    assert made == sorted(FILES)
    before = {name: (tmp_path / name).read_bytes() for name in made}
    again = read_drawings(tmp_path)
    assert again == graph_of(drawings)
    render(tmp_path, result, trace, again, window=window)
    assert {name: (tmp_path / name).read_bytes() for name in made} == before
    for name in ("timeline.png", "graph.png"):
        width, height = _size(tmp_path / name)
        assert 400 < width < 4_000
        assert 200 < height < 4_000


@pytest.mark.parametrize("count", [1, 41, 300])
def test_any_number_of_workers_has_a_timeline(count, tmp_path):
    # What would be a broken formula, were it read as one.
    workers = [rf"$\nope{number}$ is a name that is long" for number in range(count)]
    events = []
    for number, worker in enumerate(workers):
        events += [start(number, worker), finish(number + 40, worker, 2 * number)]
    trace = noted(*events, (500, "crash", workers[0], ("planned",), ()))
    result = {**result_of(workers), "name": r"$\nope$"}
    render(tmp_path, result, trace, None, window=(0, 600))
    width, height = _size(tmp_path / "timeline.png")
    assert width == 1_560
    assert 200 < height < 1_300
    assert not (tmp_path / "graph.png").exists()
    assert read_drawings(tmp_path) is None


def test_a_run_that_takes_no_time_and_records_nothing_has_a_report(tmp_path):
    render(tmp_path, result_of(("a", "b")), Trace(), {}, window=(0, 0))
    assert (tmp_path / "index.html").is_file()
    assert not (tmp_path / "graph.png").exists()


def test_the_page_needs_nothing_else_and_shows_what_was_expected(piped, tmp_path):
    trace, drawings, window = piped
    figures = {
        "messages": 12_345,
        "virtual_time_ns": 1_352_036,
        "loss": None,
        "error_message": "line <one>\nline two",
        "bubble": {"stage0": 3 / 11, "stage1": 0.5},
    }
    result = result_of(STAGES, **figures)
    render(tmp_path, result, trace, drawings, window=window)
    page = (tmp_path / "index.html").read_text()
    assert "http" not in page
    assert "<link" not in page
    assert "<script src" not in page
    assert page.count('src="data:image/png;base64,') == page.count("src=") == 1
    assert "Is 1 &lt; 2 &amp; 3 &gt; 2?" in page
    assert "line &lt;one&gt;\nline two" in page
    assert ">met</td>" in page
    assert ">not met</td>" in page
    share = formatted("bubble", 3 / 11)
    for said in ("12,345", "1.352 ms", share, "seed 7", "digest abc123"):
        assert said in page, said
    assert f"stage0: {share}" not in page  # It stands in the table by worker.
    assert "jdag run some.toml --seed 7" in page
    assert "trace.pftrace" in page


def test_figures_by_the_elements_of_another_have_a_table_of_their_own(tmp_path):
    rows = {"1": 5_529, "2": 3_913, "4": 3_790}
    figures = {
        "replicas": [1, 2, 4],
        **dict.fromkeys(("rows_per_s", "rows_least", "rows_most"), rows),
        "peak": {"a": 7, "b": 8},
        "sent": {"a": 1, "d": 2},
    }
    render(tmp_path, result_of("abc", **figures), None, None, window=(0, 0))
    page = (tmp_path / "index.html").read_text()
    assert re.findall("<h2>(By .*)</h2>", page) == ["By replicas", "By worker"]
    # What is more goes down the page: figures here, workers there.
    heads = "".join([f"<th>{one}</th>" for one in ("metric", *rows, "description")])
    cells = "".join([f'<td class="value">{one:,}</td>' for one in rows.values()])
    assert heads in page and page.count(cells) == 3
    assert "<th>worker</th><th>peak</th>" in page
    assert '<td class="name">b</td><td class="value">8</td>' in page
    assert '<td class="name">c</td><td class="value">-</td>' in page
    assert "a: 1, d: 2" in page  # By no worker of the run, and by no other figure.


def test_figures_of_one_meaning_share_its_line(tmp_path):
    figures = {name: {"a": 1, "b": 2, "c": 3} for name in ("one", "two")}
    meaning = dict.fromkeys(figures, "a share")
    result = {**result_of("abc", **figures), "meaning": meaning}
    render(tmp_path, result, None, None, window=(0, 0))
    assert "<b>one, two</b>: a share" in (tmp_path / "index.html").read_text()


def test_figures_by_what_is_twice_in_another_have_each_row_once(tmp_path):
    figures = {"worker": [9], "counts": [2, 2, 1], "apart": {"2": 5, "1": 6}}
    render(tmp_path, result_of("a", **figures), None, None, window=(0, 0))
    page = (tmp_path / "index.html").read_text()
    assert re.findall("<h2>(By .*)</h2>", page) == ["By counts"]
    assert page.count('<td class="name">2</td>') == 1


@pytest.mark.second
def test_of_a_thousand_leaves_those_that_have_room_are_drawn(tmp_path):
    graph = graph_with(1_000)
    draw_graph(tmp_path / "graph.png", graph, "many")
    _, height = _size(tmp_path / "graph.png")
    assert height < 800
    assert _left_out(graph, _laid_out(graph)) == ": its first 18 of 1,001 vertices"


@pytest.mark.parametrize("count", [1, 8])
def test_all_leaves_of_the_first_call_have_room_in_the_picture(count, tmp_path):
    graph = graph_with(count)
    draw_graph(tmp_path / "graph.png", graph, "many")
    _, height = _size(tmp_path / "graph.png")
    assert height > 110 * 0.31 * 0.88 * (count + 1)  # Dots of an inch, of a leaf.
    layout = _laid_out(graph)
    assert min(y for _, y in layout.places.values()) == layout.top


def test_a_graph_that_is_none_is_refused_by_file(tmp_path):
    (tmp_path / "graph.json").write_text('{"workers": []}')
    with fails_with(JdagError, "report.graph_json_is_not_a_graph"):
        read_drawings(tmp_path)
