"""How main finds the new process of a lost worker, or says why there is none."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from jdag.errors import JoinError
from jdag.processes.launch import main_session as module
from jdag.processes.launch.main_session import Session
from jdag.processes.net.addresses import Address
from jdag.processes.session.control import ControlClient
from jdag.processes.session.requests import AttachWorker
from tests.tools import stream_cases
from tests.tools.error_texts import fails_with
from tests.tools.rpc_cases import PlainNode, Seated, plain, plan_of, seated

soon = partial(stream_cases.soon, every_ms=10)


class Places(dict[str, Address]):
    lost = ""

    def __init__(self, worker: Seated) -> None:
        super().__init__(b=worker.server.address)
        self.die = worker.die

    def __getitem__(self, name: str) -> Address:
        if name == self.lost:
            raise JoinError(f"there is no place for {name!r}")
        return super().__getitem__(name)


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Iterator[Places]:
    monkeypatch.setattr(module, "POLL_S", 0.05)
    with seated("b") as worker:
        yield Places(worker)


def test_a_lost_worker_is_looked_for_where_it_is_now(places):
    with Session(plan_of(places, rejoin=True)) as session:
        places.die()
        with seated("b") as again:
            places["b"] = again.server.address
            soon(lambda: session.node.incarnations.get("b") == 1)
            assert plain(session).ask("b", b"anew") == b"answer anew from b\n"


def test_who_waits_for_a_lost_worker_in_vain_is_told_why_it_has_not_joined_again(
    places, monkeypatch
):
    def until(holds: Callable[[], bool], within_ns: int) -> bool:
        soon(lambda: "b" in session._refused or holds())
        return holds() and within_ns == 9

    monkeypatch.setattr(PlainNode, "until", staticmethod(until), raising=False)
    with Session(plan_of(places, rejoin=True)) as session:
        places.lost = "b"
        places.die()
        with fails_with(JoinError, "processes.there_is_no_place_for"):
            session.rejoined("b", 0, 9)
        with seated("b") as again:
            places["b"] = again.server.address
            places.lost = ""
            soon(lambda: "b" not in session._refused)  # It has joined.
            assert session.rejoined("b", 0, 9)


def test_a_session_that_ends_while_a_worker_is_attached_leaves_it_free(
    places, monkeypatch
):
    ask = ControlClient.ask

    def closing_meanwhile(client: ControlClient, asked: Any, *rest: Any, **named: Any):
        answer = ask(client, asked, *rest, **named)
        if isinstance(asked, AttachWorker):
            ending.start()
            soon(lambda: session._closing)
            ending.join(0.5)  # It would be over by then if it waited for nothing.
        return answer

    with Session(plan_of(places)) as session:
        ending = threading.Thread(target=session.close)
        places.die()
        soon(lambda: "b" in session.members.lost)
        with seated("b") as again:
            monkeypatch.setattr(ControlClient, "ask", closing_meanwhile)
            with fails_with(JoinError, "processes.b_cannot_join_the_session"):
                session.join("b", again.server.address)
            ending.join()
            assert again.seat._lease is None
