"""Nodes in one process, over socket pairs: the driver without processes."""

import functools
import json
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdag
from jdag.api.cluster import Cluster
from jdag.context import program_frame
from jdag.errors import JdagError, RemoteError, WorkerLost
from jdag.processes import node
from jdag.processes.functions import encoder as function_encoder
from jdag.processes.node import ROUNDS_MAX
from jdag.wire.trees import DEPTH_MAX
from tests.tools.error_texts import fails_with
from tests.tools.rpc_nodes import cluster, connect, made, whereabouts

W = jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)
X = jnp.linspace(0.0, 2.0, 8).reshape(2, 4)
DEEP = json.loads("[" * DEPTH_MAX + "0" + "]" * DEPTH_MAX)


def hidden(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


def total(*parts: Any) -> Any:
    return sum(jnp.sum(part * part) for part in parts)


def loss(w: Any) -> Any:
    return total(*[hidden(w * k, X) for k in (1.0, 2.0, 3.0)])


def scaled(w: Any, k: float) -> Any:
    return w * k


@jdag.program
def three_hops(ctx: Any, w: Any) -> Any:
    parts = [ctx.call("c", scaled, w, k) for k in (1.0, 2.0, 3.0)]
    return [ctx.call("b", hidden, part, X) for part in parts]


def gradient(c: Any) -> Any:
    w = c.put("b", W)
    with c.context() as ctx:
        out = ctx.call("a", total, *ctx.call("b", three_hops, w))
        ctx.backward(out)
        found = ctx.gradient(w).fetch()
    c.drop(w)
    return found


def simulated() -> Any:
    with jdag.simulate(["a", "b", "c"], seed=0) as c:
        return gradient(c)


def test_gradients_are_those_of_jax_and_have_the_bits_of_the_simulated_run() -> None:
    with cluster() as c:
        found = gradient(c)
    np.testing.assert_allclose(found, jax.grad(loss)(W), rtol=1e-5)
    assert np.asarray(found).tobytes() == np.asarray(simulated()).tobytes()


def test_one_that_joins_anew_is_no_peer_of_its_own() -> None:
    """Also where it has dialled before its name was said; else it would lose itself."""
    now = {"a": 0, "b": 0, "c": 1}
    with cluster() as c:
        others = [c.nodes["a"], c.nodes["b"]]
        c.nodes["c"].close()
        _, again = made("c", tuple(now), ("tests",), incarnations=dict(now))
        c.nodes["c"] = again
        for node in others:
            node._session.members.attach("c", 1, whereabouts(1, ("tests",)))
            again.joined(node.name, 0)
            connect(node, again)
            node.joined("c", 1)
        again.begin()
        with c.context() as ctx:
            assert ctx.call("c", hidden, W, X).fetch().shape == (2, 3)
        assert list(again.peers.connections) == ["a", "b"]


def test_a_worker_to_which_main_never_connects_leaves_within_the_deadline() -> None:
    _, node = made("b", ("a", "b"), deadline_s=0.2)
    node.joined("a", 0)
    node.run(spin=False)
    assert "gave no sign of life" in node.peers.losses["a"]


def test_another_thread_may_not_use_the_cluster() -> None:
    refused = pytest.raises(JdagError, match="another thread")
    with cluster() as c, ThreadPoolExecutor(1) as threads, refused:
        threads.submit(c.put, "b", W).result()


def test_a_closed_cluster_says_so_and_what_it_held_stays_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node, "LAST_INFO_S", 60.0)  # However busy this is.
    with cluster() as c:
        gradient(c)
    assert c.info()["b"]["messages_sent"] > 0
    with fails_with(JdagError, "processes.closed"):
        c.put("b", W)


def says_exit(cotangent: Any) -> None:
    raise SystemExit("the hook has had enough")


def test_a_hook_that_exits_fails_the_pass_and_hangs_nobody() -> None:
    with cluster() as c:
        w = c.put("b", W)
        for _ in range(2):
            with fails_with(RemoteError, "processes.had_enough"), c.context() as ctx:
                ctx.on_cotangent(w, says_exit)
                ctx.backward(ctx.call("b", total, w), timeout_s=60)
        with c.context() as ctx:
            ctx.backward(ctx.call("b", total, w))


