"""Data parallel against the gradient on one device: chunks of one size and of two."""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jdag
from jdag.compute import pairs
from jdag.compute.avals import aval_of
from jdag.errors import JdagError
from jdag.parallel import data_parallel
from jdag.parallel.data import _is_one_program
from jdag.parallel.task import task_of
from tests.tools.error_texts import fails_with, warns_with
from tests.tools.tiers import sized
from tests.unit.parallel.cases import (
    BIG,
    ODD,
    ROWS,
    UNEVEN,
    array,
    close,
    meshed,
    names,
    rows_out,
    where,
)
from tests.unit.parallel.tasks import (
    TASKS,
    TOLERANCE,
    Task,
    asked_for,
    on_one_device,
    spread_as,
)


def test_a_deadline_is_looked_at_by_one_process_too():
    with fails_with(JdagError, "parallel.deadline_s_allowed_is_a"):
        data_parallel(scaled, {}, UNEVEN, names(1), deadline_s=0)


@pytest.mark.parametrize("task", TASKS[:: sized(2, 1)])
def test_values_and_gradients_are_those_of_one_device(task: Task):
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
    rows = array(*x["x"].shape, seed=4, dtype=task.dtype)
    none = np.zeros(wanted["y"][1].shape, jax.dtypes.float0)
    losses = array(len(task.sizes), seed=5, dtype=task.dtype)
    cotangents = {"y": (rows, none), "loss": losses}
    gradients = vjp(cotangents)
    assert where(gradients) == ["cpu:0"] * 3
    close(gradients, alone_vjp(cotangents), 3 * tolerance)


def scaled(p: Any, x: Any) -> Any:
    return p["first"] * x + 0 * p["second"]


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("twice", [False, True])
def test_gradients_of_replicas_are_added_in_their_order(first, twice):
    p = {"first": jnp.float32(1), "second": jnp.float32(2)}
    for each, wanted in ((UNEVEN, 0), (UNEVEN[::-1].copy(), 2), (UNEVEN[:3], BIG)):
        devices = names(len(each), first)
        # Chunks of two rows, but the last, which has one.
        x = np.stack([each, 0 * each], 1).ravel()[:-1] if twice else each
        _, vjp = jax.vjp(lambda p, x=x, d=devices: data_parallel(scaled, p, x, d), p)
        (found,) = vjp(jnp.ones(len(x), jnp.float32))
        assert found["first"] == wanted and found["second"] == 0


@pytest.mark.parametrize("rows", ROWS)
def test_gradients_come_to_where_parameters_and_rows_live(rows):
    p = {"w": jax.device_put(array(3, 2), jax.devices()[5]), "b": array(2, seed=1)}
    x = jax.device_put(array(rows, 3, seed=2), jax.devices()[6])

    def fn(p: Any, x: Any) -> Any:
        return jnp.tanh(x @ p["w"] + p["b"])

    def loss(p: Any, x: Any) -> Any:
        return jnp.sum(data_parallel(fn, p, x, names(2, 1)) ** 2)

    found = jax.grad(loss, (0, 1))(p, x)
    assert where(found) == ["cpu:0", "cpu:5", "cpu:6"]
    here = jax.device_put((p, x), jax.devices()[0])
    close(found, jax.grad(lambda p, x: jnp.sum(fn(p, x) ** 2), (0, 1))(*here))


@pytest.mark.parametrize("rows", ROWS)
def test_gradients_of_arrays_over_several_devices_are_spread_as_these_are(rows):
    mesh = Mesh(np.asarray(jax.devices()[4:6]), ("some",))
    spread = NamedSharding(mesh, PartitionSpec(None, "some"))
    p, x = array(4, 2), array(rows, 4, seed=1)
    there = jax.device_put((p, x), spread)

    def loss(p: Any, x: Any, apply: Any) -> Any:
        return jnp.sum(apply(lambda p, x: jnp.tanh(x @ p), p, x) ** 2)

    dp = partial(data_parallel, devices=names(2))
    found = jax.grad(loss, (0, 1))(*there, dp)
    assert [one.sharding for one in found] == [spread, spread]
    wanted = jax.grad(loss, (0, 1))(p, x, lambda fn, p, x: fn(p, x))
    close(jax.device_put(found, jax.devices()[0]), wanted)


@pytest.mark.parametrize(("count", "axis_name"), [(3, None), (2, None), (3, "all")])
def test_rows_over_a_mesh_that_is_part_of_their_type_are_cut_anew(count, axis_name):
    x = array(8, 2)
    there = meshed(x, AxisType.Explicit)

    def loss(x: Any) -> Any:
        devices = names(count)
        y = data_parallel(lambda p, x, *_: p * x, 2.0, x, devices, axis_name=axis_name)
        return jnp.sum(y**3)

    found = jax.grad(loss)(there)
    assert found.sharding == there.sharding
    close(jax.device_put(found, jax.devices()[0]), 24 * x**2)


