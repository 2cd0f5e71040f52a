"""A checkpoint brings back the same bits, on any placement."""

import os
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

from jdag.api.drivers import simulate
from jdag.context.refs import fetch
from jdag.engine.arrays import DTYPES
from jdag.errors import ContextError, JdagError, RemoteError, WorkerLost
from jdag.sim import Crash, LinkModel
from jdag.training.optimizer import Optimizer
from tests.tools.error_texts import fails_with
from tests.tools.face_cases import ONES, raises_at_run_time

DATA = jnp.linspace(-1, 1, 12).reshape(4, 3)


def bits(tree):
    leaves = jax.tree.leaves(tree)
    arrays = [jax.random.key_data(leaf) if is_key(leaf) else leaf for leaf in leaves]
    return [(str(one.dtype), one.shape, np.asarray(one).tobytes()) for one in arrays]


def is_key(array):
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def hidden(params, x):
    return jnp.tanh(x @ params["w"] + params["b"])


def loss(w, h):
    return jnp.mean((h @ w) ** 2)


class Training:
    def __init__(self, cluster, first, second):
        self.cluster = cluster
        self.params = {
            "first": cluster.put(
                first, {"w": jnp.linspace(0.2, 1, 15).reshape(3, 5), "b": jnp.zeros(5)}
            ),
            "second": cluster.put(second, jnp.linspace(-1, 1.5, 5).astype("float32")),
        }
        schedule = optax.warmup_cosine_decay_schedule(0.01, 0.2, 3, 9)
        tx = optax.chain(optax.adam(schedule), optax.add_decayed_weights(1e-3))
        self.optimizer = Optimizer(tx, self.params, clip_norm=0.3)

    def train(self, begin, end):
        for step in range(begin, end):
            with self.cluster.context() as ctx:
                params = self.params
                first, second = params["first"], params["second"]
                h = ctx.call(first["b"].worker, hidden, first, DATA * (1 + step))
                ctx.backward(ctx.call(second.worker, loss, second, h))
                self.optimizer.step(ctx)

    @property
    def bits(self):
        return bits(fetch([self.params, self.optimizer.states]))


def test_training_resumed_on_another_placement_is_bit_equal_to_training_on(tmp_path):
    with simulate(["a", "b", "c"], seed=0) as cluster:
        whole = Training(cluster, "b", "c")
        whole.train(0, 7)
        wanted = whole.bits
    with simulate(["a", "b", "c"], seed=0) as cluster:
        training = Training(cluster, "b", "c")
        training.train(0, 3)
        parts = {"params": training.params, "optimizer": training.optimizer}
        cluster.save(tmp_path / "run", step=3, **parts)
        training.train(3, 5)  # What comes after is no part of it.
    with simulate(["main", "x", "y", "z"], seed=7) as cluster:
        resumed = Training(cluster, "z", "main")
        parts = {"params": resumed.params, "optimizer": resumed.optimizer}
        loaded = cluster.load(tmp_path / "run", step=0, **parts)
        assert loaded["params"] is not resumed.params
        assert loaded["params"] == resumed.params
        assert loaded["optimizer"] is resumed.optimizer
        assert loaded.keys() == {"step", "params", "optimizer"}
        assert resumed.optimizer.steps == 3
        resumed.train(loaded["step"], 7)
        assert resumed.bits == wanted
        fresh = Training(cluster, "x", "y")
        fresh.train(3, 7)
        assert fresh.bits != wanted


def test_an_optimizer_continues_from_its_own_count_of_steps(tmp_path):
    with simulate(["a", "b", "c"], seed=0) as cluster:
        training = Training(cluster, "b", "c")
        training.train(0, 2)
        taken = {"optimizer": training.optimizer.states}
        cluster.save(tmp_path / "states", **taken)
        cluster.save(tmp_path / "both", fast=training.optimizer)
        training.train(2, 3)
        cluster.load(tmp_path / "both", fast=training.optimizer)
        assert training.optimizer.steps == 2
        training.train(2, 3)
        cluster.load(tmp_path / "states", optimizer=training.optimizer)
        assert training.optimizer.steps == 3, "no count was saved"
        with fails_with(JdagError, "training.opt_steps_is_the_count"):
            cluster.save(
                tmp_path / "run", **{"opt": training.optimizer, "opt.steps": 3}
            )


