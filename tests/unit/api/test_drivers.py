"""Clusters of real processes, by the public face."""

import asyncio
import gc
import inspect
import os
import re
import signal
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdag
from jdag.api import drivers
from jdag.engine.names import TEXT_MAX
from jdag.errors import JdagError, JoinError, RemoteError, ScenarioError, WorkerLost
from jdag.processes.launch import launch as launch_module
from jdag.processes.launch.main_session import Session
from tests.tools.error_texts import fails_with
from tests.tools.rpc_cases import free_address
from tests.tools.rpc_workers import Workers, kept
from tests.unit.processes.test_node import (
    W,
    X,
    gradient,
    hidden,
    loss,
    simulated,
    total,
)

PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"


def speaks(w: Any) -> Any:
    jax.debug.print("here is c")
    return 2.0 * w


@pytest.fixture
def workers() -> Workers:
    return kept()


def test_gradients_over_processes_have_the_bits_of_the_simulated_run(
    workers: Workers,
) -> None:
    with workers.connect() as cluster:
        found = gradient(cluster)
    np.testing.assert_allclose(found, jax.grad(loss)(W), rtol=1e-5)
    assert np.asarray(found).tobytes() == np.asarray(simulated()).tobytes()


def test_workers_serve_one_cluster_after_another_and_keep_nothing(
    workers: Workers,
) -> None:
    for _ in range(3):
        with workers.connect() as cluster:
            cluster.put("b", W)
            with cluster.context() as ctx:
                ctx.call("c", total, ctx.call("b", hidden, W, X)).fetch()
            assert cluster.info()["b"]["values_held"] == 1
        with workers.connect() as cluster:
            assert [held["values_held"] for held in cluster.info().values()] == [0] * 4


@jdag.program
def habits(ctx: Any) -> Any:
    config: Any = jax.config
    return gc.get_freeze_count(), config.values["jax_cpu_enable_async_dispatch"]


@jdag.program
def cries(ctx: Any, count: int) -> Any:
    raise ValueError("begins" + "x" * count + "ends")


def test_what_says_more_than_a_message_holds_says_its_ends_and_nobody_is_lost(
    workers: Workers,
) -> None:
    count = TEXT_MAX
    with workers.connect() as cluster, cluster.context() as ctx:
        with pytest.raises(RemoteError) as caught:
            ctx.call("b", cries, count)
        assert ctx.call("b", jnp.sum, jnp.ones(3)).fetch() == 3
    said = str(caught.value)
    assert "cries failed on 'b', called at test_drivers.py:" in said
    assert re.search(r"beginsx+\.\.\. 268,\d+,\d+ characters are left out here", said)
    assert said.endswith("xends")
    assert 'raise ValueError("begins"' in said
    assert len(said) < 1 << 18


def interrupts(*_: Any) -> None:
    raise KeyboardInterrupt


