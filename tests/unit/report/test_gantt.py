"""The Gantt chart of a run under a schedule: its data, and the page that draws it."""

import json
import re

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

import jdag
from jdag import schedules
from jdag.report import render, write_traces
from jdag.report.gantt import KINDS, ROWS_MAX, gantt_of, lists_of
from jdag.report.operations import Operation
from jdag.report.spans import SpanMark, Spans, spans_of
from jdag.report.timeline import draw_timeline
from tests.tools.pipeline_cases import simulated, step

COSTS = {"layer": (1_000, 900, 800), "last_stage": (1_000, 900, 800)}
DEVICES = jdag.sim.DeviceModel(functions=COSTS)


def traced(schedule):
    settings = {"values": "abstract", "devices": DEVICES}
    with simulated(schedule, schedule.workers, **settings) as cluster:
        step(cluster, schedule, fetched=False)
        return cluster.trace, cluster.now_ns


def job(worker, start_ns, end_ns, kind="forward", **more):
    said = {"name": "m:f", "context": "0.1", "number": 0, "path": (1, 2), **more}
    return Operation(0, worker, kind, start_ns=start_ns, end_ns=end_ns, **said)


def sent(worker, start_ns, end_ns, message="Primal", payload_bytes=8):
    said = (0, worker, "send", message, "0.1", 0, (1,), start_ns, end_ns)
    return Operation(*said, "b", 0, payload_bytes, payload_bytes + 40)


def charted(jobs=(), transfers=(), marks=(), workers=("a", "b"), window=(0, 100)):
    return gantt_of(Spans(tuple(jobs), transfers, marks), workers, window, "time")


def bars_of(chart):
    """By worker, (start, end, kind, lane, label, text with the label in it)."""
    return {
        row["worker"]: [
            (*bar, label, chart["texts"][text].replace("{}", label))
            for *bar, label, text in row["bars"]
        ]
        for row in chart["rows"]
    }


@pytest.mark.parametrize(
    ("build", "kinds"),
    [
        (schedules.one_f_one_b, "FB"),
        (schedules.zb_h1, "FIW"),
        (schedules.dualpipe_v, "FIWB"),
    ],
)
def test_each_action_is_a_bar_of_its_worker_in_the_order_of_the_list(build, kinds):
    schedule = build(stages=4, micro_batches=4)
    trace, now_ns = traced(schedule)
    chart = gantt_of(spans_of(trace), schedule.workers, (0, now_ns), "virtual time")
    names = {"F": "forward", "B": "backward", "I": "input_grad", "W": "weight_grad"}
    assert {names[kind] for kind in kinds} <= set(chart["kinds"])
    assert [row["worker"] for row in chart["rows"]] == list(schedule.workers)
    for worker, row in bars_of(chart).items():
        parts = [part for step in schedule.lists[worker] for part in step.parts]
        acts = [bar for bar in row if re.match(r"\d+[FIWB]\d+: ", bar[-1])]
        assert [bar[-1].partition(":")[0] for bar in acts] == [str(p) for p in parts]
        assert [bar[2] for bar in acts] == [names[part.kind] for part in parts]
        assert [bar[4] for bar in acts] == [str(part.micro_batch) for part in parts]
        halves = [len(step.parts) == 2 for step in schedule.lists[worker]]
        assert [bar[3] for bar in acts].count(1) == sum(halves)
        took = [end - start for start, end, kind, lane, *_ in acts if not lane]
        assert {*took} <= {1_000, 900, 800, 1_700}


def test_what_a_bar_is_called_and_says():
    jobs = [
        job("a", 0, 10),
        job("a", 10, 20, "vjp"),
        job("a", 20, 30, context=""),
        job("b", 0, 10, action="3F7"),
        job("b", 20, 30, "runsegment", name="p:f+g)", context=""),
    ]
    transfers = (sent("a", 10, 30), sent("a", 11, 31, "Cotangent"))
    found = bars_of(charted(jobs, (*transfers, sent("a", 1, 9, payload_bytes=0))))
    assert found == {
        "a": [
            (0, 10, "forward", 0, "1.2", "forward m:f, call 1.2 of context 0.1"),
            (10, 20, "backward", 0, "1.2", "vjp m:f, call 1.2 of context 0.1"),
            (20, 30, "update", 0, "", "forward m:f"),
            (10, 30, "primal", 3, "", "Primal to b, 8 bytes"),
            (11, 31, "cotangent", 3, "", "Cotangent to b, 8 bytes"),
        ],
        "b": [
            (0, 10, "forward", 0, "7", "3F7: forward of stage 3, micro-batch 7"),
            (20, 30, "segment", 0, "f+g", "segment p:f+g)"),
        ],
    }


def test_two_actions_that_ran_as_one_share_a_bar_and_other_jobs_do_not():
    jobs = [
        job("a", 0, 10, action="0F3"),
        job("b", 0, 10),
        job("a", 0, 10, "vjp", action="7B1"),
        job("b", 0, 10),
        job("a", 10, 20, action="0F4"),
    ]
    found = bars_of(charted(jobs))
    assert [(bar[3], bar[4]) for bar in found["a"]] == [(1, "3"), (2, "1"), (0, "4")]
    assert [bar[3] for bar in found["b"]] == [0, 0]
    assert lists_of(jobs, ("a", "b")) == [["(0F3;7B1)OVERLAP_F_B", "0F4"], []]