@pytest.mark.parametrize("rows", ROWS)
def test_rows_may_have_keys(rows):
    def noisy(p: Any, x: Any, *rows: Any) -> Any:
        return p * x[0] + jax.vmap(jax.random.normal)(x[1])

    keys = jax.random.split(jax.random.key(0), rows)
    x = jnp.arange(1.0 * rows), keys
    close(data_parallel(noisy, 2.0, x, names(2)), noisy(2.0, x))
    found = data_parallel(noisy, 2.0, x, names(4), axis_name="all")
    close(found, noisy(2.0, x))


def test_one_device_still_honours_where_outputs_go():
    p, x = {"w": array(3, 2)}, array(4, 3, seed=1)
    found = data_parallel(rows_out, p, x, ["cpu:3"], "cpu:6")
    assert where(found) == ["cpu:6"]
    assert where(data_parallel(rows_out, p, x, ["cpu:3"])) == ["cpu:3"]
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

    p = jnp.float64(2)
    for x in (jnp.arange(1.0, 7.0), jnp.arange(1.0, 6.0)):

        def total(p: Any, x: Any = x) -> Any:
            out, aux = data_parallel(fn, p, x, names(3), has_aux=True)
            return jnp.sum(out) + 100 * aux["first"], aux

        (_, aux), found = jax.value_and_grad(total, has_aux=True)(p)
        assert found == jnp.sum(x) and aux == {"first": 2, "count": 2}
    with fails_with(JdagError, "parallel.with_has_aux_true_it"):
        data_parallel(rows_out, {"w": array(3, 2)}, array(4, 3), has_aux=True)


# --------------------------------------------------------------------- training


@pytest.mark.parametrize("rows", ROWS)
def test_second_derivatives_are_those_of_one_device(rows):
    p, x = {"w": array(3, 2)}, array(rows, 3, seed=1)

    def spread(p: Any) -> Any:
        return jnp.sum(data_parallel(rows_out, p, x, names(2)) ** 3)

    @jax.jit
    def alone(p: Any) -> Any:
        return jnp.sum(rows_out(p, x) ** 3)

    def along(loss: Any) -> Any:
        return jax.jvp(jax.grad(loss), (p,), (p,))[1]

    def twice(loss: Any) -> Any:
        return jax.grad(lambda p: jnp.sum(jax.grad(loss)(p)["w"] ** 2))(p)

    close(along(spread), along(alone))
    close(twice(spread), twice(alone))


