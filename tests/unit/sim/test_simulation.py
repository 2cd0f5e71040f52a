"""The driver: what an engine asks for happens, in order, when and where it should."""

import gc
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jdag.engine.protocol import (
    Arrived,
    Compute,
    Computed,
    Drop,
    Left,
    Resume,
    Send,
    landing,
)
from jdag.errors import JdagError, ScenarioError
from jdag.runtime.chooser import Chooser
from jdag.sim.devices import DeviceModel
from jdag.sim.faults import Crash, Slow
from jdag.sim.network import LinkModel
from jdag.sim.settings import SimSettings
from jdag.sim.simulation import GARBAGE_MIN, YOUNG_MIN, CycleCollector, Simulation
from tests.tools.error_texts import fails_with
from tests.tools.sim_cases import (
    WORKERS,
    Work,
    answer,
    cotangent,
    effects_then_reply,
    job,
    key,
    no_program,
    play,
    resume,
    send,
    tag_of,
)

SLOW_LINKS = LinkModel(latency_ns=100)


# ------------------------------------------------------------------------- messages


def test_values_lie_under_their_landing_keys_before_the_engine_is_told(monkeypatch):
    message = cotangent(1, 3)
    seen: list[Any] = []

    def react(engine, event):
        if isinstance(event, Left):
            return [Send("b", message, (key("x"), key("y"), key("x")))]
        if engine.worker == "b":
            values = engine.simulation._env.hosts["b"].machine.values
            seen.extend(values.get(each) for each in landing(message))
            return [send("a", 2)]
        return [Resume(1, None)]

    played = play(monkeypatch, react)
    x, y = jnp.ones(3), jnp.zeros(2)
    played.put(key("x"), x)
    played.put(key("y"), y)
    played.run()
    assert [id(value) for value in seen] == [id(x), id(y), id(x)]


def test_effects_are_carried_out_in_their_order(monkeypatch):
    def react(engine, event):
        if isinstance(event, Left):
            x = key("x")
            # A value is read when it is sent; one that is gone cannot be sent again.
            return [Send("b", cotangent(1), (x,)), Drop((x,)), send("b", 2)]
        if engine.worker == "b" and event.message == answer(2):
            return [send("a", 3)]
        return [Resume(1, None)] if engine.worker == "a" else None

    played = play(monkeypatch, react, network=SLOW_LINKS)
    played.put(key("x"), jnp.ones(3))
    played.run()
    assert played.engines["b"].heard == [(100, "a", 1), (100, "a", 2)]
    assert key("x") not in played.port.host.machine.values


def test_what_is_told_takes_no_virtual_time_and_nothing_happens_until_main_waits(
    monkeypatch,
):
    react = effects_then_reply([send("b", 1)])
    played = play(monkeypatch, react, network=SLOW_LINKS)
    waiter = played.ask()
    assert played.engines["b"].told == []
    assert played.simulation.now_ns == 0
    assert played.port.wait(waiter) == "done"
    assert played.simulation.now_ns == 200


def test_a_result_that_is_there_is_had_without_letting_anything_happen(monkeypatch):
    def react(engine, event):
        return [send("b", 1), resume(event, 5)] if engine.worker == "a" else None

    played = play(monkeypatch, react)
    assert played.run() == 5
    assert played.engines["b"].told == []
    played.simulation.settle()
    assert len(played.engines["b"].told) == 1


def test_waiting_for_what_never_comes_names_who_waits_for_what(monkeypatch):
    played = play(monkeypatch, lambda engine, event: None, network=SLOW_LINKS)
    with fails_with(JdagError, "sim.event_is_left_a_for"):
        played.run()


# ----------------------------------------------------------------------------- jobs

MODEL = DeviceModel(forward_ns=10, functions={"slow": (70, 0)})


def test_a_job_is_computed_when_it_starts_and_told_when_its_time_is_over(monkeypatch):
    seen: list[Any] = []

    def react(engine, event):
        values = engine.simulation._env.hosts["a"].machine.values
        now_ns = engine.simulation.now_ns
        if isinstance(event, Left):
            work = Work("slow", lambda: seen.append((now_ns, "computed")))
            return [Compute(job(7, work, key("x"), key("y")))]
        assert event == Computed(7)
        seen.append((now_ns, values.get(key("made", 7))))
        return [Resume(1, None)]

    played = play(monkeypatch, react, devices=MODEL)
    played.put(key("x"), 1.5)
    played.put(key("y"), 2.0)
    played.run()
    assert seen == [(0, "computed"), (70, 3.5)]
    assert played.kinds("start", "finish") == [(0, "start", "a"), (70, "finish", "a")]
    assert played.simulation.info()["a"]["busy_ns"] == 70