def held(dtype):
    if dtype.startswith("key"):
        impl = {"fry": "threefry2x32", "rbg": "rbg", "urbg": "unsafe_rbg"}[dtype[4:-1]]
        key = jax.random.key(7, impl=impl)
        return [key, jax.random.split(key, 3), jax.random.split(key, 3)[:0]]
    arrays = [jnp.arange(6).reshape(2, 3), jnp.asarray(1), jnp.zeros((2, 0, 3))]
    arrays = [array.astype(dtype) for array in arrays]
    if dtype == "float32":
        strange = np.array([0x7FC12345, 0xFF812345, 0x80000000, 1], np.uint32)
        arrays.append(jnp.asarray(strange.view(np.float32)))
    return arrays


def test_every_dtype_comes_back_bit_by_bit(cluster, tmp_path):
    values = [value for dtype in DTYPES for value in held(dtype)]
    refs = cluster.put("b", values)
    cluster.save(tmp_path / "run", refs=refs, plain=values)
    blank = cluster.put("d", [jnp.zeros_like(value) for value in values])
    placed = ["c"] * len(values)
    for name, like in (("refs", blank), ("refs", placed), ("plain", values)):
        got = fetch(cluster.load(tmp_path / "run", **{name: like})[name])
        assert bits(got) == bits(values)
        assert [one.dtype for one in got] == [one.dtype for one in values]
    assert bits(fetch(blank)) == bits(values)


def test_any_reader_of_safetensors_reads_the_arrays_by_their_names(cluster, tmp_path):
    model = {
        "w": jnp.linspace(0, 1, 6, dtype="float32").reshape(2, 3),
        "b": jnp.arange(3).astype("bfloat16"),
        "z": jnp.asarray([1 + 2j], "complex64"),
        "f8": jnp.asarray([1.5, -2.0], "float8_e4m3fn"),
        "i4": jnp.asarray([-1, 7], "int4"),
        "z128": jnp.asarray([1 + 2j, 3.0], "complex128"),
        "key": jax.random.key(7),
    }
    cluster.save(tmp_path / "run", model=cluster.put("b", model), rate=0.5)
    arrays = load_file(tmp_path / "run.safetensors")
    assert list(arrays) == [f"model[{name!r}]" for name in sorted(model)]
    for name in ("w", "b", "z"):
        assert bits(arrays[f"model[{name!r}]"]) == bits(model[name])
    for name in ("f8", "i4", "z128"):
        array = arrays[f"model[{name!r}]"]
        assert array.dtype == np.uint8 and len(array) == 2
        assert array.tobytes() == np.asarray(model[name]).tobytes()
    np.testing.assert_array_equal(
        arrays["model['key']"], jax.random.key_data(model["key"])
    )


def test_a_dtype_or_names_that_no_file_has_are_refused_when_saving(cluster, tmp_path):
    strange = np.zeros(2, [("x", "f4")])
    with fails_with(JdagError, "training.it_s_cannot_be_in"):
        cluster.save(tmp_path / "run", it={"s": strange, "w": ONES})
    with fails_with(JdagError, "training.two_arrays_have_the_name"):
        cluster.save(tmp_path / "run", **{"a": {"b": ONES}, "a['b']": ONES})
    with fails_with(JdagError, "training.two_arrays_have_the_name_metadata"):
        cluster.save(tmp_path / "run", __metadata__=ONES)
    with fails_with(JdagError, "training.no_checkpoint_can_be_written"):
        cluster.save(tmp_path / "run", **{"\ud800": ONES})
    with fails_with(JdagError, "training.no_checkpoint_can_be_written_to"):
        cluster.save(tmp_path / "run", **{"x" * (1 << 26): ONES})  # No reader opens it.
    assert not list(tmp_path.iterdir())


def test_a_number_that_was_saved_as_a_leaf_comes_back_as_a_number(cluster, tmp_path):
    were = {"rate": jnp.asarray(0.5), "n": jnp.asarray(7), "w": ONES}
    cluster.save(tmp_path / "run", model=cluster.put("b", were), wide=jnp.ones(1))
    got = cluster.load(tmp_path / "run", model={"rate": 0.0, "n": 0, "w": "c"})["model"]
    assert (got["rate"], got["n"]) == (0.5, 7)
    assert [type(got[name]) for name in ("rate", "n")] == [float, int]
    for other in ({"rate": 0, "n": 0, "w": "c"}, {"rate": 0.0, "n": 0, "w": 0.0}):
        with pytest.raises(JdagError, match=r"expected a Python (int|float)"):
            cluster.load(tmp_path / "run", model=other)


