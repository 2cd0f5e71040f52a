"""Data parallel against the gradient on one device, by each way of dispatch."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jdag
from jdag.compute import pairs
from jdag.compute.avals import aval_of
from jdag.errors import JdagError
from jdag.parallel import data_parallel, dispatch, ready
from tests.parallel.cases import (
    BIG,
    HOW,
    ODD,
    UNEVEN,
    array,
    close,
    meshed,
    names,
    rows_out,
    where,
)
from tests.parallel.tasks import (
    TASKS,
    TOLERANCE,
    UNLIKE,
    Task,
    asked_for,
    on_one_device,
    spread_as,
)
from tests.tiers import sized


@pytest.mark.parametrize("task", TASKS[:: sized(2, 1)])
def test_values_and_gradients_are_those_of_one_device(task):
    check(task)


@pytest.mark.parametrize("deadline_s", [0, True])
def test_a_deadline_is_looked_at_by_one_process_too(deadline_s):
    with pytest.raises(JdagError, match=r"deadline_s = .*: allowed is a number of s"):
        data_parallel(scaled, {}, UNEVEN, names(1), deadline_s=deadline_s)


def check(task: Task) -> None:
    """Values and both gradients of a task, against plain JAX."""
    params, x = asked_for(task)
    arguments = (params["parts"], x["x"])

    def filled(parts: Any, values: Any) -> tuple[Any, Any]:
        return {**params, "parts": parts}, {**x, "x": values}

    def spread(parts: Any, values: Any) -> Any:
        return spread_as(task, *filled(parts, values))

    @jax.jit  # Else each of its operations is compiled for each shape.
    def alone(parts: Any, values: Any) -> Any:
        return on_one_device(*filled(parts, values), task.sizes, task.dim)

    tolerance = TOLERANCE[task.dtype]
    wanted, alone_vjp = jax.vjp(alone, *arguments)
    found, vjp = jax.vjp(spread, *arguments)
    plain = spread(*arguments)
    assert where(found) == where(plain) == [f"cpu:{task.output}"] * 3
    close(found, wanted, tolerance)
    close(plain, wanted, tolerance)
    cotangents = {
        "y": (
            array(*x["x"].shape, seed=4, dtype=task.dtype),
            np.zeros(wanted["y"][1].shape, jax.dtypes.float0),
        ),
        "loss": array(len(task.sizes), seed=5, dtype=task.dtype),
    }
    gradients = vjp(cotangents)
    assert where(gradients) == ["cpu:0"] * 3
    close(gradients, alone_vjp(cotangents), 3 * tolerance)


@pytest.mark.parametrize("task", UNLIKE)
def test_one_program_takes_chunks_of_one_size(task):
    with pytest.raises(JdagError, match=f"how = {task.how!r} takes chunks of one size"):
        spread_as(task, *asked_for(task))


def scaled(p: Any, x: Any) -> Any:
    return p["first"] * x + 0 * p["second"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("first", [0, 3])
def test_gradients_of_replicas_are_added_in_their_order(how, first):
    p = {"first": jnp.float32(1), "second": jnp.float32(2)}
    for x, wanted in ((UNEVEN, 0), (UNEVEN[::-1].copy(), 2), (UNEVEN[:3], BIG)):
        devices = names(len(x), first)
        _, vjp = jax.vjp(
            lambda p, x=x, d=devices: data_parallel(scaled, p, x, d, how=how), p
        )
        (found,) = vjp(jnp.ones(len(x), jnp.float32))
        assert found["first"] == wanted and found["second"] == 0


@pytest.mark.parametrize("how", HOW)
def test_gradients_come_to_where_parameters_and_rows_live(how):
    p = {"w": jax.device_put(array(3, 2), jax.devices()[5]), "b": array(2, seed=1)}
    x = jax.device_put(array(8, 3, seed=2), jax.devices()[6])

    def fn(p: Any, x: Any) -> Any:
        return jnp.tanh(x @ p["w"] + p["b"])

    def loss(p: Any, x: Any) -> Any:
        return jnp.sum(data_parallel(fn, p, x, names(4, 1), how=how) ** 2)

    found = jax.grad(loss, (0, 1))(p, x)
    assert where(found) == ["cpu:0", "cpu:5", "cpu:6"]
    here = jax.device_put((p, x), jax.devices()[0])
    close(found, jax.grad(lambda p, x: jnp.sum(fn(p, x) ** 2), (0, 1))(*here))


@pytest.mark.parametrize("how", HOW)
def test_gradients_of_arrays_over_several_devices_are_spread_as_these_are(how):
    mesh = Mesh(np.asarray(jax.devices()[4:6]), ("some",))
    spread = NamedSharding(mesh, PartitionSpec(None, "some"))
    p, x = array(4, 2), array(6, 4, seed=1)
    there = jax.device_put((p, x), spread)

    def loss(p: Any, x: Any, apply: Any) -> Any:
        return jnp.sum(apply(lambda p, x: jnp.tanh(x @ p), p, x) ** 2)

    dp = partial(data_parallel, devices=names(3), how=how)
    found = jax.grad(loss, (0, 1))(*there, dp)
    assert [one.sharding for one in found] == [spread, spread]
    wanted = jax.grad(loss, (0, 1))(p, x, lambda fn, p, x: fn(p, x))
    close(jax.device_put(found, jax.devices()[0]), wanted)


@pytest.mark.parametrize(
    ("how", "count", "axis_name"),
    [("each", 3, None), ("shard_map", 2, None), ("shard_map", 3, "all")],
)
def test_rows_over_a_mesh_that_is_part_of_their_type_are_cut_anew(
    how, count, axis_name
):
    x = array(8, 2)
    there = meshed(x, AxisType.Explicit)

    def loss(x: Any) -> Any:
        options: Any = {"how": how, "axis_name": axis_name}
        y = data_parallel(lambda p, x, *_: p * x, 2.0, x, names(count), **options)
        return jnp.sum(y**3)

    found = jax.grad(loss)(there)
    assert found.sharding == there.sharding
    close(jax.device_put(found, jax.devices()[0]), 24 * x**2)


@pytest.mark.parametrize("how", HOW)
def test_rows_may_have_keys(how):
    def noisy(p: Any, x: Any, *rows: Any) -> Any:
        return p * x[0] + jax.vmap(jax.random.normal)(x[1])

    keys = jax.random.split(jax.random.key(0), 6)
    x = jnp.arange(6.0), keys
    close(data_parallel(noisy, 2.0, x, names(3), how=how), noisy(2.0, x))
    if how != "each":
        found = data_parallel(noisy, 2.0, x, names(4), axis_name="all", how=how)
        close(found, noisy(2.0, x))


def test_one_device_still_honours_where_outputs_go():
    p, x = {"w": array(3, 2)}, array(4, 3, seed=1)
    for how in (None, *HOW):
        found = data_parallel(rows_out, p, x, ["cpu:3"], "cpu:6", how=how)
        assert where(found) == ["cpu:6"]
        assert where(data_parallel(rows_out, p, x, ["cpu:3"], how=how)) == ["cpu:3"]
        close(jax.device_put(found, jax.devices()[0]), rows_out(p, x))
    losses = data_parallel(lambda p, x: jnp.sum(x), p, x, ["cpu:0"])
    assert losses.shape == (1,)


def test_all_devices_are_taken_and_the_first_has_the_outputs():
    seen = data_parallel(lambda p, x: x, {}, array(16, 2))
    assert where(seen) == ["cpu:0"] and seen.shape == (16, 2)
    each = data_parallel(lambda p, x: jnp.sum(x), {}, jnp.ones(16))
    np.testing.assert_array_equal(each, np.full(8, 2.0))


def test_what_is_aux_is_of_the_first_replica_and_nothing_flows_back_to_it():
    def fn(p: Any, x: Any) -> Any:
        return p * x, {"first": p * x[0], "count": len(x)}

    p, x = jnp.float64(2), jnp.arange(1.0, 7.0)
    for how in HOW:

        def total(p: Any, how: str = how) -> Any:
            out, aux = data_parallel(fn, p, x, names(3), has_aux=True, how=how)
            return jnp.sum(out) + 100 * aux["first"], aux

        (_, aux), found = jax.value_and_grad(total, has_aux=True)(p)
        assert found == 21 and aux == {"first": 2, "count": 2}
    with pytest.raises(JdagError, match=r"with has_aux=True it returns a pair"):
        data_parallel(rows_out, {"w": array(3, 2)}, array(4, 3), has_aux=True)


# --------------------------------------------------------------------- training


@pytest.mark.parametrize("how", HOW)
def test_second_derivatives_are_those_of_one_device(how):
    p, x = {"w": array(3, 2)}, array(4, 3, seed=1)

    def spread(p: Any) -> Any:
        return jnp.sum(data_parallel(rows_out, p, x, names(2), how=how) ** 3)

    @jax.jit
    def alone(p: Any) -> Any:
        return jnp.sum(rows_out(p, x) ** 3)

    def along(loss: Any) -> Any:
        return jax.jvp(jax.grad(loss), (p,), (p,))[1]

    def twice(loss: Any) -> Any:
        return jax.grad(lambda p: jnp.sum(jax.grad(loss)(p)["w"] ** 2))(p)

    close(along(spread), along(alone))
    close(twice(spread), twice(alone))


@pytest.mark.parametrize("how", HOW)
def test_what_makes_another_result_makes_another_plan(how):
    x, devices = array(4, 4), names(2)

    def times(n: int) -> Any:
        return lambda p, x: (p * n * jnp.cumsum(x, 1), x[0])

    def spread(fn: Any, dim: int = 0, has_aux: bool = False) -> Any:
        settings: Any = {"has_aux": has_aux, "how": how}
        return data_parallel(fn, 2.0, x, devices, dim=dim, **settings)

    for n in (2, 3, 2):
        close(spread(times(n))[0], 2 * n * jnp.cumsum(x, 1))
    halves = [jnp.cumsum(x[:, :2], 1), jnp.cumsum(x[:, 2:], 1)]
    both = [lambda p, x: jnp.cumsum(x, 1), lambda p, x: jnp.sin(x)]
    close(spread(both[0], 1), jnp.concatenate(halves, 1))
    close(spread(both[0]), jnp.cumsum(x, 1))
    close(spread(both[1]), jnp.sin(x))
    close(spread(times(2), has_aux=True)[1], x[0])
    close(spread(times(2))[1], jnp.concatenate([x[0], x[2]]))


@pytest.mark.parametrize("how", HOW)
def test_a_function_made_anew_in_a_loop_is_warned_of(how, monkeypatch):
    monkeypatch.setattr(pairs, "ANEW_MAX", 3)
    cache = pairs.PairCache(9)  # It has seen none of them.
    monkeypatch.setattr(dispatch, "pair", cache.pair)
    monkeypatch.setattr(ready, "CACHE", cache)
    with pytest.warns(UserWarning, match=r"<lambda> .* for 3 different closures"):
        for n in range(3):
            data_parallel(lambda p, x, n=n: x * n, 1.0, array(4), names(2), how=how)


@pytest.mark.parametrize("how", HOW)
def test_nothing_is_traced_again_in_the_next_step(how):
    traced = []

    def fn(p: Any, x: Any) -> Any:
        traced.append(1)
        return p * x

    def step(p: Any) -> Any:
        return jax.grad(
            lambda p: jnp.sum(data_parallel(fn, p, jnp.arange(4.0), names(2), how=how))
        )(p)

    p = jnp.float64(2)
    p = p - step(p)
    before = len(traced)
    for _ in range(3):
        p = p - step(p)
    assert len(traced) == before > 0


# ------------------------------------------------------------------- what is refused


def first(p: Any, x: Any) -> Any:
    return x[:, 0]


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        (r"data_parallel: no devices; it takes one or more of cpu:0", {"devices": []}),
        (r"no device 'gpu:0' here", {"output_device": "gpu:0"}),
        (r"leaf itself has 2 dimensions and no dim 2: allowed are -2 to 1", {"dim": 2}),
        (r"dim = 'rows': allowed is an int", {"dim": "rows"}),
        (
            r"leaf \['b'\] is ~float64\[\], a scalar",
            {"x": {"a": jnp.ones(3), "b": 1.0}},
        ),
        (
            r"leaf \['b'\] has 4 rows along dim 0, and leaf \['a'\] has 3",
            {"x": {"a": jnp.ones(3), "b": jnp.ones(4)}},
        ),
        (r"the pytree to be cut into chunks has no arrays", {"x": "rows"}),
        (r"data_parallel: this is no pytree of JAX: .* '<' not", {"params": ODD}),
        (r"returned is no pytree of JAX: .* '<' not", {"fn": lambda p, x: ODD}),
        (r"leaf \[0\]: an object is no array", {"params": object()}),
        (r"axis_name = 3: allowed is a str, or None", {"axis_name": 3}),
        (r"how = 'all': allowed is 'pmap' or 'shard_map' or 'each'", {"how": "all"}),
        (r"has_aux = 1: allowed is True or False", {"has_aux": 1}),
        (r"how = 'each' runs every replica by", {"how": "each", "axis_name": "r"}),
        (r"a call takes a function, not 3", {"fn": 3}),
        (r"returned a dict_keys at|returned an object", {"fn": lambda p, x: object()}),
        (r"output 0 of .* has 1 dimensions and no dim 1", {"dim": 1, "fn": first}),
        (
            r"output 0 of .* is float64\[2,2\] of replica 0 and float64\[1,1\] of",
            {"fn": lambda p, x: x @ x.T, "x": jnp.ones((3, 2)), "devices": names(2)},
        ),
        (
            r"output 0 of .* is float64\[3\] for an input of 2 rows",
            {
                "fn": lambda p, x, rows: jnp.sum(x, 0),
                "axis_name": "r",
                "devices": names(2),
            },
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_error(said, wrong):
    given = {
        "fn": lambda p, x: x,
        "params": {"w": jnp.ones((3, 2))},
        "x": jnp.ones((4, 3)),
        **wrong,
    }
    with pytest.raises(JdagError, match=said) as caught:
        data_parallel(**given)
    assert caught.value.__cause__ is None or "returned" in str(caught.value)


@pytest.mark.parametrize("how", HOW)
def test_it_is_refused_inside_of_jit_and_vmap_and_loops(how):
    p, x = {"w": array(3, 2)}, array(4, 3, seed=1)

    def loss(p: Any) -> Any:
        return jnp.sum(data_parallel(rows_out, p, x, names(2), how=how))

    stacked = jax.tree.map(lambda a: a[None], p)
    around: list[Any] = [
        lambda: jax.jit(loss)(p),
        jax.jit(lambda: loss(p)),
        lambda: jax.jit(jax.grad(loss))(p),
        lambda: jax.vmap(loss)(stacked),
        lambda: jax.lax.scan(lambda c, q: (c, loss(q)), 0, stacked),
        lambda: jax.lax.cond(True, loss, lambda p: 0.0, p),
    ]
    for call in around:
        with pytest.raises(
            JdagError, match=r"cannot move between devices inside of ja"
        ):
            call()
    assert jax.eval_shape(loss, p) == aval_of(loss(p)).struct()
    again = jax.checkpoint(loss)
    close(jax.grad(again)(p), jax.grad(loss)(p))


def test_what_the_function_raises_is_raised_as_it_is():
    def wrong(p: Any, x: Any) -> Any:
        raise KeyError("mine")

    for how in HOW:
        with pytest.raises(KeyError, match="mine"):
            data_parallel(wrong, {}, jnp.ones(4), names(2), how=how)


@jax.tree_util.register_dataclass
@dataclass
class Layer:
    """A module: a pytree that is called."""

    w: Any

    def __call__(self, p: Any, x: Any) -> Any:
        return x * self.w


def test_statics_and_modules_are_part_of_the_function():
    def power(p: Any, x: Any) -> Any:
        return x ** p["n"] if p["name"] == "power" else x

    p = {"n": jdag.static(3), "name": "power"}
    close(data_parallel(power, p, jnp.arange(4.0), names(2)), jnp.arange(4.0) ** 3)

    def loss(layer: Any) -> Any:
        return jnp.sum(data_parallel(layer, {}, jnp.arange(4.0), names(2)))

    assert jax.grad(loss)(Layer(jnp.float64(2))).w == 6
