"""Steps of plans on nodes: when frames leave, and by which streams."""

import socket
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdag
from jdag.processes.net.tls import Tls
from tests.tools import rpc_nodes
from tests.tools.connection_cases import secured
from tests.tools.plan_cases import batch, bits, network, put
from tests.tools.rpc_nodes import cluster


def both(ctx: Any, x: Any) -> Any:
    return ctx.call("a", jnp.sin, x), ctx.call("b", jnp.cos, x)


def test_frames_leave_before_the_rows_that_are_ready_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jdag.processes.jobs.SHORT_NS", 1 << 60)
    with cluster(("a", "b")) as c:
        node, unsent = c.nodes["a"], []
        step, run = jdag.compile(both, c), node._jobs._computed

        def look_and_run(*args: Any) -> Any:
            unsent.append(node.peers.connections["b"].waiting_bytes)
            return run(*args)

        for _ in range(4):  # The last of them runs its row without a job.
            step(np.ones(3))
        node._jobs._computed = look_and_run
        step(np.ones(3))
    assert unsent[0] == 0


def trained(c: Any) -> list[bytes]:
    params = put(c, "bcab")
    optimizer = jdag.Optimizer(optax.adam(0.1), params)
    step = jdag.compile(network, c, optimizer, exact=True)
    losses = [step(params, *batch(number)) for number in range(5)]
    return bits([losses, params, optimizer.states])


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        return near, server.accept()[0]


@pytest.mark.parametrize("uses_tls", [False, True])
def test_steps_over_tcp_and_tls_have_the_bits_of_virtual_time(
    uses_tls: bool, tls: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def joined(one: Any, other: Any) -> Any:
        ends = joined_by(one, other)
        streams: Any = [end[0] for end in ends]
        if uses_tls:
            streams = secured(tls, *streams)
        return [(stream, *end[1:]) for stream, end in zip(streams, ends, strict=True)]

    joined_by = rpc_nodes.joined_by
    monkeypatch.setattr(rpc_nodes, "socket", SimpleNamespace(socketpair=tcp_pair))
    monkeypatch.setattr(rpc_nodes, "joined_by", joined)
    monkeypatch.setattr("jdag.processes.jobs.SHORT_NS", 1 << 60)
    with jdag.simulate(["a", "b", "c"], seed=0) as c:
        wanted = trained(c)
    with cluster() as c:
        assert trained(c) == wanted