def fails() -> None:
    raise ValueError("too small")


def test_a_job_that_raises_is_told_as_a_failure_and_what_waits_runs(monkeypatch):
    told = []

    def react(engine, event):
        if isinstance(event, Left):
            jobs = [job(1, Work("m:fails", fails), path=(4,)), job(2, Work("m:fine"))]
            return [Compute(each) for each in jobs]
        told.append((engine.simulation.now_ns, event.job, event.failure))
        return [Resume(1, None)] if len(told) == 2 else None

    # By path, 2 goes before 4.
    played = play(monkeypatch, react, devices=MODEL)
    played.run()
    assert [each[:2] for each in told] == [(10, 2), (20, 1)]
    failure = told[1][2]
    assert (failure.error, failure.worker) == ("RemoteError", "a")
    assert (failure.path, failure.function) == ((4,), "m:fails")
    assert "too small" in failure.message
    assert isinstance(failure.exception, ValueError)
    assert "in fails" in failure.traceback
    assert "machine.py" not in failure.traceback
    assert played.records("finish")[1].named["failure"] == "RemoteError"


@pytest.mark.parametrize(
    ("policy", "order"), [("path", [1, 2, 3, 4]), ("last", [4, 3, 2, 1])]
)
def test_of_jobs_that_become_ready_at_one_time_the_policy_says_which_runs(
    monkeypatch, policy, order
):
    # They come by messages of one instant, the first of which finds the device idle.
    chooser = Chooser()
    if policy == "last":
        chooser.job_key = lambda job: (-job.path[0],)
    done = []

    def react(engine, event):
        if isinstance(event, Left):
            return [send("b", tag) for tag in (3, 1, 4, 2)]
        if isinstance(event, Arrived) and engine.worker == "b":
            return [Compute(job(tag_of(event.message), Work("f")))]
        if isinstance(event, Computed):
            done.append((engine.simulation.now_ns, event.job))
            return [send("a", 0)] if len(done) == 4 else None
        return [Resume(1, None)]

    played = play(
        monkeypatch, react, devices=MODEL, chooser=chooser, network=SLOW_LINKS
    )
    played.run()
    assert done == [(110 + 10 * n, number) for n, number in enumerate(order)]


def test_a_device_chooses_when_all_that_happens_at_that_time_has_happened(monkeypatch):
    # The first job in program order comes by way of c, in no time.
    done = []

    def react(engine, event):
        match engine.worker, event:
            case "a", Left():
                return [send("b", 2), send("c", 1)]
            case "c", Arrived():
                return [send("b", 1)]
            case "b", Arrived():
                return [Compute(job(tag_of(event.message), Work("f")))]
            case "b", Computed():
                done.append(event.job)
                return [send("a", 0)] if len(done) == 2 else None
            case "a", Arrived():
                return [Resume(1, None)]

    play(monkeypatch, react, devices=MODEL).run()
    assert done == [1, 2]


def test_what_is_sent_is_caused_by_what_made_it_and_by_what_asked_for_it(monkeypatch):
    def react(engine, event):
        match engine.worker, event:
            case "a", Left():
                return [Compute(job(1, Work("f"), key("x"))), send("b", 1)]
            case "b", Arrived():
                return [send("a", 2)]
            case "a", Arrived() if len(engine.heard) == 1:
                values = (key("x"), key("made", 1), key("y"))
                return [Send("b", cotangent(3, 3), values)]
            case "a", Arrived():
                return [Resume(1, None)]

    played = play(monkeypatch, react, network=SLOW_LINKS, devices=MODEL)
    played.put(key("x"), 1.0)
    waiter = played.ask()
    values = played.port.host.machine.values
    values.put(key("y"), 2.0)  # Told by no event, so that nothing made it.
    played.port.wait(waiter)
    (issue,) = played.records("issue")
    (start,) = played.records("start")
    (finish,) = played.records("finish")
    answered = next(r for r in played.records("deliver") if r.worker == "a")
    sent = [r for r in played.records("send") if r.named["message"] == "Cotangent"]
    assert start.causes == (issue.index,)
    assert sent[0].causes == (answered.index, issue.index, finish.index)


