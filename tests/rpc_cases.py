"""A node without an engine, cluster files and certificates, for tests of processes."""

import os
import selectors
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from jdag.rpc.device import settings_of
from jdag.rpc.gate import dial
from jdag.rpc.handshake import ours
from jdag.rpc.place import MakeNode, Place
from jdag.rpc.session import Plan
from jdag.rpc.settings import Address
from jdag.rpc.worker import Options

TOKEN = "the token of the tests"


class PlainNode:
    """A node that only holds its streams, and says on stdout what it is told.

    It answers each line that comes over a stream: `ask X` by `answer X from NAME`. A
    worker's ends when the stream from main does.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.streams: dict[str, Any] = {}
        self.heard: dict[str, bytes] = {}
        self.incarnations: dict[str, int] = {}
        self.changed = threading.Condition()
        self.closed = False
        self.drained = False
        self._wake, self._woken = socket.socketpair()

    def say(self, *words: object) -> None:
        if self.place.worker != self.place.main:  # Its file of output is read.
            sys.stdout.write(" ".join(map(str, words)) + "\n")

    def joined(self, peer: str, incarnation: int) -> None:
        self.say("joined", peer, incarnation)
        self.incarnations[peer] = incarnation

    def adopt(self, peer: str, incarnation: int, stream: Any, received: int) -> None:
        self.say("adopted", peer, incarnation, received)
        with self.changed:
            assert self.incarnations[peer] == incarnation
            self.streams[peer] = stream
            self.changed.notify_all()
        self.wake()

    def received(self, peer: str) -> int:
        return 7

    def lost(self, peer: str, why: str) -> None:
        with self.changed:
            stream = self.streams.pop(peer, None)
            self.changed.notify_all()
        if stream is not None:
            stream.close()
            self.place.gone(peer, why)
            self.wake()

    def begin(self) -> None:
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        while not self.closed:
            with selectors.DefaultSelector() as selector:
                selector.register(self._woken, selectors.EVENT_READ)
                with self.changed:
                    for peer, stream in self.streams.items():
                        if stream.fileno() >= 0:
                            selector.register(stream, selectors.EVENT_READ, peer)
                for key, _ in selector.select():
                    self._came(key.data)
        with self.changed:
            for stream in self.streams.values():
                stream.close()
            self._wake.close()
            self._woken.close()

    def _came(self, peer: str | None) -> None:
        if peer is None:
            self._woken.recv(1)
            return
        room = bytearray(1 << 16)
        try:
            count = self.streams[peer].recv_into(memoryview(room))
        except BlockingIOError:
            return
        except (ConnectionError, KeyError):
            self.lost(peer, "the stream ended")
            if peer == self.place.main:
                self.close()
            return
        with self.changed:
            self.heard[peer] = self.heard.get(peer, b"") + bytes(room[:count])
            self.changed.notify_all()
        for line in bytes(room[:count]).splitlines():
            if line.startswith(b"ask "):
                answer = b"answer %s from %s\n" % (line[4:], self.place.worker.encode())
                self.streams[peer].send([memoryview(answer)])

    def ask(self, peer: str, what: bytes) -> bytes:
        """Ask a peer, and wait for its answer."""
        self.streams[peer].send([memoryview(b"ask " + what + b"\n")])
        with self.changed:
            came = self.changed.wait_for(lambda: what in self.heard.get(peer, b""), 20)
        assert came, f"{peer} did not answer"
        return self.heard[peer]

    def wait(self, what: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(what, 20)

    def drain(self) -> None:
        self.say("drained")
        self.close()

    def close(self) -> None:
        self.closed = True
        self.wake()

    def wake(self) -> None:
        with self.changed:
            self.changed.notify_all()
            if self._wake.fileno() >= 0:
                self._wake.send(b"w")


def make_plain(options: Options) -> MakeNode:
    """What worker processes of tests make their nodes by."""
    return PlainNode


def make_broken(options: Options) -> MakeNode:
    """What a worker process that dies at its start makes its nodes by."""
    for line in range(100):
        sys.stdout.write(f"line {line}\n")
    os._exit(3)


def options_of(*workers: str, **changed: Any) -> list[Options]:
    """Options for worker processes of this one, with plain nodes."""
    common: dict[str, Any] = {
        "node": "tests.rpc_cases:make_plain",
        "control": "127.0.0.1:0",
        "token": TOKEN,
        "config": settings_of(None),
        "message_bytes_max": 1 << 30,
        "once": True,
        "cores": tuple(sorted(os.sched_getaffinity(0))),
    }
    return [Options(worker=worker, **{**common, **changed}) for worker in workers]


def plan_of(controls: dict[str, Address], **changed: Any) -> Plan:
    """A session of main `m` with these workers, with plain nodes."""
    common: dict[str, Any] = {
        "main": "m",
        "workers": ("m", *controls),
        "handshake": ours(),
        "make_node": PlainNode,
        "dial_gate": dial,
        "token": TOKEN,
    }
    return Plan(controls=controls, **{**common, **changed})


def free_address() -> Address:
    """An address of loopback that the system says is free."""
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return Address("127.0.0.1", tried.getsockname()[1])
