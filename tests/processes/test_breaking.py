"""Connections that break and nodes that die, at every frame that each node sends."""

import socket
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdag
from jdag.errors import JdagError, WorkerLost
from jdag.processes import jobs, peers
from jdag.processes.net.streams import SocketStream
from tests.tools import plan_cases
from tests.tools.rpc_breaking import CUT, KILL, Breaking, Killed, breaking
from tests.tools.tiers import sized

FRAMES_MAX = 400  # A bound; the program below sends fewer.
STEP = sized(7, 1)  # Between frames at which something happens.
W = jnp.linspace(-1.0, 1.0, 4 * 20_000).reshape(4, 20_000)  # Its elements are chunks.
V = jnp.linspace(0.5, -0.5, 20_000)
X = jnp.linspace(0.0, 2.0, 12).reshape(3, 4)


def hidden(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


def loss_of(v: Any, *parts: Any) -> Any:
    return sum(jnp.sum((part @ v) ** 2) for part in parts)


def scaled(w: Any, k: float) -> Any:
    return w * k


def half(v: Any) -> Any:
    return 0.5 * v


def gathered(momentum: Any, gradient: Any) -> Any:
    return 0.9 * momentum + gradient


def lowered(leaf: Any, momentum: Any) -> Any:
    return leaf - 0.01 * momentum


@jdag.program
def three_parts(ctx: Any, w: Any) -> Any:
    there = "b" if ctx.here == "c" else "c"
    return [
        ctx.call(there, hidden, ctx.call(there, scaled, w, k), X)
        for k in (1.0, 2.0, 3.0)
    ]


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(one).tobytes() for one in tree]


def program(cluster: Any) -> list[bytes]:
    held: list[Any] = []
    try:
        w, v = cluster.put("b", W), cluster.put("c", V)
        held += [w, v]
        momenta = [cluster.make("b", jnp.zeros_like, w), cluster.make("c", half, v)]
        held += momenta
        with cluster.context() as ctx:
            loss = ctx.call("c", loss_of, v, *ctx.call("c", three_parts, w))
            ctx.backward(loss)
            found = jdag.fetch([loss, ctx.gradient(w), ctx.gradient(v)])
            cluster.update(gathered, momenta, ctx.gradient([w, v]))
            cluster.update(lowered, [w, v], momenta)
        return bits([*found, *jdag.fetch([w, v, *momenta])])
    finally:
        for one in held:
            cluster.drop(one)


@patch.multiple(jobs, _RUNS=1, SHORT_NS=1 << 60)
def planned(cluster: Any) -> list[bytes]:
    """Rows are jobs in the first step, and run without jobs in the second."""
    params = plan_cases.put(cluster, "bc")
    held: list[Any] = [params]
    try:
        optimizer = jdag.Optimizer(optax.adam(0.1), params)
        held.append(optimizer.states)
        step = jdag.compile(plan_cases.network, cluster, optimizer, exact=True)
        losses = [step(params, *plan_cases.batch(number)) for number in range(2)]
        return plan_cases.bits([losses, params, optimizer.states])
    finally:
        for one in held:
            cluster.drop(one)


def held(cluster: Any, *but: str) -> dict[str, tuple[int, ...]]:
    cluster.driver.settle()
    return {
        worker: (each["live_contexts"], each["live_passes"], each["values_held"])
        for worker, each in cluster.info().items()
        if worker not in but
    }


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "REDIAL_S", 0.002)


@pytest.fixture(scope="module", params=[program, planned])
def run(request: pytest.FixtureRequest) -> Callable[[Any], list[bytes]]:
    found: Callable[[Any], list[bytes]] = request.param
    return found


@pytest.fixture(scope="module")
def wanted(run: Callable[[Any], list[bytes]]) -> list[bytes]:
    with jdag.simulate(["a", "b", "c"], seed=0) as cluster:
        return run(cluster)


