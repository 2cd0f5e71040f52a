"""Errors: each names what is wrong, reaches the caller, and leaves nothing behind."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import jdag
from jdag.errors import RemoteError
from tests.conformance.drivers import held, leaving_nothing
from tests.conformance.functions import (
    ONES,
    dies_backward,
    dies_forward,
    fails_at_once,
    fails_without_text,
    fails_without_text_when_traced,
    forwarding_failure,
    lingers,
    nested_sine,
    program_without_text,
    refuses_without_text,
    sum_of_product,
    there,
    three_times,
    total,
)
from tests.tools.error_texts import fails_with

equal = np.testing.assert_array_equal


def six_wrong_backwards(cluster: Any) -> list[tuple[type, str]]:
    w = cluster.put("b", ONES)
    with cluster.context() as over:
        foreign = over.call("c", total, w)
    said = []
    with cluster.context() as ctx:
        wrong: tuple[tuple[Any, ...], ...] = (
            (),
            (None,),
            (ctx.call("b", total, ONES),),
            (w,),
            (ctx.call("c", three_times, w),),
            (foreign,),
        )
        for roots in wrong:
            with pytest.raises(jdag.JdagError) as caught:
                ctx.backward(*roots)
            said.append((caught.type, str(caught.value)))
        assert ctx.gradients() == {}
        ctx.backward(ctx.call("d", total, w))
        equal(ctx.gradient(w).fetch(), ONES)
    return said


def test_no_roots_none_constant_leaf_not_scalar_unknown_context_are_six_messages(
    cluster: Any,
):
    said = six_wrong_backwards(cluster)
    assert len({message for _, message in said}) == 6
    kinds = [kind for kind, _ in said]
    assert kinds == [jdag.errors.RootError] * 5 + [jdag.errors.ContextError]
    what = (
        "has no roots",
        "root 0 is None",
        "is a constant",
        ", a leaf, so there is no graph",
        "of size 9",
        "which is over",
    )
    for number, part in enumerate(what):
        assert [part in message for _, message in said].index(True) == number, said
        assert sum(part in message for _, message in said) == 1, part


def test_an_error_in_the_backward_of_the_second_hop_brings_the_path_of_workers(
    driver: Any, cluster: Any
):
    w = cluster.put("a", ONES)
    with leaving_nothing(driver, cluster), cluster.context() as ctx:
        loss = ctx.call("b", forwarding_failure, w)
        assert loss.worker == "c"
        out = ctx.call("d", three_times, ctx.call("b", three_times, loss))
        with pytest.raises(jdag.errors.RemoteError) as caught:
            ctx.backward(out)
        said = str(caught.value)
        assert "total_that_fails_backward failed on 'c'" in said, said
        assert "RuntimeError: no way back" in said, said
        assert "called at functions.py:" in said, said
        # The pass began on d, and came by way of b to c.
        assert "a <- d <- b <- c" in said, said
        assert not [each for each in held(cluster).values() if each[1]]


def test_after_50_failing_passes_a_good_one_gives_what_one_good_pass_gives(
    driver: Any, cluster: Any
):
    w, v = cluster.put("a", ONES), cluster.put("b", 2 * ONES)
    with cluster.context() as ctx:
        good = ctx.call("b", sum_of_product, ctx.call("c", nested_sine, w), v)
        ctx.backward(good)
        wanted = jdag.fetch(ctx.gradient([w, v]))
    with leaving_nothing(driver, cluster), cluster.context() as ctx:
        good = ctx.call("b", sum_of_product, ctx.call("c", nested_sine, w), v)
        bad = ctx.call("b", forwarding_failure, w)
        for _ in range(50):
            with fails_with(jdag.errors.RemoteError, "conformance.no_way_back"):
                ctx.backward(good, bad, retain_graph=True)
            assert [passes for _, passes, _ in held(cluster).values()] == [0] * 4
            assert ctx.gradients() == {}
        ctx.backward(good)
        found = jdag.fetch(ctx.gradient([w, v]))
        for one, other in zip(found, wanted, strict=True):
            equal(one, other)


def test_a_function_that_raises_names_function_worker_call_site_and_its_own_line(
    cluster: Any,
):
    w = cluster.put("b", ONES)
    with cluster.context() as ctx, pytest.raises(jdag.errors.RemoteError) as caught:
        ctx.call("c", fails_at_once, w).fetch()
    said = str(caught.value)
    for part in (
        "fails_at_once failed on 'c'",
        "called at test_errors.py:",
        "ValueError: not with these",
        'raise ValueError("not with these")',
    ):
        assert part in said, said


# ------------------------------------------------------------------ workers that die


def test_a_worker_that_dies_in_a_pass_is_told_in_time_and_the_others_go_on(driver: Any):
    with driver.mortal("c") as cluster:
        w, v = cluster.put("a", ONES), cluster.put("b", ONES)
        with cluster.context() as ctx:
            h = ctx.call("c", dies_backward, ctx.call("b", sum_of_product, w, v))
            loss = ctx.call("d", total, h)
            before_ns = cluster.now_ns
            with fails_with(jdag.errors.WorkerLost, "conformance.c"):
                ctx.backward(loss)
            assert cluster.now_ns - before_ns <= driver.loss_max_s * 1e9
            assert ctx.gradients() == {}
        with cluster.context() as ctx:
            ctx.backward(ctx.call("d", sum_of_product, w, v))
            equal(ctx.gradient(w).fetch(), ONES)
        driver.settle(cluster)
        assert all(each[:2] == (0, 0) for each in held(cluster).values())


def test_a_worker_that_dies_in_forward_is_an_error_at_who_fetches_and_at_backward(
    driver: Any,
):
    with driver.mortal("c") as cluster:
        w = cluster.put("a", ONES)
        with cluster.context() as ctx:
            loss = ctx.call("b", total, ctx.call("c", dies_forward, w))
            before_ns = cluster.now_ns
            with fails_with(jdag.errors.WorkerLost, "conformance.c"):
                loss.fetch()
            with fails_with(jdag.errors.WorkerLost, "conformance.c"):
                ctx.backward(loss)
            assert cluster.now_ns - before_ns <= driver.loss_max_s * 1e9
        driver.settle(cluster)
        assert all(each[:2] == (0, 0) for each in held(cluster).values())


def test_every_participant_is_told_and_refuses_to_go_on(driver: Any):
    """Also d, which only ever saw a constant."""
    with driver.mortal("c") as cluster:
        w = cluster.put("a", ONES)
        with cluster.context() as ctx:
            constant = ctx.call("d", three_times, 2.0)
            h = ctx.call("a", three_times, ctx.call("b", nested_sine, w))
            loss = ctx.call("b", total, ctx.call("c", dies_backward, h))
            with pytest.raises(jdag.errors.WorkerLost):
                ctx.backward(loss)
            driver.settle(cluster)
            with fails_with(jdag.errors.WorkerLost, "conformance.c"):
                ctx.call("d", total, constant).fetch()
            with fails_with(jdag.errors.WorkerLost, "conformance.c"):
                ctx.backward(loss)


# ---------------------------------------------------------------------- deadlines


def test_a_pass_that_takes_longer_than_timeout_s_raises_with_what_is_owed(driver: Any):
    with driver.slow() as cluster:
        w, v = cluster.put("a", ONES), cluster.put("b", ONES)
        with cluster.context() as ctx:  # What it is to wait for is compiled by then.
            ctx.backward(ctx.call("d", total, ctx.call("b", sum_of_product, w, v)))
        with cluster.context() as ctx:
            h = ctx.call("c", lingers, ctx.call("b", sum_of_product, w, v))
            loss = ctx.call("d", total, h)
            before_ns = cluster.now_ns
            with pytest.raises(jdag.errors.PassTimeout) as caught:
                ctx.backward(loss, timeout_s=2.0)
            assert 2e9 <= cluster.now_ns - before_ns < 9e9
            sends: Any = caught.value.sends
            owed = [
                (send.worker, send.destination, send.function.rpartition(":")[2])
                for send in sends
            ]
            # What d owed c has come; what c owes b is being computed.
            assert owed == [("a", "b", "sum_of_product"), ("b", "c", "lingers")]
            said = str(caught.value)
            assert "timeout_s=2.0" in said and "test_errors.py:" in said, said
            assert all(passes == 0 for _, passes, _ in held(cluster).values())


def test_an_exception_whose_str_raises_is_one_error_and_its_worker_goes_on(
    driver: Any, cluster: Any
):
    w = cluster.put("b", ONES)

    def hooked(ctx: Any) -> None:
        ctx.on_cotangent(w, refuses_without_text)
        ctx.backward(ctx.call("b", total, w))

    tries: dict[str, Callable[[Any], Any]] = {
        "fails_without_text": lambda ctx: ctx.call(
            "b", fails_without_text, ONES
        ).fetch(),
        "when_traced": lambda ctx: ctx.call("b", fails_without_text_when_traced, w),
        "program_without_text": lambda ctx: ctx.call("b", program_without_text),
        "refuses_without_text": hooked,
    }
    for name, attempt in tries.items():
        said = pytest.raises(RemoteError, match=rf"{name} failed on 'b'.*Mute")
        with leaving_nothing(driver, cluster), said, cluster.context() as ctx:
            attempt(ctx)
    with cluster.context() as ctx:
        equal(ctx.call("b", total, w).fetch(), 9.0)


def test_programs_that_call_each_other_for_ever_are_an_error_that_names_the_two(
    driver: Any, cluster: Any
):
    w = cluster.put("b", ONES)
    said = (
        r"functions:back_again on 'c' calls tests\.conformance\.functions:there on 'b'"
        r", at functions\.py:\d+ in back_again, but 200 .*nesting_max = 200, a setting"
    )
    named = pytest.raises(jdag.JdagError, match=said)
    with leaving_nothing(driver, cluster), named, cluster.context() as ctx:
        ctx.call("b", there, 1)
    with cluster.context() as ctx:
        equal(ctx.call("b", total, w).fetch(), 9.0)
