"""Pipeline schedules: orders, published bubbles, closed forms, memory, times."""

import re
from functools import partial
from itertools import product
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jdag.errors import ScheduleError
from jdag.schedules import (
    Action,
    Schedule,
    dualpipe_v,
    eager_one_f_one_b,
    gpipe,
    interleaved,
    one_f_one_b,
    zb_h1,
    zb_h2,
    zb_v,
)
from tests.tools.error_texts import fails_with

ONE_STAGE = (gpipe, one_f_one_b, eager_one_f_one_b, zb_h1, zb_h2)
UNIT = {"forward": 1, "input_grad": 1, "weight_grad": 1}

# Zero Bubble Pipeline Parallelism (ICLR 2024): p, m, layers, costs in microseconds, and
# bubbles of 1F1B, interleaved (with all dependencies), ZB-H1 and ZB-H2.
PUBLISHED = (
    (8, 24, 24, (18_522, 18_086, 9_337, 601), (0.2431, 0.1090, 0.1585, 0.1083)),
    (8, 64, 24, (18_546, 18_097, 9_321, 762), (0.1240, 0.0461, 0.0674, 0.0444)),
    (8, 32, 32, (29_802, 29_428, 19_530, 577), (0.1898, 0.0644, 0.1045, 0.0559)),
    (16, 48, 48, (11_347, 11_248, 8_132, 377), (0.2552, 0.1136, 0.1397, 0.0672)),
    (16, 128, 48, (11_325, 11_308, 8_109, 378), (0.1251, 0.0459, 0.0576, 0.0266)),
    (32, 128, 64, (10_408, 10_204, 7_703, 408), (0.2168, 0.1192, 0.1106, 0.0490)),
)


@pytest.mark.parametrize(("p", "m", "layers", "costs_us", "bubbles"), PUBLISHED)
def test_bubbles_are_those_of_the_zero_bubble_paper(p, m, layers, costs_us, bubbles):
    keys = ("forward", "input_grad", "weight_grad", "comm")
    costs = dict(zip(keys, [1000 * cost for cost in costs_us], strict=True))
    v = layers // p
    # A chunk has 1/v of the work; all times are scaled by v, to stay whole.
    scaled = {**costs, "comm": v * costs["comm"]}
    chunked = interleaved(stages=p * v, chunks=v, micro_batches=m)
    actual = (
        one_f_one_b(stages=p, micro_batches=m).timeline(**costs).bubble,
        chunked.timeline(**scaled).bubble,
        zb_h1(stages=p, micro_batches=m).timeline(**costs).bubble,
        zb_h2(stages=p, micro_batches=m).timeline(**costs).span_bubble,
    )
    assert tuple(round(bubble, 4) for bubble in actual) == bubbles


sizes = st.integers(1, 6)
cost = st.integers(1, 20)


@given(p=sizes, m=sizes, f=cost, i=cost, w=cost, c=cost)
def test_gpipe_and_1f1b_have_the_closed_form(p, m, f, i, w, c):
    costs = {"forward": f, "input_grad": i, "weight_grad": w}
    work = f + i + w
    sized = {"stages": p, "micro_batches": m}
    assert one_f_one_b(**sized).makespan_ns(**costs) == (m + p - 1) * work
    actual = gpipe(**sized).makespan_ns(**costs, comm=c)
    assert actual == (m + p - 1) * work + 2 * (p - 1) * c


@given(p=st.integers(2, 5), groups=st.integers(1, 3), f=cost, b=cost, c=cost)
def test_1f1b_pays_for_communication_and_eager_1f1b_hides_it(p, groups, f, b, c):
    m = p * groups
    costs = {"forward": f, "input_grad": b, "weight_grad": 0, "comm": c}
    assume(c <= 3 * min(f, b))
    actual = one_f_one_b(stages=p, micro_batches=m).makespan_ns(**costs)
    filled = m * (f + b) + (p - 1) * (f + b + 2 * c)
    assert actual == filled + (2 * (p - 1) * groups - 2) * c
    if 2 * c <= f + b:
        eager = eager_one_f_one_b(stages=p, micro_batches=m)
        assert eager.makespan_ns(**costs) == filled


@given(p=sizes, groups=st.integers(1, 3), v=st.integers(1, 3), f=cost, b=cost)
def test_interleaved_has_the_closed_form(p, groups, v, f, b):
    m = p * groups
    schedule = interleaved(stages=p * v, chunks=v, micro_batches=m)
    actual = schedule.makespan_ns(forward=f, input_grad=b, weight_grad=0)
    assert actual == (m * v + p - 1) * (f + b)


