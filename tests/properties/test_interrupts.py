"""Ctrl-C at any moment: engines are never left half-way, and the cluster goes on."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import ROOT
from tests.tools.face_cases import squares
from tests.tools.rpc_nodes import cluster
from tests.tools.stream_cases import soon

LONG_S = 60.0


@pytest.mark.second
@pytest.mark.parametrize(("what", "count"), [("whole", 100), ("steps", 200)])
def test_after_many_interrupts_the_cluster_is_as_it_was(what: str, count: int) -> None:
    run = f"from tests.tools.interrupt_cases import main; main(0, {count}, {what!r})"
    ran = subprocess.run(
        [sys.executable, "-c", run],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.endswith(f"interrupted {count}\n"), (ran.stdout, ran.stderr)


WAITS, MAY_GO_ON = threading.Event(), threading.Event()
W = jnp.linspace(0.5, 2.0, 7)


def _wait() -> None:
    WAITS.set()
    assert MAY_GO_ON.wait(LONG_S)


def waits(x: Any) -> Any:
    jax.debug.callback(_wait)
    return 1.0 * x


@jax.custom_vjp
def backward_waits(x: Any) -> Any:
    return x


backward_waits.defvjp(lambda x: (x, None), lambda _, given: (waits(given),))


@pytest.fixture
def nodes() -> Iterator[Any]:
    """Nodes of this process, whose main holds signals back; nothing waits at first."""
    WAITS.clear()
    MAY_GO_ON.clear()
    with cluster(deadline_s=2 * LONG_S) as made:  # Some say nothing for a while.
        undo = made.nodes["a"].guard_signals()
        try:
            yield made
        finally:
            MAY_GO_ON.set()
            undo()


def press(*whens: Callable[[], object]) -> threading.Thread:
    def run() -> None:
        for when in whens:
            when()
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def goes_on(made: Any, leaf: Any) -> None:
    with made.context() as ctx:
        ctx.backward(ctx.call("c", squares, ctx.call("b", jnp.sin, leaf)))
        found = ctx.gradient(leaf).fetch()
    np.testing.assert_allclose(found, 2 * np.sin(W) * np.cos(W))
    made.driver.settle()
    waiters = made.nodes["a"]._waiters
    assert (waiters.events, waiters.results, waiters.alarms) == ({}, {}, {})
    held = made.info().values()
    assert [(one["live_contexts"], one["live_passes"]) for one in held] == [(0, 0)] * 3


def test_ctrl_c_during_a_pass_ends_it_and_the_cluster_goes_on(nodes: Any) -> None:
    leaf = nodes.put("b", W)
    thread = press(WAITS.wait)
    with pytest.raises(KeyboardInterrupt), nodes.context() as ctx:
        h = ctx.call("b", backward_waits, leaf)
        try:
            ctx.backward(ctx.call("c", squares, h, h, h))
        finally:  # Leaving waits until b is quiet.
            assert not MAY_GO_ON.is_set()
            MAY_GO_ON.set()
    thread.join()
    goes_on(nodes, leaf)


def test_a_second_ctrl_c_ends_the_leaving_that_the_first_began(nodes: Any) -> None:
    leaf = nodes.put("b", W)
    loop, left = nodes.nodes["c"]._loop, threading.Event()
    held = threading.Event()

    def hold() -> None:  # c answers nothing until all is over.
        with loop:
            held.set()
            left.wait(LONG_S)

    holder = threading.Thread(target=hold, daemon=True)

    def waits_for(what: str) -> None:
        asked = nodes.nodes["a"]._waiters.events
        soon(lambda: any(what in one for one in tuple(asked.values())))

    with pytest.raises(KeyboardInterrupt) as caught, nodes.context() as ctx:
        h = ctx.call("c", jnp.cos, ctx.call("b", backward_waits, leaf))
        h.fetch()
        holder.start()
        assert held.wait(LONG_S)
        thread = press(*[partial(waits_for, one) for one in ("Differentiated", "Left")])
        ctx.backward(ctx.call("b", squares, h, h, h))
    assert isinstance(caught.value.__context__, KeyboardInterrupt)
    thread.join()
    left.set()
    holder.join()
    MAY_GO_ON.set()
    goes_on(nodes, leaf)


def test_while_a_worker_computes_for_long_its_loop_is_free(nodes: Any) -> None:
    large = np.arange(1_000_000.0)
    small, much = nodes.put("b", W), nodes.put("b", large)
    with nodes.context() as ctx:
        slow = ctx.call("b", waits, small)
        assert WAITS.wait(LONG_S)
        np.testing.assert_array_equal(small.fetch(), W)
        np.testing.assert_array_equal(much.fetch(), large)
        another = nodes.put("b", large + 1.0)
        np.testing.assert_array_equal(another.fetch(), large + 1.0)
        moved = ctx.move("c", much)  # From b to c, while b computes.
        assert float(ctx.call("c", jnp.sum, moved).fetch()) == float(large.sum())
        assert not nodes.info()["b"]["lost"] and not MAY_GO_ON.is_set()
        MAY_GO_ON.set()
        np.testing.assert_array_equal(slow.fetch(), W)
