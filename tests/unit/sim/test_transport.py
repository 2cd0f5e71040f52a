"""Links in virtual time: what arrives when, over which faults; who gives up whom."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from msgspec.structs import replace

import jdag
from jdag.context.cluster_state import ClusterState
from jdag.engine import Engine
from jdag.engine.backward import Backward
from jdag.engine.graph import Fragment, Value
from jdag.engine.protocol import (
    Arrived,
    Compute,
    Computed,
    ContextId,
    Left,
    Lost,
    Resume,
    Send,
)
from jdag.engine.state import State
from jdag.engine.worker_pass import Pass
from jdag.runtime.worker_runtime import WorkerRuntime
from jdag.scenario import Case
from jdag.sim.devices import DeviceModel
from jdag.sim.faults import Delay, Drop, Duplicate, Partition
from jdag.sim.link_end import LinkEnd, link_settings
from jdag.sim.network import LinkModel, Network
from jdag.sim.outages import OUT_OF_REACH
from jdag.sim.reliable_link import LinkSettings
from jdag.sim.simulation import Simulation
from jdag.wire.frames import FRAME_BYTES
from tests.tools.sim_cases import (
    Work,
    answer,
    cotangent,
    job,
    key,
    play,
    resume,
    send,
    tag_of,
)

LATENCY_NS = 100
NETWORK = LinkModel(latency_ns=LATENCY_NS)
QUICK = LinkSettings(resend_ns=1_000, resend_max=3, ack_delay_ns=50)


def quick(monkeypatch, react, **settings):
    """A run over links of LATENCY_NS that send again soon, and not often."""
    return play(monkeypatch, react, **{"network": NETWORK, "link": QUICK, **settings})


def stream(count):
    """Home sends 1, 2, ... to b, which says 0 when it has all."""

    def react(engine, event):
        if isinstance(event, Left):
            return [send("b", tag) for tag in range(1, count + 1)]
        if engine.worker == "b" and isinstance(event, Arrived):
            return [send("a", 0)] if len(engine.heard) == count else None
        return [Resume(1, None)] if isinstance(event, Arrived) else None

    return react


@pytest.mark.parametrize("way", [("a", "b"), ("b", "a")])
def test_while_a_slow_link_carries_either_way_nothing_is_sent_again(monkeypatch, way):
    slow = LinkModel(latency_ns=LATENCY_NS, bandwidth_bytes_per_s=1_000_000)
    network = Network(NETWORK, {way: slow})
    played = play(monkeypatch, stream(3), network=network, link=QUICK)
    played.run_out()
    assert played.simulation.now_ns > 20 * QUICK.resend_ns
    assert played.records("resend", "duplicate") == []


def test_a_resend_waits_until_what_is_ahead_of_it_has_left(monkeypatch):
    # The first frame is lost, and those behind it keep the link busy for long.
    def react(engine, event):
        if isinstance(event, Left):
            return [send("b", 1), Compute(job(1, Work("f")))]
        if isinstance(event, Computed):
            return [send("b", tag) for tag in range(2, 11)]
        return stream(10)(engine, event)

    slow = LinkModel(latency_ns=LATENCY_NS, bandwidth_bytes_per_s=1_000_000)
    played = play(
        monkeypatch,
        react,
        network=Network(NETWORK, {("a", "b"): slow}),
        faults=[Drop(1, until_ns=1)],
        link=QUICK,
        devices=DeviceModel(forward_ns=5),
    )
    played.run_out()
    (resend,) = played.records("resend")
    assert resend.time_ns > sum(
        record.named["wire_bytes"] * 1_000 for record in played.records("send")[:10]
    )


def test_a_large_message_holds_up_what_follows_it_and_is_named_as_the_cause(
    monkeypatch,
):
    network = Network(LinkModel(latency_ns=10, bandwidth_bytes_per_s=1_000_000_000))

    def react(engine, event):
        if isinstance(event, Left):
            first = [send("b", 1), send("c", 2), resume(event)]
            return first if event.waiter == 1 else [send("b", 3)]
        if engine.worker == "b" and tag_of(event.message) == 3:
            return [send("a", 4)]
        return [Resume(2, None)] if engine.worker == "a" else None

    played = play(monkeypatch, react, network=network)
    played.run()
    played.simulation.until(lambda: False, 0)
    played.run()
    issue, _, first, other, again, second = played.records()[:6]
    sizes = [record.named["wire_bytes"] for record in (first, second)]
    heard = played.engines["b"].heard
    assert [now_ns for now_ns, _, _ in heard] == [sizes[0] + 10, sum(sizes) + 10]
    assert (first.causes, other.causes) == ((issue.index,), (issue.index,))
    assert second.causes == (again.index, first.index)


def test_the_messages_of_an_action_leave_in_one_frame(monkeypatch):
    network = Network(LinkModel(latency_ns=10, bandwidth_bytes_per_s=1_000_000_000))

    def react(engine, event):
        if isinstance(event, Left):
            return [send("b", 1), send("c", 2), send("b", 3)]
        if engine.worker == "b" and tag_of(event.message) == 3:
            return [send("a", 4)]
        return [Resume(1, None)] if engine.worker == "a" else None

    played = play(monkeypatch, react, network=network)
    played.run()
    first, second, other, _ = played.records("send")
    sizes = [record.named["wire_bytes"] for record in (first, second, other)]
    heard = played.engines["b"].heard
    assert heard == [(sum(sizes[:2]) + 10, "a", 1), (sum(sizes[:2]) + 10, "a", 3)]
    assert played.engines["c"].heard == [(sizes[2] + 10, "a", 2)]
    assert (sizes[0], sizes[1]) == (sizes[2], sizes[2] - FRAME_BYTES)
    info = played.simulation.info()["a"]
    assert (info["messages_sent"], info["frames_sent"]) == (3, 2)
    assert info["bytes_sent"] == sum(sizes)


def test_what_waits_for_a_port_names_what_passed_it_before_as_the_cause(monkeypatch):
    rate = 1_000_000_000
    network = Network(LinkModel(latency_ns=10), port_bandwidth_bytes_per_s=rate)

    def react(engine, event):
        if isinstance(event, Left):
            return [send("b", 1), send("c", 2)]
        if engine.worker in "bc":
            return [send("a", 3 if engine.worker == "b" else 4)]
        return [Resume(1, None)] if tag_of(event.message) == 4 else None

    played = play(monkeypatch, react, network=network)
    played.run()
    issue = played.records("issue")[0]
    first, other, *back = played.records("send")
    size = first.named["wire_bytes"]
    assert first.causes == (issue.index,)
    assert other.causes == (issue.index, first.index)
    came = played.records("deliver")
    assert [one.time_ns for one in came[:2]] == [size + 10, 2 * size + 10]
    assert [len(one.causes) for one in back] == [1, 1]  # These wait for nothing.


def test_what_waits_where_it_goes_names_what_came_there_before(monkeypatch):
    network = Network(
        LinkModel(latency_ns=10),
        {("a", "c"): LinkModel()},
        port_bandwidth_bytes_per_s=1_000_000_000,
    )

    def react(engine, event):
        if isinstance(event, Left):
            return [send("b", 1), send("c", 2)]
        if engine.worker != "a":
            return [send("a", 3)]
        return [Resume(1, None)] if len(engine.heard) == 2 else None

    played = play(monkeypatch, react, network=network)
    played.run()
    first, _, by_b, by_c = played.records("send")
    size = first.named["wire_bytes"]
    assert (by_b.time_ns, by_c.time_ns) == (size + 10, 2 * size)
    came = [one.time_ns for one in played.records("deliver") if one.worker == "a"]
    assert came == [2 * size + 20, 3 * size + 20]  # Not 3 size + 10.
    assert by_b.index not in by_b.causes and len(by_b.causes) == 1
    assert by_c.causes[1:] == (by_b.index,)


def test_a_message_that_a_gap_held_up_is_caused_by_what_filled_the_gap(monkeypatch):
    # The first frame is lost; those behind it wait for its resend.
    faults = [Drop(1, until_ns=1)]

    def react(engine, event):
        if isinstance(event, Left):
            return [send("b", 1), Compute(job(1, Work("f")))]
        if isinstance(event, Computed):
            return [send("b", 2), send("b", 3)]
        if engine.worker == "b" and tag_of(event.message) == 3:
            return [send("a", 4)]
        return [Resume(1, None)] if engine.worker == "a" else None

    model = DeviceModel(forward_ns=5)
    played = quick(monkeypatch, react, faults=faults, devices=model)
    played.run()
    sends = played.records("send")[:3]
    (resend,) = played.records("resend")
    delivers = played.records("deliver")[:3]
    assert [r.time_ns for r in delivers] == [1_200] * 3
    assert resend.causes == (sends[0].index,)
    assert [r.causes for r in delivers] == [
        (sends[number].index, resend.index) for number in range(3)
    ]


def lost(engine):
    return [(t, event.worker) for t, event in engine.told if isinstance(event, Lost)]


def test_a_link_that_gives_up_tells_its_side_at_once_and_the_other_later(monkeypatch):
    def react(engine, event):
        if isinstance(event, Left):
            return [send("b", 1), send("c", 2)]
        return [Resume(1, None)] if event == Lost("b", OUT_OF_REACH) else None

    faults = [Partition((("a",), ("b",)), until_ns=100_000)]
    played = quick(monkeypatch, react, faults=faults, detect_ns=77)
    assert not played.port.lost("b")
    played.run()
    assert played.port.lost("b")
    played.simulation.settle()
    # Waits of 1, 2, 4 and 8 times resend_ns, each and the flight of 100 ns.
    gave_up_ns = 15_000 + 4 * LATENCY_NS
    assert lost(played.engines["a"]) == [(gave_up_ns, "b")]
    assert lost(played.engines["b"]) == [(gave_up_ns + 77, "a")]
    assert lost(played.engines["c"]) == []
    assert played.engines["c"].heard == [(LATENCY_NS, "a", 2)]
    assert len(played.records("resend")) == QUICK.resend_max
    assert played.records("lost")[0].causes == (played.records("resend")[-1].index,)


def test_frames_of_a_lost_worker_are_ignored_and_what_is_sent_to_it_vanishes(
    monkeypatch,
):
    # Only what a sends to b is lost; b sends on until it is told.
    def react(engine, event):
        match engine.worker, event:
            case "a", Left():
                return [send("b", 1), send("c", 0)]
            case "c", Arrived():
                return [send("b", 5)] if len(engine.heard) < 2 else None
            case "b", Arrived():
                return [send("a", 9), send("c", 9)]
            case "a", Lost():
                return [send("b", 2), Resume(1, None)]

    faults = [
        Drop(1, source="a", destination="b"),
        Delay(1, 18_000, 18_000, source="b", destination="a"),
    ]
    played = quick(monkeypatch, react, faults=faults, detect_ns=10**6)
    played.run()
    assert played.engines["a"].heard == []
    played.simulation.settle()
    assert played.engines["a"].heard == []
    drops = [r.detail for r in played.records("drop") if r.worker == "a"]
    assert drops == [("b", "drop")] * 4 + [("b", "lost")]


def test_acknowledgements_ride_on_answers_and_cost_their_own_bytes_alone(monkeypatch):
    def react(engine, event):
        if isinstance(event, Left):
            return [send("b", 1), resume(event)]
        return [send("a", 2)] if engine.worker == "b" else None

    played = play(monkeypatch, react, network=NETWORK)
    played.run_out()
    (ack,) = played.records("ack")
    assert ack.worker == "a" and ack.named["wire_bytes"] == FRAME_BYTES
    assert ack.causes == (played.records("send")[1].index,)


def test_waits_suit_the_latencies_of_a_pair():
    there, back = LinkModel(latency_ns=10**6), LinkModel(latency_ns=10**9, jitter_ns=7)
    settings = link_settings(there, back)
    assert settings.resend_ns > settings.ack_delay_ns + 10**6 + 10**9 + 7
    assert settings == link_settings(back, there)


def test_a_lasting_partition_parts_also_those_who_have_nothing_to_say(monkeypatch):
    def react(engine, event):
        is_lost = event == Lost("c", OUT_OF_REACH) and engine.worker == "a"
        return [Resume(1, None)] if is_lost else None

    groups = (("a",), ("c",))
    for until_ns, parted in ((None, True), (100_000, True), (30_000, False)):
        faults = [Partition(groups, from_ns=500, until_ns=until_ns)]
        played = quick(monkeypatch, react, faults=faults)
        played.ask()
        played.simulation.settle()
        # Twice the waits of a link: 1, 2, 4 and 8 times resend_ns.
        assert lost(played.engines["a"]) == [(30_500, "c")] * parted
        assert lost(played.engines["c"]) == [(30_500, "a")] * parted
        assert lost(played.engines["b"]) == []
        assert played.port.lost("c") == (OUT_OF_REACH if parted else None)


RATE = 1_000_000_000  # Bytes a second: a byte takes a nanosecond.
VALUE = np.zeros(10_000, np.uint8)


def with_value(number, tag):
    """A cotangent of a context of its own, whose value is VALUE."""
    return Send("b", replace(cotangent(tag), context=ContextId(0, number, 0)), (KEY,))


KEY = key("value")


def over_control_lane(monkeypatch, effects, count, apart=False, **settings):
    rest = [*effects]

    def react(engine, event):
        if isinstance(event, Left):
            if len(rest) > 1 and apart:
                return [rest.pop(0), resume(event)]
            return rest
        if engine.worker == "b" and isinstance(event, Arrived):
            return [Send("a", answer(0))] if len(engine.heard) == count else None
        last = len(effects) if apart else 1
        return [Resume(last, None)] if isinstance(event, Arrived) else None

    model = LinkModel(latency_ns=100, bandwidth_bytes_per_s=RATE)
    lane = LinkModel(latency_ns=7)
    network = Network(model, control_lane=lane)
    played = play(monkeypatch, react, network=network, **settings)
    played.put(KEY, VALUE)
    for _ in effects if apart else effects[:1]:
        played.run()
        played.simulation.until(lambda: False, 0)
    return played, [(now_ns, tag) for now_ns, _, tag in played.engines["b"].heard]


def test_on_a_control_lane_messages_neither_wait_for_values_nor_delay_them(monkeypatch):
    effects = [send("b", 1), with_value(2, 2), send("b", 3), with_value(3, 4)]
    effects += [send("b", 5)]
    played, heard = over_control_lane(monkeypatch, effects, 5)
    assert heard == [(7, 1), (7, 3), (7, 5), (10_100, 2), (20_100, 4)]
    second = played.records("send")[3]
    assert second.causes[1:] == (played.records("send")[1].index,)
    sent = sum(record.named["wire_bytes"] for record in played.records("send")[:5])
    info = played.simulation.info()["a"]
    assert info["payload_bytes_sent"] == 20_000
    assert info["bytes_sent"] == sent


def test_on_a_control_lane_what_depends_on_values_still_comes_after_them(monkeypatch):
    own = ContextId(0, 2, 0)
    effects = [with_value(2, 1), Send("b", replace(answer(2), context=own))]
    effects += [send("b", 3)]
    _, heard = over_control_lane(monkeypatch, effects, 3)
    assert heard == [(7, 3), (10_100, 1), (10_100, 2)]


@pytest.mark.parametrize("seed", range(8))
def test_over_a_faulty_control_lane_each_message_arrives_once(monkeypatch, seed):
    faults = [Drop(0.2), Duplicate(0.3, 500), Delay(0.3, 10, 900)]
    effects = [with_value(n, n) if n % 3 else send("b", n) for n in range(1, 61)]
    played, heard = over_control_lane(
        monkeypatch, effects, 60, apart=True, seed=seed, faults=faults
    )
    tags = [tag for _, tag in heard]
    assert sorted(tags) == list(range(1, 61)) != tags
    assert played.simulation.info()["a"]["resends"] > 0


@contextmanager
def no_cycles(*kinds: type) -> Iterator[Callable[[], int]]:
    def count() -> int:
        return sum([isinstance(each, kinds) for each in gc.get_objects()])

    gc.collect()
    gc.disable()
    try:
        before = count()
        yield lambda: count() - before
        assert count() == before
    finally:
        gc.enable()


def test_engines_and_links_of_a_closed_cluster_are_in_no_cycle():
    with no_cycles(Engine, State, Backward, LinkEnd) as new:
        with jdag.simulate([*"ab"], seed=0, trace=False) as cluster:
            with cluster.context() as ctx:
                ctx.call("b", jnp.sin, jnp.ones(3)).fetch()
            assert new() == 2 * 4
        del ctx, cluster


def weighted(ctx: Any, refs: Any) -> Any:
    return ctx.call("a", jnp.sum, ctx.call("b", jnp.sin, refs["w"]))


WEIGHTED = Case(weighted, {"w": np.ones(3, np.float32)}, {"w": "b"})


def test_nothing_of_an_explored_run_is_left_in_a_cycle():
    jdag.explore(WEIGHTED, [*"ab"], runs=1)
    with no_cycles(Simulation, ClusterState, WorkerRuntime, Fragment, Value, Pass):
        assert jdag.explore(WEIGHTED, [*"ab"], runs=3).failure is None


def test_free_links_count_the_bytes_that_the_trace_tells():
    def counted(run: Any) -> None:
        for name, one in run.info.items():
            own = [record for record in run.trace if record.worker == name]
            sent = [r.named["wire_bytes"] for r in own if r.kind in ("send", "ack")]
            assert (one["frames_sent"], one["bytes_sent"]) == (len(sent), sum(sent))

    assert jdag.explore(WEIGHTED, [*"ab"], counted, runs=2).failure is None
