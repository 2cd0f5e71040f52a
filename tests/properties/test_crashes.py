"""Crashes: what goes with a worker, who is told when, and that nothing else changes."""

from typing import Any

import jax.numpy as jnp
import pytest

from jdag.engine.protocol import Arrived, Compute, Computed, Left, Lost, Resume, Send
from jdag.sim.devices import DeviceModel
from jdag.sim.faults import Crash
from jdag.sim.network import LinkModel
from jdag.sim.outages import CRASHED
from jdag.sim.reliable_link import LinkSettings
from tests.tools.sim_cases import Played, Work, cotangent, job, key, play, resume, send

WORKERS = ("a", "b", "c", "d")
NETWORK = LinkModel(latency_ns=100)
MODEL = DeviceModel(forward_ns=1_000)


def busy(log: list[str]) -> Any:
    """Each other worker is sent a value, computes with it twice, and says so to home.

    Home, in turn, waits for the loss of b.
    """

    def react(engine, event):
        match event:
            case Left():
                others = WORKERS[1:]
                return [Send(to, cotangent(1), (key("x"),)) for to in others]
            case Arrived() if engine.worker != "a":
                work = Work("f", lambda: log.append(engine.worker))
                return [Compute(job(number, work)) for number in (1, 2)]
            case Computed() if engine.worker != "a":
                return [send("a", event.job)]
            case Lost(worker="b") if engine.worker == "a":
                return [Resume(1, None)]

    return react


def asked(monkeypatch: pytest.MonkeyPatch, log: list[str], *crashes: Crash) -> Played:
    played = play(
        monkeypatch, busy(log), WORKERS, network=NETWORK, devices=MODEL, faults=crashes
    )
    played.put(key("x"), jnp.ones(8))
    played.ask()
    return played


def crashed(monkeypatch: pytest.MonkeyPatch, log: list[str], crash: Crash) -> Played:
    played = asked(monkeypatch, log, crash)
    played.port.wait(1)
    return played


def test_a_crashed_worker_is_told_nothing_more_and_its_jobs_never_end(monkeypatch):
    log: list[str] = []
    played = crashed(monkeypatch, log, Crash("b", 70, at_ns=1_500))
    played.simulation.settle()
    # At 1,500 b computes its second job, whose end nobody will hear of.
    assert log.count("b") == log.count("c") == 2
    told = {worker: len(each.told) for worker, each in played.engines.items()}
    assert (told["b"], told["c"]) == (2, 4)
    assert [sender for _, sender, _ in played.engines["a"].heard].count("b") == 1
    finished = [r.time_ns for r in played.records("finish") if r.worker == "b"]
    assert finished == [1_100]


def test_what_it_held_is_gone_and_what_it_did_before_still_counts(monkeypatch):
    played = crashed(monkeypatch, [], Crash("b", 70, at_ns=1_500))
    gone, alive = (played.simulation.info()[worker] for worker in ("b", "c"))
    assert (gone["lost"], alive["lost"]) == (True, False)
    held = ("values_held", "bytes_held", "live_contexts", "live_passes")
    assert [gone[name] for name in held] == [0, 0, 0, 0]
    assert alive["values_held"] > 0 and alive["live_passes"] > 0
    assert gone["bytes_peak"] == alive["bytes_peak"] > 0
    assert gone["messages_sent"] == 1
    # What it had begun counts as begun.
    assert gone["busy_ns"] == 2_000
    host = played.simulation._env.hosts["b"]
    assert host.engine is None
    assert [of for of, _ in played.simulation._jobs._devices if of == "b"] == []


def test_every_survivor_is_told_at_once_when_the_crash_is_detected(monkeypatch):
    played = crashed(monkeypatch, [], Crash("b", 70, at_ns=1_500))
    played.simulation.settle()
    (crash,) = played.records("crash")
    assert (crash.time_ns, crash.worker, crash.detail) == (1_500, "b", ("at_ns",))
    losses = played.records("lost")
    assert [(r.time_ns, r.worker, r.detail) for r in losses] == [
        (1_570, worker, ("b",)) for worker in ("a", "c", "d")
    ]
    assert {r.causes for r in losses} == {(crash.index,)}
    assert played.port.lost("b") and not played.port.lost("c")


