"""Looking for main where it said that it is."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from jdag.errors import JoinError
from jdag.rpc.control import ControlServer
from jdag.rpc.dialling import Lookout, Routes
from jdag.rpc.gate import dial
from jdag.rpc.requests import Attach, Health
from jdag.rpc.settings import Address
from tests.rpc_cases import ANY
from tests.test_seat import attach


class Main:
    """Main's own address, and a worker's lookout for it."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.routes = Routes("w", 0, {}, dial_gate=dial, tls=None, timeout_s=5.0)
        self.server = self.open(ANY)

    def open(self, address: Address) -> ControlServer:
        return ControlServer(address, {Health: lambda _: {"pid": self.pid}})

    def lookout(self, **changed: Any) -> Lookout:
        asked: Attach = attach(**{"control": str(self.server.address), **changed})
        return Lookout(asked, self.routes)


@pytest.fixture
def main() -> Iterator[Main]:
    made = Main()
    yield made
    made.routes.close()
    made.server.close()


def test_main_is_there_until_its_process_ends(main: Main):
    lookout = main.lookout()
    lookout.find()
    lookout.look("m")
    main.server.close()
    with pytest.raises(JoinError, match="Connection refused") as caught:
        lookout.look("m")
    assert caught.value.absent
    lookout.look("v")  # Of others it says nothing.


def test_another_process_at_its_address_is_not_main(main: Main):
    lookout = main.lookout()
    lookout.find()
    main.pid += 1
    with pytest.raises(JoinError, match=f"process {main.pid} is where main 'm' was"):
        lookout.look("m")


@pytest.mark.parametrize("control", ["", "127.0.0.1:1", "no address"])
def test_who_was_never_found_is_not_missed(main: Main, control: str):
    lookout = main.lookout(control=control)
    lookout.look("m")
    lookout.find()
    lookout.look("m")


def test_one_found_by_another_number_was_never_main(main: Main):
    lookout = main.lookout(handshake={"pid": 1})
    lookout.find()
    lookout.look("m")
