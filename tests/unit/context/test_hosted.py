"""Objects on workers: on both drivers, one call at a time, and in no graph."""

from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jdag
from jdag.errors import ContextError, JdagError, RemoteError, WorkerLost
from tests.conformance.drivers import DRIVERS
from tests.tools.error_texts import fails_with
from tests.tools.hosted_cases import (
    Counter,
    Env,
    Relay,
    bump,
    calls,
    counted,
    failing,
    handed,
    hosts,
    makes_unread,
    trains,
)


@pytest.fixture(params=["sim", "socket"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Any]:
    with DRIVERS[request.param].cluster() as made:
        yield made


def test_an_object_is_made_and_called_where_it_lives(cluster: Any) -> None:
    counter = cluster.host("b", Counter, 3, says="hey")
    assert counter.worker == "b"
    assert repr(counter).startswith("Hosted(Counter ")
    assert repr(counter).endswith(" on 'b')")
    assert counter.call("add") == 4
    assert counter.call("add", by=5) == 9
    assert counter.call("text") == {"says": "hey", "totals": [9, 1.5], "none": None}
    assert cluster.host("a", counted, 5).call("add", 2) == 7  # On the caller's own.


def test_a_call_may_use_a_few_special_names(cluster: Any) -> None:
    counter = cluster.host("c", Counter, 1)
    assert counter.call("__call__", 2, k="v") == [1, (2,), {"k": "v"}]
    assert counter.call("__len__") == 7
    assert counter.call("__getitem__", 4) == 8
    assert [counter.call("__next__"), counter.call("__next__")] == [2, 3]
    for name in ("_secret", "__init__", "__class__", 3):
        with fails_with(JdagError, "context.cannot_be_called_allowed_are"):
            counter.call(name)


def test_started_calls_run_in_order_and_are_waited_for_with_other_tasks(
    cluster: Any,
) -> None:
    counter = cluster.host("b", Counter)
    with cluster.context() as ctx:
        tasks = [counter.start("add", by) for by in (1, 2, 3)]
        tasks.append(ctx.start("c", calls, counter, 3))
        *added, (kind, totals) = jdag.wait(tasks)
        assert added == sorted(added) and kind == "Hosted"
        assert totals == sorted(totals) and counter.call("add", 0) == 9
        assert repr(tasks[0]).startswith("Task(Counter.add on 'b', called at test_host")


def test_a_program_that_is_handed_the_object_holds_it_until_it_returns(
    cluster: Any,
) -> None:
    counter, leaf = cluster.host("b", Counter), cluster.put("d", jnp.int32(1))
    with cluster.context() as ctx:
        tasks = [ctx.start("b", bump, counter, leaf) for _ in range(4)]
        tasks += [counter.start("add_slowly", leaf) for _ in range(4)]
        assert jdag.wait(tasks)[:4] == [("b", "Counter")] * 4
    assert counter.call("add", 0) == 8  # None was lost between a read and a write.


def test_programs_of_several_workers_share_one_object(cluster: Any) -> None:
    counter, leaf = cluster.host("b", Counter), cluster.put("d", jnp.int32(1))
    train = partial(trains, counter, leaf)
    found = cluster.run({"a": train, "c": train, "d": train})
    assert sorted(chain(*found.values())) == list(range(1, 16))
    nothing = {name: one["live_contexts"] for name, one in cluster.info().items()}
    assert nothing["c"] == nothing["d"] == 0  # The contexts of those calls are over.
    assert cluster.run({"c": hosts})["c"].call("add", 2) == 42  # It outlives that one.


def test_arrays_are_copies_in_both_directions(cluster: Any) -> None:
    env = cluster.host("b", Env, np.arange(3.0))
    action = np.ones(3)
    state, extra = env.call("step", action)
    action[:] = 7.0
    later, _ = env.call("step", np.ones(3))
    assert state.tolist() == [1.0, 2.0, 3.0] and extra == {"reward": 6.0}
    assert later.tolist() == [2.0, 3.0, 4.0]
    for one in (state, later):
        assert type(one) is np.ndarray and not one.flags.writeable
    assert env.call("keep", np.zeros(2)) is False


def test_refs_of_leaves_arrive_as_refs_and_other_handles_as_handles(
    cluster: Any,
) -> None:
    counter, leaf = cluster.host("b", Counter), cluster.put("c", jnp.ones(3))
    assert counter.call("kind_of", leaf) == "Ref"
    assert counter.call("kind_of", {"in": [cluster.host("c", Counter)]}["in"]) == "list"
    other = cluster.host("c", Counter, 20)
    assert counter.call("kind_of", other) == "Hosted"
    assert counter.call("handle", other).call("add") == 21
    with cluster.context() as ctx:
        h = ctx.call("c", jnp.sin, leaf)
        with fails_with(ContextError, "context.refs_do_not_leave_their"):
            counter.call("kind_of", h)


def test_objects_call_each_other_and_one_that_would_wait_for_ever_is_told(
    cluster: Any,
) -> None:
    counter = cluster.host("c", Counter, 1)
    there = cluster.host("c", Relay, counter)  # On its own worker: the object.
    assert there.call("hold") == "Counter"
    one = cluster.host("b", Relay, counter)
    two = cluster.host("d", Relay, one)
    one.call("link", counter)
    assert two.call("ask", "ask", "add", 4) == 5
    one.call("link", two)
    with fails_with(ContextError, "context.cannot_end_before_this_one") as caught:
        two.call("ask", "ask", "hold")
    assert f"{two.data} is held by the call at test_hosted.py:" in str(caught.value)
    assert one.call("hold") == two.call("hold") == "Hosted"


def test_an_exception_leaves_the_object_usable(cluster: Any) -> None:
    counter = cluster.host("b", Counter, 3)
    with fails_with(RemoteError, "context.valueerror_no_more_than_4") as caught:
        counter.call("raises")
    assert "Counter.raises failed on 'b', called at test_hosted.py:" in str(
        caught.value
    )
    assert 'hosted_cases.py", line' in str(caught.value)
    assert counter.call("add") == 5
    with fails_with(RemoteError, "context.missing_1_required_positional_argument"):
        counter.call("kind_of")
    with fails_with(RemoteError, "context.lookuperror_no_such_data") as caught:
        cluster.host("b", failing)
    assert "cluster.host of tests.tools.hosted_cases:failing failed on" in str(
        caught.value
    )


def test_what_is_no_method_is_named_with_what_is_near(cluster: Any) -> None:
    counter = cluster.host("b", Counter)
    with fails_with(JdagError, "context.counter_ad_there_is_none"):
        counter.call("ad")
    with fails_with(JdagError, "context.counter_limit_is_an_int"):
        counter.call("limit")


def test_what_cannot_travel_is_named_with_the_method(cluster: Any) -> None:
    counter = cluster.host("b", Counter)
    with fails_with(JdagError, "context.counter_kind_of_argument_0"):
        counter.call("kind_of", object())
    with fails_with(JdagError, "context.counter_odd_returned_an_object"):
        counter.call("odd")
    with fails_with(JdagError, "context.counter_itself_returned_a_counter"):
        counter.call("itself")
    assert counter.call("add") == 1


def test_an_object_that_is_dropped_is_gone_and_its_calls_say_so(cluster: Any) -> None:
    counter, leaf = cluster.host("b", Counter), cluster.put("d", jnp.int32(1))
    other = cluster.host("c", Counter)
    before = [counter.start("add_slowly", leaf) for _ in range(3)]
    cluster.drop({"both": (counter, leaf), "other": other})
    assert jdag.wait(before) == [1, 2, 3]
    for one in (counter, other):
        with fails_with(ContextError, "context.counter_was_dropped_by_cluster"):
            one.call("add")
    with fails_with(ContextError, "context.was_dropped"):
        cluster.drop(counter)
    with fails_with(ContextError, "context.was_dropped"):
        leaf.fetch()


def test_a_drop_leaves_the_contexts_of_calls_that_have_ended(cluster: Any) -> None:
    first, second = cluster.host("b", Counter), cluster.host("c", Counter)
    assert first.call("add") == second.call("add") == 1
    running = first.start("add_slowly", cluster.put("b", jnp.int32(1)))
    cluster.drop(second)
    assert running.result() == 2
    cluster.drop(first)
    if cluster.trace is None:
        cluster.driver.settle()
    assert [one["live_contexts"] for one in cluster.info().values()] == [0] * 4
    assert cluster.host("b", Counter).call("add") == 1


def test_an_error_that_nobody_asked_for_is_raised_at_the_end_of_its_program(
    cluster: Any,
) -> None:
    counter = cluster.host("b", Counter)
    ctx = cluster.context()
    with ctx, fails_with(RemoteError, "context.counter_raises_failed_on_b"):
        ctx.call("c", makes_unread, counter)
    counter.start("raises")
    with fails_with(RemoteError, "context.counter_raises_failed_on_b"):
        cluster.close()
    with fails_with(ContextError, "context.counter_add_on_the_cluster"):
        counter.call("add")


def test_a_handle_given_to_its_own_worker_comes_back_as_a_handle(cluster: Any) -> None:
    counter = cluster.host("b", Counter, 3)
    with cluster.context() as ctx:
        for worker in ("c", "d", "a"):
            assert ctx.call(worker, handed, counter).call("add") > 3
        with fails_with(ContextError, "context.handed_returned_a_counter_the"):
            ctx.call("b", handed, counter)


def test_a_worker_that_is_killed_takes_its_objects_with_it() -> None:
    with DRIVERS["socket"].cluster() as cluster:
        doomed, other = cluster.host("b", Counter), cluster.host("c", Counter)
        relay = cluster.host("c", Relay, doomed)
        with fails_with(WorkerLost, "context.b_is_lost"):
            relay.call("ask", "die")
        for _ in range(2):
            with fails_with(WorkerLost, "context.counter_add_worker_b_is"):
                doomed.call("add")
        with fails_with(WorkerLost, "context.b_is_lost"):
            cluster.host("b", Counter)
        with fails_with(WorkerLost, "context.b_is_lost"):
            cluster.drop(doomed)
        assert other.call("add") == 1
        with pytest.raises(WorkerLost):
            relay.call("ask", "add")
        assert relay.call("hold") == "Hosted"
