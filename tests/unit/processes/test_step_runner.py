"""Steps of plans on a node: when frames leave."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jdag
from tests.tools.rpc_nodes import cluster


def both(ctx: Any, x: Any) -> Any:
    return ctx.call("a", jnp.sin, x), ctx.call("b", jnp.cos, x)


def test_frames_leave_before_the_rows_that_are_ready_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jdag.processes.jobs.SHORT_NS", 1 << 60)
    with cluster(("a", "b")) as c:
        node, unsent = c.nodes["a"], []
        step, run = jdag.compile(both, c), node._jobs.run

        def look_and_run() -> None:
            unsent.append(node.peers.connections["b"].waiting_bytes)
            run()

        for _ in range(4):  # The last of them runs its row without a job.
            step(np.ones(3))
        node._jobs.run = look_and_run
        step(np.ones(3))
    assert unsent[0] == 0
