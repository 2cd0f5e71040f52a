"""A peer that has gone mad: what it sends loses it, and hurts nobody else."""

import logging
import os
import random
import socket
import threading
from contextlib import suppress
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jdag.engine.protocol import ContextId, Release, Settle, check_owner, incarnated
from jdag.errors import ProtocolError
from jdag.processes.net.streams import SocketStream
from jdag.wire.frames import FRAME_BYTES, LENGTHS_MAX, FrameKind, pack_header
from tests.processes.test_breaking import hidden, loss_of, program, scaled
from tests.tools.fuzz_cases import Recorded, attack, recording
from tests.tools.rpc_breaking import Breaking, breaking
from tests.tools.stream_cases import soon
from tests.tools.tiers import sized

FRAMES_EACH_MAX = 12
APART = 1_000_000  # From here on the others' numbers go; no lie comes to be of theirs.
PATIENCE_S = 60.0
W = jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)
V = jnp.linspace(0.5, -0.5, 3)
X = jnp.linspace(0.0, 2.0, 12).reshape(3, 4)


@pytest.fixture(scope="module")
def recorded() -> list[Recorded]:
    with recording() as kept, breaking() as nodes:
        program(nodes.cluster)
        nodes.cluster.info()
        frames = [*kept]  # Without those by which nodes leave.
    assert len(frames) > 60
    return frames


def small_program(cluster: Any) -> list[bytes]:
    w, v = cluster.put("b", W), cluster.put("a", V)
    with cluster.context() as ctx:
        parts = [
            ctx.call("a", hidden, ctx.call("b", scaled, w, k), X)
            for k in (1.0, 2.0, 3.0)
        ]
        loss = ctx.call("b", loss_of, v, *parts)
        ctx.backward(loss)
        found = [loss.fetch(), *[one.fetch() for one in ctx.gradient([w, v])]]
    cluster.drop([w, v])
    return [np.asarray(one).tobytes() for one in found]


class Mad:
    """Comes as c to b, again and again, and sends what it likes."""

    def __init__(self, nodes: Breaking, recorded: list[Recorded], seed: int) -> None:
        self.node = nodes.nodes["b"]
        self.recorded = recorded
        self.rng = random.Random(seed)
        self.codec = self.node._codec
        self.incarnation = 0
        self.frames = self.refused = 0

    def come(self) -> None:
        self.incarnation += 1
        self.node.joined("c", self.incarnation)
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.settimeout(PATIENCE_S)
            self.node.adopt("c", self.incarnation, SocketStream(ours, "c"), 0)
            sequence, count = 1, self.rng.randrange(1, FRAMES_EACH_MAX)
            with suppress(ConnectionError):  # It has hung up.
                for _ in range(count):
                    frame = attack(self.recorded, self.codec, self.rng, sequence)
                    theirs.sendall(frame)
                    self.frames += 1
                    sequence += frame[FRAME_BYTES - 1 : FRAME_BYTES] != b"\x00"
                theirs.sendall(pack_header(0, 0, 1, FrameKind.PURE) + b"?")
                # It may wait for the rest of a frame that was cut off.
                theirs.shutdown(socket.SHUT_WR)
                while theirs.recv(1 << 16):
                    pass
        now = incarnated("c", self.incarnation)
        self.refused += now in self.node.peers.losses
        self.node.lost("c", "it has said enough")


def rss_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def held(nodes: Breaking, worker: str) -> list[Any]:
    nodes.cluster.driver.settle()
    return list(nodes.nodes[worker]._host.machine.values._held)


