"""Which of what is ready goes first; every choice of a run is one object's."""

from dataclasses import dataclass
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdag.engine.protocol import Listed, Tag
from jdag.errors import JdagError
from jdag.runtime.chooser import Chooser, checked_index
from jdag.runtime.ready import ReadyJobs
from jdag.schedules import Action
from jdag.sim import Delay, DeviceModel, Drop, Duplicate, LinkModel
from jdag.sim.settings import SimSettings
from tests.tools.error_texts import fails_with
from tests.tools.face_cases import total
from tests.tools.sim_cases import cluster_of


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


class Picking(Chooser):
    """Picks by a function; records the offered jobs."""

    picks_jobs = True

    def __init__(self, policy="path", pick=lambda ready: 0):
        super().__init__(0, policy)
        self.pick = pick
        self.seen = []

    def pick_job(self, worker, ready):
        self.seen.append((worker, [job.path for job in ready]))
        return self.pick(ready)


def order(chooser, jobs):
    ready = ReadyJobs(chooser, "a")
    for job in jobs:
        ready.add(job, (job.phase, job.path))
    return [item for [item] in iter(ready.take, [])]


FORWARD, BACKWARD = (
    [(0, (1,)), (0, (2,)), (0, (2, 1))],
    [(1, (1,)), (1, (2,)), (2, (1,))],
)


def test_forward_and_passes_are_each_in_the_order_of_paths():
    assert order(Chooser(), JOBS) == FORWARD + BACKWARD
    assert order(Chooser(0, "backward_first"), JOBS) == BACKWARD + FORWARD


jobs = st.lists(
    st.builds(Job, st.integers(0, 2), st.tuples(st.integers(0, 3)), st.integers(0, 2))
)


@given(jobs, st.sampled_from(["path", "backward_first"]))
def test_picking_the_first_of_all_that_is_ready_is_the_order_of_the_key(jobs, name):
    assert order(Chooser(0, name), jobs) == order(Picking(name), jobs)


def test_a_picking_chooser_sees_the_worker_and_all_that_is_ready_in_order():
    chooser = Picking(pick=lambda ready: len(ready) - 1)
    jobs = [Job(0, (2,)), Job(0, (1,)), Job(0, (3,))]
    assert [path for _, path in order(chooser, jobs)] == [(3,), (2,), (1,)]
    assert chooser.seen[0] == ("a", [(1,), (2,), (3,)])


def test_a_pick_that_is_not_there_is_refused_by_index():
    ready = ReadyJobs(Picking(pick=lambda ready: 7), "a")
    ready.add(JOBS[0], None)
    with fails_with(JdagError, "runtime.chooser_7_from_0_to"):
        ready.take()
    assert len(ready) == 1
    with fails_with(JdagError, "runtime.pick_of_the_chooser_1"):
        checked_index(-1, 3)


def test_what_is_cleared_is_not_handed_out():
    ready = ReadyJobs(Chooser(), "a")
    for job in JOBS:
        ready.add(job, job)
    ready.clear()
    assert len(ready) == 0 and ready.take() == []


def test_a_list_waits_for_nothing_while_its_next_action_is_ready():
    ready = ReadyJobs(Chooser(), "a", (Action("F", 0, 0), Action("F", 0, 1)))

    def add(micro_batch: int) -> None:
        tag = SimpleNamespace(listed=True, stage=0, micro_batch=micro_batch)
        ready.add(SimpleNamespace(context=None, action="F", tag=tag), micro_batch)

    add(1)
    assert ready.stalled.startswith("worker a waits for 0F0,") and not ready.take()
    add(0)
    assert not ready.stalled
    assert [ready.take(), ready.take()] == [[0], [1]]


def test_a_list_that_has_less_waits_for_that_and_for_what_is_ready():
    listed = [Action(kind, 0, m) for m in range(4) for kind in "FB"]
    ready = ReadyJobs(Chooser(), "a", listed)

    def add(kind: str, micro_batch: int) -> None:
        tag = Tag(0, micro_batch, listed=True)
        item = f"{kind}{micro_batch}"
        ready.add(SimpleNamespace(context=None, action=kind, tag=tag), item)

    def narrow(*actions: str) -> None:
        acts = tuple([(one[0], Tag(0, int(one[1]), listed=True)) for one in actions])
        ready.skip(Listed(None, acts))  # type: ignore[arg-type]

    add("F", 1)
    add("F", 2)
    narrow("F0", "F2", "F3")
    assert ready.take() == [] and "waits for 0F0" in ready.stalled
    narrow("F2", "F3")
    assert ready.take() == ["F1"]
    assert ready.take() == ["F2"]
    add("B", 0)  # It comes nevertheless: before 0F3, for which the list waits.
    assert ready.take() == ["B0"]
    assert ready.take() == [] and not ready.stalled


@pytest.mark.parametrize("chooser", [Chooser(), Picking()])
def test_jobs_of_equal_keys_come_in_the_order_of_being_added(chooser):
    ready = ReadyJobs(chooser, "a")
    alike = [Job(0, (1,)) for _ in range(3)]
    for job in alike:
        ready.add(job, job)
    taken = [id(job) for [job] in iter(ready.take, [])]
    assert taken == [id(job) for job in alike]


class Free(Chooser):
    """Takes every choice at random, and keeps each answer."""

    picks_jobs = picks_events = True

    def __init__(self, seed):
        super().__init__(seed)
        self.picks = Random(seed)
        self.taken = []

    def note(self, taken):
        self.taken.append(taken)
        return taken

    def chance(self, probability):
        return self.note(super().chance(probability))

    def amount(self, least, most):
        return self.note(super().amount(least, most))

    def pick_job(self, worker, ready):
        return self.note(self.picks.randrange(len(ready)))

    def pick_event(self, tied):
        return self.note(self.picks.randrange(len(tied)))


class Script(Free):
    """Answers as another chooser did."""

    def __init__(self, taken):
        super().__init__(0)
        self.script = iter(taken)

    def note(self, taken):
        return super().note(next(self.script))


def layer(w, x):
    return w * x + x


def run(chooser):
    settings = SimSettings(
        workers=("a", "b", "c"),
        seed=0,
        home="a",
        network=LinkModel(latency_ns=1_000, jitter_ns=300),
        faults=[Drop(0.1), Delay(0.2, 1, 2_000), Duplicate(0.2, 500)],
        devices=DeviceModel(forward_ns=500, backward_ns=700),
        chooser=chooser,
    )
    with cluster_of(settings) as cluster:
        w = [cluster.put(worker, np.ones(3, np.float32)) for worker in ("b", "c")]
        with cluster.context() as ctx:
            outs = [
                ctx.call("b", layer, w[0], ctx.call("c", layer, w[1], x))
                for x in np.arange(12, dtype=np.float32).reshape(4, 3)
            ]
            ctx.backward(*[ctx.call("a", total, out) for out in outs])
            (gradient,) = ctx.gradient([w[1]])
            found = np.asarray(gradient.fetch()).tobytes()
        cluster.driver.settle()
        return cluster.trace.digest, found


def test_a_script_of_all_choices_gives_the_same_run_whatever_the_seed():
    free, other = Free(1), Free(2)
    digest, gradient = run(free)
    assert run(other)[0] != digest and run(other)[1] == gradient
    script = Script(free.taken)
    assert run(script) == (digest, gradient)
    assert script.taken == free.taken
    assert next(script.script, None) is None