def counts(nodes: Breaking) -> tuple[int, int]:
    connections = [node.peers.connections for node in nodes.nodes.values()]
    every = [peer for peers_of in connections for peer in peers_of.values()]
    heard = sum(peer.reader.assembler.messages for peer in every)
    return sum(peer.sent.messages for peer in every), heard


ANEW = pytest.mark.filterwarnings("ignore:.*was recorded 32 times")


@ANEW
@pytest.mark.parametrize("worker", ["a", "b", "c"])
def test_a_connection_may_break_at_any_frame_and_no_bit_is_another(
    worker: str, run: Any, wanted: list[bytes]
) -> None:
    with breaking() as nodes:
        assert run(nodes.cluster) == wanted
        before = held(nodes.cluster)
        tap = nodes.taps[worker]
        for number in range(1, FRAMES_MAX, STEP):
            tap.plan(number, CUT)
            assert run(nodes.cluster) == wanted, number
            if not tap.tripped:
                tap.plan(0, CUT)
                break
            assert held(nodes.cluster) == before, number
            said, heard = counts(nodes)
            assert said == heard, number
        assert 10 < number < FRAMES_MAX - STEP


@ANEW
@pytest.mark.parametrize("worker", ["b", "c"])
def test_a_node_may_die_at_any_frame_and_nothing_is_left_of_it(
    worker: str, run: Any, wanted: list[bytes]
) -> None:
    with breaking() as nodes:
        cluster = nodes.cluster
        assert run(cluster) == wanted
        before = held(cluster)
        for number in range(1, FRAMES_MAX, STEP):
            tap = nodes.taps[worker]
            tap.plan(number, KILL)
            try:
                found = run(cluster)
                assert found == wanted, number
                if not tap.tripped:
                    tap.plan(0, KILL)
                    break
            except WorkerLost as error:
                assert f"worker '{worker}" in str(error), number
            assert tap.tripped, number
            nodes.wait_until_over(worker)
            nodes.again(worker)
            assert run(cluster) == wanted, number
            assert held(cluster) == before, number
        assert 10 < number < FRAMES_MAX - STEP


@pytest.mark.parametrize("number", range(1, 40, sized(13, 3)))
def test_main_may_die_at_any_frame_and_who_worked_for_it_is_free(
    number: int, run: Any, wanted: list[bytes]
) -> None:
    with breaking() as nodes:
        nodes.taps["a"].plan(number, KILL)
        with pytest.raises((Killed, JdagError)) as ended:
            assert run(nodes.cluster) == wanted
            nodes.taps["a"].plan(1, KILL)
            run(nodes.cluster)
        died = ended.value  # Its loop's thread may be the first to see that it is dead.
        assert isinstance(died if isinstance(died, Killed) else died.__cause__, Killed)
        assert nodes.taps["a"].dead
        for worker in ("b", "c"):  # Told by who watches it, or by the deadline.
            nodes.nodes[worker].lost("a", "it was killed")
            nodes.wait_until_over(worker)
            node = nodes.nodes[worker]
            node.close()
            values = node._host.machine.values
            assert not values.held and not values.bytes_held


def test_what_a_former_incarnation_says_is_not_heard(
    run: Any, wanted: list[bytes]
) -> None:
    """It was only slow: its connection is still there, and it dials again."""
    with breaking() as nodes:
        cluster = nodes.cluster
        assert run(cluster) == wanted
        slow = nodes.nodes["b"]
        for other in ("a", "c"):
            nodes.nodes[other].lost("b", "it was slow")
        nodes.again("b", alive=True)
        assert run(cluster) == wanted
        before = held(cluster)
        ours, theirs = socket.socketpair()
        nodes.nodes["a"].adopt("b", slow.incarnation, SocketStream(ours, "b"), 0)
        assert theirs.recv(1) == b""
        theirs.close()
        assert run(cluster) == wanted
        assert held(cluster) == before
        slow.close()
