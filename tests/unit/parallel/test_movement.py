"""Copies, chunks and joins: their values, where they are, and their transposes."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType

import jdag
from jdag.errors import JdagError
from jdag.parallel import gather, reduce_add, replicate, scatter
from jdag.parallel.movement import repeat_arrays
from tests.tools.error_texts import fails_with
from tests.unit.parallel.cases import UNEVEN, array, close, meshed, names, where


def test_each_replica_is_whole_and_on_its_device():
    params: dict[str, Any] = {"w": array(3, 2), "n": np.arange(3), "lr": 0.5}
    params |= {"act": jnp.tanh, "name": "net", "none": None}
    found = replicate(params, ["cpu:3", jax.devices()[1], "cpu:0"])
    for replica, device in zip(found, ("cpu:3", "cpu:1", "cpu:0"), strict=True):
        assert replica["act"] is jnp.tanh and replica["name"] == "net"
        arrays = {name: replica[name] for name in ("w", "n", "lr")}
        assert where(arrays) == [device] * 3 and replica["none"] is None
        close(jax.device_put(arrays["w"], jax.devices()[0]), params["w"])
        np.testing.assert_array_equal(arrays["n"], params["n"])
    assert len(replicate(array(2))) == 8


def test_the_transpose_of_replicas_adds_in_their_order_where_the_original_lives():
    p = jax.device_put({"w": jnp.ones(2, np.float32), "b": array(3)}, jax.devices()[5])
    for first in (0, 6):
        made, vjp = jax.vjp(lambda p, n=first: replicate(p, names(4, n)), p)
        assert where(made) == [name for name in names(4, first) for _ in range(2)]
        cotangents = [
            jax.device_put(
                {"w": jnp.full(2, value, jnp.float32), "b": value * jnp.ones(3)},
                jax.devices()[(first + number) % 8],
            )
            for number, value in enumerate(UNEVEN)
        ]
        (found,) = vjp(tuple(cotangents))
        assert where(found) == ["cpu:5"] * 2
        np.testing.assert_array_equal(found["w"], np.zeros(2))
        np.testing.assert_array_equal(found["b"], np.full(3, 2.0))


def test_one_call_adds_all_leaves():
    p = [array(n + 1, seed=n) for n in range(5)]
    _, vjp = jax.vjp(lambda p: repeat_arrays(p, 3), p)
    pattern = jax.make_jaxpr(vjp)([*p, *p, *p])
    calls = [e.params["name"] for e in pattern.eqns if e.primitive.name == "jit"]
    assert calls == ["_added"]
    (found,) = vjp([*p, *p, *p])
    close(found, [3 * one for one in p])


def test_a_replica_that_nobody_uses_adds_nothing():
    def loss(p: Any) -> Any:
        first, _, third = replicate(p, names(3))
        one, other = gather([first["w"], third["w"]])
        return one * other

    p = {"w": jnp.ones(1) * 3, "b": jnp.ones(2)}
    found = jax.grad(loss)(p)
    close(found, {"w": jnp.ones(1) * 6, "b": jnp.zeros(2)})


@settings(max_examples=16)
@given(
    st.integers(0, 9),
    st.integers(1, 8),
    st.integers(-3, 2),
    st.sampled_from(["float32", "int32", "bool", "complex64", "bfloat16"]),
)
def test_chunks_are_joined_to_what_they_were_cut_from(rows, count, dim, dtype):
    shape = [2, 3, 1]
    shape[dim] = rows
    x = {"a": array(*shape).astype(dtype), "b": [array(*shape, seed=1)], "c": "static"}
    chunks = scatter(x, names(count), dim)
    size = max(1, -(-rows // count))
    assert [chunk["a"].shape[dim] for chunk in chunks] == [
        min(size, rows - n) for n in range(0, max(rows, 1), size)
    ]
    for number, chunk in enumerate(chunks):
        assert where({**chunk, "c": []}) == [f"cpu:{number}"] * 2
    whole = gather(chunks, "cpu:7", dim)
    assert where({**whole, "c": []}) == ["cpu:7"] * 2 and whole["c"] == "static"
    for name in ("a", "b"):
        close(whole[name], jax.device_put(x[name], jax.devices()[7]), 0)


def test_gradients_of_chunks_and_joins_are_those_of_plain_jax():
    x, weights = array(7, 3), array(7, 3, seed=1)

    def loss(x: Any, device: str = "cpu:2") -> Any:
        chunks = scatter(x, names(3, 1))
        joined = gather([jnp.sin(chunk) * 2 for chunk in chunks], device)
        sums = gather([jnp.sum(chunk**2) for chunk in chunks], device)
        here = jax.device_put(weights, jax.devices()[2])
        return jnp.sum(joined * here) + jnp.prod(sums)

    @jax.jit
    def alone(x: Any) -> Any:
        sums = jnp.stack([jnp.sum(x[n : n + 3] ** 2) for n in (0, 3, 6)])
        return jnp.sum(jnp.sin(x) * 2 * weights) + jnp.prod(sums)

    found, wanted = jax.grad(loss)(x), jax.grad(alone)(x)
    assert where(found) == ["cpu:0"]
    close(found, wanted)
    tangents = [jax.jvp(fn, (x,), (weights,))[1] for fn in (loss, alone)]
    close(jax.device_put(tangents[0], jax.devices()[0]), tangents[1])


def test_arrays_of_numpy_and_keys_are_taken_as_they_are_now():
    mine = np.arange(4.0)
    keys = jax.random.split(jax.random.key(0), 4)
    chunks = scatter((mine, keys), names(2))
    replicas = replicate(mine, names(2))
    mine[:] = -1
    whole = gather(chunks)
    np.testing.assert_array_equal(whole[0], np.arange(4.0))
    np.testing.assert_array_equal(
        jax.random.key_data(whole[1]), jax.random.key_data(keys)
    )
    for replica in replicas:
        np.testing.assert_array_equal(replica, np.arange(4.0))


def test_gradients_of_replicas_are_added_in_their_order():
    trees = [{"a": jnp.full(2, value), "b": jnp.float32(value)} for value in UNEVEN]
    spread = [
        jax.device_put(tree, jax.devices()[n + 1]) for n, tree in enumerate(trees)
    ]
    for replicas, device in ((spread, "cpu:1"), (trees, "cpu:0")):
        found = reduce_add(replicas)
        assert where(found) == [device] * 2 and found["b"] == 0
    assert reduce_add(spread[::-1], "cpu:6")["b"] == 2
    assert where(reduce_add(spread, "cpu:6")) == ["cpu:6"] * 2
    assert jax.jit(reduce_add)(trees)["b"] == 0


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        (r"replicate: the list of devices is empty", lambda: replicate(1.0, [])),
        (
            r"replicate: leaf \['a'\]: an object is no",
            lambda: replicate({"a": object()}),
        ),
        (
            r"replicate: leaf \[0\]: a numpy .*object",
            lambda: replicate([np.asarray([{}])]),
        ),
        (r"scatter: leaf itself is ~float64\[\], a scalar", lambda: scatter(1.0)),
        (r"gather needs a list .*, one for each chunk, not \[\]", lambda: gather([])),
        (r"gather: 'b/cpu:1' is a device of", lambda: gather([1.0], "b/cpu:1")),
        (
            r"gather: chunk 0 is .* and chunk 1 is .*structures must be equal",
            lambda: gather([{"a": 1.0}, {"b": 1.0}]),
        ),
        (
            r"gather: leaf itself is float64\[2,3\] in replica 0 and float64\[2,2\] in",
            lambda: gather([jnp.ones((2, 3)), jnp.ones((2, 2))]),
        ),
        (
            r"gather: leaf itself is float64\[2\] in replica 0 and float32\[2\] in rep",
            lambda: gather([jnp.ones(2), jnp.ones(2, np.float32)]),
        ),
        (
            r"gather: leaf \[0\] has 1 dimensions, but dim is 1: expected -1 to 0",
            lambda: gather([[jnp.ones(2)]], None, 1),
        ),
        (
            r"leaf \['w'\] is float64\[3\] in replica 0 and float64\[2\] in replica 2",
            lambda: reduce_add([{"w": jnp.ones(n)} for n in (3, 3, 2)]),
        ),
        (r"reduce_add needs a list .* one for each replica", lambda: reduce_add(())),
        (
            r"reduce_add needs arrays of numbers, but leaf \['w'\] is bool\[2\]",
            lambda: reduce_add([{"w": jnp.ones(2, bool)}] * 3),
        ),
        (
            r"reduce_add needs arrays of numbers, but leaf itself is key<fry>\[\]",
            lambda: reduce_add([jax.random.key(0)] * 3),
        ),
        (
            r"scatter: dim = 1.0: expected an int",
            lambda: scatter([1.0], None, cast(Any, 1.0)),
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_error(said, wrong):
    with pytest.raises(JdagError, match=said):
        wrong()


def test_what_moves_is_refused_inside_of_jit():
    one = jnp.ones(4)
    for wrong in (
        lambda x: replicate(x, names(2)),
        lambda x: scatter(x, names(2)),
        lambda x: gather([x, x], "cpu:0"),
        lambda x: gather([x, x]),
        lambda x: reduce_add([x, x], "cpu:0"),
        jax.grad(lambda x: jnp.sum(replicate(x, names(1))[0])),
    ):
        with fails_with(JdagError, "parallel.cannot_move_between_devices_inside"):
            jax.jit(wrong)(one)


def test_an_array_that_was_deleted_is_named():
    gone = jnp.ones(3)
    gone.delete()
    with fails_with(JdagError, "parallel.replicate_leaf_w_float64_3"):
        replicate({"w": gone}, names(2))


def test_a_dimension_may_be_numpys():
    x = array(3, 4)
    chunks = scatter(x, names(2), np.int64(1))
    assert [chunk.shape for chunk in chunks] == [(3, 2)] * 2
    close(gather(chunks, "cpu:0", np.int32(-1)), x)


def test_statics_may_be_wrapped():
    found = replicate({"n": jdag.static(3), "w": jnp.ones(2)}, names(2))
    assert [replica["n"] == jdag.static(3) for replica in found] == [True] * 2


def test_what_lies_over_a_mesh_that_is_part_of_its_type_is_cut_and_copied():
    x = array(8, 2)
    there = meshed(x, AxisType.Explicit)
    chunks = scatter(there, names(3))
    assert where(chunks) == names(3) and [len(chunk) for chunk in chunks] == [3, 3, 2]

    def loss(x: Any) -> Any:
        parts = [*scatter(x, names(3)), *replicate(x, names(2, 6))]
        return jnp.sum(gather([jnp.sin(part) for part in parts], "cpu:0") ** 2)

    found = jax.grad(loss)(there)
    assert found.sharding == there.sharding
    wanted = jax.grad(lambda x: 3 * jnp.sum(jnp.sin(x) ** 2))(x)
    close(jax.device_put(found, jax.devices()[0]), wanted)
