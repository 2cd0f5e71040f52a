"""Checkpoints that were cut off, damaged, edited, or written by earlier versions."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as orbax
import pytest

from jdag.api import checkpoint
from jdag.api.refs import fetch
from jdag.errors import JdagError
from tests.face_cases import ONES
from tests.test_checkpoint import bits

CRASHING = """
import os, sys
import jax.numpy as jnp
import jdag

def die(event, details):
    if event == sys.argv[2] and str(details[0]).endswith(sys.argv[3]):
        os._exit(9)

with jdag.simulate(["a", "b"], seed=0) as cluster:
    w = cluster.put("b", jnp.zeros(3))
    cluster.save(sys.argv[1], w=w)
    cluster.update(jnp.add, w, 1.0)
    sys.addaudithook(die)
    cluster.save(sys.argv[1], w=w)
"""


@pytest.mark.parametrize(
    ("event", "path", "value"),
    [
        pytest.param("os.mkdir", "new/arrays", 0, marks=pytest.mark.second),
        pytest.param("os.rename", "next/marker", 0, marks=pytest.mark.second),
        pytest.param("os.rename", "new/arrays", 1, marks=pytest.mark.second),
        ("os.rename", "next/marker.json", 1),
    ],
)
def test_a_crash_in_the_middle_leaves_one_checkpoint_whole(
    cluster, tmp_path, event, path, value
):
    folder = tmp_path / "run"
    script = [sys.executable, "-c", CRASHING, str(folder), event, path]
    died = subprocess.run(script, capture_output=True, text=True, check=False)
    assert died.returncode == 9, died.stderr
    w = cluster.put("c", 7 * jnp.ones(3, "float32"))
    cluster.load(folder, w=w)
    np.testing.assert_array_equal(w.fetch(), jnp.full(3, float(value)))
    cluster.save(folder, w=cluster.put("b", jnp.full(3, 5.0, "float32")))
    assert sorted(path.name for path in (folder / ".jdag").iterdir()) == [
        "lock",
        "marker.json",
    ]
    cluster.load(folder, w=w)
    np.testing.assert_array_equal(w.fetch(), jnp.full(3, 5.0))


# -------------------------------------------------------------------------- damaged


def test_one_flipped_bit_in_any_array_is_found_and_its_leaf_is_named(cluster, tmp_path):
    values = [jnp.sin(jnp.arange(100.0) + n) for n in range(3)]
    keys = jax.random.split(jax.random.key(7), 3)
    cluster.save(tmp_path, w=cluster.put("b", values), keys=keys)
    files = sorted((tmp_path / "arrays").glob("*/0*"))
    w = cluster.put("c", [jnp.zeros(100)] * 3)
    named = []
    for path in files:
        good = path.read_bytes()
        at = len(good) // 2
        path.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        with pytest.raises(JdagError, match=f"cannot be .* '{tmp_path}'") as error:
            cluster.load(tmp_path, w=w, keys=keys)
        named.append(str(error.value).split(" ", 1)[0])
        path.write_bytes(good)
    assert named == ["w[0]", "w[1]", "w[2]", "keys"]
    assert bits(fetch(w)) == bits([jnp.zeros(100)] * 3)
    assert bits(fetch(cluster.load(tmp_path, w=w)["w"])) == bits(values)


def test_a_description_that_was_edited_is_refused(cluster, tmp_path):
    cluster.save(tmp_path, w=jnp.ones(3, "float32"))
    about = json.loads((tmp_path / "about.json").read_text())
    about["parts"]["w"][0]["shape"] = [4]
    (tmp_path / "about.json").write_text(json.dumps(about))
    edited = r"its description, about\.json, is not as jdag wrote it: its digest"
    with pytest.raises(JdagError, match=edited):
        cluster.load(tmp_path, w="b")


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (0, {"shape": [0, 10**30]}),
        (0, {"shape": [10**12]}),
        (3, {"kind": "static"}),
        (3, {"kind": "int", "text": "3"}),
        (3, {"name": ""}),
    ],
)
def test_what_a_description_says_in_vain_is_an_error_that_names_the_leaf(
    cluster, tmp_path, size, changes
):
    w = cluster.put("b", jnp.ones(size, "float32"))
    cluster.save(tmp_path, w=w)
    about = json.loads((tmp_path / "about.json").read_text())
    about["parts"]["w"][0].update(changes)
    about["digest"] = checkpoint._digest(about["parts"])
    (tmp_path / "about.json").write_text(json.dumps(about))
    for place in (w, "b"):
        with pytest.raises(JdagError, match=r"^w.* (cannot be restored|is .* wanted)"):
            cluster.load(tmp_path, w=place)


def test_a_folder_that_cannot_be_is_refused(cluster, tmp_path):
    with pytest.raises(JdagError, match="no checkpoint can be written to"):
        cluster.save(tmp_path / "t/\udcff", w=jnp.ones(3))


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000, '{"jdag": 3}'])
def test_what_is_no_description_is_refused(cluster, tmp_path, text):
    cluster.save(tmp_path, step=1)
    (tmp_path / "about.json").write_text(text)
    with pytest.raises(JdagError, match=r"no checkpoint can be read from .*: its desc"):
        cluster.load(tmp_path, step=0)


# ------------------------------------------------------------- what was written before


def saved_before(folder, number, w, **changes):
    """Write a checkpoint of format 1: by Orbax's manager, without digests."""
    saved = {
        "path": "",
        "kind": "array",
        "dtype": str(w.dtype),
        "shape": list(w.shape),
        "text": "",
        **changes,
    }
    content = orbax.args.Composite(
        about=orbax.args.JsonSave({"jdag": 1, "parts": {"w": [saved]}}),
        arrays=orbax.args.PyTreeSave({"": np.zeros(1, np.int8), "w.0": np.asarray(w)}),
    )
    options = orbax.CheckpointManagerOptions(enable_async_checkpointing=False)
    with orbax.CheckpointManager(folder, options=options) as manager:
        manager.save(number, args=content, force=True)


