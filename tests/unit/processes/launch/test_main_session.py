"""A session seen by its main, with workers that are threads of this process."""

import gc
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest

from jdag.errors import JoinError
from jdag.processes.launch import main_session as module
from jdag.processes.launch.main_session import Session
from jdag.processes.launch.worker_server import CallerLease
from jdag.processes.net.addresses import Address
from jdag.processes.net.greeting import ConnectionPair
from jdag.processes.net.handshake import ours
from jdag.processes.net.listener import dial
from jdag.processes.net.tls import load_tls
from jdag.processes.session.control import Refusal, answering
from jdag.processes.session.requests import (
    AttachWorker,
    Detach,
    Health,
    Info,
    Mesh,
    Peer,
)
from tests.tools.certificates import Issuer
from tests.tools.error_texts import fails_with, warns_with
from tests.tools.rpc_cases import Seated, free_address, plain, plan_of, seated
from tests.tools.stream_cases import soon

LONG_S = 60.0
REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)

REQUESTS = (AttachWorker, Mesh, Peer, Detach, Info, Health)
ODD = (b"null", b"-1", b"1e999", b'"\\ud800"', b"[[[[", b"{}", b"9" * 40)


@pytest.fixture
def three() -> Iterator[dict[str, Seated]]:
    with ExitStack() as stack:
        yield {name: stack.enter_context(seated(name)) for name in "abc"}


def dialled_by(worker: Seated) -> list[str]:
    """Whom the newest node of a worker dials."""
    members = worker.nodes[-1].place.members
    return [name for name in members.joined if members[name].is_dialled]


def controls(workers: dict[str, Seated]) -> dict[str, Address]:
    return {name: worker.server.address for name, worker in workers.items()}


def test_all_are_joined_to_all_and_of_two_the_lower_number_dials(three):
    with Session(plan_of(controls(three), allow=("mine",))) as session:
        for name, worker in three.items():
            node = worker.nodes[0]
            answer = f"answer hi from {name}\n".encode()
            assert plain(session).ask(name, b"hi") == answer
            assert node.place.settings.workers == ("m", "a", "b", "c")
            assert node.incarnations == {one: 0 for one in "mabc" if one != name}
            allowed = {one: node.place.members[one].allowed for one in node.streams}
            usual = dict.fromkeys("abc", ("models",))
            assert allowed.items() <= {**usual, "m": ("mine",)}.items()
            for other in "abc".replace(name, ""):
                node.wait(lambda node=node, other=other: other in node.streams)
        assert three["a"].nodes[0].ask("c", b"x") == b"answer x from c\n"
        dials = {name: dialled_by(worker) for name, worker in three.items()}
        assert dials == {"a": ["b", "c"], "b": ["c"], "c": []}
    assert all(worker.ask(Health())["state"] == "idle" for worker in three.values())


def test_who_dials_may_have_been_told_of_the_others_first(monkeypatch, request):
    answer, dialled = CallerLease.mesh, threading.Event()

    def mesh(lease: CallerLease, asked: Mesh) -> Mapping[str, Any]:
        if lease.worker != "a":
            assert dialled.wait(LONG_S)
        answered = answer(lease, asked)
        dialled.set()
        return answered

    monkeypatch.setattr(CallerLease, "mesh", mesh)
    workers = request.getfixturevalue("three")
    with Session(plan_of(controls(workers))):
        for name, worker in workers.items():
            node, others = worker.nodes[0], "mabc".replace(name, "")
            for other in others:
                node.wait(partial(node.streams.__contains__, other))
            assert node.incarnations == dict.fromkeys(others, 0)
        assert workers["c"].nodes[0].ask("a", b"x") == b"answer x from a\n"


def test_a_broken_stream_is_dialled_again_by_who_dialled_it(three):
    with Session(plan_of(controls(three))) as session:
        before = plain(session).streams["b"]
        stream, theirs = plain(session).place.dial("b", 5)
        assert theirs == 7
        session.node.adopt("b", 0, stream, theirs)
        before.close()
        node = three["b"].nodes[0]
        soon(lambda: node.streams["m"].fileno() >= 0)