@jdag.program
def interrupted(ctx: Any, x: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("driver", ["virtual time", "processes"])
def test_an_interrupt_on_a_worker_is_one_in_the_caller_and_the_cluster_goes_on(
    workers: Workers, driver: str
) -> None:
    if driver == "processes":
        made = workers.connect()
    else:
        made = jdag.simulate(workers.names, seed=0)
    with made as cluster:
        for worker in workers.names[:2]:
            with pytest.raises(KeyboardInterrupt), cluster.context() as ctx:
                ctx.call("c", jnp.sum, ctx.call(worker, interrupted, W))
            with pytest.raises(KeyboardInterrupt), cluster.context() as ctx:
                h = ctx.call(worker, jnp.sin, cluster.put("b", W))
                ctx.on_cotangent(h, interrupts)
                ctx.backward(ctx.call("c", total, h))
        cluster.driver.settle()
        held = [
            (one["live_contexts"], one["live_passes"])
            for one in cluster.info().values()
        ]
        assert held == [(0, 0)] * 4
        np.testing.assert_allclose(gradient(cluster), jax.grad(loss)(W), rtol=1e-5)


def test_workers_collect_no_imports_and_compute_on_the_thread_that_waits(
    workers: Workers,
) -> None:
    with workers.connect() as cluster, cluster.context() as ctx:
        assert habits(ctx)[1] is True  # Main's process is its user's.
        for name in workers.names[1:]:
            frozen, is_elsewhere = ctx.call(name, habits)
            assert frozen > 10_000
            assert is_elsewhere is False


@jdag.program
def deeper(ctx: Any, depth: int) -> Any:
    there = "b" if ctx.here == "c" else "c"
    return ctx.call(there, deeper, depth - 1) if depth > 1 else ctx.here


@pytest.mark.parametrize("late_s", [1.0, pytest.param(0.0, marks=pytest.mark.second)])
def test_launched_workers_bound_calls_and_one_that_is_killed_is_lost_with_its_lines(
    late_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wait(child: launch_module._Child) -> None:
        await ended(child)
        await asyncio.sleep(late_s)

    # Its sockets are closed before its process has ended, and that may take a while.
    ended = launch_module._Child.wait
    monkeypatch.setattr(launch_module._Child, "wait", wait)
    with jdag.launch(["a", "b", "c"], allow=("tests",), nesting_max=4) as cluster:
        with cluster.context() as ctx:
            assert ctx.call("b", deeper, 4) == "c"
        bound = "deeper on 'c' calls .*deeper on 'b', at .* nesting_max = 4, a setting"
        with pytest.raises(JdagError, match=bound), cluster.context() as ctx:
            ctx.call("b", deeper, 5)
        w = cluster.put("b", W)
        with cluster.context() as ctx:
            ctx.call("c", speaks, w).fetch()
        os.kill(cluster.driver.launch.pids["c"], signal.SIGKILL)
        said = (
            r"^(.|\n)*worker 'c' is lost.*: it was killed by SIGKILL \(process \d+\)\n"
        )
        with pytest.raises(WorkerLost, match=said) as caught, cluster.context() as ctx:
            ctx.call("c", hidden, w, X).fetch()
        log = cluster.driver.launch.log_of("c")
        assert f"\nthe end of {log}:\n    here is c" in str(caught.value)
        with cluster.context() as ctx:
            out = ctx.call("a", total, ctx.call("b", hidden, w, X))
            ctx.backward(out)
            assert ctx.gradient(w).fetch().shape == W.shape
        pids = tuple(cluster.driver.launch.pids.values())
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"workers": []}, r"workers = \[\]: expected a list of 1 to 65,536 different"),
        ({"workers": ["a", "b#1"]}, "b#1"),
        ({"workers": None}, "workers = None"),
        ({"workers": ["a", "b"], "allow": "mine"}, "allow = 'mine': .*\\[\"mymodels"),
        ({"workers": ["a", "b"], "deadline_s": "9"}, "deadline_s = '9': .* seconds"),
        ({"workers": ["a", "b"], "ready_s": -1}, "ready_s = -1: .* seconds"),
        ({"workers": ["a", "b"], "env": {"N": 1}}, r"env\.N = 1: .*names to strings"),
        ({"workers": ["a", "b"], "logs": 5}, "logs = 5: expected .* writable folder"),
        (
            {"workers": ["a", "b"], "logs": "x\0y"},
            r"x00y': .* writable folder",
        ),
        ({"workers": ["a", "b"], "journal": ""}, "journal = '': .* of a folder"),
        ({"workers": ["a", "b"], "device": 3}, "device = 3: expected cpu, gpu, or"),
        ({"workers": ["a", "b"], "value_bytes_max": True}, "max = True: .*an integer"),
    ],
)
def test_what_launch_cannot_use_is_refused_in_a_line(
    arguments: dict[str, Any], said: str
) -> None:
    names = arguments.pop("workers")
    with pytest.raises(ScenarioError, match=said):
        jdag.launch(names, **arguments)


def test_a_device_that_a_worker_has_not_is_named() -> None:
    said = "worker 'b' did not start: worker 'b' has no device 'gpu:99'"
    with pytest.raises(JoinError, match=said):
        jdag.launch(["a", "b"], device="gpu:99")


@pytest.mark.parametrize("path", [3, None, b"cluster.toml", "a\0b", ["a"]])
def test_what_is_no_path_of_a_file_cannot_be_connected_to(path: Any) -> None:
    with pytest.raises(ScenarioError) as caught:
        jdag.connect(path, name="a")
    said = f"path = {path!r}: expected the path of the TOML file of a cluster, such"
    assert str(caught.value).startswith(said)