def test_a_checkpoint_of_format_1_loads_and_is_saved_over(cluster, tmp_path):
    w = cluster.put("b", ONES)
    saved_before(tmp_path, 9, ONES)
    saved_before(tmp_path, 10, 5 * ONES)
    mine = tmp_path / "2024" / "about" / "metadata"
    mine.parent.mkdir(parents=True)
    mine.write_text('{"camera": 1}')
    cluster.load(tmp_path, w=w)
    np.testing.assert_array_equal(w.fetch(), 5 * ONES)
    cluster.save(tmp_path, w=w)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".jdag", "2024", "about.json", "arrays"]
    assert mine.read_text() == '{"camera": 1}'
    cluster.update(jnp.negative, w)
    cluster.load(tmp_path, w=w)
    np.testing.assert_array_equal(w.fetch(), 5 * ONES)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"shape": [4]}, r"w cannot .*its array is float32\[3\], and float32\[4\] in"),
        ({"shape": [3, 0]}, r"its array is float32\[3\], and float32\[3,0\] in the"),
        ({"dtype": "int32"}, r"its array is float32\[3\], and int32\[3\] in the desc"),
        ({"dtype": "float99"}, r"w cannot be restored from .*float99"),
        ({"kind": "rgb"}, r"w cannot be restored from .*rgb"),
        ({"kind": None}, r"metadata, is not as jdag wrote it: "),
        ({"path": ["x"]}, r"metadata, is not as jdag wrote it: "),
        ({"shape": "x"}, r"metadata, is not as jdag wrote it: "),
        ({"shape": None}, r"metadata, is not as jdag wrote it: "),
        ({"more": 1}, r"metadata, is not as jdag wrote it: .*more"),
    ],
)
def test_a_description_of_format_1_that_was_edited_is_refused(
    cluster, tmp_path, changes, text
):
    saved_before(tmp_path, 1, jnp.ones(3, "float32"), **changes)
    with pytest.raises(JdagError, match=text):
        cluster.load(tmp_path, w="b")
