"""A worker's side of sessions: who may hold it, who may come in, and how it is left.

Without processes: seats, their control servers and gates are real, and in this one.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from jdag.errors import JdagError, JoinError
from jdag.processes.launch import worker_server as module
from jdag.processes.net.greeting import ConnectionPair
from jdag.processes.net.handshake import ours
from jdag.processes.net.listener import dial
from jdag.processes.net.shared_secrets import proof_of
from jdag.processes.session.requests import (
    AttachWorker,
    Detach,
    Health,
    Info,
    Mesh,
    Peer,
    WorkerAddress,
)
from tests.tools.error_texts import fails_with
from tests.tools.rpc_cases import TOKEN, PlainNode, Seated, seated
from tests.tools.stream_cases import receive

SECRET = "the secret of m and w"
WITH_V = "the secret of v and w"
WITH_U = "the secret of u and w"
THREE = {
    "settings": {"workers": ("m", "w", "v", "u")},
    "secrets": {"v": WITH_V, "u": WITH_U},
}
NOBODY = WorkerAddress(incarnation=0, data="unix:@no", allow=())


@pytest.fixture
def worker() -> Iterator[Seated]:
    with seated() as made:
        yield made


def attach(**changed: Any) -> AttachWorker:
    asked = {
        "token": TOKEN,
        "secret": SECRET,
        "secrets": {"v": WITH_V},
        "main": "m",
        "worker": "w",
        "settings": {"workers": ("m", "w", "v"), "deadline_s": 20.0},
        "incarnations": {"m": 0, "w": 0},
        "allow": ("mine",),
        "handshake": ours(),
    }
    return AttachWorker(**{**asked, **changed})


def come_in(
    answer: Any, secret: str = SECRET, dialler: str = "m", listener: str = "w"
) -> Any:
    pair = ConnectionPair(dialler, listener, secret)
    return dial(answer["data"], pair, 3, timeout_s=60)


def unknown(answer: Any, secret: str, dialler: str, listener: str = "w") -> None:
    with fails_with(JoinError, "processes.does_not_know_it") as caught:
        come_in(answer, secret, dialler, listener)
    assert not caught.value.given_up


def peer(whereabouts: WorkerAddress, **changed: Any) -> Peer:
    usual = {"secret": SECRET, "shared": WITH_V, "worker": "v"}
    return Peer(whereabouts=whereabouts, **{**usual, **changed})


def refused(ask: Callable[[], object]) -> str:
    with pytest.raises(JoinError) as caught:
        ask()
    assert "\n" not in str(caught.value)
    for secret in (TOKEN, SECRET, WITH_V):
        assert secret not in str(caught.value)
    return str(caught.value)


# ----------------------------------------------------------------------------- attach


def test_a_worker_is_idle_then_held_then_idle_and_each_session_has_its_own_node(worker):
    for _ in range(2):
        assert worker.ask(Health())["state"] == "idle"
        answer = worker.ask(attach())
        assert answer["worker"] == "w"
        assert answer["allow"] == ["models"]
        assert answer["handshake"]["pid"] == os.getpid()
        assert worker.ask(Health())["state"] == "held"
        info = worker.ask(Info(token=TOKEN))
        assert (info["main"], info["incarnation"]) == ("m", 0)
        node = worker.nodes[-1]
        assert node.place.members["m"].allowed == ("mine",)
        assert node.incarnations == {"m": 0}
        stream, theirs = come_in(answer)
        assert theirs == 7  # What the node says that it has received.
        node.wait(lambda node=node: "m" in node.streams)
        assert worker.ask(Detach(secret=SECRET)) == {"ended": True}
        assert node.closed
        with pytest.raises(ConnectionError):
            receive(stream, 10)
        stream.close()
        with fails_with(JdagError, "processes.cannot_reach"):
            come_in(answer)
    assert len(worker.nodes) == 2


def test_a_wrong_token_is_refused_and_a_missing_one_too(worker):
    said = (
        "worker 'w' refused the request: the token is wrong; token_file, or else the "
        ".token file of the cluster file, must be the same on both sides"
    )
    for asked in (attach(token="other"), Info(token="other")):
        assert refused(partial(worker.ask, asked)).startswith(said)
    assert "the request has no token" in refused(lambda: worker.ask(attach(token="")))
    assert worker.ask(Health())["state"] == "idle"


@pytest.mark.parametrize(
    "changed",
    [
        {"main": "n"},
        {"settings": {"workers": ("m", "v")}},
        {"settings": {"workers": ("m", "w", "w")}},
        {"settings": {"workers": ("m", "w"), "nesting_max": 0}},
        {"incarnations": {"m": 0}},
        {"incarnations": {"m": 0, "w": 0, "x": 0}},
    ],
)
def test_names_that_make_no_sense_are_refused(worker, changed):
    refused(lambda: worker.ask(attach(**changed)))
    assert worker.ask(Health())["state"] == "idle"


def test_a_main_that_differs_is_refused_with_both_sides(worker):
    said = refused(lambda: worker.ask(attach(handshake={**ours(), "jax": "other"})))
    assert said.startswith("main 'm' and worker 'w' differ in jax: main 'm' has \"oth")


def test_another_main_is_told_who_holds_the_worker(worker):
    worker.ask(attach())
    other = attach(main="v", secret="s" * 32, incarnations={"v": 0, "w": 0})
    said = refused(lambda: worker.ask(other))
    assert said.startswith(f"worker 'w' is held by main 'm' (process {os.getpid()} on ")
    assert said.endswith("; wait until that session has ended")
    # The same one again, without having lost it, is no better.
    assert "is held by main 'm'" in refused(lambda: worker.ask(attach()))
    assert len(worker.nodes) == 1


def test_a_main_that_died_on_this_host_holds_nothing(worker):
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)
    worker.ask(attach(handshake={**ours(), "pid": pid}))
    worker.ask(attach(secret="s" * 32))
    assert worker.nodes[0].closed and not worker.nodes[1].closed


def test_main_takes_a_worker_anew_that_it_has_lost(worker):
    worker.ask(attach())
    worker.ask(attach(incarnations={"m": 0, "w": 1}))
    assert worker.nodes[0].closed and not worker.nodes[1].closed
    assert worker.ask(Info(token=TOKEN))["incarnation"] == 1


def test_a_session_ends_when_its_main_is_lost(worker):
    stream, _ = come_in(worker.ask(attach()))
    node = worker.nodes[0]
    node.wait(lambda: "m" in node.streams)
    stream.close()
    worker.seat.answers[Detach](Detach(secret=SECRET))
    assert worker.ask(attach(secret="t" * 32))["worker"] == "w"


def test_a_session_that_does_not_end_is_said_to_be_in_the_way(monkeypatch):
    monkeypatch.setattr(module, "SESSION_END_S", 0.1)
    with seated() as worker:
        worker.ask(attach())
        node = worker.nodes[0]
        close = node.close
        monkeypatch.setattr(node, "close", lambda: None)
        said = refused(lambda: worker.ask(Detach(secret=SECRET)))
        assert said.startswith("worker 'w' did not leave the session of 'm' within 0.1")
        monkeypatch.setattr(node, "close", close)


# ------------------------------------------------------------------------ knock, mesh


def test_a_wrong_secret_is_refused_whatever_is_asked(worker):
    worker.ask(attach())
    # What v knows is of no use to be taken for main.
    for wrong in ("not it", "", SECRET[:-1], WITH_V):
        for asked in (Mesh(wrong, peers={}, dial=()), peer(NOBODY, secret=wrong)):
            said = refused(partial(worker.ask, asked))
            assert "it does not contain the secret of 'm', which holds" in said
        assert worker.ask(Detach(secret=wrong)) == {"ended": False}
    assert worker.ask(Health())["state"] == "held"


def test_who_comes_as_another_or_to_another_is_not_let_in(worker):
    answer = worker.ask(attach(incarnations={"m": 0, "w": 0, "v": 0, "u": 0}, **THREE))
    come_in(answer, WITH_U, "u")[0].close()
    for secret in (WITH_V, SECRET, "", "x" * 64):
        unknown(answer, secret, "u")
    for name in ("u#1", "w", "x"):
        unknown(answer, WITH_U, name)
    for name in ("w#1", "v"):
        unknown(answer, WITH_U, "u", name)


def test_who_has_no_secret_yet_is_let_in_by_none(worker):
    answer = worker.ask(attach(incarnations={"m": 0, "w": 0, "v": 0}, secrets={}))
    for secret in ("", SECRET, WITH_V):
        unknown(answer, secret, "v")


def test_who_is_in_no_session_holds_nobody(worker):
    asked = Mesh(secret=SECRET, peers={}, dial=())
    assert refused(lambda: worker.ask(asked)) == "worker 'w' is in no session"
    assert worker.ask(Detach(secret=SECRET)) == {"ended": False}


def test_who_was_given_up_is_told_so_if_it_proves_itself(worker):
    answer = worker.ask(attach(incarnations={"m": 0, "w": 0, "v": 0}))
    worker.nodes[0].place.members.lose("v", 0, "it was silent")
    with fails_with(JoinError, "processes.has_given_it_up") as caught:
        come_in(answer, WITH_V, "v")
    assert caught.value.given_up
    assert "v" not in worker.nodes[0].streams
    unknown(answer, SECRET, "v")  # Strangers are not told.


def test_a_new_incarnation_replaces_the_old_one(worker):
    answer = worker.ask(attach(incarnations={"m": 0, "w": 0, "v": 0}))
    newer = replace(NOBODY, incarnation=1, allow=("theirs",))
    worker.ask(peer(newer, shared=WITH_U))
    node = worker.nodes[0]
    known = node.place.members["v"]
    assert node.incarnations["v"] == known.incarnation == 1
    assert known.allowed == ("theirs",)
    with pytest.raises(JoinError) as caught:
        come_in(answer, WITH_V, "v")
    assert caught.value.given_up
    assert "0 of 'v' was replaced" in refused(lambda: worker.ask(peer(NOBODY)))
    # Nor is the former one taken for the new one: they are known by other secrets.
    unknown(answer, WITH_V, "v#1")
    come_in(answer, WITH_U, "v#1")[0].close()


def test_who_is_to_be_dialled_has_to_be_there(worker):
    worker.ask(attach())
    nowhere = Mesh(secret=SECRET, peers={"v": NOBODY}, dial=("v",))
    said = "cannot reach worker 'v' at unix:@no: Connection refused"
    assert refused(lambda: worker.ask(nowhere)) == said
    unknown = Mesh(secret=SECRET, peers={}, dial=("v",))
    assert "the request to dial" in refused(lambda: worker.ask(unknown))
    strange = Mesh(secret=SECRET, peers={"x": NOBODY}, dial=())
    assert "is not a peer of 'w' " in refused(lambda: worker.ask(strange))


# ------------------------------------------------------------------------- stopping


def test_draining_ends_the_session_and_then_the_worker():
    with seated() as worker:
        worker.ask(attach())
        worker.seat.stop()
        worker.thread.join(60)
        assert worker.nodes[0].closed
        assert worker.ask(Health())["state"] == "stopping"
        assert "is stopping" in refused(lambda: worker.ask(attach()))


def test_a_launched_worker_stops_with_its_first_session():
    with seated(once=True) as worker:
        worker.ask(attach())
        worker.ask(Detach(secret=SECRET))
        worker.thread.join(60)
        assert not worker.thread.is_alive()


def test_who_attaches_while_the_worker_is_asked_to_stop_is_refused():
    def make_node(info: Any) -> PlainNode:
        asked.seat.stop()  # As SIGTERM does, while the session is being made.
        made.append(PlainNode(info))
        return made[-1]

    made: list[PlainNode] = []
    with seated(make_node=make_node) as asked:
        assert "worker 'w': it is stopping" in refused(lambda: asked.ask(attach()))
        asked.thread.join(60)
        assert not asked.thread.is_alive()
        assert [node.closed for node in made] == [True]


def test_who_shows_the_token_or_the_secret_of_main_is_known(worker):
    def known(*secrets: str) -> list[bool]:
        return [worker.seat.knows(proof_of(secret)) for secret in secrets]

    all_of_them = (TOKEN, SECRET, WITH_V, "other", "")
    assert known(*all_of_them) == [True, False, False, False, False]
    worker.ask(attach(incarnations={"m": 0, "w": 0, "v": 0}))
    assert known(*all_of_them) == [True, True, False, False, False]
    for odd in ("", TOKEN, "\udcff", "é"):
        assert not worker.seat.knows(odd)
    worker.ask(Detach(secret=SECRET))
    assert known(*all_of_them) == [True, False, False, False, False]