def test_what_main_finds_to_be_lost_may_join_again_as_the_next_incarnation(
    three, monkeypatch
):
    monkeypatch.setattr(module, "POLL_S", 0.05)
    with Session(plan_of(controls(three), rejoin=True)) as session:
        address = three["b"].server.address
        three["b"].die()
        soon(lambda: "b" in session.members.lost)
        with seated("b", address) as again:
            soon(lambda: not session.members.lost and "b" in plain(session).streams)
            soon(lambda: bool(again.nodes) and len(again.nodes[-1].streams) == 3)
            number = session.members["b"].incarnation
            assert number >= 1
            assert again.nodes[-1].place.members.incarnation == number
            for name in "ac":
                node = three[name].nodes[0]
                known = node.place.members["b"].incarnation
                assert node.incarnations["b"] == known == number
                # It dials all, whatever its number.
                assert "b" not in dialled_by(three[name])
            assert sorted(dialled_by(again)) == ["a", "c"]
            assert plain(session).ask("b", b"anew") == b"answer anew from b\n"


def test_a_new_process_in_place_of_a_lost_one_may_be_told_to_join(three):
    def secrets(name: str) -> dict[str, str]:
        held = workers[name].seat._lease
        assert held is not None
        return dict(held.secrets)

    workers = dict(three)
    with Session(plan_of(controls(three))) as session:
        with fails_with(JoinError, "processes.b_has_joined_already"):
            session.join("b")
        former, address = secrets("a"), three["b"].server.address
        three["b"].die()
        soon(lambda: "b" in session.members.lost)
        with fails_with(JoinError, "processes.cannot_reach_worker_b"):
            session.join("b")
        with seated("b", address) as again:
            session.join("b")
            assert session.members.lost == {}
            assert plain(session).ask("b", b"anew") == b"answer anew from b\n"
            assert session.members["b"].incarnation == 1
            # What the former process has known of the others is of no use any more.
            workers["b"] = again
            assert secrets("a")["b#1"] == secrets("b")["a"] != former["b"]
            assert secrets("a")["c"] == former["c"]
            session.close()


def test_whatever_fails_in_keeping_the_rest_is_kept(three, monkeypatch, caplog):
    monkeypatch.setattr(module, "POLL_S", 0.05)
    tried = threading.Event()

    def mesh(self: Session, peer: str, dial: Any) -> None:
        tried.set()
        raise ValueError(peer)

    with Session(plan_of(controls(three), rejoin=True)) as session:
        monkeypatch.setattr(Session, "_mesh", mesh)
        address = three["b"].server.address
        three["b"].die()
        with seated("b", address):
            assert tried.wait(LONG_S)
            soon(lambda: "did not join: b" in session.members.lost.get("b", ""))
            session.lost("c", "its process has ended")
            soon(lambda: session.members.lost.get("c") == "its process has ended")
            soon(lambda: "b has not rejoined" in caplog.text)
            session.close()
    with fails_with(JoinError, "processes.worker_b_cannot_join_the"):
        session.join("b")


@pytest.mark.parametrize("watched", [False, True])
def test_a_worker_that_does_not_answer_keeps_main_from_leaving_for_a_bounded_time(
    watched: bool, monkeypatch: pytest.MonkeyPatch
):
    over = threading.Event()

    def frozen(asked: Any) -> dict[str, Any]:
        assert over.wait(LONG_S)
        return {}

    for bound in ("_DETACH_S", "_DETACH_LAUNCHED_S"):
        monkeypatch.setattr(module, bound, 0.1)
    with seated("a") as worker, worker.but(Detach, frozen) as address:
        with Session(plan_of({"a": address}, deadline_s=3600.0, watched=watched)):
            pass
        over.set()  # With the deadline as the bound this would come too late.


def test_all_that_were_attached_are_left_when_one_refuses(three):
    with fails_with(JoinError, "processes.this_is_worker_c_not"):
        Session(plan_of({**controls(three), "d": three["c"].server.address}))
    assert all(worker.ask(Health())["state"] == "idle" for worker in three.values())