@given(p=sizes, more=sizes, f=cost, i=cost, w=cost, c=cost)
def test_zb_h1_and_zb_h2_have_the_closed_forms(p, more, f, i, w, c):
    w = min(f, i, w)
    c = min(f // 2, i // 2, c)
    costs = {"forward": f, "input_grad": i, "weight_grad": w}
    m = p - 1 + more
    actual = zb_h1(stages=p, micro_batches=m).makespan_ns(**costs)
    assert actual == m * (f + i + w) + (p - 1) * (f + i - w)
    m = 2 * p - 2 + more
    span = zb_h2(stages=p, micro_batches=m).timeline(**costs, comm=c).span_ns
    assert span == m * (f + i + w) + (p - 1) * (f + i + 2 * c - 2 * w)


@given(p=sizes, more=sizes)
def test_no_worker_waits_in_zb_v_if_f_i_and_w_cost_the_same(p, more):
    m = 2 * p - 2 + more
    actual = zb_v(stages=2 * p, micro_batches=m).timeline(**UNIT)
    assert (actual.span_ns, actual.makespan_ns) == (6 * m, 6 * m + p - 1)


@given(p=sizes, more=sizes, f=cost, w=cost, hidden=cost)
def test_dualpipe_v_waits_as_long_as_its_authors_say(p, more, f, w, hidden):
    # (PP/2 - 1) (F&B + B - 3W), for F = I, where PP/2 is the number of workers.
    w = min(f, w)
    both = 2 * f + w - min(f, hidden)
    schedule = dualpipe_v(stages=2 * p, micro_batches=2 * p - 1 + more)
    actual = schedule.timeline(forward=f, input_grad=f, weight_grad=w, overlap_ns=both)
    busy = [sum(s.end_ns - s.start_ns for s in spans) for spans in actual.spans]
    idle = actual.makespan_ns - min(busy)
    assert idle == (p - 1) * (both + f + w - 3 * w)


@given(p=sizes, more=sizes)
def test_peaks_of_activations_are_the_published_ones(p, more):
    m = 2 * p - 1 + more
    ranks = range(p)
    for builder, peaks in (
        (gpipe, [m] * p),
        (one_f_one_b, [p - r for r in ranks]),
        (eager_one_f_one_b, [2 * (p - r) - 1 for r in ranks]),
        (zb_h1, [p] * p),
        (zb_h2, [2 * p - 1] * p),
    ):
        actual = builder(stages=p, micro_batches=m).peak_activations()
        assert list(actual.values()) == peaks, builder
    for builder, peak in ((zb_v, 2 * p), (dualpipe_v, 2 * p + 1)):
        actual = builder(stages=2 * p, micro_batches=m).peak_activations()
        assert list(actual.values()) == [peak] * p, builder
    actual = interleaved(stages=2 * p, chunks=2, micro_batches=2 * p).peak_activations()
    assert list(actual.values()) == [3 * p - 1 - 2 * r for r in ranks]


def every_schedule(most):
    for p, m in product(range(1, most), repeat=2):
        for builder in ONE_STAGE:
            yield builder(stages=p, micro_batches=m)
        yield zb_v(stages=2 * p, micro_batches=m)
        if m >= 2 * p:
            yield dualpipe_v(stages=2 * p, micro_batches=m)
        for v in (1, 2, 3):
            yield interleaved(stages=v * p, chunks=v, micro_batches=m * p)


def orders(schedule):
    return [" ".join(map(str, steps)) for steps in schedule.actions]


def test_orders_with_one_stage_a_worker():
    assert orders(one_f_one_b(stages=2, micro_batches=3)) == [
        "0F0 0F1 0B0 0F2 0B1 0B2",
        "1F0 1B0 1F1 1B1 1F2 1B2",
    ]
    assert orders(zb_h1(stages=2, micro_batches=3)) == [
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2",
        "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2",
    ]
    assert orders(zb_h2(stages=2, micro_batches=3)) == [
        "0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2",
        "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2",
    ]


def test_orders_with_two_stages_a_worker():
    # ZB-V and DualPipeV as torch.distributed.pipelining has them.
    assert orders(interleaved(stages=4, chunks=2, micro_batches=2)) == [
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1",
    ]
    assert orders(zb_v(stages=4, micro_batches=4)) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 "
        "3W3 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 "
        "2I3 1I3 1W2 2W3 1W3",
    ]
    assert orders(zb_v(stages=4, micro_batches=2)) == [
        "0F0 0F1 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 0I1 0W1",
        "1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 2I1 2W1 1I1 1W1",
    ]
    assert orders(dualpipe_v(stages=4, micro_batches=4)) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 (0F3;3B1)OVERLAP_F_B (3F2;0B0)OVERLAP_F_B 3B2 "
        "(3F3;0B1)OVERLAP_F_B 3B3 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 1F2 2B0 (2F2;1B0)OVERLAP_F_B (1F3;2B1)OVERLAP_F_B "
        "(2F3;1B1)OVERLAP_F_B 2B2 1B2 2I3 1I3 2W3 1W3",
    ]