def session(recorded: list[Recorded], seed: int, frames: int) -> Mad:
    with breaking() as nodes:
        cluster = nodes.cluster
        for one in ("a", "b"):
            numbers = cluster.state.numbers(one)
            numbers.contexts = numbers.leaves = numbers.assignments = APART
        wanted = small_program(cluster)
        for one in ("a", "b"):  # Nobody dials who is mad.
            nodes.nodes[one]._session.members["c"].is_dialled = False
        nodes.nodes["b"].lost("c", "it is mad")
        mad = Mad(nodes, recorded, seed)
        trouble: list[BaseException] = []

        def rage() -> None:
            try:
                while mad.frames < frames:
                    mad.come()
            except BaseException as error:
                trouble.append(error)

        thread = threading.Thread(target=rage, daemon=True)
        thread.start()
        while thread.is_alive():
            assert small_program(cluster) == wanted, seed
        assert not trouble, trouble
        assert small_program(cluster) == wanted
        for one in ("a", "b"):
            assert nodes.nodes[one]._broken is None
            assert nodes.threads[one].is_alive()
            # Leaves that it made live until somebody drops them.
            assert [key for key in held(nodes, one) if key.kind != "leaf"] == []
            assert nodes.nodes[one]._jobs.idle
    assert mad.refused > mad.frames // 50
    return mad


@pytest.mark.parametrize("seed", range(sized(1, 4)))
def test_what_a_mad_peer_sends_loses_it_and_hurts_nobody_else(
    seed: int, recorded: list[Recorded]
) -> None:
    session(recorded, seed, 700)


@pytest.mark.long
def test_100_000_frames_of_mad_peers_neither_hurt_anybody_nor_grow(
    recorded: list[Recorded], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "jdag")  # What pytest keeps of it grows.
    sent, sizes = 0, []
    for seed in range(100, 150):
        sent += session(recorded, seed, 2_000).frames
        sizes.append(rss_bytes())
    assert sent >= 100_000
    assert max(sizes[25:]) - sizes[10] < 64 << 20, sizes


@pytest.mark.parametrize("kind", [FrameKind.ASIDE, FrameKind.DEFINE, FrameKind.MESSAGE])
def test_what_a_frame_announces_takes_no_memory_before_it_comes(
    kind: FrameKind,
) -> None:
    with breaking() as nodes:
        before = rss_bytes()
        mad = Mad(nodes, [], 0)
        nodes.nodes["b"].lost("c", "it is mad")
        nodes.nodes["b"].joined("c", 1)
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.settimeout(PATIENCE_S)
            mad.node.adopt("c", 1, SocketStream(ours, "c"), 0)
            theirs.sendall(pack_header(1, 0, LENGTHS_MAX[kind], kind) + bytes(100))
            reader = mad.node.peers.connections["c#1"].reader
            soon(lambda: reader._direct is not None)
            assert reader._direct is not None
            assert len(reader._direct) == LENGTHS_MAX[kind] - 100
            assert rss_bytes() - before < 64 << 20
        mad.node.lost("c", "it has said enough")
        assert reader._direct_frame is None


OF_A = ContextId(0, 7, 0)


def test_only_its_owner_ends_a_context() -> None:
    names = ("a", "b", "c")
    check_owner(Release(OF_A, (), abort=False), "a", names)
    check_owner(Release(ContextId(0, 7, 1), (), abort=False), "a#1", names)
    for sender in ("c", "a#1"):
        said = f"came from '{sender}', but only 'a' may send it"
        with pytest.raises(ProtocolError, match=said):
            check_owner(Release(OF_A, (), abort=False), sender, names)


@pytest.mark.parametrize(
    "lie",
    [
        Release(OF_A, (), abort=True),
        Settle(OF_A, 1, commits=True, over=False),
    ],
    ids=lambda one: type(one).__name__,
)
def test_who_says_what_it_may_not_is_lost_by_name_and_the_others_go_on(
    lie: Any,
) -> None:
    with breaking() as nodes:
        before = small_program(nodes.cluster)
        liar, told = nodes.nodes["c"], nodes.nodes["b"]
        with liar._loop:
            liar.peers.connections["b"].send(lie, ())
        for node in (told, nodes.nodes["a"]):
            soon(partial(node.peers.losses.__contains__, "c"))
        assert "it broke the protocol: " in told.peers.losses["c"]
        assert told.peers.losses["c"] == nodes.nodes["a"].peers.losses["c"]
        assert small_program(nodes.cluster) == before