def test_a_worker_that_main_may_not_take_is_left(three):
    plan = plan_of(controls(three))
    with fails_with(JoinError, "processes.main_m_and_worker_differ"):
        Session(plan_of(controls(three), handshake={**plan.handshake, "jaxlib": "x"}))


def test_the_name_of_main_is_for_one_process(monkeypatch):
    monkeypatch.setattr(module, "_HEALTH_S", LONG_S)  # However busy this is.
    control = free_address()
    with seated("w") as worker:
        plan = plan_of({"w": worker.server.address}, control=control)
        with Session(plan), pytest.raises(JoinError) as caught:
            Session(plan_of({}, control=control))
        said = str(caught.value)
        reason = f"cannot listen at {control}: Address already in use by "
        assert said.startswith(f"cannot join as 'm': {reason}")
        assert ", 'm'; each name in the file is one process" in said
        assert "--except" not in said
        with Session(plan):  # It is free again.
            pass
        taken = plan_of({}, control=worker.server.address)
        with fails_with(JoinError, "processes.in_use_by_process_w"):
            Session(taken)
    with seated("m") as worker:  # As `jdag up` starts it with the others of its host.
        taken = plan_of({}, control=worker.server.address)
        with fails_with(JoinError, "processes.jdag_up_except_m_leaves"):
            Session(taken)


def test_a_worker_cannot_speak_for_main_whatever_it_shows(three):
    with Session(plan_of(controls(three))) as session:
        held = three["a"].seat._lease
        assert held is not None
        known = list(held.secrets.values())
        assert len(set(known)) == 3  # With main, b and c: each is another one.
        for secret in known:
            for other in "bc":
                assert three[other].ask(Detach(secret=secret)) == {"ended": False}
        assert plain(session).ask("b", b"hi") == b"answer hi from b\n"
        assert three["a"].nodes[0].ask("c", b"x") == b"answer x from c\n"


def test_over_tls_all_is_as_without_and_a_stranger_is_refused(tmp_path, monkeypatch):
    # However busy this is.
    monkeypatch.setattr("jdag.processes.session.control._PROBE_S", LONG_S)
    issuer = Issuer(tmp_path, "ca")
    tls = {name: load_tls(*issuer.issue(name)) for name in "mab"}
    with ExitStack() as stack:
        workers = {}
        for name in "ab":
            own: dict[str, Any] = {"tls": tls[name], "data": "tcp:127.0.0.1:0"}
            workers[name] = stack.enter_context(seated(name, **own))
        with Session(plan_of(controls(workers), tls=tls["m"])) as session:
            assert plain(session).ask("b", b"hi") == b"answer hi from b\n"
            assert workers["a"].nodes[0].ask("b", b"x") == b"answer x from b\n"
        (tmp_path / "other").mkdir()
        other = load_tls(*Issuer(tmp_path / "other", "ca").issue("m"))
        with fails_with(JoinError, "processes.cannot_reach_worker_a_tls"):
            Session(plan_of(controls(workers), tls=other))


def test_a_certificate_is_held_to_the_worker_who_shows_it(tmp_path, caplog):
    issuer = Issuer(tmp_path, "ca")
    tls = {name: load_tls(*issuer.issue(name)) for name in "mab"}
    own: dict[str, Any] = {"tls": tls["b"], "hosts": {"m": "10.1.1.1"}}
    own["data"] = "tcp:127.0.0.1:0"
    with seated("b", **own) as worker:
        plan = plan_of({"b": worker.server.address}, tls=tls["m"])
        with Session(plan):
            held = worker.seat._lease
            assert held is not None
            pair = ConnectionPair("m", "b", held.secrets["m"])
            where = held.listener.address
            with fails_with(JoinError, "processes.does_not_know_it"):
                dial(where, pair, 0, tls=tls["a"], timeout_s=LONG_S)
        said = (
            "a process that joins as worker 'm' has a certificate for a, "
            "127.0.0.1; expected a certificate for m or 10.1.1.1"
        )
        assert said in caplog.text
        with pytest.raises(JoinError, match=said):
            Session(plan_of({"b": worker.server.address}, tls=tls["a"]))
        assert len(worker.nodes) == 1  # It has not even been attached.


