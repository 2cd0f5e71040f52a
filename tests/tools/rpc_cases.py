"""Nodes without an engine, and seats and processes that have them."""

import gc
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jdag.processes.launch.device import settings_of
from jdag.processes.launch.main_session import Session, SessionPlan
from jdag.processes.launch.worker_server import WorkerServer
from jdag.processes.net.addresses import Address
from jdag.processes.net.handshake import ours
from jdag.processes.session.cluster_file import SessionSettings, WorkerOptions
from jdag.processes.session.control import ControlClient, ControlServer
from jdag.processes.session.session_info import SessionInfo

TOKEN = "the token of the tests"
ANY = Address("127.0.0.1", 0)
PORTS = range(20_000, 32_768)


class PlainNode:
    """A node that only holds its streams, and says on stdout what it is told.

    It answers each line that comes over a stream: `ask X` by `answer X from NAME`. A
    worker's ends when the stream from main does. One thread alone touches streams; it
    looks for what there is to do a hundred times a second.
    """

    def __init__(self, place: SessionInfo) -> None:
        self.place = place
        self.streams: dict[str, Any] = {}
        self.heard: dict[str, bytes] = {}
        self.incarnations: dict[str, int] = {}
        self.changed = threading.Condition()
        self.closed = False
        self.ended = False
        self._adopted: dict[str, int] = {}
        self._left: list[Any] = []
        self._said: list[tuple[str, bytes]] = []

    def say(self, *words: object) -> None:
        if self.place.worker != self.place.main:  # Its file of output is read.
            sys.stdout.write(" ".join(map(str, words)) + "\n")

    def joined(self, peer: str, incarnation: int) -> None:
        self.say("joined", peer, incarnation)
        self.incarnations[peer] = incarnation

    def adopt(self, peer: str, incarnation: int, stream: Any, received: int) -> None:
        self.say("adopted", peer, incarnation, received)
        with self.changed:
            # Who dials may have heard of this one before this one has of it.
            assert self.incarnations.get(peer, incarnation) == incarnation
            self._leave(peer)
            self.streams[peer], self._adopted[peer] = stream, incarnation
            if self.ended:  # Its gate closes only after it.
                stream.close()
            self.changed.notify_all()

    def _leave(self, peer: str) -> bool:
        stream = self.streams.pop(peer, None)
        if stream is not None:
            self._left.append(stream)
        return stream is not None

    def received(self, peer: str) -> int:
        return 7

    def lost(self, peer: str, why: str, incarnation: int | None = None) -> None:
        with self.changed:
            was_there = self._leave(peer)
            self.changed.notify_all()
        if was_there:
            self._lose(peer, why)

    def _lose(self, peer: str, why: str) -> None:
        self.place.members.lose(peer, self._adopted[peer], why)

    def begin(self) -> None:
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        while not self.closed:
            with self.changed:
                streams, said = dict(self.streams), self._said
                self._said = [one for one in said if one[0] not in streams]
                left, self._left = self._left, []
            for stream in left:
                stream.close()
            for peer, line in said:
                if peer in streams:  # Else it is said when there is a stream.
                    streams[peer].send([memoryview(line)])
            for peer, stream in streams.items():
                self._look(peer, stream)
            with self.changed:
                self.changed.wait(0.01)
        with self.changed:
            self.ended = True
            for stream in (*self._left, *self.streams.values()):
                stream.close()

    def _look(self, peer: str, stream: Any) -> None:
        room = bytearray(1 << 16)
        try:
            came = bytes(room[: stream.recv_into(memoryview(room))])
        except BlockingIOError:
            return
        except ConnectionError as error:
            with self.changed:
                # It may have been replaced meanwhile.
                is_end = self.streams.get(peer) is stream and self._leave(peer)
                self.closed |= is_end and peer == self.place.main
                self.changed.notify_all()
            if is_end:
                self._lose(peer, str(error))
            return
        with self.changed:
            self.heard[peer] = self.heard.get(peer, b"") + came
            self.changed.notify_all()
        for line in came.splitlines():
            if line.startswith(b"ask "):
                answer = b"answer %s from %s\n" % (line[4:], self.place.worker.encode())
                stream.send([memoryview(answer)])

    def ask(self, peer: str, what: bytes) -> bytes:
        with self.changed:
            self._said.append((peer, b"ask " + what + b"\n"))
        self.wait(lambda: what in self.heard.get(peer, b""))
        return self.heard[peer]

    def wait(self, what: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(what, 60), "it never came to be"

    def drain(self) -> None:
        self.say("drained")
        self.close()

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()


def make_plain(options: WorkerOptions) -> Any:
    return PlainNode


def make_broken(options: WorkerOptions) -> Any:
    for line in range(100):
        sys.stdout.write(f"line {line}\n")
    os._exit(3)


def make_collecting(options: WorkerOptions) -> Any:
    sys.stdout.write(f"collector {gc.isenabled()} {gc.get_freeze_count() > 0}\n")
    os._exit(3)


def make_odd(options: WorkerOptions) -> Any:
    parent = socket.socket(fileno=os.dup(int(sys.argv[1])))
    parent.sendall(b'{"ready": 5}\n{"ready": "127.0.0.1:7000"}\n')
    return PlainNode


def options_of(*workers: str, **changed: Any) -> list[WorkerOptions]:
    common: dict[str, Any] = {
        "node": "tests.tools.rpc_cases:make_plain",
        "control": "127.0.0.1:0",
        "token": TOKEN,
        "config": settings_of(None),
        "once": True,
        "cores": tuple(sorted(os.sched_getaffinity(0))),
    }
    return [WorkerOptions(worker=worker, **{**common, **changed}) for worker in workers]


def plan_of(controls: dict[str, Address], **changed: Any) -> SessionPlan:
    common: dict[str, Any] = {
        "main": "m",
        "handshake": ours(),
        "make_node": PlainNode,
        "token": TOKEN,
    }
    own = {key: changed.pop(key) for key in [*changed] if hasattr(SessionSettings, key)}
    settings = SessionSettings(("m", *controls), **own)
    made = {**common, **changed}
    return SessionPlan(settings=settings, controls=controls, **made)


def plain(session: Session) -> PlainNode:
    assert isinstance(session.node, PlainNode)
    return session.node


def lives(pid: int) -> bool:
    """Whether there is a process; one that nobody has waited for is none."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def free_address() -> Address:
    """An address of loopback at which nobody listens, and that none else is given.

    The port lies below those that the system chooses, one of which could be anybody's
    by the time it is listened at. Until this process ends, it holds a name by which
    others of the tests see that it is taken.
    """
    for port in PORTS:
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0jdag tests: port {port}")
            with socket.socket() as tried:
                tried.bind(("127.0.0.1", port))
        except OSError:
            claim.close()
            continue
        claim.detach()
        return Address("127.0.0.1", port)
    raise AssertionError(f"all of {PORTS} are taken")


class Seated:
    """A seat with a thread that serves, a control server, and a client of that."""

    def __init__(self, name: str, address: Address = ANY, **own: Any) -> None:
        self.nodes: list[PlainNode] = []
        handshake, tls = own.pop("handshake", ours()), own.pop("tls", None)
        make_node = own.pop("make_node", self._make)
        own = {"allow": ("models",), "once": False, **own}
        (options,) = options_of(name, **own)
        self.seat = WorkerServer(options, handshake, make_node, tls)
        self.server = ControlServer(
            f"worker {name!r}",
            address,
            self.seat.answers,
            tls=tls,
            hosts=options.hosts,
            knows=self.seat.knows,
        )
        self.client = ControlClient(f"worker {name!r}", self.server.address, tls=tls)
        self.ask = self.client.ask
        self.thread = threading.Thread(target=self.seat.serve)
        self.thread.start()

    def _make(self, place: Any) -> Any:
        self.nodes.append(PlainNode(place))
        return self.nodes[-1]

    @contextmanager
    def but(self, asked: type, answer: Any) -> Iterator[Address]:
        answers = {**self.seat.answers, asked: answer}
        server = ControlServer(self.client.name, ANY, answers)
        try:
            yield server.address
        finally:
            server.close()

    def die(self) -> None:
        self.server.close(0)
        for node in self.nodes:
            node.close()
        self.seat.stop()
        self.thread.join(60)
        self.client.close()

    def close(self) -> None:
        self.seat.stop()
        self.thread.join(60)
        assert not self.thread.is_alive()
        self.client.close()
        self.server.close()


@contextmanager
def seated(name: str = "w", address: Address = ANY, **own: Any) -> Iterator[Seated]:
    made = Seated(name, address, **own)
    try:
        yield made
    finally:
        made.close()
