"""Workers and runs on a real local Ray of several nodes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import jax.numpy as jnp
import pytest
import ray

import jdag
from jdag.errors import JdagError, JoinError, RecoveryError, ScenarioError
from jdag.lab.campaign import campaign
from jdag.lab.sweep import sweep
from jdag.processes.launch import on_ray
from jdag.processes.launch.on_ray import _end_actor, _Parent, ray_results
from jdag.processes.session.authority import fresh_authority
from tests import ROOT
from tests.tools import stream_cases as waiting
from tests.tools.error_texts import fails_with
from tests.tools.ray_cases import facts, layer
from tests.tools.recovery_cases import Patient, train
from tests.tools.rpc_cases import options_of

ALLOW, RECOVERED = ["tests.tools.ray_cases"], ["tests.tools.recovery_cases"]
WORKERS = ["main", "a", "b"]
PLACES = {"a": {"CPU": 1, "GPU": 1, "left": 1}, "b": {"CPU": 1, "right": 1}}
W = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)

# Processes start late on a busy host, and those that start say nothing for a while.
launch = partial(jdag.launch, on="ray", deadline_s=60.0, ready_s=600.0)
soon = partial(waiting.soon, every_ms=100, most_ms=600_000)


def not_there(path: str) -> bool:
    return not os.path.exists(path)


def facts_of(cluster, worker: str) -> list[int]:
    with cluster.context() as ctx:
        return [int(one) for one in ctx.call(worker, facts)]


def gradients(cluster) -> list[bytes]:
    v, w = cluster.put("a", W), cluster.put("b", W.T)
    with cluster.context() as ctx:
        hidden = ctx.call("a", layer, v, jnp.ones((2, 3)))
        out = ctx.call("b", layer, w, hidden)
        ctx.backward(ctx.call("main", jnp.sum, out))
        return [bytes(ctx.gradient(one).fetch().tobytes()) for one in (v, w)]


# In a process of its own, since Ray forks, which JAX does not survive. It starts no
# more than these tests need, since others run beside them.
NODES = """
import json, sys
from ray.cluster_utils import Cluster
least = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 80 << 20}
head = {**least, "num_gpus": 1, "resources": {"left": 1}, "include_log_monitor": False}
made = Cluster(initialize_head=True, head_node_args={**head, "no_monitor": True})
try:
    made.add_node(**least, resources={"right": 1})
    print(json.dumps([made.address]), flush=True)
    added = {}
    for name, has in map(json.loads, sys.stdin):  # Add a node, or remove it.
        if has:
            added[name] = made.add_node(**least, resources=has)
        else:
            made.remove_node(added.pop(name), allow_graceful=False)
        print(json.dumps(sorted(added)), flush=True)
finally:
    made.shutdown()