def test_numbers_come_back_as_they_were(cluster, tmp_path):
    numbers = {"n": 7, "f": 0.1 + 0.2, "c": 1 - 2j, "b": False, "i": float("-inf")}
    cluster.save(tmp_path / "run", it=numbers)
    got = cluster.load(
        tmp_path / "run", it={"n": 0, "f": 0.0, "c": 0j, "b": True, "i": 1.0}
    )["it"]
    assert got == numbers
    assert [type(got[name]) for name in numbers] == [int, float, complex, bool, float]


def test_names_of_workers_are_places_for_new_leaves(cluster, tmp_path):
    values = {"w": ONES, "rest": [jnp.arange(3.0), jnp.asarray(2)]}
    cluster.save(tmp_path / "run", params=cluster.put("b", values))
    with simulate(["p", "q"], seed=1) as other:
        wanted = {"w": "q", "rest": ["p", "q"]}
        params = other.load(tmp_path / "run", params=wanted)["params"]
        assert jax.tree.map(lambda ref: ref.worker, params) == wanted
        assert bits(fetch(params)) == bits(values)
        with other.context() as ctx:
            ctx.backward(ctx.call("p", jnp.sum, params["w"]))
            np.testing.assert_array_equal(ctx.gradient(params["w"]).fetch(), ONES)
        optimizer = Optimizer(optax.sgd(0.1), params["w"])
        assert other.load(tmp_path / "run", params=params)["params"] == params
        optimizer.drop()


def test_a_load_is_one_message_to_each_owner_and_a_save_reads_each_leaf_by_itself(
    cluster, tmp_path
):
    refs = [cluster.put("bcd"[n % 3], ONES + n) for n in range(9)]

    def sent(act):
        cluster.driver.settle()
        before = cluster.info()["a"]["messages_sent"]
        act(tmp_path / "run", refs=refs)
        cluster.driver.settle()
        return cluster.info()["a"]["messages_sent"] - before

    assert sent(cluster.save) == 3 + 9 + 3  # Versions are kept, read, and dropped.
    assert sent(cluster.load) == 3


def steps_on(leaves, cluster):
    for _ in range(30):
        cluster.update(lambda *arrays: [one + 1 for one in arrays], leaves)


def saves(path, leaves, cluster):
    cluster.update(lambda *arrays: [one + 1 for one in arrays], leaves)
    cluster.save(path, leaves=leaves)


def test_leaves_of_one_owner_are_saved_as_they_are_at_one_moment(cluster, tmp_path):
    leaves = [cluster.put("d", ONES) for _ in range(9)]
    programs = {
        "b": partial(saves, str(tmp_path / "run"), leaves),
        "c": partial(steps_on, leaves),
    }
    cluster.run(programs)
    assert {float(leaf.fetch()[0, 0]) for leaf in leaves} == {32.0}
    saved = fetch(cluster.load(tmp_path / "run", leaves=["b"] * 9)["leaves"])
    versions = {float(array[0, 0]) for array in saved}
    assert len(versions) == 1 and max(versions) < 31.0
    assert len(cluster.state.leaves) == 9 + 9, "what the save kept is gone"


def test_a_context_that_read_a_leaf_keeps_the_version_from_before_a_load(
    cluster, tmp_path
):
    w = cluster.put("b", jnp.asarray([3.0, 4.0, 5.0]))
    cluster.save(tmp_path / "run", w=w)
    cluster.update(jnp.negative, w)
    with cluster.context() as ctx:
        out = ctx.call("c", lambda w: jnp.sum(w**2), w)
        cluster.load(tmp_path / "run", w=w)
        ctx.backward(out)
        np.testing.assert_array_equal(ctx.gradient(w).fetch(), [-6.0, -8.0, -10.0])
    np.testing.assert_array_equal(w.fetch(), [3.0, 4.0, 5.0])