# ------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("workers", "settings", "said"),
    [
        ((), {}, r"workers = \(\): expected a list of 1 to 65,536"),
        ({"a", "b"}, {}, "workers = {'[ab]', '[ab]'}: expected a list"),
        ((1, 2), {}, r"workers = \(1, 2\): expected a list"),
        (range(1 << 17), {}, r"workers = range.*a list of 1 to 65,536"),
        (WORKERS, {"seed": -1}, "seed = -1: expected an integer >= 0"),
        (WORKERS, {"seed": -(10**5000)}, "seed = an int: expected an integer >= 0"),
        (np.array("a"), {}, "workers = array.*: expected a list of 1 to"),
        ({"a": 1, "b": 2}, {}, "workers = {'a': 1, 'b': 2}: expected a list of 1"),
        (WORKERS, {"home": ["a"]}, r"home = \['a'\]: expected a string"),
        (WORKERS, {"policy": []}, r"policy = \[\]: expected one of path"),
        (WORKERS, {"faults": None}, "faults = None: expected a list of jdag.sim's"),
        (WORKERS, {"faults": Slow("b", 2)}, r"faults = Slow.*: expected a list"),
        (WORKERS, {"faults": [3]}, r"faults\[0\] = 3: expected one of Drop"),
        (WORKERS, {"network": 3}, "network = 3: expected a Network or a LinkModel"),
        (WORKERS, {"devices": 3}, "devices = 3: expected a DeviceModel"),
        (WORKERS, {"devices": {"a": 5}}, "devices.a = 5: expected a DeviceModel"),
        (WORKERS, {"link": 3}, "link = 3: expected a LinkSettings, or None"),
        (WORKERS, {"events_max": 0}, "events_max = 0: expected an integer >= 1"),
        (WORKERS, {"events_max": None}, "events_max = None: expected an integer"),
        (WORKERS, {"trace": "x"}, "trace = 'x': expected true or false"),
        ("abc", {}, "workers = 'abc': expected"),
        (("a", "a"), {}, "workers = .*different names"),
        (("a", "b c"), {}, "workers = .* letters, digits"),
        (("a", "b\0"), {}, "workers = .* letters, digits"),
        (WORKERS, {"home": "z"}, "home = 'z': expected one of a, b, c"),
        (WORKERS, {"seed": 1.5}, "seed = 1.5: expected an integer"),
        (WORKERS, {"policy": "luck"}, "policy = 'luck': expected one of path"),
        (WORKERS, {"detect_ns": -1}, "detect_ns = -1: expected"),
        (WORKERS, {"devices": {"z": MODEL}}, "'z': expected one of a, b, c"),
        (
            WORKERS,
            {"faults": [Slow("b", 2), Crash("a", 5, at_ns=3)]},
            r"faults\[1\].worker = 'a': expected a worker other than home",
        ),
        (
            WORKERS,
            {"faults": [Crash("b", 5, at_index=3)], "trace": False},
            r"faults\[0\].at_index = 3: expected at_ns",
        ),
    ],
)
def test_an_unusable_setting_is_refused_by_name(workers: Any, settings: Any, said: str):
    with pytest.raises(ScenarioError, match=said):
        made = {"workers": workers, "seed": 0, "home": "a", **settings}
        Simulation(SimSettings(**made), no_program)


# -------------------------------------------------------------------- life and death


