"""How a pass ended, as users are told."""

import jax.numpy as jnp
import optax
import pytest
from msgspec.structs import replace

import jdag
from jdag.context.outcome import expired, nanoseconds, stuck_pass_text
from jdag.engine.protocol import Failure, Outcome, Owed, PassResult
from jdag.errors import JdagError, WorkerLost
from jdag.sim.devices import MOVED
from jdag.sim.faults import Crash
from jdag.sim.network import LinkModel
from tests.tools.error_texts import fails_with
from tests.tools.face_cases import total

OWED = Owed((3, 1), "b", "c", "m:f", "x.py:7 in main")


@pytest.mark.parametrize(("seconds", "ns"), [(None, None), (1, 10**9), (1e-12, 1)])
def test_a_time_is_whole_nanoseconds_and_at_least_one(seconds, ns):
    assert nanoseconds(seconds) == ns


@pytest.mark.parametrize(
    "seconds", [0, -1, "1", True, float("inf"), float("nan"), 1e300]
)
def test_a_time_that_is_none_is_refused(seconds):
    for given in (seconds, 10**400):
        with fails_with(JdagError, "context.allowed_is_a_number_of"):
            nanoseconds(given)


def test_a_pass_whose_time_is_over_says_what_it_waits_for():
    failure = Failure("PassTimeout", "", "a")
    result = PassResult(2, Outcome.EXPIRED, failure, (OWED,), (), ())
    assert expired(result, 0.5).splitlines() == [
        "pass 2 took longer than timeout_s=0.5; no cotangent has arrived for the "
        "values sent by",
        "  call 3.1: b -> c, sent for m:f, called at x.py:7 in main",
    ]


def test_a_pass_that_had_not_begun_says_for_want_of_what():
    failure = Failure("PassTimeout", "acknowledgements of call (1,) on 'b'", "a")
    result = PassResult(1, Outcome.EXPIRED, failure, (), (), ())
    assert expired(result, 1) == (
        "pass 1 took longer than timeout_s=1; it had not begun, since it waited for "
        "acknowledgements of call (1,) on 'b'"
    )


def test_what_was_moved_is_said_to_be_moved():
    assert "sent for ctx.move, called" in stuck_pass_text(
        (replace(OWED, function=MOVED),)
    )


def test_a_stuck_pass_says_what_helps():
    said = stuck_pass_text((OWED,))
    assert "call 3.1: b -> c, sent for m:f, called at x.py:7 in main" in said
    assert "mode='smart'" in said


def two_steps(crash_ns: int, *, settles: bool) -> tuple[list[str], int]:
    """Two steps of leaves on b, c and d, and a crash of c: the errors that are raised.

    With `settles`, the crash comes before the second step. Returns also when the
    second step was asked for.
    """
    said, asked_ns = [], 0
    crash, links = Crash("c", 70, at_ns=crash_ns), LinkModel(latency_ns=100)
    with jdag.simulate(list("abcd"), seed=0, faults=[crash], network=links) as cluster:
        leaves = [cluster.put(worker, jnp.ones(3)) for worker in "bcd"]
        optimizer = jdag.Optimizer(optax.sgd(0.25), leaves)
        for number in (1, 2):
            try:
                with cluster.context() as ctx:
                    ctx.backward(ctx.call("a", total, *leaves))
                    if number == 2 and settles:
                        cluster.driver.settle()
                    asked_ns = cluster.now_ns
                    optimizer.step(ctx)
            except WorkerLost as error:
                said.append(str(error))
        made = 1 if settles else 2
        for leaf in leaves[::2]:
            assert leaf.fetch().tolist() == [1 - made * 0.25] * 3
    return said, asked_ns


def test_a_loss_after_a_step_was_asked_for_names_the_owners_that_have_stepped():
    _, asked_ns = two_steps(10**12, settles=False)
    (said,), _ = two_steps(asked_ns + 1, settles=False)
    assert "worker 'c' is lost" in said.splitlines()[0]
    assert said.splitlines()[-1] == (
        "step 2 of Optimizer(3 leaves on 'b', 'c', 'd') was made on 'b', 'd'; "
        "the leaves on 'c' are lost"
    )


def test_a_step_with_a_lost_owner_names_itself_and_the_owners_of_the_one_before():
    (said,), _ = two_steps(10**6, settles=True)
    assert said.splitlines()[-1] == (
        "no leaf of Optimizer(3 leaves on 'b', 'c', 'd') was stepped by step 2; step 1 "
        "of Optimizer(3 leaves on 'b', 'c', 'd') was made on 'b', 'd'; the leaves on "
        "'c' are lost"
    )
