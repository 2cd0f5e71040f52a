"""The Gantt chart of a run under a schedule: its data, and the page that draws it."""

import json
import re

import pytest

import jdag
from jdag import schedules
from jdag.errors import JdagError
from jdag.report import render, write_traces
from jdag.report.gantt import ACTIONS, gantt_of
from jdag.report.spans import spans_of
from tests.pipeline_cases import simulated, step

COSTS = {"layer": (1_000, 900, 800), "last_stage": (1_000, 900, 800)}
DEVICES = jdag.sim.DeviceModel(functions=COSTS)


def spans_under(schedule):
    with simulated(
        schedule, schedule.workers, values="abstract", devices=DEVICES
    ) as cluster:
        step(cluster, schedule, fetched=False)
        return spans_of(cluster.trace), cluster.now_ns


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
    spans, now_ns = spans_under(schedule)
    chart = gantt_of(spans.jobs, schedule.workers, (0, now_ns))
    assert chart is not None and sorted(chart["kinds"]) == sorted(kinds)
    assert chart["workers"] == list(schedule.workers) and chart["length_ns"] == now_ns
    for worker, row in zip(chart["workers"], chart["bars"], strict=True):
        actions = [[f"{s}{kind}{m}" for s, kind, m in parts] for _, _, *parts in row]
        steps = schedule.lists[worker]
        assert actions == [[str(part) for part in step.parts] for step in steps]
        times = [time for start, end, *_ in row for time in (start, end)]
        assert times == sorted(times) and max(times) <= now_ns
    took = {kind: end - start for start, end, (_, kind, _), *_ in chart["bars"][0][:4]}
    assert took["F"] == 1_000


def test_times_count_from_the_window_and_what_is_outside_is_left_out():
    schedule = schedules.gpipe(stages=2, micro_batches=3)
    spans, now_ns = spans_under(schedule)
    chart = gantt_of(spans.jobs, schedule.workers, (1_500, now_ns))
    assert chart is not None
    assert chart["bars"][0][0] == [-500, 500, (0, "F", 1)]
    assert gantt_of(spans.jobs, schedule.workers, (now_ns, now_ns + 5)) is None


def test_colours_are_blue_teal_green_and_orange_and_all_differ():
    colours = [colour for _, colour in ACTIONS.values()]
    assert len(dict.fromkeys(colours)) == 4
    red, green, blue = (
        {kind: int(of[1][at : at + 2], 16) for kind, of in ACTIONS.items()}
        for at in (1, 3, 5)
    )
    assert blue["F"] > green["F"] > red["F"]
    assert green["I"] >= blue["I"] > red["I"]
    assert green["W"] > 2 * max(blue["W"], red["W"])
    assert red["B"] > green["B"] > blue["B"]


RESULT = {
    **{"name": "<b>pipe</b>", "question": "?", "answer": "met", "outcome": "finished"},
    **{"seed": 0, "workers": ["w0", "w1"], "digest": "d", "command": "jdag run"},
    **{"figures": {}, "meaning": {}, "expect": [], "exact": {}, "versions": {}},
}


def test_the_page_has_the_chart_within_itself(tmp_path):
    schedule = schedules.gpipe(stages=2, micro_batches=3)
    with simulated(
        schedule, ["w0", "w1"], values="abstract", devices=DEVICES
    ) as cluster:
        step(cluster, schedule, fetched=False)
        window = (0, cluster.now_ns)
        render(tmp_path, RESULT, cluster.trace, None, window=window)
    page = (tmp_path / "index.html").read_text()
    found = re.search(r'id="gantt-data">(.*?)</script>', page, re.DOTALL)
    assert found and len(json.loads(found[1])["bars"]) == 2
    assert 'document.getElementById("gantt")' in page
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "B, backward" in page and "I, input gradients" not in page


def test_a_run_without_actions_has_no_chart(tmp_path):
    with jdag.simulate(["w0", "w1"], seed=0) as cluster:
        render(tmp_path, RESULT, cluster.trace, None, window=(0, 1))
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
    with simulated(
        schedule, schedule.workers, values="abstract", devices=DEVICES
    ) as cluster:
        step(cluster, schedule, fetched=False)
        write_traces(tmp_path, cluster.trace, schedule.workers, ["torch"])
    text = (tmp_path / "trace.csv").read_text()
    assert text == schedules.to_csv(schedule)
    assert schedules.from_csv(text).actions == schedule.actions


def test_a_run_without_actions_has_no_order_to_write(tmp_path):
    with (
        jdag.simulate(["w0"], seed=0) as cluster,
        pytest.raises(JdagError, match="a run without actions of a schedule"),
    ):
        write_traces(tmp_path, cluster.trace, ["w0"], ["torch"])
