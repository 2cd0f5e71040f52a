"""The handshake: what differs is refused, with both sides and what to do."""

import json
import os
import subprocess
import sys

import jax
import pytest

from jdag.errors import JoinError
from jdag.processes.net.handshake import AGREE, other_cpu, ours, refuse_mismatch
from jdag.runtime.versions import version_of

OTHER = {
    "jdag": "0.0.1",
    "python": "2.7",
    "jax": "0.9.9",
    "jaxlib": "0.9.9",
    "numpy": "1.0",
    "optax": "0.0.1",
    "byteorder": "big",
    "configuration": {"jax_enable_x64": "other"},
    "xla_flags": "--xla_other=1",
    "cores": 4096,
    "nproc": "17",
}


def refused(mine: dict[str, object], theirs: dict[str, object]) -> str:
    with pytest.raises(JoinError) as caught:
        refuse_mismatch(mine, theirs, "main 'm'", "worker 'w'")
    return str(caught.value)


def test_the_cases_here_are_all_that_has_to_agree():
    assert list(OTHER) == list(AGREE)


@pytest.mark.parametrize("field", [*OTHER])
def test_what_differs_is_named_with_both_sides_and_what_to_do(field: str):
    mine = ours()
    mine["xla_flags"] = "--xla_mine=1"
    theirs = {**mine, field: OTHER[field]}
    said = refused(mine, theirs)
    assert said.startswith("main 'm' and worker 'w' differ in ")
    assert said.endswith("; " + AGREE[field])
    if field != "configuration":
        has = f"main 'm' has {json.dumps(mine[field])}"
        assert f"in {field}: {has}, worker 'w' has {json.dumps(OTHER[field])}" in said


@pytest.mark.parametrize(
    "theirs",
    [
        {},
        {"optax": "0+unknown"},
        {"platform": "gpu", "pid": 1, "host": "other", "boot": "x"},
    ],
    ids=["equal", "optax", "place"],
)
def test_where_it_runs_and_whether_it_has_optax_may_differ(theirs):
    mine = ours()
    theirs = json.loads(json.dumps({**mine, **theirs}))
    refuse_mismatch(mine, theirs, "a", "b")
    refuse_mismatch(theirs, mine, "a", "b")


def test_cpus_of_two_kinds_are_told_with_what_differs_and_not_refused():
    mine = ours()
    assert mine["platform"] == "cpu" and len(mine["cpu"]) > 1
    assert other_cpu(mine, mine, "a", "b") is None
    theirs = {**mine, "cpu": [*mine["cpu"][1:], "avx999"]}
    refuse_mismatch(mine, theirs, "a", "b")
    said = other_cpu(mine, theirs, "main 'm'", "worker 'w'") or ""
    assert said.startswith(
        "the CPU of worker 'w' differs from that of main 'm': it lacks "
        f"{mine['cpu'][0]} and also has avx999; gradients are right, but their bits"
    )
    assert other_cpu(mine, {**theirs, "platform": "gpu"}, "a", "b") is None


def test_a_setting_that_differs_is_named_itself():
    mine = ours()
    other = {**mine["configuration"], "jax_enable_x64": False}
    assert refused(mine, {**mine, "configuration": other}) == (
        "main 'm' and worker 'w' differ in jax_enable_x64: main 'm' has true, worker "
        "'w' has false; configure JAX alike on both, before anything is computed"
    )


def test_of_a_package_that_is_on_the_path_but_not_installed_the_version_is_unknown():
    assert version_of("jax") == jax.__version__
    assert version_of("no-such-package-here") == "0+unknown"


def test_another_version_that_says_less_is_still_told_of_its_version():
    assert "differ in jdag: " in refused(ours(), {"jdag": "9.9.9", "new": 1})
    assert "differ in jdag: " in refused(ours(), {})


def test_what_a_process_says_is_what_bits_depend_on():
    code = "import json, jdag.processes.net.handshake as h; print(json.dumps(h.ours()))"
    env = {
        **os.environ,
        "XLA_FLAGS": " --xla_cpu_multi_thread_eigen=true   ",
        "NPROC": "1",
        "JAX_ENABLE_X64": "0",
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "JAX_THREEFRY_PARTITIONABLE": "0",
        "JAX_RANDOM_SEED_OFFSET": "5",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_LOG_COMPILES": "1",
        "JAX_ENABLE_COMPILATION_CACHE": "0",
    }
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    theirs = json.loads(done.stdout)
    assert theirs["xla_flags"] == "--xla_cpu_multi_thread_eigen=true"
    assert theirs["nproc"] == "1"
    assert theirs["jax"] == jax.__version__
    assert theirs["cores"] == len(os.sched_getaffinity(0))
    mine = ours()["configuration"]
    differ = [name for name in mine if theirs["configuration"][name] != mine[name]]
    assert {name: theirs["configuration"][name] for name in differ} == {
        "jax_default_matmul_precision": "highest",
        "jax_disable_most_optimizations": True,
        "jax_enable_x64": False,
        "jax_random_seed_offset": 5,
        "jax_threefry_partitionable": False,
    }
    assert theirs["boot"] == ours()["boot"]
    assert theirs["pid"] != ours()["pid"]
