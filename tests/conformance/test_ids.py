"""Ids and life of contexts."""

from typing import Any

import pytest

import jdag
from tests.conformance.functions import (
    KEPT,
    ONES,
    keep,
    keep_at_second_hop,
    three_times,
    total,
    use_what_was_kept,
)
from tests.tools.error_texts import fails_with


def test_200_contexts_have_200_ids_with_the_workers_number_on_top(cluster: Any):
    ids = []
    for _ in range(200):
        with cluster.context() as ctx:
            ids.append(ctx.id)
    assert len(dict.fromkeys(ids)) == 200
    assert [id >> 48 for id in ids] == [cluster.workers.index(cluster.here)] * 200
    counters = [id & (1 << 48) - 1 for id in ids]
    assert counters == sorted(counters)


def test_the_counter_ends_at_2_to_the_48_less_1_and_then_refuses(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
):
    assert jdag.api.cluster.CONTEXTS_MAX == (1 << 48) - 1
    monkeypatch.setattr("jdag.api.cluster.CONTEXTS_MAX", 3)
    ids = []
    for _ in range(3):
        with cluster.context() as ctx:
            ids.append(ctx.id)
    assert ids[-1] & (1 << 48) - 1 == 3
    for _ in range(2):
        with fails_with(jdag.errors.ContextError, "conformance.contexts_the_maximum"):
            cluster.context()


def test_after_a_context_ends_every_use_of_it_fails_for_its_owner(cluster: Any):
    w = cluster.put("b", ONES)
    with cluster.context() as ctx:
        h = ctx.call("c", three_times, w)
        loss = ctx.call("d", total, h)
        ctx.backward(loss, retain_graph=True)
        gradient = ctx.gradient(w)
    uses: dict[str, Any] = {
        "call": lambda: ctx.call("b", total, w),
        "move": lambda: ctx.move("b", w),
        "backward": lambda: ctx.backward(loss),
        "gradient": lambda: ctx.gradient(w),
        "gradients": ctx.gradients,
        "graph": ctx.graph,
        "hook": lambda: ctx.on_cotangent(w, three_times),
        "fetch": h.fetch,
        "fetch of a gradient": gradient.fetch,
        "enter": ctx.__enter__,
    }
    for use in uses.values():
        with pytest.raises(jdag.errors.ContextError):
            use()
    with cluster.context() as other:
        for ref in (h, gradient):
            with fails_with(jdag.errors.ContextError, "conformance.which_is_over"):
                other.call("b", three_times, ref)


@pytest.mark.parametrize("worker", ["b", "c", "d"])
def test_after_a_context_ends_every_use_of_it_fails_on_all_who_took_part(
    cluster: Any, worker: str
):
    """On b, on c, its second hop, and on d, which only ever saw a constant."""
    KEPT.clear()
    w = cluster.put("a", ONES)
    with cluster.context() as ctx:
        made = ctx.call("b", keep_at_second_hop, w)
        constant = ctx.call("d", three_times, 2.0)
        ctx.call("d", keep, constant)
        ctx.backward(ctx.call("a", total, made))
    with cluster.context() as other:
        answers = other.call(worker, use_what_was_kept)
    assert len(answers) == 8
    for use, answer in answers.items():
        assert answer.startswith("ContextError"), (use, answer)
