"""Going to others: main waits for all workers, and a worker looks for main."""

import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from jdag.errors import JoinError
from jdag.processes.launch.dialling import MainLiveness
from jdag.processes.launch.main_session import Session
from jdag.processes.net.addresses import Address
from jdag.processes.session.control import ControlServer
from jdag.processes.session.requests import Detach, Health
from paper.proxy import Proxy
from tests.tools.error_texts import fails_with
from tests.tools.rpc_cases import ANY, free_address, plan_of, seated
from tests.tools.stream_cases import soon


class Main:
    def __init__(self) -> None:
        self.pid = os.getpid()
        self.server = self.open(ANY)

    def open(self, address: Address) -> ControlServer:
        return ControlServer("main 'm'", address, {Health: lambda _: {"pid": self.pid}})

    def lookout(
        self, control: str | None = None, pid: int = os.getpid()
    ) -> MainLiveness:
        at = str(self.server.address) if control is None else control
        return MainLiveness("m", at, pid, None)


@pytest.fixture
def main() -> Iterator[Main]:
    made = Main()
    yield made
    made.server.close()


def test_main_is_there_until_its_process_ends(main: Main):
    lookout = main.lookout()
    lookout.find()
    lookout.look("m")
    main.server.close()
    with fails_with(JoinError, "processes.connection_refused") as caught:
        lookout.look("m")
    assert caught.value.absent
    lookout.look("v")  # Of others it says nothing.


def test_another_process_at_its_address_is_not_main(main: Main):
    lookout = main.lookout()
    lookout.find()
    main.pid += 1
    with pytest.raises(JoinError, match=f"process {main.pid} answers at its addr"):
        lookout.look("m")


@pytest.mark.parametrize(
    "other",
    [{"pid": 1}, *[{"control": at} for at in ("", "127.0.0.1:1", "no address")]],
)
def test_who_was_never_found_is_not_missed(main: Main, other: dict[str, Any]):
    lookout = main.lookout(**other)
    lookout.look("m")
    lookout.find()
    lookout.look("m")


def test_no_worker_is_attached_before_all_answer(monkeypatch: pytest.MonkeyPatch):
    missing, again = free_address(), threading.Semaphore(0)
    find = Session._check_reachable

    def counted(session: Session, peer: str) -> None:
        if peer == "d":
            again.release()
        find(session, peer)

    monkeypatch.setattr(Session, "_check_reachable", counted)
    with ExitStack() as stack:
        workers = [stack.enter_context(seated(name)) for name in "abc"]
        controls = {one.seat._options.worker: one.server.address for one in workers}
        plan = plan_of({**controls, "d": missing}, ready_s=60.0)
        pool = stack.enter_context(ThreadPoolExecutor())
        begun = pool.submit(Session, plan)
        for _ in range(6):
            assert again.acquire(timeout=60)
        # They would end their sessions if the last came later than `deadline_s`.
        states = [worker.ask(Health())["state"] for worker in workers]
        with seated("d", missing), begun.result(60) as session:
            node: Any = session.node
            assert node.ask("d", b"hi") == b"answer hi from d\n"
    assert states == ["idle"] * 3


def test_a_worker_is_told_to_leave_also_when_its_network_has_only_just_been_mended(
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level(logging.INFO)
    told: list[Detach] = []

    def noted(asked: Detach) -> dict[str, Any]:
        told.append(asked)
        return {}

    proxy = Proxy(0)
    with seated("a") as worker, worker.but(Detach, noted) as address:
        port, gate = proxy.before(address.port)
        plan = plan_of({"a": address._replace(port=port)}, deadline_s=60.0)
        with Session(plan) as session:
            proxy.do(gate, refuses=True)
            with (
                fails_with(JoinError, "processes.cannot_reach"),
                session._client("a") as client,
            ):
                client.ask(Health())
            leaving = threading.Thread(target=session.close)
            leaving.start()
            soon(lambda: "a request to a failed: cannot reach" in caplog.text)
            proxy.heal([gate])
            leaving.join()
        assert told
    proxy.close()