def test_stages_have_workers_in_a_loop_or_in_a_v():
    loop = interleaved(stages=6, chunks=3, micro_batches=2)
    assert [loop.worker(s) for s in range(6)] == ["w0", "w1", "w0", "w1", "w0", "w1"]
    names = ["a", "b", "c"]
    v = zb_v(stages=6, micro_batches=2, workers=names)
    assert [v.worker(s) for s in range(6)] == ["a", "b", "c", "c", "b", "a"]
    assert (v.workers, v.stages, v.micro_batches) == (("a", "b", "c"), 6, 2)
    with fails_with(ScheduleError, "schedules.unknown_stage"):
        v.worker(6)


def needed(schedule, part):
    s, m, last = part.stage, part.micro_batch, schedule.stages - 1
    match part.kind:
        case "F":
            return [f"{s - 1}F{m}"] if s else []
        case "W":
            return [f"{s}I{m}"]
    later = [f"{s + 1}B{m}", f"{s + 1}I{m}"] if s < last else []
    return [f"{s}F{m}", *later]


@given(st.sampled_from(list(every_schedule(4))), cost, cost, cost, cost, cost)
def test_actions_start_when_the_last_thing_that_they_need_is_there(
    schedule, f, i, w, c, both
):
    actual = schedule.timeline(
        forward=f, input_grad=i, weight_grad=w, comm=c, overlap_ns=both
    )
    lasts = {"F": f, "B": i + w, "I": i, "W": w, "OVERLAP_F_B": both}
    ends = {
        str(part): (span.end_ns, worker)
        for worker, spans in enumerate(actual.spans)
        for span in spans
        for part in span.action.parts
    }
    for worker, spans in enumerate(actual.spans):
        free = 0
        for span, step in zip(spans, schedule.actions[worker], strict=True):
            there = [
                ends[name][0] + (c if ends[name][1] != worker else 0)
                for part in step.parts
                for name in needed(schedule, part)
                if name in ends
            ]
            assert span.start_ns == max([free, *there])
            assert span.end_ns == span.start_ns + lasts[step.kind]
            free = span.end_ns


def test_an_overlap_costs_its_forward_and_backward_if_nothing_else_is_said():
    schedule = dualpipe_v(stages=4, micro_batches=5)
    costs = {"forward": 3, "input_grad": 5, "weight_grad": 2}
    whole = schedule.makespan_ns(**costs)
    assert whole == schedule.makespan_ns(**costs, overlap_ns=10)
    assert whole > schedule.makespan_ns(**costs, overlap_ns=9)


CHUNKED = partial(interleaved, chunks=2)
FRACTION: Any = UNIT | {"comm": 1.5}


def sized(builder, stages, micro_batches, **rest):
    return partial(builder, stages=stages, micro_batches=micro_batches, **rest)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (sized(gpipe, 0, 2), "stages = 0: expected an integer >= 1"),
        (sized(zb_h1, 2, 1.0), "micro_batches = 1.0: expected an integer >= 1"),
        (sized(CHUNKED, 5, 4), "stages = 5: expected a multiple of chunks = 2"),
        (sized(CHUNKED, 6, 4), "micro_batches = 4: expected a multiple of the 3 wor"),
        (sized(zb_v, 3, 4), "stages = 3: expected an even number"),
        (sized(dualpipe_v, 4, 3), "micro_batches = 3: expected an integer >= stage"),
        *[
            (sized(gpipe, 2, 2, workers=names), f"workers = {names!r}: expected a li")
            for names in (["a"], ["a", "a"], "ab")
        ],
        (partial(Action, "X", 0, 0), "kind = 'X': expected one of F, B, I, W"),
        (partial(Action, "F", -1, 0), "stage = -1: expected an integer >= 0"),
        (
            partial(gpipe(stages=2, micro_batches=2).makespan_ns, **FRACTION),
            "comm = 1.5: expected an integer of nanoseconds >= 0",
        ),
        (
            partial(Schedule, ("a",), ((Action("F", 0, 0),),), (1,), 1),
            "placement[0] = 1: expected an index of a worker, 0 to 0",
        ),
    ],
)
def test_an_unusable_value_is_named_with_what_is_allowed(build, message):
    with pytest.raises(ScheduleError, match=re.escape(message)):
        build()