def test_statics_beside_leaves_stay_as_they_are_given(cluster, tmp_path):
    layer = {"w": ONES, "act": jnp.tanh, "name": "first", "bias": None}
    refs = cluster.put("b", layer)
    cluster.save(tmp_path / "run", layer=refs)
    cluster.update(jnp.negative, refs)
    assert cluster.load(tmp_path / "run", layer=refs)["layer"] == refs
    np.testing.assert_array_equal(refs["w"].fetch(), ONES)
    given = {"w": "d", "act": jnp.sin, "name": "second", "bias": None}
    loaded = cluster.load(tmp_path / "run", layer=given)["layer"]
    assert loaded["w"].worker == "d"
    assert (loaded["act"], loaded["name"], loaded["bias"]) == (jnp.sin, "second", None)
    with fails_with(JdagError, "training.layer_act_is_a_static"):
        cluster.load(tmp_path / "run", layer={**given, "act": jnp.ones(())})


def test_a_load_that_is_refused_changes_no_leaf(cluster, tmp_path):
    cluster.save(tmp_path / "run", v=cluster.put("b", ONES), w=cluster.put("b", ONES))
    v, w = cluster.put("c", 3 * ONES), cluster.put("d", jnp.zeros(2))
    with fails_with(JdagError, "training.w_leaf_5_on_d"):
        cluster.load(tmp_path / "run", v=v, w=w)
    np.testing.assert_array_equal(v.fetch(), 3 * ONES)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"w": "b", "v": ["c"]},
            r"has params\['u'\], which is not expected; saved in params: ",
        ),
        (
            {"w": "b", "v": ["c"], "u": "b", "x": "b"},
            r"has no params\['x'\]; saved in params: \['u'\], \['v'\]\[0\], \['w'\]; ",
        ),
        (
            {"w": jnp.zeros(2), "v": [0], "u": "b"},
            r"params\['w'\] is float32\[3\] in the .*expected float64\[2\]",
        ),
        ({"w": 0, "v": [0], "u": "b"}, r"\['w'\] is float32\[3\] .* a Python int"),
        ({"w": "b", "v": [0.0], "u": "b"}, r"v'\]\[0\] is the int 3 .* a Python float"),
        ({"w": "b", "v": ["c"], "u": "b"}, r"v'\]\[0\] is the int 3 .* put on 'c'"),
        ({"w": "bb", "v": [0], "u": "b"}, r"params\['w'\].*no worker 'bb'"),
        ({"w": object(), "v": [0], "u": "b"}, r"object is not an array"),
        (
            {"w": jnp.tanh, "v": [0], "u": "b"},
            r"is float32\[3\] .* expected a static",
        ),
        ("b", r"has no params; saved in params: \['u'\], .*; expected: a single value"),
    ],
)
def test_what_does_not_fit_is_named_with_what_is_found_and_wanted(
    cluster, tmp_path, given, text
):
    params = {"w": jnp.ones(3, "float32"), "v": [3], "u": jnp.ones(())}
    cluster.save(tmp_path / "run", params=params)
    with pytest.raises(JdagError, match=text):
        cluster.load(tmp_path / "run", params=given)
    with fails_with(JdagError, "training.has_no_state_it_has"):
        cluster.load(tmp_path / "run", state=params)


def test_a_path_that_has_no_checkpoint_is_refused(cluster, tmp_path):
    w = cluster.put("b", ONES)
    (tmp_path / "file.safetensors").write_text("no")
    (tmp_path / "file").write_text("no")
    (tmp_path / "empty.safetensors").touch()
    save_file({"w": np.ones(3)}, tmp_path / "others.safetensors")
    for name, text in [
        ("nowhere", "No such file or directory"),
        ("file", "no checkpoint can be read from .*file.safetensors"),
        ("empty", "no checkpoint can be read from"),
        ("others", "no checkpoint can be read from .*: its format version is none"),
    ]:
        with pytest.raises(JdagError, match=text):
            cluster.load(tmp_path / name, w=w)
    for name, text in [
        ("file/x", "no checkpoint can be written to .*(exists|Not a directory)"),
        ("t\0", "cluster.save, .*: no file can have this name"),
    ]:
        with pytest.raises(JdagError, match=text):
            cluster.save(f"{tmp_path}/{name}", w=w)
    for use in (cluster.load, cluster.save):
        with fails_with(JdagError, "training.takes_the_path_of_a"):
            use(3, w=w)
    np.testing.assert_array_equal(w.fetch(), ONES)