def test_what_left_before_the_crash_arrives_unless_the_loss_is_known(monkeypatch):
    for detect_ns, arrives in ((50, False), (150, True)):
        # b's first answer leaves at 1,100 and is to arrive at 1,200.
        crash = Crash("b", detect_ns, at_ns=1_101)
        played = crashed(monkeypatch, [], crash)
        played.simulation.settle()
        heard = [(t, who) for t, who, _ in played.engines["a"].heard if who == "b"]
        assert heard == ([(1_200, "b")] if arrives else []), detect_ns


def test_frames_to_a_crashed_worker_vanish_until_its_link_is_given_up(monkeypatch):
    def react(engine, event):
        match event:
            case Left():
                return [send("b", 1)]
            case Lost(worker="b") if engine.worker == "a":
                return [Resume(1, None)]

    link = LinkSettings(resend_ns=1_000, resend_max=3, ack_delay_ns=50)
    faults = [Crash("b", 10**9, at_ns=50)]
    played = play(
        monkeypatch, react, WORKERS, network=NETWORK, faults=faults, link=link
    )
    played.run()
    assert len(played.records("resend")) == 3
    assert {r.kind for r in played.records() if r.worker == "b"} == {"crash"}
    played.simulation.settle()
    # The others are told by the crash, a by its link: once each.
    losses = [(r.worker, r.detail[0]) for r in played.records("lost")]
    assert losses == [("a", "b"), ("c", "b"), ("d", "b")]


def test_two_who_crash_at_once_are_not_told_of_each_other(monkeypatch):
    def react(engine, event):
        return [resume(event)] if isinstance(event, Left) else None

    faults = [Crash("b", 10, at_ns=5), Crash("c", 10, at_ns=5)]
    played = play(monkeypatch, react, WORKERS, faults=faults)
    played.run_out()
    losses = [(r.worker, r.detail[0]) for r in played.records("lost")]
    assert sorted(losses) == [("a", "b"), ("a", "c"), ("d", "b"), ("d", "c")]


def test_a_crash_by_index_comes_when_the_trace_has_so_many_records(monkeypatch):
    undisturbed = asked(monkeypatch, [])
    undisturbed.simulation.settle()
    for index in range(len(undisturbed.records())):
        played = crashed(monkeypatch, [], Crash("b", 70, at_index=index))
        (crash,) = played.records("crash")
        assert crash.index == index
        assert crash.detail == ("at_index",)
        later = [r for r in played.records()[index + 1 :] if r.worker == "b"]
        # All that may still be said of it is that something left before.
        assert [r.kind for r in later] in ([], ["send"]), index
        told = [now_ns for now_ns, _ in played.engines["b"].told]
        assert all(now_ns <= crash.time_ns for now_ns in told)


def test_a_crash_by_index_may_fall_between_two_effects_of_one_event(monkeypatch):
    def react(engine, event):
        if isinstance(event, Left):
            return [send("b", 1)]
        if engine.worker == "b":
            return [send("c", 2), send("d", 3), Compute(job(1, Work("f")))]
        return (
            [Resume(1, None)]
            if event == Lost("b", CRASHED) and engine.worker == "a"
            else None
        )

    # 0 issue, 1 send, 2 deliver, 3 send to c: then it is over.
    faults = [Crash("b", 1_000, at_index=4)]
    played = play(monkeypatch, react, WORKERS, network=NETWORK, faults=faults)
    played.run()
    assert [r.kind for r in played.records()[:5]] == [
        *("issue", "send", "deliver", "send"),
        "crash",
    ]
    assert played.engines["c"].heard == [(200, "b", 2)]
    assert played.engines["d"].heard == []


def test_two_crashes_may_be_due_at_one_index(monkeypatch):
    def react(engine, event):
        if isinstance(event, Left):
            return [send("b", 1)]
        return (
            [Resume(1, None)]
            if event == Lost("c", CRASHED) and engine.worker == "a"
            else None
        )

    faults = [Crash("b", 10, at_index=1), Crash("c", 10, at_index=1)]
    played = play(monkeypatch, react, WORKERS, faults=faults)
    played.run()
    assert [r.worker for r in played.records("crash")] == ["b", "c"]
    assert played.engines["b"].told == []


def test_a_crash_leaves_what_others_do_as_it_was(monkeypatch):
    def seen(*crashes):
        played = asked(monkeypatch, [], *crashes)
        played.simulation.settle()
        told = [e for e in played.engines["c"].told if not isinstance(e[1], Lost)]
        return told, [t for t, who, _ in played.engines["a"].heard if who == "c"]

    assert seen() == seen(Crash("b", 70, at_ns=1_050))
