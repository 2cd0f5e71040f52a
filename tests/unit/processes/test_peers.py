"""Peers that are given up, and live on."""

from typing import Any

import numpy as np
import pytest

from jdag.errors import JoinError, WorkerLost
from jdag.processes.net.loop import clock_ns
from jdag.processes.node import Node
from jdag.processes.peers import LEFT
from tests.tools.rpc_breaking import Breaking, breaking
from tests.tools.rpc_nodes import cluster
from tests.tools.stream_cases import soon

# Main is told by b as it is given up, and as b leaves; either may come first.
TOLD = "('b' has given it up|it has lost 'a'): it broke the protocol:"


def has_left(node: Node) -> bool:
    return node.peers.stopping.is_set() and node._loop._stopped.is_set()


def assert_lost_alone(c: Any, leaf: Any, why: str) -> None:
    with pytest.raises(WorkerLost, match=why):
        leaf.fetch()
    assert c.put("c", np.ones(3)).fetch().tolist() == [1.0, 1.0, 1.0]
    assert c.info()["b"]["lost"] and not c.info()["c"]["lost"]


@pytest.mark.parametrize("by", ["a", "b"])
def test_who_is_given_up_is_told_and_leaves_the_session(
    by: str, caplog: pytest.LogCaptureFixture
) -> None:
    with cluster() as c:
        c.nodes[by].lost("c", "it was silent")
        soon(lambda: has_left(c.nodes["c"]))
        said = "worker 'c' leaves the session: '[ab]' has given it up: it was silent"
        (line,) = [one for one in caplog.messages if one.startswith("worker 'c'")]
        assert line in (said.replace("[ab]", one) for one in "ab")
        soon(lambda: set(c.info()) == {"a", "b", "c"} and c.info()["c"]["lost"])
        assert not c.info()["b"]["lost"] and not has_left(c.nodes["b"])


def test_what_a_lost_process_printed_last_is_told_to_main_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    why = "it was killed\nthe end of b.log:\n    one\n    two"
    with cluster() as c:
        c.nodes["a"].lost("b", why)
        soon(lambda: "b" in c.nodes["c"].peers.losses)
        assert c.nodes["c"].peers.losses["b"] == "it was killed"
        assert c.nodes["a"].peers.losses["b"] == why
        told = [one for one in caplog.messages if "worker 'b' is lost" in one]
        assert sorted(told) == [
            f"a: worker 'b' is lost: {why}",
            "c: worker 'b' is lost: it was killed",
        ]


def test_who_loses_main_as_it_leaves_has_left_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with cluster() as c:
        main = c.nodes["a"]
        with main._loop:
            main.peers.connections["b"].lose({"bye": LEFT})  # c is still to hear of it.
        gone = c.nodes["c"].peers.losses
        soon(lambda: "b" in gone)
        assert gone["b"] == LEFT
        assert caplog.messages == []  # Warnings are what a worker's own log shows.


def cut_and_refused(nodes: Breaking, one: str, other: str) -> None:
    """Their connection ends, and the one that dials is told that it was given up."""

    def refuse(near: Node, peer: str, received: int) -> tuple[object, int]:
        if (near.name, peer) != (one, other):
            return dial(near, peer, received)
        raise JoinError(f"{other!r} has given {one!r} up", given_up=True)

    dial = nodes._dial
    nodes._dial = refuse  # type: ignore[method-assign]
    stream = nodes.nodes[one].peers.connections[other].stream
    stream.end()  # type: ignore[union-attr]


def test_who_dials_and_was_given_up_leaves_the_session_at_once() -> None:
    with breaking() as nodes:
        cut_and_refused(nodes, "b", "c")
        soon(lambda: has_left(nodes.nodes["b"]))
        assert nodes.nodes["b"].peers.losses == {}


def test_main_that_was_given_up_by_a_worker_loses_that_worker() -> None:
    with breaking() as nodes:
        cut_and_refused(nodes, "a", "c")
        main = nodes.nodes["a"]
        soon(lambda: "c" in main.peers.losses)
        assert main.peers.losses["c"] == "'c' has given it up: 'c' has given 'a' up"
        assert not has_left(main)
        assert not nodes.cluster.info()["b"]["lost"]


def test_who_sends_more_than_is_taken_is_told_how_much_that_is() -> None:
    with cluster() as c:
        c.nodes["b"].peers.connections["a"].reader.assembler._value_bytes_max = 1_000
        leaf = c.put("b", np.zeros(1_000))
        assert_lost_alone(
            c, leaf, f"{TOLD} a received value has 8000 bytes; expected at most "
        )


def test_who_acknowledges_more_than_it_was_sent_is_lost() -> None:
    with cluster() as c:
        c.put("b", np.zeros(3))
        c.driver.settle()
        c.nodes["b"].peers.connections["a"].order.handled += 5
        why = "it broke the protocol: 'b' acknowledged 6 messages, but only 1 are"
        c.put("b", np.zeros(3))
        soon(lambda: "b" in c.driver.peers.losses)
        assert c.driver.peers.losses["b"].startswith(why)
        assert not c.info()["c"]["lost"]


@pytest.mark.parametrize("silent", [0.4, 0.6])
def test_a_worker_that_main_does_not_reach_either_leaves_and_gives_nobody_up(
    silent: float,
) -> None:
    with cluster() as c:
        b = c.nodes["b"]
        with b._loop:
            silent_s = silent * b._session.settings.deadline_s
            b.peers.connections["a"].heard_ns = clock_ns() - round(silent_s * 1e9)
            b.peers.failed(b.peers.connections["c"], "it was silent")
        left, stays = ("b", "c") if silent > 0.5 else ("c", "b")
        soon(lambda: c.info()[left]["lost"])
        soon(lambda: has_left(c.nodes[left]))
        assert not has_left(c.nodes[stays]) and not c.info()[stays]["lost"]


def test_a_worker_without_memory_for_a_value_leaves_alone() -> None:
    class NoneLeft:
        def aligned(self, nbytes: int) -> memoryview:
            raise MemoryError(f"{nbytes} bytes")

    with cluster() as c:
        reader = c.nodes["b"].peers.connections["a"].reader
        reader.assembler._buffers = NoneLeft()
        leaf = c.put("b", np.zeros(100_000))
        why = "'b'.*it has no memory for a received value: 800000 bytes"
        assert_lost_alone(c, leaf, why)