def test_a_setting_that_simulate_has_not_is_refused_with_those_it_has() -> None:
    said = "simulate has no setting faluts: expected one of .*did you mean faults"
    with pytest.raises(ScenarioError, match=said):
        jdag.simulate(["a"], seed=0, faluts=[])  # type: ignore[call-arg]
    with fails_with(ScenarioError, "api.carrier_was_removed"):
        jdag.launch(["a"], carrier="grpc")  # type: ignore[call-arg]
    with fails_with(TypeError, "api.simulate_missing_argument_seed"):
        jdag.simulate(["a"])  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("device", "before", "after"),
    [
        ("gpu:0", None, "false"),
        (None, None, "false"),
        ("cpu", None, None),
        ("gpu:0", "true", "true"),
    ],
)
def test_the_caller_shares_the_gpu_of_workers_on_its_host_unless_told_otherwise(
    device: str | None,
    before: str | None,
    after: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def starts(*_: Any, **__: Any) -> None:
        raise JoinError("all is set by now")

    monkeypatch.setattr(drivers, "Launch", starts)
    monkeypatch.setattr(drivers, "Session", starts)
    file, on = tmp_path / "cluster.toml", ["cpu", device, "cpu"]
    tables = [
        f'[workers.{name}]\ncontrol = "127.0.0.1:{number}"\n'
        + (f'device = "{of}"\n' if of else "")
        for name, number, of in zip("abc", (7000, 7001, 7002), on, strict=True)
    ]
    file.write_text("".join(tables))
    for begin, here, found in (
        (partial(jdag.launch, ["a", "b"], device=device), True, after),
        (partial(jdag.connect, file, name="a"), True, after),
        (partial(jdag.connect, file, name="a"), False, before),
    ):
        monkeypatch.setattr(drivers, "is_here", {"127.0.0.1": here}.__getitem__)
        monkeypatch.setenv(PREALLOCATE, "")
        monkeypatch.delenv(PREALLOCATE)
        if before is not None:
            monkeypatch.setenv(PREALLOCATE, before)
        with fails_with(JoinError, "api.all_is_set_by_now"):
            begin()
        assert os.environ.get(PREALLOCATE) == found


@pytest.mark.second
def test_a_module_that_a_worker_is_to_allow_and_has_not_is_named() -> None:
    said = "worker 'b' did not start: allow contains nowhere.x: expected modules"
    with pytest.raises(JoinError, match=said):
        jdag.launch(["a", "b"], allow=["tests", "nowhere.x"])


def test_who_connects_before_a_worker_runs_is_told_how_to_start_it(
    tmp_path: Path,
) -> None:
    file = tmp_path / "cluster.toml"
    addresses = {name: free_address() for name in ("a", "b")}
    tables = [f'[workers.{key}]\ncontrol = "{one}"' for key, one in addresses.items()]
    file.write_text("\n".join(["ready_s = 0.2", *tables]))
    said = (
        "worker 'b' is not ready within ready_s=0.2: cannot reach worker 'b' at "
        f"{addresses['b']}: .*jdag up {file}"
    )
    with pytest.raises(JoinError, match=said):
        jdag.connect(file, name="a")
    with fails_with(ScenarioError, "api.name_none_allowed_is_one"):
        jdag.connect(file, name=cast("str", None))


def test_who_connects_while_workers_start_waits_for_them(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = ("b", "c", "d")
    find, failed = Session._check_reachable, {name: 0 for name in late}

    def not_yet(session: Session, peer: str) -> None:
        failed[peer] += 1
        if failed[peer] < 3:
            raise JoinError(f"{peer} is not there", reached=False, absent=True)
        find(session, peer)

    monkeypatch.setattr(Session, "_check_reachable", not_yet)
    with workers.connect() as cluster:
        refs = [cluster.put(name, jnp.arange(3.0)) for name in late]
        assert sum(float(jnp.sum(ref.fetch())) for ref in refs) == 9.0
    assert failed == dict.fromkeys(late, 3)


def test_a_worker_that_refuses_is_not_waited_for_nor_are_the_others(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(session: Session, peer: str) -> None:
        if peer == "c":
            raise JoinError("the token is wrong")
        raise JoinError("b is not there", reached=False, absent=True)

    text = workers.path.read_text()
    monkeypatch.setattr(Session, "_check_reachable", refuses)
    workers.path.write_text(f"ready_s = 3600\n{text}")
    try:
        with fails_with(JoinError, "api.the_token_is_wrong"):
            workers.connect()
    finally:
        workers.path.write_text(text)


class Trainer:
    def train(self, cluster: Any) -> int:
        return len(cluster.workers)


def test_a_method_of_an_object_is_refused_since_its_object_would_stay_here(
    workers: Workers,
) -> None:
    with (
        workers.connect() as cluster,
        fails_with(JdagError, "api.trainer_train_cannot_go_to"),
    ):
        cluster.run({"b": Trainer().train})


@pytest.mark.parametrize("make", [jdag.launch, jdag.connect, jdag.simulate])
def test_each_option_is_documented(make: Any):
    text = inspect.getdoc(make) or ""
    for name in inspect.signature(make).parameters:
        assert f"\n    {name}: " in text, name
