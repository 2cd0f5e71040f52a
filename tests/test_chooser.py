"""Which of what is ready goes first, and at what cost."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdag.errors import JdagError, ScenarioError
from jdag.sim.chooser import ReadyJobs, checked, policy


@dataclass(frozen=True)
class Job:
    phase: int
    path: tuple[int, ...]
    sequence: int = 0


# Two micro-batches, 1 and 2, through a forward and a backward each, and a second pass.
JOBS = [
    Job(1, (2,)),
    Job(0, (2, 1)),
    Job(2, (1,)),
    Job(0, (1,)),
    Job(1, (1,)),
    Job(0, (2,)),
]


def order(chooser, jobs):
    ready = ReadyJobs(chooser, "a")
    for job in jobs:
        ready.add(job)
    return [(job.phase, job.path) for job in iter(ready.take, None)]


def test_path_order_is_forward_then_passes_each_by_path():
    assert order(policy("path"), JOBS) == [
        (0, (1,)),
        (0, (2,)),
        (0, (2, 1)),
        (1, (1,)),
        (1, (2,)),
        (2, (1,)),
    ]


def test_backward_first_is_passes_then_forward_each_by_path():
    assert order(policy("backward_first"), JOBS) == [
        (1, (1,)),
        (1, (2,)),
        (2, (1,)),
        (0, (1,)),
        (0, (2,)),
        (0, (2, 1)),
    ]


def test_no_policy_picks_where_nobody_asked_it_to():
    for name in ("path", "backward_first"):
        chooser = policy(name)
        assert chooser.name == name
        assert not chooser.picks_jobs and not chooser.picks_events


jobs = st.lists(
    st.builds(Job, st.integers(0, 2), st.tuples(st.integers(0, 3)), st.integers(0, 2))
)


@given(jobs, st.sampled_from(["path", "backward_first"]))
def test_picking_the_first_of_all_that_is_ready_is_the_order_of_the_key(jobs, name):
    chooser = policy(name)
    assert order(chooser, jobs) == order(replace(chooser, picks_jobs=True), jobs)


def test_a_picking_policy_sees_the_worker_and_all_that_is_ready_in_order():
    seen = []

    def last(worker, ready):
        seen.append((worker, [job.path for job in ready]))
        return len(ready) - 1

    chooser = replace(policy("path"), picks_jobs=True, pick_job=last)
    jobs = [Job(0, (2,)), Job(0, (1,)), Job(0, (3,))]
    assert [path for _, path in order(chooser, jobs)] == [(3,), (2,), (1,)]
    assert seen[0] == ("a", [(1,), (2,), (3,)])


def test_a_pick_that_is_not_there_is_refused_by_policy_and_index():
    chooser = replace(policy("path"), picks_jobs=True, pick_job=lambda *_: 7)
    ready = ReadyJobs(chooser, "a")
    ready.add(JOBS[0])
    with pytest.raises(JdagError, match=r"'path' picked 7; .* from 0 to 0"):
        ready.take()
    assert len(ready) == 1
    with pytest.raises(JdagError, match="picked -1"):
        checked(chooser, -1, 3)


def test_clearing_gives_back_what_was_ready_in_order():
    ready = ReadyJobs(policy("path"), "a")
    for job in reversed(JOBS):
        ready.add(job)
    came = [(job.phase, job.path) for job in ready.clear()]
    assert came == order(policy("path"), JOBS)
    assert came != [(job.phase, job.path) for job in JOBS]
    assert len(ready) == 0 and ready.take() is None


@pytest.mark.parametrize("picks_jobs", [False, True])
def test_jobs_of_equal_keys_come_in_the_order_of_being_added(picks_jobs):
    ready = ReadyJobs(replace(policy("path"), picks_jobs=picks_jobs), "a")
    alike = [Job(0, (1,)) for _ in range(3)]
    for job in alike:
        ready.add(job)
    assert [id(job) for job in iter(ready.take, None)] == [id(job) for job in alike]


def test_an_unknown_policy_is_refused_with_those_there_are():
    with pytest.raises(
        ScenarioError, match=r"'lifo': allowed is one of path, backward"
    ):
        policy("lifo")