def test_a_worker_on_another_kind_of_cpu_is_warned_of(three):
    theirs = {**ours(), "cpu": ["x", "y"]}
    with (
        warns_with(UserWarning, "processes.the_cpu_of_worker_a"),
        seated("a", handshake=theirs) as worker,
        Session(plan_of({"a": worker.server.address})),
    ):
        pass


@pytest.mark.parametrize(
    ("answer", "words"),
    [({}, "Object missing required fie"), ({"data": 3}, "Expected `str`, got `int`")],
)
def test_a_worker_whose_answer_cannot_be_used_is_named(answer: Any, words: str):
    def odd(asked: Any) -> dict[str, Any]:
        return {**right(asked), **answer} if answer else {}

    with seated("a") as worker:
        right = worker.seat.answers[AttachWorker]
        with worker.but(AttachWorker, odd) as address:
            said = f"worker 'a' at {address} sent an invalid "
            with pytest.raises(JoinError) as caught:
                Session(plan_of({"a": address}))
        assert str(caught.value).startswith(
            f"{said}WorkerAttached as its reply: {words}"
        )
        assert worker.ask(Health())["state"] == "idle"


@pytest.mark.parametrize(
    "count", [10_000, pytest.param(100_000, marks=pytest.mark.long)]
)
def test_mutated_requests_crash_no_handler_and_grow_nothing(three, count: int):
    rng, worker = np.random.default_rng(1), three["a"]
    handle = {
        asked: answering(asked, answer, {})
        for asked, answer in worker.seat.answers.items()
    }
    sizes = []
    for number in range(count):
        asked = REQUESTS[number % len(REQUESTS)]
        try:
            handle[asked](_mutated(rng, _example(asked)), None)
        except Refusal as error:
            assert error.code in REFUSALS and str(error)
        if number % 5_000 == 4_999:  # The first time all is warm.
            gc.collect()
            sizes.append(len(gc.get_objects()))
    assert sizes[-1] < sizes[0] + 1_000
    assert worker.nodes == []
    assert worker.ask(Health())["state"] == "idle"


def _example(asked: type) -> bytes:
    known: dict[str, object] = {
        "token": "x" * 20,
        **dict.fromkeys(("secret", "shared"), "s" * 32),
        "secrets": {"b": "s" * 32},
        "main": "m",
        "worker": "a",
        "settings": {"workers": ["m", "a", "b"], "deadline_s": 5.0, "nesting_max": 7},
        "incarnations": {"m": 0, "a": 0},
        "allow": ["mod"],
        "program": "program.py",
        "schedule": {"workers": ["a"], "csv": "0F0,0B0"},
        "control": "h:1",
        "handshake": {"jax": "1"},
        "peers": {"b": {"incarnation": 0, "control": "h:1", "data": "d", "allow": []}},
        "dial": ["b"],
        "watched": True,
        "whereabouts": {"incarnation": 0, "control": "h:1", "data": "d", "allow": []},
        "incarnation": 0,
    }
    fields = getattr(asked, "__struct_fields__")  # noqa: B009 - msgspec's.
    return json.dumps({name: known[name] for name in fields}).encode()


def _mutated(rng: np.random.Generator, body: bytes) -> bytes:
    changed = bytearray(body)
    for _ in range(int(rng.integers(1, 4))):
        place = int(rng.integers(0, len(changed) + 1))
        match int(rng.integers(0, 5)):
            case 0:
                changed[place : place + 1] = rng.bytes(1)
            case 1:
                del changed[place:]
            case 2:
                changed[place:place] = changed[: int(rng.integers(0, 40))]
            case 3:
                changed[place:place] = rng.bytes(int(rng.integers(1, 9)))
            case _:
                changed[place : place + 3] = ODD[int(rng.integers(0, len(ODD)))]
    return bytes(changed)