@jdag.program
def size(ctx: Any, array: Any) -> int:
    return int(array.size)


def test_large_arrays_may_be_arguments_of_programs_and_larger_ones_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with cluster(("a", "b")) as c, c.context() as ctx:
        assert ctx.call("b", size, np.zeros(10_000_000)) == 10_000_000
        monkeypatch.setattr("jdag.processes.functions.encoder.DATA_BYTES_MAX", 1_000)
        with fails_with(JdagError, "processes.size_is_given_too_many_bytes"):
            ctx.call("b", size, np.zeros(1_000))


@jdag.program
def nested(ctx: Any, w: Any, given: Any, depth: int) -> Any:
    ctx.call("c", scaled, w, 2.0)  # It returns when this is acknowledged.
    for _ in range(depth):
        given = [given]
    return given


@jdag.program
def without_gradient(ctx: Any, w: Any) -> Any:
    return np.zeros(3, jax.dtypes.float0)


@jdag.program
def leaking(ctx: Any, w: Any, hide: bool) -> Any:
    leaked: list[Any] = []

    @jax.jit
    def leaks(x: Any) -> Any:
        leaked.append(x)
        return x

    leaks(1.0)
    return functools.partial(scaled, leaked[0]) if hide else {"a": [2.0, *leaked]}


@jdag.program
def lookalike(ctx: Any, w: Any) -> Any:
    return jax.ShapeDtypeStruct((3,), "float32")


def test_what_cannot_travel_or_only_not_so_deep_fails_its_call_alone() -> None:
    with cluster() as c:
        w = c.put("b", W)
        for given, depth in ((DEEP, 0), (0, DEPTH_MAX)):
            said = f"{__name__}:nested (on 'b' is given|returned).*: .* nested too deep"
            with c.context() as ctx, pytest.raises(JdagError, match=said):
                ctx.call("c", scaled, w, 2.0)
                ctx.call("b", nested, w, given, depth)
        said = f"{__name__}:without_gradient .* cannot be sent: dtype .*float0"
        with c.context() as ctx, pytest.raises(JdagError, match=said):
            ctx.call("b", without_gradient, w)
        for call, said in (
            (
                (lookalike, w),
                "lookalike returned cannot be sent: Shape.* is abstract",
            ),
            ((leaking, w, True), "leaking returned cannot be sent: .* is abstract"),
            ((leaking, w, False), r"leaking returned a tracer .*at \['a'\]\[1\]"),
        ):
            with c.context() as ctx, pytest.raises(JdagError, match=said):
                ctx.call("b", *call)
        with c.context() as ctx:
            assert ctx.call("b", nested, w, 0, 3) == [[[0]]]


def test_what_is_found_not_to_travel_only_when_it_is_sent_fails_its_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (node, function_encoder):
        monkeypatch.setattr(module, "check_size", lambda *_: None)
    monkeypatch.setattr(program_frame, "check_travels", lambda *_: None)
    with cluster() as c:
        w = c.put("b", W)
        for given, depth, how in ((DEEP, 0, "arguments"), (0, DEPTH_MAX, "result")):
            why = "the data are nested too deep to be sent: expected at most 100 levels"
            said = f"the {how} of a program cannot be sent: {why}"
            with c.context() as ctx, pytest.raises(JdagError, match=said):
                ctx.call("c", scaled, w, 2.0)
                ctx.call("b", nested, w, given, depth)
        with c.context() as ctx:
            assert ctx.call("b", nested, w, 0, 3) == [[[0]]]
        assert not any(one.peers.losses for one in c.nodes.values())


