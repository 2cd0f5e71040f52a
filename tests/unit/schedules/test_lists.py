"""Schedules from lists and CSV: what is read and written, and each mistake in them."""

from typing import Any

import pytest

from jdag.errors import ScheduleError
from jdag.schedules import Action, Schedule, from_csv, from_lists, to_csv, zb_h1
from tests.tools.error_texts import fails_with
from tests.unit.schedules.test_schedules import every_schedule


@pytest.mark.parametrize("input_half", ["I", "B"])
def test_every_built_schedule_is_read_as_it_was_written(input_half):
    for schedule in every_schedule(5):
        assert from_csv(to_csv(schedule, input_half), input_half) == schedule


def test_the_two_dialects_differ_in_the_name_of_the_input_half():
    schedule = zb_h1(stages=2, micro_batches=1)
    assert to_csv(schedule) == "0F0,0I0,0W0\n1F0,1I0,1W0\n"
    assert to_csv(schedule, "B") == "0F0,0B0,0W0\n1F0,1B0,1W0\n"
    older = from_csv("0F0,0F1,0B0,0W0,0BW1\n", "B")
    assert list(map(str, older.actions[0])) == ["0F0", "0F1", "0I0", "0W0", "0B1"]
    assert to_csv(older, "B") == "0F0,0F1,0B0,0W0,0BW1\n"
    # Without any W, an older version of torch ran B as a whole backward.
    assert str(from_csv("0F0,0B0\n", "B").actions[0][1]) == "0B0"
    assert to_csv(from_csv("0F0,0BW0,0F1,0B1\n", "B")) == "0F0,0B0,0F1,0B1\n"


def test_idle_cells_spaces_and_empty_last_rows_change_nothing():
    text = "\ufeff0F0,,(0F1; 0B0)OVERLAP_F_B ,0B1\r\n,1F0,1B0,1F1,1B1\r\n,,\r\n\r\n"
    schedule = from_csv(text)
    assert to_csv(schedule) == "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1\n"
    lists: list[list[Any]] = [["0F0", None, Action("B", 0, 0)], ["", "1F0", "1B0"]]
    made = from_lists(lists, workers=["a", "b"], stages=2, micro_batches=1)
    assert (made.worker(1), made.micro_batches) == ("b", 1)


WRONG = [
    ("0F0,0X0", "worker w0, entry 2: '0X0' is not an action; expected a stage, a k"),
    ("0F0,SEND", "worker w0, entry 2: 'SEND' is not an action"),
    ("0F0,0BW0", "worker w0, entry 2: '0BW0' is not an action"),
    ("0F0,(0F1;0I0)OVERLAP_F_B", "backward of OVERLAP_F_B = '0I0': expected an act"),
    ("0F0,0B0\n2F0,2B0", "no worker has an action of stage 1; stages are 0 to 2"),
    ("0F0,0B0\n\n1F0,1B0", "worker w1 has no action; each worker needs a stage"),
    ("0F0,0B0,1B0\n1F0", "worker w1 has 1F0, but stage 1 is on w0; a stage must"),
    ("0F0,0B0,0B1", "worker w0 lacks 0F1: each stage has one F for each micro-batch"),
    ("0F0", "worker w0 lacks 0B0, or 0I0 and 0W0: each F has a backward"),
    ("0F0,0I0", "worker w0 lacks 0W0, the other half of 0I0"),
    ("0F0,0W0", "worker w0 lacks 0I0, the other half of 0W0"),
    ("0F0,0B0,0W0", "worker w0 has both 0B0 and 0W0: a backward is either one B, or"),
    ("0F0,0B0,0I0,0W0", "worker w0 has both 0B0 and 0I0: a backward is either one B"),
    ("0F0,0B0,0F0", "worker w0 has 0F0 for a second time; each action comes once"),
    ("0F0,0W0,0I0", "worker w0 has 0W0 before 0I0, which it needs: 0I0 must come fir"),
    ("0B0,0F0", "worker w0 has 0B0 before 0F0, which it needs: 0F0 must come first"),
    ("(0F0;0B0)OVERLAP_F_B", "0B0 in one action with 0F0, which it needs: 0F0 must"),
    (
        "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0",
        "deadlock: worker w0 waits at 0B0 for 1B0, worker w1 waits at 1F1 for 0F1; on "
        "one of these workers, the action that another waits for must come earlier",
    ),
    # The first workers wait too, but the list of the last one is wrong.
    (
        "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n2F0,2B1,2F1,2B0",
        "worker w2 has 2B1 before 2F1, which it needs: 2F1 must come first",
    ),
    # The same for two workers that wait for each other.
    (
        "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n2F1,2B1,2F0,2B0",
        "deadlock: worker w1 waits at 1B0 for 2B0, worker w2 waits at 2F1 for 1F1; on",
    ),
    ("0F0,0B0\n1F0,1B0,\x00", "worker w1, entry 3: '.x00' is not an action"),
    ("", "the schedule = .*: expected a list of actions for each worker"),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_a_wrong_schedule_is_one_line_that_says_what_is_right(text, message):
    with pytest.raises(ScheduleError, match=r"^[^\n]*" + message) as caught:
        from_csv(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"workers": ["a", "b"]}, "expected a list of 1 different names, one for"),
        ({"stages": 1}, "worker w0 has 1F0, an unknown stage; stages are 0 to 0"),
        ({"stages": 3}, "no worker has an action of stage 2; stages are 0 to 2"),
        ({"micro_batches": 1}, "w0 has 0F1, an unknown micro-batch; micro-batches are"),
        ({"micro_batches": 3}, "worker w0 lacks 0F2: each stage has one F for each"),
        ({"stages": 0}, "stages = 0: expected an integer >= 1"),
    ],
)
def test_a_schedule_of_another_size_is_refused(given, message):
    text = "0F0,1F0,1B0,0B0,0F1,1F1,1B1,0B1"
    from_csv(text, stages=2, micro_batches=2)
    with pytest.raises(ScheduleError, match=message):
        from_csv(text, **given)


def test_what_is_no_list_of_actions_is_refused():
    for lists, message in (
        ([["0F0", 3]], "worker w0, entry 2 is an int; expected an action, its text"),
        (["0F0"], "worker w0 = '0F0': expected a list of actions"),
        ("0F0", "the schedule = '0F0': expected a list of actions for each worker"),
        ([], r"the schedule = \[\]: expected a list of actions for each worker"),
    ):
        with pytest.raises(ScheduleError, match=message):
            from_lists(lists)  # type: ignore[arg-type]
    with fails_with(ScheduleError, "schedules.unknown_input_half"):
        from_csv("0F0,0B0", "X")  # type: ignore[arg-type]
    with fails_with(ScheduleError, "schedules.csv_is_no_text"):
        from_csv(b"0F0,0B0")  # type: ignore[arg-type]


def test_an_action_of_another_worker_or_size_in_a_hand_made_schedule():
    f, b = Action("F", 0, 0), Action("B", 0, 0)
    far = Action("F", 1, 0)
    for actions, message in (
        (((f,), (b,)), "worker v has 0B0, but stage 0 is on u"),
        (((f, far, b), ()), "worker u has 1F0, an unknown stage; stages are 0 to 0"),
    ):
        schedule = Schedule(("u", "v"), actions, (0,), 1)
        with pytest.raises(ScheduleError, match=message):
            schedule.check()
        with pytest.raises(ScheduleError, match=message):
            schedule.makespan_ns(forward=1, input_grad=1, weight_grad=1)