def test_times_count_from_the_window_and_what_is_outside_is_left_out():
    jobs = [job("a", 0, 50), job("a", 50, 60), job("b", 80, 90), job("b", 90, 95)]
    marks = tuple([SpanMark("a", "crash", "", at) for at in (10, 70)])
    lost = SpanMark("b", "lost", "a", 70)
    chart = charted(jobs, (), (*marks, lost), window=(50, 90))
    kept = {worker: [bar[:2] for bar in row] for worker, row in bars_of(chart).items()}
    assert kept == {"a": [(0, 10)], "b": [(30, 40)]}
    assert [row["marks"] for row in chart["rows"]] == [[[20, "crash"]], []]
    assert [row["busy"] for row in chart["rows"]] == ["25% busy", "25% busy"]
    assert chart["axis"] == "time since 50 ns" and chart["length_ns"] == 40
    assert list(chart["kinds"]) == ["forward"] and list(chart["marks"]) == ["crash"]


def test_of_many_workers_only_the_devices_have_bars():
    workers = [str(number) for number in range(ROWS_MAX + 1)]
    spans = [job("7", 0, 9)], (sent("7", 9, 20),)
    chart = charted(*spans, workers=workers)
    assert chart["is_dense"] and list(chart["kinds"]) == ["forward"]
    fewer = charted(*spans, workers=workers[1:])
    assert not fewer["is_dense"] and list(fewer["kinds"]) == ["forward", "primal"]


def test_colours_are_blue_teal_green_and_orange_and_all_differ():
    colours = {kind: colour for kind, (_, colour) in KINDS.items()}
    assert len({*colours.values()}) == len(KINDS)
    red, green, blue = (
        {kind: int(of[at : at + 2], 16) for kind, of in colours.items()}
        for at in (1, 3, 5)
    )
    assert blue["forward"] > green["forward"] > red["forward"]
    assert green["input_grad"] >= blue["input_grad"] > red["input_grad"]
    assert green["weight_grad"] > 2 * max(blue["weight_grad"], red["weight_grad"])
    assert red["backward"] > green["backward"] > blue["backward"]


RESULT = {
    **{"name": "<b>pipe</b>", "question": "?", "answer": "met", "outcome": "finished"},
    **{"seed": 0, "workers": ["w0", "w1"], "digest": "d", "command": "jdag run"},
    **{"figures": {}, "meaning": {}, "expect": [], "exact": {}, "versions": {}},
}


def test_the_page_has_the_chart_within_itself(tmp_path):
    trace, now_ns = traced(schedules.gpipe(stages=2, micro_batches=3))
    window = (0, now_ns)
    render(tmp_path, RESULT, trace, None, window=window)
    chart = gantt_of(spans_of(trace), ["w0", "w1"], window, "virtual time")
    page = (tmp_path / "index.html").read_text()
    found = re.search(r'id="gantt-data">(.*?)</script>', page, re.DOTALL)
    assert found and json.loads(found[1]) == json.loads(json.dumps(chart))
    assert 'document.getElementById("gantt")' in page
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "</i>backward" in page and "input gradients" not in page


def test_in_the_picture_no_job_is_drawn_longer_than_it_was(tmp_path):
    # Of a, nine jobs for each pixel, which take 30% of the time.
    jobs = [job("a", at, at + 3) for at in range(0, 100_000, 10)]
    chart = charted([*jobs, job("b", 0, 50_000)], window=(0, 100_000))
    draw_timeline(tmp_path / "one.png", chart, "a title")
    picture = imread(tmp_path / "one.png")[:, :, :3]
    blue, idle = (np.array(to_rgb(of)) for of in (KINDS["forward"][1], chart["idle"]))
    solid = np.abs(picture - blue).max(axis=2) < 0.02
    left, right = solid.any(axis=0).nonzero()[0][[0, -1]]
    rows = solid[:, left + 5].nonzero()[0]
    assert 0.45 < (right - left) / picture.shape[1] < 0.5
    above = round(rows.mean() - len(rows) / chart["lanes"][0][1])
    share = ((idle - picture[above, left : 2 * right - left]) / (idle - blue))[:, 0]
    assert share.min() > 0.2 and share.max() < 0.32


def test_a_run_without_a_trace_has_no_chart(tmp_path):
    render(tmp_path, RESULT, None, None, window=(0, 1))
    assert "gantt-data" not in (tmp_path / "index.html").read_text()


@pytest.mark.parametrize(
    "schedule",
    [
        schedules.one_f_one_b(stages=3, micro_batches=5),
        schedules.zb_h2(stages=3, micro_batches=5),
        schedules.zb_v(stages=4, micro_batches=4),
        schedules.dualpipe_v(stages=4, micro_batches=6),
    ],
)
def test_the_order_of_a_run_is_written_as_torch_does_and_read_back(tmp_path, schedule):
    write_traces(tmp_path, traced(schedule)[0], schedule.workers, ["torch"])
    text = (tmp_path / "trace.csv").read_text()
    assert text == schedules.to_csv(schedule)
    assert schedules.from_csv(text).actions == schedule.actions


def test_a_run_without_actions_has_no_order_to_write(tmp_path):
    with jdag.simulate(["w0"], seed=0) as cluster:
        of = cluster.trace, ["w0"], ["torch"]
    files, (why,) = write_traces(tmp_path, *of)
    assert files == [] == [*tmp_path.iterdir()]
    assert why.endswith("expected a run with a schedule, but this run has no schedule")