def test_a_counted_message_that_cannot_be_sent_loses_its_receiver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("no way")

    with cluster(("a", "b")) as c, c.context() as ctx:
        peer = c.nodes["a"].peers.connections["b"]
        monkeypatch.setattr(peer, "send", refuse)
        with pytest.raises(ValueError, match="no way"):
            ctx.call("b", jnp.sin, 1.0)
        with fails_with(WorkerLost, "processes.a_call_cannot_be_sent"):
            ctx.call("b", jnp.sin, 1.0).fetch()


def test_who_ends_by_an_error_of_its_own_tells_the_others_which() -> None:
    def fails() -> None:
        raise ZeroDivisionError("of this:\n  no such")

    home, a = made("a", ("a", "b"))
    _, b = made("b", ("a", "b"))
    a.joined("b", 0)
    b.joined("a", 0)
    connect(a, b)
    a.begin()
    b._loop.post(fails)
    with pytest.raises(ZeroDivisionError):
        b.run()
    b.close()
    said = "it ended by an error of its own: ZeroDivisionError: of this: no such$"
    tells = pytest.raises(WorkerLost, match=said)
    with Cluster(home, a.port) as c, tells, c.context() as ctx:
        ctx.call("b", scaled, W, 2.0).fetch()
    a.close()


def test_who_puts_more_than_may_wait_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 16 << 20
    monkeypatch.setattr("jdag.processes.peers.BULK_BYTES_MAX", most)
    with cluster(("a", "b")) as c:
        for number in range(12):
            c.put("b", np.full(1 << 20, float(number)))
            waiting = c.driver.peers.connections["b"].bulk.nbytes
            assert waiting <= most, number
        c.driver.settle()
        assert c.info()["b"]["values_held"] == 12


def test_an_acknowledgement_leaves_with_what_the_jobs_that_are_due_make(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jdag.processes.jobs.SHORT_NS", 1 << 60)  # Even if busy.
    did: list[str] = []
    with cluster(("a", "b")) as c, c.context() as ctx:
        for _ in range(4):  # Compiled, and then known to be short.
            ctx.call("b", jnp.sin, np.ones(3)).fetch()
        b = c.nodes["b"]
        peer, functions = b.peers.connections["a"], b._functions
        for name, where in (("run", b._jobs), ("flush", peer), ("bind", functions)):
            noted = partial(_noted, did, name, getattr(where, name))
            monkeypatch.setattr(where, name, noted)
        ctx.call("b", jnp.sin, np.ones(3)).fetch()
        # Before the call came, signs of life may have left.
        assert did[did.index("bind Call") :][1:3] == ["run", "flush"]


def test_however_many_jobs_are_due_what_is_said_leaves_between_them() -> None:
    did: list[str] = []
    run = partial(did.append, "run")
    unflushed: deque[Any] = deque()
    bulk = SimpleNamespace(nbytes=0)
    peer = SimpleNamespace(waiting_bytes=0, bulk=bulk)

    def flush() -> None:
        did.append("flush")
        unflushed.append(peer)

    peer.flush = flush
    unflushed.append(peer)
    with cluster(("a", "b")) as c, pytest.MonkeyPatch.context() as patched:
        b = c.nodes["b"]
        with b._loop:  # Nothing but acknowledgements and signs of life is said.
            patched.setattr(b, "_jobs", SimpleNamespace(due=[...], run=run))
            patched.setattr(b._loop, "unflushed", unflushed)
            b._flush()
            patched.undo()
    assert did == ["run", *["flush", "run"] * (ROUNDS_MAX - 1)]


def _noted(did: list[str], name: str, do: Callable[..., Any], *given: Any) -> Any:
    did.append(" ".join([name, *[type(one).__name__ for one in given[:1]]]))
    return do(*given)


@jdag.program
def many(ctx: Any, w: Any, count: int) -> Any:
    for _ in range(count):
        w = ctx.call(ctx.here, jnp.sin, w)
    return w


def test_the_graph_of_a_large_fragment_can_be_asked_for() -> None:
    with cluster(("a", "b")) as c:
        w = c.put("b", W)
        with c.context() as ctx:
            ctx.call("b", many, w, 1_500)
            assert ctx.graph().counts()["b"]["nodes"] == 1_500