"""
# Niceness is 15 by default: workers would starve beside other tests.
RAY = {"RAY_enable_worker_prestart": "0", "RAY_prestart_worker_first_driver": "0"}
RAY["RAY_worker_niceness"] = "0"


class Nodes:
    def __init__(self, made: subprocess.Popen[bytes]) -> None:
        self._made = made

    def __call__(self, name: str, **has: float) -> None:
        """Add a node that has this, or remove it, as if its host had lost power."""
        assert self._made.stdin is not None and self._made.stdout is not None
        self._made.stdin.write(json.dumps([name, has]).encode() + b"\n")
        self._made.stdin.flush()
        assert (name in json.loads(self._made.stdout.readline())) == bool(has)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    # Names of sockets are short: tests have a long path of their own.
    with (
        TemporaryDirectory(prefix="ray", dir="/tmp") as folder,
        subprocess.Popen(
            [sys.executable, "-c", NODES],
            env={**os.environ, **RAY, "PYTHONPATH": str(ROOT), "RAY_TMPDIR": folder},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as made,
    ):
        assert made.stdin is not None and made.stdout is not None
        try:
            address, *_ = json.loads(made.stdout.readline())
            ray.init(address=address, log_to_driver=False, configure_logging=False)
            yield Nodes(made)
        finally:
            ray.shutdown()
            made.stdin.close()


@pytest.mark.second
def test_workers_are_where_ray_places_them_and_have_the_bits_of_a_simulation(nodes):
    with jdag.simulate(WORKERS, seed=0) as cluster:
        expected = gradients(cluster)
    with launch(WORKERS, allow=ALLOW, resources=PLACES) as cluster:
        soon(lambda: not {"left", "right", "GPU"} & {*ray.available_resources()})
        assert gradients(cluster) == expected
        (first, gpu), (second, none) = (facts_of(cluster, name) for name in "ab")
        assert (gpu, none) == (0, -1)
    # Nothing is left, and Ray has its resources again.
    soon(lambda: ray.available_resources().get("GPU") == 1)
    for path in (f"/proc/{first}", f"/proc/{second}"):
        soon(partial(not_there, path))


@pytest.mark.second
def test_a_worker_that_dies_is_started_again_by_ray_and_joins_again(nodes):
    with launch(WORKERS, allow=ALLOW, resources=PLACES) as cluster:
        expected, (pid, _) = gradients(cluster), facts_of(cluster, "a")
        os.kill(pid, signal.SIGKILL)

        def has_joined() -> bool:
            try:
                return gradients(cluster) == expected
            except JdagError:
                return False

        soon(has_joined)
        assert facts_of(cluster, "a")[0] != pid


def trained(hurt: Mapping[int, Callable[[Any], object]], recover: Any) -> int:
    """Train with workers that are hurt, and have a quiet run's bits; count losses."""
    names, steps, to_hurt = ("d", "b", "c"), max(hurt) + 2, dict(hurt)
    with jdag.simulate(names, seed=0, recover=True) as cluster:
        quiet = train(cluster, Patient(cluster.recover), steps)
    needs = {"b": {"CPU": 1, "b": 1}, "c": {"CPU": 1, "left": 1}}
    with launch(names, resources=needs, allow=RECOVERED, recover=True) as cluster:

        def begins(step: int) -> None:
            if step in to_hurt:
                to_hurt.pop(step)(cluster)
                soon(lambda: bool(cluster.state.recovery.lost_workers))

        again = partial(recover, cluster, partial(cluster.recover, timeout_s=600))
        patient = Patient(again)
        assert train(cluster, patient, steps, begins) == quiet and not to_hurt
        return patient.losses


@pytest.mark.second
def test_a_training_goes_on_on_another_node_with_the_same_bits_or_says_there_is_none(
    nodes,
):
    def move(cluster: Any) -> None:
        nodes("second", b=1)
        nodes("first")

    def is_refused(cluster: Any) -> bool:
        said = "worker 'b' has not joined again within timeout_s=2: "
        with pytest.raises(RecoveryError, match=said) as raised:
            cluster.recover(timeout_s=2)
        return "Ray can no longer place" in str(raised.value)  # Once Ray has noticed.

    def recover(cluster: Any, patient: Any) -> None:
        if none_left:
            soon(partial(is_refused, cluster))
            none_left.clear()
            nodes("third", b=1)
        patient()

    def remove(cluster: Any) -> None:
        none_left.append(True)
        nodes("second")

    none_left: list[bool] = []
    nodes("first", b=1)
    assert trained({1: move, 3: remove}, recover) >= 2
    nodes("third")


@pytest.mark.second
def test_what_ray_cannot_place_is_refused_and_leaves_nothing(nodes):
    said = r"Ray did not place \[\{'CPU': 1, 'up': 1\}\] within ready_s=1; the .*CPU"
    with pytest.raises(JoinError, match=said):
        launch(["m", "a"], resources={"CPU": 1, "up": 1}, ready_s=1)
    soon(lambda: ray.available_resources()["CPU"] == 4)


@pytest.mark.second
def test_a_worker_that_does_not_start_says_why(nodes):
    said = "worker 'a' did not start: allow contains no_such"
    with pytest.raises(JoinError, match=said):
        launch(["m", "a"], allow=["no_such"])
    soon(lambda: ray.available_resources()["CPU"] == 4)


@pytest.mark.second
def test_a_placement_group_of_the_user_is_used_and_kept(nodes):
    group = ray.util.placement_group([PLACES["b"]])
    with launch(["m", "a"], allow=ALLOW, resources=group) as cluster:
        assert facts_of(cluster, "a")[1] == -1
    assert group.wait(60)
    ray.util.remove_placement_group(group)