@pytest.mark.parametrize("rows", ROWS)
def test_what_makes_another_result_makes_another_program(rows):
    x, devices = array(rows, 4), names(2)

    def times(n: int) -> Any:
        return lambda p, x: (p * n * jnp.cumsum(x, 1), x[0])

    def spread(fn: Any, dim: int = 0, has_aux: bool = False) -> Any:
        return data_parallel(fn, 2.0, x, devices, dim=dim, has_aux=has_aux)

    for n in (2, 3, 2):
        close(spread(times(n))[0], 2 * n * jnp.cumsum(x, 1))
    halves = [jnp.cumsum(x[:, :2], 1), jnp.cumsum(x[:, 2:], 1)]
    both = [lambda p, x: jnp.cumsum(x, 1), lambda p, x: jnp.sin(x)]
    close(spread(both[0], 1), jnp.concatenate(halves, 1))
    close(spread(both[0]), jnp.cumsum(x, 1))
    close(spread(both[1]), jnp.sin(x))
    close(spread(times(2), has_aux=True)[1], x[0])
    close(spread(times(2))[1], jnp.concatenate([x[0], x[-(-rows // 2)]]))


@pytest.mark.parametrize("rows", ROWS)
def test_a_function_made_anew_in_a_loop_is_warned_of(rows, monkeypatch):
    monkeypatch.setattr(pairs, "ANEW_MAX", 3)
    cache = pairs.PairCache(9)  # It has seen none of them.
    monkeypatch.setattr("jdag.parallel.apply.pair", cache.pair)
    monkeypatch.setattr("jdag.parallel.program.CACHE", cache)
    with warns_with(UserWarning, "parallel.lambda_for_3_different_closures"):
        for n in range(3):
            data_parallel(lambda p, x, n=n: x * n, 1.0, array(rows), names(2))


@pytest.mark.parametrize("rows", ROWS)
def test_nothing_is_traced_again_in_the_next_step(rows):
    traced = []

    def fn(p: Any, x: Any) -> Any:
        traced.append(1)
        return p * x

    def step(p: Any) -> Any:
        return jax.grad(
            lambda p: jnp.sum(data_parallel(fn, p, jnp.arange(1.0 * rows), names(2)))
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
        (
            r"data_parallel: the list of .* is empty; expected one or more of cpu:0",
            {"devices": []},
        ),
        (r"has no device 'gpu:0'", {"output_device": "gpu:0"}),
        (r"leaf itself has 2 dimensions, but dim is 2: expected -2 to 1", {"dim": 2}),
        (r"dim = 'rows': expected an int", {"dim": "rows"}),
        (
            r"leaf \['b'\] is ~float64\[\], a scalar",
            {"x": {"a": jnp.ones(3), "b": 1.0}},
        ),
        (
            r"leaf \['b'\] has 4 rows along dim 0, and leaf \['a'\] has 3",
            {"x": {"a": jnp.ones(3), "b": jnp.ones(4)}},
        ),
        (r"the pytree to split into chunks has no arrays", {"x": "rows"}),
        (r"data_parallel: this is not a pytree of JAX: .* '<' not", {"params": ODD}),
        (r"returned is not a pytree of JAX: .* '<' not", {"fn": lambda p, x: ODD}),
        (r"data_parallel: argument 0 is an object, which no", {"params": object()}),
        (r"axis_name = 3: expected a str, or None", {"axis_name": 3}),
        (r"has_aux = 1: expected True or False", {"has_aux": 1}),
        (r"a call takes a function, not 3", {"fn": 3}),
        (r"returned a dict_keys at|returned an object", {"fn": lambda p, x: object()}),
        (r"output 0 of .* has 1 dimensions, but dim is 1", {"dim": 1, "fn": first}),
        (
            r"output 0 of .* is float64\[2,2\] in replica 0 and float64\[1,1\] in",
            {"fn": lambda p, x: x @ x.T, "x": jnp.ones((3, 2)), "devices": names(2)},
        ),
        (
            r"output 0 of .* is float64\[3\] for an input of 2 rows",
            {"fn": lambda p, x, _: x.sum(0), "axis_name": "r", "devices": names(2)},
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_error(said, wrong):
    given = {"fn": lambda p, x: x, "params": {}, "x": jnp.ones((4, 3)), **wrong}
    with pytest.raises(JdagError, match=said) as caught:
        data_parallel(**given)
    assert caught.value.__cause__ is None or "returned" in str(caught.value)


@pytest.mark.parametrize("rows", ROWS)
def test_it_is_refused_inside_of_jit_and_vmap_and_loops(rows):
    p, x = {"w": array(3, 2)}, array(rows, 3, seed=1)

    def loss(p: Any) -> Any:
        return jnp.sum(data_parallel(rows_out, p, x, names(2)))

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
        with fails_with(JdagError, "parallel.cannot_move_between_devices_inside"):
            call()
    assert jax.eval_shape(loss, p) == aval_of(loss(p)).struct()
    again = jax.checkpoint(loss)
    close(jax.grad(again)(p), jax.grad(loss)(p))


def test_what_the_function_raises_is_raised_as_it_is():
    def wrong(p: Any, x: Any) -> Any:
        raise KeyError("mine")

    for rows in ROWS:
        with fails_with(KeyError, "parallel.mine"):
            data_parallel(wrong, {}, jnp.ones(rows), names(2))


@jax.tree_util.register_dataclass
@dataclass
class Layer:
    w: Any

    def __call__(self, p: Any, x: Any) -> Any:
        return x * self.w


def test_devices_of_several_kinds_run_side_by_side():
    """A program over devices has devices of one kind."""
    given = rows_out, {"w": array(3, 2)}, array(4, 3), names(2), None, 0
    options: Any = {"axis_name": None, "has_aux": False, "deadline_s": 1.0}
    task, gpu = task_of(*given, **options), cast(Any, SimpleNamespace(platform="gpu"))
    assert _is_one_program(task)
    assert not _is_one_program(task._replace(devices=(task.devices[0], gpu)))


@pytest.mark.parametrize("rows", ROWS)
def test_it_is_differentiated_forward_as_on_one_device(rows):
    p, v, x = {"w": array(3, 2)}, {"w": array(3, 2, seed=5)}, array(rows, 3, seed=1)
    found = jax.jvp(lambda p: data_parallel(rows_out, p, x, names(2)), [p], [v])
    close(found, jax.jvp(lambda p: rows_out(p, x), [p], [v]))


def test_statics_and_modules_are_part_of_the_function():
    def power(p: Any, x: Any) -> Any:
        return x ** p["n"] if p["name"] == "power" else x

    p = {"n": jdag.static(3), "name": "power"}
    close(data_parallel(power, p, jnp.arange(4.0), names(2)), jnp.arange(4.0) ** 3)

    def loss(layer: Any) -> Any:
        return jnp.sum(data_parallel(layer, {}, jnp.arange(4.0), names(2)))

    assert jax.grad(loss)(Layer(jnp.float64(2))).w == 6