@pytest.mark.parametrize("name", ["run", "run.safetensors"])
def test_a_folder_of_former_versions_is_refused_and_left_alone(cluster, tmp_path, name):
    about = tmp_path / name / "about.json"
    about.parent.mkdir()
    about.write_text('{"jdag": 2}')
    w = cluster.put("b", ONES)
    with fails_with(JdagError, "training.is_a_folder_orbax_version"):
        cluster.load(tmp_path / name, w=w)
    if name == "run":
        cluster.save(tmp_path / name, w=w)
        cluster.load(tmp_path / name, w=w)
    else:
        with fails_with(JdagError, "training.is_a_directory"):
            cluster.save(tmp_path / name, w=w)
        assert os.listdir(tmp_path) == [name]
    assert about.read_text() == '{"jdag": 2}'


def test_a_save_needs_leaves_of_its_open_cluster_with_real_values(tmp_path):
    with simulate(["a", "b"], seed=0, values="abstract") as cluster:
        w = cluster.put("b", ONES)
        with fails_with(JdagError, "training.cluster_save_on_values_are"):
            cluster.save(tmp_path / "run", w=w)
        with fails_with(JdagError, "training.cluster_load_on_values_are"):
            cluster.load(tmp_path / "run", w=w)
    with simulate(["a", "b"], seed=0) as cluster:
        w = cluster.put("b", ONES)
        with fails_with(JdagError, "training.needs_something_by_name_such"):
            cluster.save(tmp_path)
        with fails_with(JdagError, "training.w_x_cannot_be_in"):
            cluster.save(tmp_path / "run", w={"x": "y"})
        optimizer = Optimizer(optax.adam(0.1), w)
        optimizer.drop()
        with fails_with(ContextError, "training.whose_states_were_dropped"):
            cluster.save(tmp_path / "run", optimizer=optimizer)
        with cluster.context() as ctx:
            out = ctx.call("b", jnp.sum, w)
            with fails_with(JdagError, "training.is_no_leaf"):
                cluster.save(tmp_path / "run", out=out)
        with simulate(["x", "y"], seed=0) as other:
            for act in (other.save, other.load):
                with fails_with(ContextError, "training.is_of_the_cluster_of"):
                    act(tmp_path / "run", w=w)
    for act in (cluster.save, cluster.load):
        with fails_with(ContextError, "training.which_is_closed"):
            act(tmp_path / "run", w=w)
    assert not list(tmp_path.iterdir())


def test_a_leaf_that_failed_or_whose_owner_is_lost_is_named(tmp_path):
    crash = Crash("c", 70, at_ns=1_000_000)
    link = LinkModel(latency_ns=100)
    with simulate(list("abc"), seed=0, faults=[crash], network=link) as cluster:
        params = {name: cluster.put(name, ONES) for name in "abc"}
        cluster.save(tmp_path / "run", params=params)
        cluster.driver.settle()
        with fails_with(WorkerLost, "training.params_c_leaf_2_on"):
            cluster.save(tmp_path / "run", params=params)
        cluster.update(jnp.negative, [params["a"], params["b"]])
        with fails_with(WorkerLost, "training.leaf_2_on_c_cannot"):
            cluster.load(tmp_path / "run", params=params)
        np.testing.assert_array_equal(params["b"].fetch(), -ONES)
        cluster.update(raises_at_run_time, params["b"])
        with fails_with(RemoteError, "training.b_b_leaf_1_on") as e:
            cluster.save(tmp_path / "run", b={"b": params["b"]})
        assert isinstance(e.value.__cause__, RuntimeError)
        anew = cluster.load(
            tmp_path / "run", params={"a": "a", "b": params["b"], "c": "b"}
        )
        for leaf in fetch(anew["params"]).values():
            np.testing.assert_array_equal(leaf, ONES)


def test_without_safetensors_it_says_what_to_install(cluster, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for act in (cluster.save, cluster.load):
        with fails_with(JdagError, "training.pip_install_jdag_safetensors"):
            act(tmp_path / "run", step=3)


def test_a_path_is_found_from_where_one_stands_or_from_home(
    cluster, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    cluster.save("run", step=3)
    cluster.save("~/deep/run.v2", step=4)
    assert Path("run.safetensors").is_file()
    assert (tmp_path / "home" / "deep" / "run.v2.safetensors").is_file()
    assert cluster.load(Path("run.safetensors"), step=0) == {"step": 3}
    assert cluster.load("~/deep/run.v2", step=0) == {"step": 4}
    Path("link.safetensors").symlink_to("run.safetensors")
    cluster.save("link", step=5)
    assert Path("link.safetensors").is_symlink()
    assert cluster.load("run", step=0) == {"step": 5}
