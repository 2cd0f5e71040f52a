"""The file of a checkpoint is whole at any moment, and damage to it is found."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jdag.context.refs import fetch
from jdag.errors import JdagError
from jdag.training import checkpoint_file
from tests import ROOT
from tests.tools.error_texts import fails_with
from tests.tools.face_cases import ONES
from tests.unit.training.test_checkpoint import bits


def played(case: str, folder: Path) -> str:
    script = [sys.executable, "-m", "tests.tools.checkpoint_cases", case, str(folder)]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_saver_killed_at_any_step_leaves_the_former_checkpoint_or_the_new_one(
    tmp_path,
):
    played("killed", tmp_path)


def test_two_savers_at_once_leave_the_checkpoint_of_one_whole(tmp_path):
    played("raced", tmp_path)


def test_a_saver_takes_what_a_killed_one_left_and_nothing_of_one_that_finishes(
    tmp_path,
):
    played("left", tmp_path)


def test_a_save_holds_one_leaf_at_a_time(tmp_path):
    assert float(played("peak", tmp_path)) < 2.5  # Of 8.


def test_one_flipped_bit_of_any_array_is_found_and_its_leaf_is_named(cluster, tmp_path):
    values = [jnp.sin(jnp.arange(100.0) + n) for n in range(3)]
    keys = jax.random.split(jax.random.key(7), 3)
    cluster.save(tmp_path / "run", w=cluster.put("b", values), keys=keys)
    w = cluster.put("c", [jnp.zeros(100)] * 3)
    path = tmp_path / "run.safetensors"
    good = path.read_bytes()
    named = []
    for at in (-24 - 5, -24 - 805, -24 - 1605, -1):
        path.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at:][1:])
        with pytest.raises(
            JdagError, match=f"cannot be .* '{path}': .*digest"
        ) as error:
            cluster.load(tmp_path / "run", w=w, keys=keys)
        named.append(str(error.value).split(" ", 1)[0])
    assert named == ["w[2]", "w[1]", "w[0]", "keys"]
    assert bits(fetch(w)) == bits([jnp.zeros(100)] * 3)
    path.write_bytes(good)
    assert bits(fetch(cluster.load(tmp_path / "run", w=w)["w"])) == bits(values)


def test_no_flipped_bit_of_the_header_changes_what_is_loaded(cluster, tmp_path):
    cluster.save(tmp_path / "run", w=cluster.put("b", ONES), n=3)
    path = tmp_path / "run.safetensors"
    good = path.read_bytes()
    refused = 0
    for at in range(len(good) - ONES.nbytes):
        path.write_bytes(good[:at] + bytes([good[at] ^ (1 << at % 8)]) + good[at + 1 :])
        try:
            got = cluster.load(tmp_path / "run", w=ONES, n=0)
        except JdagError:
            refused += 1
        else:
            assert bits(got["w"]) == bits(ONES) and got["n"] == 3
    assert refused > 0.9 * at


def test_what_is_cut_off_is_refused(cluster, tmp_path):
    cluster.save(tmp_path / "run", w=ONES)
    path = tmp_path / "run.safetensors"
    good = path.read_bytes()
    for size in (0, 7, 8, 100, len(good) - 1):
        path.write_bytes(good[:size])
        with fails_with(JdagError, "training.no_checkpoint_can_be_read"):
            cluster.load(tmp_path / "run", w=ONES)


def test_a_disk_that_is_full_leaves_the_former_checkpoint(cluster, tmp_path):
    cluster.save(tmp_path / "run", n=1)
    script = [sys.executable, "-c", FULL, str(tmp_path / "run")]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert cluster.load(tmp_path / "run", n=0) == {"n": 1}
    assert [one.name for one in tmp_path.iterdir()] == ["run.safetensors"]


FULL = """
import resource, signal, sys
import jax.numpy as jnp
import jdag

with jdag.simulate(["a", "b"], seed=0) as cluster:
    w = cluster.put("b", jnp.zeros(100_000))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    try:
        cluster.save(sys.argv[1], w=w)
    except jdag.errors.JdagError as error:
        assert "no checkpoint can be written to" in str(error), error
        assert "File too large" in str(error), error
    else:
        raise AssertionError
"""


def test_more_savers_at_once_than_there_are_names_are_refused(
    cluster, tmp_path, monkeypatch
):
    monkeypatch.setattr(checkpoint_file, "SAVERS_MAX", 0)
    with fails_with(JdagError, "training.0_others_are_saving_there"):
        cluster.save(tmp_path / "run", n=1)
