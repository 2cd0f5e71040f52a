"""Programs that run at the same time as the program that started them."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdag
from jdag import sim
from jdag.errors import ContextError, JdagError, PassTimeout, RemoteError, TaskTimeout
from tests.tools.error_texts import fails_with
from tests.tools.face_cases import nothing_is_left

SECOND = 10**9
DEVICES = sim.DeviceModel(functions={"work": (SECOND, SECOND), "add": (0, 0)})
X = jnp.array([0.5, -1.0, 2.0])


def work(w, x):
    return jnp.tanh(w * x)


def add(*arrays):
    return sum(jnp.sum(array) for array in arrays)


@jdag.program
def works(ctx, w, x):
    made = ctx.call(ctx.here, work, w, x)
    made.fetch()
    return made


@jdag.program
def both(ctx, w, x):
    others = [name for name in ("b", "c", "d") if name != ctx.here]
    found = jdag.wait([ctx.start(other, works, w, x) for other in others])
    return ctx.call(ctx.here, add, *found)


@jdag.program
def breaks(ctx, text):
    raise ValueError(text)


@jdag.program
def leaves_running(ctx, worker, text):
    ctx.start(worker, breaks, text)
    ctx.start(worker, breaks, f"{text} again")


def timed(**settings: Any) -> Any:
    return jdag.simulate(["a", "b", "c", "d"], seed=0, devices=DEVICES, **settings)


def test_programs_that_were_started_take_the_time_of_the_longest():
    with timed() as cluster:
        w = cluster.put("b", X)
        with cluster.context() as ctx:
            tasks = [ctx.start(worker, works, w, 1.0) for worker in "bcd"]
            assert cluster.now_ns == 0
            assert "running" in repr(tasks[0]) and "test_tasks.py" in repr(tasks[0])
            found = jdag.wait(tasks)
            assert cluster.now_ns == SECOND
            assert [one.worker for one in found] == ["b", "c", "d"]
            both_of = [ctx.start(worker, both, w, 1.0) for worker in "bc"]
            jdag.wait(both_of)  # Two seconds of work each for d, one for b and c.
            assert cluster.now_ns == 3 * SECOND
        nothing_is_left(cluster)


def held_after(run: Any) -> dict[str, int]:
    with timed() as cluster:
        w = cluster.put("b", X)
        with cluster.context() as ctx:
            for number in range(3):
                made = ctx.call("b", work, w, float(number))
                result = run(ctx, "c", works, made, 2.0)
                del made  # The program may not have begun.
                expected = jnp.tanh(jnp.tanh(X * number) * 2)
                np.testing.assert_allclose(result().fetch(), expected, rtol=1e-6)
                del result
            ctx.call("c", work, w, 1.0).fetch()
            cluster.driver.settle()
            info = cluster.info()
        return {worker: info[worker]["values_held"] for worker in "abcd"}


def test_arguments_and_results_live_as_long_as_those_of_a_call():
    def called(ctx: Any, *call: Any) -> Any:
        made = ctx.call(*call)
        return lambda: made

    started = held_after(lambda ctx, *call: ctx.start(*call).result)
    assert started == held_after(called)


def test_what_nobody_asked_for_is_waited_for_and_its_errors_are_raised_at_the_end():
    with timed() as cluster:
        w = cluster.put("b", X)
        with cluster.context() as ctx:
            ctx.start("b", works, w, 1.0)
        assert cluster.now_ns == SECOND
        with (
            fails_with(RemoteError, "context.breaks_failed_on_c_valueerror") as e,
            cluster.context() as ctx,
        ):
            slow = ctx.start("b", works, w, 1.0)
            ctx.start("c", breaks, "1")
            ctx.start("b", leaves_running, "d", "2")
            asked = ctx.start("d", breaks, "asked")
            with fails_with(RemoteError, "context.asked"):
                asked.result()
        assert cluster.now_ns == 2 * SECOND and slow.result().worker == "b"
        (note,) = e.value.__notes__
        assert "leaves_running on 'b'" in note and "ValueError: 2" in note
        assert "breaks on 'd' also failed" in note and "ValueError: 2 again" in note
        nothing_is_left(cluster)
        before_ns = cluster.now_ns
        with pytest.raises(ZeroDivisionError), cluster.context() as ctx:
            ctx.start("c", breaks, "unseen")
            ctx.start("b", works, w, 1.0)
            raise ZeroDivisionError
        assert cluster.now_ns == before_ns + SECOND
        nothing_is_left(cluster)


def test_waiting_for_several_raises_the_first_error_in_their_order():
    with timed() as cluster, cluster.context() as ctx:
        w = cluster.put("b", X)
        tasks = [
            ctx.start("b", works, w, 1.0),
            ctx.start("c", breaks, "first"),
            ctx.start("d", breaks, "second"),
        ]
        with fails_with(RemoteError, "context.first") as caught:
            jdag.wait(tasks)
        assert ["second" in note for note in caught.value.__notes__] == [True]
        with fails_with(RemoteError, "context.second") as caught:
            jdag.wait(list(reversed(tasks)))


def test_a_result_that_takes_too_long_can_be_asked_for_again():
    with timed() as cluster, cluster.context() as ctx:
        w = cluster.put("b", X)
        task = ctx.start("b", works, w, 1.0)
        late = r"not finished within timeout_s=0.25: Task.*works on 'b', .*, running\)"
        with pytest.raises(TaskTimeout, match=late):
            task.result(timeout_s=0.25)
        assert cluster.now_ns == SECOND // 4
        with pytest.raises(TaskTimeout):
            jdag.wait([task], timeout_s=0.5)
        assert cluster.now_ns == SECOND * 3 // 4
        np.testing.assert_allclose(task.result(timeout_s=0.5).fetch(), jnp.tanh(X))
        assert cluster.now_ns == SECOND
        with fails_with(JdagError, "context.timeout_s_1_allowed_is"):
            task.result(timeout_s=-1)


def test_a_pass_begins_when_all_programs_have_ended():
    with timed() as cluster:
        w = cluster.put("b", X)
        with cluster.context() as ctx:
            total = ctx.call("b", add, ctx.call("b", work, w, 1.0))
            ctx.start("c", both, w, 1.0)
            late = r"it waited for .*both on 'c'"
            with pytest.raises(PassTimeout, match=late):
                ctx.backward(total, timeout_s=0.5)
            ctx.backward(total, timeout_s=60.0)
            expected = jax.grad(lambda w: jnp.sum(jnp.tanh(w)))(X)
            np.testing.assert_allclose(ctx.gradient(w).fetch(), expected, rtol=1e-6)
        nothing_is_left(cluster)


def test_what_was_interrupted_ends_with_its_context():
    with timed() as cluster:
        w = cluster.put("b", X)
        with pytest.raises(KeyboardInterrupt), cluster.context() as ctx:
            ctx.start("b", works, w, 1.0)
            raise KeyboardInterrupt
        assert cluster.now_ns < SECOND
        nothing_is_left(cluster)


def test_a_task_of_a_lost_worker_is_a_loss():
    crash = sim.Crash("c", detect_ns=1000, at_ns=SECOND // 2)
    with timed(faults=[crash]) as cluster:
        w = cluster.put("b", X)
        lost = fails_with(jdag.errors.WorkerLost, "context.c")
        with lost, cluster.context() as ctx:
            task = ctx.start("c", works, w, 1.0)
            other = ctx.start("b", works, w, 1.0)
            with fails_with(jdag.errors.WorkerLost, "context.c"):
                task.result()
            np.testing.assert_allclose(other.result().fetch(), jnp.tanh(X))
            with fails_with(jdag.errors.WorkerLost, "context.c"):
                ctx.start("c", works, w, 1.0)
            ctx.backward(ctx.call("b", add, w))
        nothing_is_left(cluster)


KEPT: list[Any] = []


@jdag.program
def waits_for_a_foreign_task(ctx):
    return KEPT[0].result()


@pytest.mark.parametrize(
    ("attempt", "said"),
    [
        (
            lambda ctx: ctx.start("b", work, X, 1.0),
            "ctx.start takes a program, and .*work",
        ),
        (
            lambda ctx: ctx.start("z", works, X, 1.0),
            "ctx.start: there is no worker 'z'",
        ),
        (lambda ctx: jdag.wait([ctx.id]), "jdag.wait takes a list of tasks.*an int"),
        (jdag.wait, "jdag.wait takes a list of tasks.*Context"),
    ],
)
def test_what_is_no_task_and_no_program_is_refused(attempt: Any, said: str):
    refused = pytest.raises(JdagError, match=said)
    with timed() as cluster, cluster.context() as ctx, refused:
        attempt(ctx)


def test_only_the_program_that_started_a_task_waits_for_it():
    with timed() as cluster:
        with cluster.context() as ctx:
            KEPT[:] = [ctx.start("b", both, cluster.put("b", X), 1.0)]
            refused = r"waiting for a task on context 0\.1, whose program waits"
            with pytest.raises(ContextError, match=refused):
                ctx.call("c", waits_for_a_foreign_task)
        assert KEPT[0].result() is not None  # Its end was waited for.
        with fails_with(ContextError, "context.which_is_over"):
            KEPT[0].result().fetch()


def test_the_oracle_runs_what_is_started_at_once():
    def program(ctx, w):
        task = ctx.start("b", breaks, "no")
        return task.result()

    with fails_with(ValueError, "context.no"):
        jdag.oracle(program)(X)
    assert re.match(r"Task\(.*ended\)", repr(KEPT[0]))