@pytest.mark.second
def test_calls_on_ray_give_each_its_own_reply_and_name_what_fails(nodes):
    calls = {0: (1, 2), 1: (3, 4), 2: (5, 6), 3: (7, 8)}
    got = dict(ray_results("operator:add", calls, 2))
    assert got == {0: 3, 1: 7, 2: 11, 3: 15}
    with fails_with(JoinError, "processes.a_run_on_ray_has"):
        list(ray_results("operator:add", {0: (1, "2")}, 2))


@pytest.mark.second
def test_a_sweep_on_ray_has_the_table_of_one_here(nodes, tmp_path: Path):
    values = {"seed": [1, 2], "settings.size": [3]}
    chain = ROOT / "scenarios" / "chain.toml"
    here = sweep(chain, values, jobs=1, out=tmp_path / "here")
    there = sweep(chain, values, on="ray", out=tmp_path / "there")
    assert len(here) == 2 and there == here


@pytest.mark.second
def test_an_exploration_on_ray_reports_what_one_here_does(nodes):
    chain = ROOT / "scenarios" / "chain.toml"
    wanted: dict = {"values": "abstract", "strategy": "random:7", "faults": {}}
    here = campaign(chain, wanted, runs=50)
    there = campaign(chain, wanted, runs=50, jobs=2, on="ray")
    assert (there.runs, there.orders) == (here.runs, here.orders)
    assert there.reached == here.reached and there.failure is None


def test_runs_are_on_ray_or_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    chain = ROOT / "scenarios" / "chain.toml"
    with fails_with(ScenarioError, "processes.on_slurm_allowed_is_ray"):
        sweep(chain, {"seed": [1]}, on="slurm", out=tmp_path)
    wanted: dict = {"values": None, "strategy": "exhaustive", "faults": {}}
    with fails_with(ScenarioError, "processes.on_ray_allowed_is_one"):
        campaign(chain, wanted, runs=9, on="ray")
    monkeypatch.setattr(on_ray, "ray", None)
    with fails_with(ScenarioError, "processes.on_ray_needs_ray_jdag"):
        sweep(chain, {"seed": [1]}, on="ray", out=tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_process_that_does_not_start_again_is_started_by_who_asks_once_more(
    monkeypatch: pytest.MonkeyPatch,
):
    class Started:
        addresses: ClassVar = {"a": "127.0.0.1:7000"}

        def __init__(self, options: Any, **settings: Any) -> None:
            begun.append(options[0].worker)
            if len(begun) < 3:
                raise JoinError(f"not ready {len(begun)}")

        def on_death(self, tell: Any) -> None:
            begun.append(tell)

    begun: list[Any] = []
    monkeypatch.setattr(on_ray, "Launch", Started)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    (options,) = options_of("a")
    actor = _Parent(options.written(), fresh_authority(), None, None, 1.0)
    answers = [actor.where() for _ in range(4)]
    assert answers[:2] == [("", "not ready 1"), ("", "not ready 2")]
    assert answers[2:] == [("127.0.0.1:7000", "")] * 2
    assert begun == ["a", "a", "a", _end_actor]


@pytest.mark.parametrize(
    "resources",
    [{}, {"CPU": 0}, {"CPU": "1"}, [1], 3, {"a": {"CPU": 1}}, {"a": {}, "b": {"x": 1}}],
)
def test_resources_that_ray_has_not_are_refused(resources):
    with fails_with(ScenarioError, "processes.resources_allowed_is_amounts_of"):
        jdag.launch(WORKERS, on="ray", resources=resources)


def test_resources_are_for_ray_alone(monkeypatch: pytest.MonkeyPatch):
    with fails_with(ScenarioError, "processes.allowed_is_none_without_on"):
        jdag.launch(WORKERS, resources={"CPU": 1})
    with fails_with(ScenarioError, "processes.on_rays_allowed_is_one"):
        jdag.launch(WORKERS, on="rays")
    monkeypatch.setattr(on_ray, "ray", None)
    with fails_with(ScenarioError, "processes.not_here_pip_install_jdag"):
        jdag.launch(WORKERS, on="ray")