def test_info_counts_what_is_held_sent_and_computed(monkeypatch):
    effects: Any = [Send("b", cotangent(1), (key("x"),)), Drop((key("x"),))]
    played = play(monkeypatch, effects_then_reply(effects), network=SLOW_LINKS)
    played.put(key("x"), jnp.ones(4))
    played.run_out()
    info = played.simulation.info()
    assert list(info) == list(WORKERS)
    a, b, c = info.values()
    assert (a["values_held"], a["bytes_held"], a["bytes_peak"]) == (0, 0, 32)
    assert (b["values_held"], b["bytes_held"], b["bytes_peak"]) == (1, 32, 32)
    assert (a["messages_sent"], a["payload_bytes_sent"]) == (1, 32)
    assert (b["messages_sent"], b["payload_bytes_sent"]) == (1, 0)
    assert (a["live_contexts"], a["live_passes"], a["lost"]) == (2, 1, False)
    # a acknowledges b's answer by itself; b's answer acknowledged a's message.
    assert (a["frames_sent"], b["frames_sent"], c["frames_sent"]) == (2, 1, 0)
    for worker in WORKERS:
        left = [r for r in played.records("send", "ack") if r.worker == worker]
        assert info[worker]["bytes_sent"] == sum(r.named["wire_bytes"] for r in left)


def test_without_a_trace_the_same_happens(monkeypatch):
    react = effects_then_reply([Send("b", cotangent(1), (key("x"),))])
    ends = []
    for trace in (True, False):
        played = play(monkeypatch, react, network=SLOW_LINKS, trace=trace)
        played.put(key("x"), jnp.ones(4))
        played.run()
        assert (played.simulation.trace is None) is not trace
        ends.append((played.simulation.now_ns, played.simulation.info()))
    assert ends[0] == ends[1]


def test_a_closed_cluster_says_so_and_what_it_counted_stays(monkeypatch):
    def react(engine, event):
        return [send("b", 1), resume(event)] if isinstance(event, Left) else None

    played = play(monkeypatch, react, network=SLOW_LINKS)
    played.put(key("x"), jnp.ones(4))
    played.run_out()
    now_ns, before = played.simulation.now_ns, played.simulation.info()
    played.simulation.close()
    played.simulation.close()
    after = played.simulation.info()
    assert played.simulation.now_ns == now_ns
    assert after["a"]["messages_sent"] == before["a"]["messages_sent"] == 1
    assert (after["a"]["values_held"], after["a"]["live_contexts"]) == (0, 0)
    for refused in (played.ask, lambda: played.port.wait(9)):
        with fails_with(JdagError, "sim.this_cluster_is_closed"):
            refused()


def test_the_collectors_thresholds_are_as_they_were_after_all_clusters(monkeypatch):
    inside = []

    def react(engine, event):
        inside.append(gc.get_threshold()[0])
        return [send("b", 1)] if engine.worker == "a" else None

    # Those that other tests left open do not count, nor end by a collection meanwhile.
    monkeypatch.setattr("jdag.sim.simulation.COLLECTOR", CycleCollector())
    gc.disable()
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    other, played = play(monkeypatch, react), play(monkeypatch, react)
    with pytest.raises(JdagError):
        played.run()
    played.simulation.close()
    played.simulation.close()
    assert inside[-1] == GARBAGE_MIN
    assert gc.get_threshold() == (GARBAGE_MIN, YOUNG_MIN, 10)
    other.simulation.close()
    assert gc.get_threshold() == (700, 10, 10)
    gc.set_threshold(*before)
    gc.enable()


def test_an_engine_that_breaks_in_the_loop_breaks_the_wait_and_not_the_cluster(
    monkeypatch,
):
    def react(engine, event):
        if isinstance(event, Left):
            return [send("b", event.waiter)]
        if engine.worker == "b" and event.message.owed == 1:
            raise ZeroDivisionError
        return [send("a", 2)] if engine.worker == "b" else [Resume(2, "well")]

    played = play(monkeypatch, react)
    with pytest.raises(ZeroDivisionError):
        played.run()
    assert played.run() == "well"


def test_what_an_interrupted_wait_asked_for_is_not_kept(monkeypatch):
    def react(engine, event):
        if isinstance(event, Left):
            work = Work("f", interrupt if event.waiter == 1 else lambda: None)
            return [Compute(job(event.waiter, work))]
        told.append((event.job, event.failure and event.failure.message))
        return [Resume(event.job, event.job)]

    def interrupt():
        raise KeyboardInterrupt

    told: list[Any] = []
    played = play(monkeypatch, react)
    with pytest.raises(KeyboardInterrupt):
        played.run()
    assert played.run() == 2  # The device was not left with a job that never ends.
    assert told == [(1, "KeyboardInterrupt"), (2, None)]
    assert played.simulation._env.waiters.results == {}
