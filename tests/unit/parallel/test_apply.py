"""Functions side by side: where their outputs go, their gradients, their errors."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jdag
from jdag.compute.moves import home_of, moved_arrays
from jdag.errors import JdagError
from jdag.parallel import data_parallel, gather, parallel_apply, replicate, scatter
from tests.tools.error_texts import fails_with
from tests.unit.parallel.cases import array, close, meshed, names, where


def linear(w: Any, x: Any) -> Any:
    return {"y": x @ w, "n": jnp.argmax(x, 0)}


def test_outputs_are_on_the_given_devices_or_where_inputs_live():
    inputs = [jax.device_put(array(2, seed=n), jax.devices()[n + 2]) for n in range(3)]
    fns = [jnp.sin, jnp.cos, lambda x: (x, jnp.sum(x))]
    for devices, wanted in ((None, names(3, 2)), (names(3, 5), names(3, 5))):
        found = parallel_apply(fns, inputs, devices)
        assert where(found) == [*wanted, wanted[2]]
        for fn, given, made in zip(fns, inputs, found, strict=True):
            host = jax.tree.map(np.asarray, fn(given))
            close(jax.tree.map(np.asarray, made), host)


def test_an_input_over_several_devices_is_worked_on_there():
    x, w = array(8, 3), array(3, 2, seed=1)
    there = meshed(x, AxisType.Auto), w

    def loss(*given: Any) -> Any:
        return parallel_apply([lambda x, w: jnp.sum(jnp.sin(x @ w))], [given])[0]

    value, found = jax.value_and_grad(loss, (0, 1))(*there)
    assert len(value.sharding.device_set) == 4
    assert found[0].sharding.is_equivalent_to(there[0].sharding, 2)
    wanted = jax.value_and_grad(lambda x, w: jnp.sum(jnp.sin(x @ w)), (0, 1))(x, w)
    close(jax.device_put((value, found), jax.devices()[0]), wanted)


def test_gradients_are_those_of_one_function_after_the_other():
    w, x = array(3, 2), array(7, 3, seed=1)

    def loss(w: Any, x: Any) -> Any:
        replicas, chunks = replicate(w, names(3, 1)), scatter(x, names(3, 1))
        fns = [linear, linear, lambda w, x: linear(2 * w, x)]
        outputs = parallel_apply(fns, list(zip(replicas, chunks, strict=True)))
        return jnp.sum(gather([out["y"] for out in outputs], "cpu:0") ** 3)

    @jax.jit
    def alone(w: Any, x: Any) -> Any:
        return jnp.sum((x @ w * jnp.ones(7).at[6].set(2)[:, None]) ** 3)

    found = jax.grad(loss, (0, 1))(w, x)
    close(found, jax.grad(alone, (0, 1))(w, x))
    assert where(found) == ["cpu:0"] * 2


def test_all_run_to_their_end_before_the_first_error_by_replica_is_raised():
    ended = []

    def ends(x: Any) -> Any:
        jax.debug.callback(lambda: ended.append(1))
        return x

    def fails(x: Any) -> Any:
        if isinstance(x, jax.core.Tracer):  # It moves: its shapes are known, it fails.
            return moved_arrays([x], jax.devices()[1:2])[0]
        raise ValueError("at run time")

    def never(x: Any) -> Any:
        raise KeyError("in tracing")

    one = jnp.ones(2)
    for fns, error, number in (
        ([ends, fails, ends, never, ends], ValueError, 1),
        ([never, ends, fails, ends, ends], KeyError, 0),
    ):
        ended.clear()
        with pytest.raises(error, match=r"run time|tracing") as caught:
            parallel_apply(fns, [one] * 5)
        assert len(ended) == 3
        noted = [n for n in caught.value.__notes__ if "Raised by replica" in n]
        assert noted == [f"Raised by replica {number} of 0 to 4."]


def test_what_runs_unjitted_makes_its_arrays_where_its_input_lives():
    def made(x: Any) -> Any:
        return moved_arrays([x + jnp.ones(2)], [home_of(x) or jax.devices()[0]])[0]

    inputs = [jax.device_put(jnp.ones(2), jax.devices()[n]) for n in (3, 5)]
    found = parallel_apply([made, made], inputs)
    assert where(found) == ["cpu:3", "cpu:5"]


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        (
            r"2 functions and 1 inputs: pass one input for each f",
            {"inputs": [1.0]},
        ),
        (
            r"2 functions and 3 devices: pass one device",
            {"devices": names(3)},
        ),
        (r"2 functions and 1 devices", {"devices": names(1)}),
        (r"device cpu:1 is listed twice", {"devices": ["cpu:1", "cpu:1"]}),
        (r"parallel_apply: the list of devices is empty", {"devices": []}),
        (r"fns is a function; expected a list", {"fns": jnp.ones}),
        (r"inputs is a JAX array; expected a list", {"inputs": jnp.ones(2)}),
        (r"a call takes a function, not 4", {"fns": [jnp.sin, 4]}),
        (
            r"parallel_apply: argument 0\['a'\] is an object, which no call accepts",
            {"inputs": [1.0, {"a": object()}]},
        ),
        (
            r"returned an object as its output; a function must",
            {"fns": [jnp.sin, lambda x: object()]},
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_error(said, wrong):
    given = {"fns": [jnp.sin, jnp.cos], "inputs": [1.0, 2.0], **wrong}
    with pytest.raises(JdagError, match=said):
        parallel_apply(**given)


@pytest.mark.parametrize(
    "closing",
    [
        lambda w: lambda x: x * w,
        lambda w: lambda x, w=w: x * w,
        lambda w: lambda x, *, w=(w,): x * w[0],
        lambda w: partial(jnp.multiply, w),
        lambda w: jax.jit(lambda x, held={"w": [w]}: x * held["w"][0]),
        lambda w: partial(lambda fn, x: fn(x), lambda y: y * w),
    ],
)
def test_what_closes_over_a_tracer_is_refused(closing):
    x = array(3)
    close(parallel_apply([closing(2.0)], [x]), [2 * x])
    with fails_with(JdagError, "parallel.closes_over_a_tracer_hand"):
        jax.grad(lambda w: jnp.sum(parallel_apply([closing(w)], [x])[0]))(2.0)
    spread = partial(data_parallel, devices=names(3))
    with fails_with(JdagError, "parallel.data_parallel_closes_over_a"):
        jax.grad(lambda w, p: jnp.sum(spread(lambda p, x: closing(w)(x), p, x)))(2.0, x)


def test_an_input_lives_where_what_was_put_somewhere_is_and_not_on_two():
    far = jax.device_put(array(3), jax.devices()[2])
    (found,) = parallel_apply([jnp.multiply], [(jnp.float64(2), far)])
    assert where(found) == ["cpu:2"]
    other = jax.device_put(array(3), jax.devices()[4])
    given = [(1.0, 2.0), (3.0, far, other)]
    fns: list[Any] = [jnp.add, lambda n, a, b: n * a + b]
    for wrong in (
        lambda: parallel_apply(fns, given),
        lambda: jax.vjp(lambda a: parallel_apply(fns[1:], [(3.0, a, other)]), far),
    ):
        with fails_with(ValueError, "parallel.incompatible_devices_device_ids_4"):
            wrong()
    assert where(parallel_apply(fns, given, names(2, 6))) == ["cpu:6", "cpu:7"]


def test_nothing_at_all_gives_nothing():
    assert parallel_apply([], []) == []


# ------------------------------------------------- replicas of data_parallel, as these


def by_hand(p: Any, x: Any) -> Any:
    """Tell by the numbers whether it was compiled."""
    is_compiled = isinstance(x, jax.core.Tracer) and not hasattr(x, "primal")
    return (1 if is_compiled else 2) * p * x


@pytest.mark.parametrize("rows", [6, 5])
def test_a_function_that_moves_arrays_is_not_jitted_in_its_replicas(rows):
    def moves(p: Any, x: Any) -> Any:
        return moved_arrays([by_hand(p, x)], jax.devices()[:1])[0]

    x, p, devices = jnp.arange(float(rows)), jnp.float64(3), names(3)
    close(data_parallel(by_hand, p, x, devices), p * x)
    close(data_parallel(moves, p, x, devices), 2 * p * x)


def test_what_runs_as_python_is_refused_with_what_to_do():
    fn = jdag.unjitted(lambda p, x: x)
    with fails_with(JdagError, "parallel.data_parallel_jdag_unjitted_leave"):
        data_parallel(fn, {}, array(6), names(3))
    with fails_with(JdagError, "parallel.parallel_apply_jdag_unjitted_leave"):
        parallel_apply([fn], [(array(6), array(6))])


@pytest.mark.parametrize(
    ("full", "last"),
    [
        (lambda x: {"a": x}, lambda x: {"b": x}),
        (lambda x: x, lambda x: (x, -x)),
        (lambda x: (x, -x), lambda x: x),
        (lambda x: {"a": x, "b": None}, lambda x: {"a": x, "b": x}),
    ],
)
def test_replicas_that_return_other_structures_are_not_joined(full, last):
    def fn(p: Any, x: Any) -> Any:
        return full(x) if len(x) == 2 else last(x)

    with fails_with(JdagError, "parallel.returned_pytreedef_of_replica_0"):
        data_parallel(fn, {}, array(5), names(3))
    both = partial(data_parallel, lambda p, x: (x, fn(p, x)), has_aux=True)
    close(both({}, array(5), names(3)), (array(5), full(array(5)[:2])))


def test_aux_of_other_structures_takes_nothing_from_the_gradient():
    def fn(p: Any, x: Any) -> Any:
        return p * x, [p * row for row in x]

    def found_by(p: Any) -> Any:
        y, aux = data_parallel(fn, p, array(5), names(3), has_aux=True)
        assert len(aux) == 2
        return jnp.sum(y**2)

    close(jax.grad(found_by)(3.0), 6 * jnp.sum(array(5) ** 2))


def test_the_replica_that_raised_is_named():
    def fn(p: Any, x: Any) -> Any:
        if len(x) == 1:
            raise KeyError("mine")
        return x

    with fails_with(KeyError, "parallel.mine") as caught:
        data_parallel(fn, {}, array(5), names(3))
    assert caught.value.__notes__[-1].endswith("by replica 2 of 0 to 2.")


INSIDE = r"cannot move between devices inside of jax\.jit"


def weighted(p: Any, x: Any) -> Any:
    return jnp.sin(x) * p


def test_what_reduces_over_replicas_moves_no_arrays():
    def fn(p: Any, x: Any, rows: Any) -> Any:
        return data_parallel(weighted, p, x, names(2))

    with pytest.raises(JdagError, match=INSIDE):
        data_parallel(fn, 2.0, array(6), names(3), axis_name="all")


def test_what_spreads_its_own_rows_is_called_on_each_device():
    def fn(p: Any, x: Any) -> Any:
        return data_parallel(weighted, p, x, names(2))

    x = array(6)
    found, vjp = jax.vjp(lambda p: data_parallel(fn, p, x, names(3)), jnp.float64(2))
    close(found, weighted(2.0, x))
    close(vjp(x), (jnp.sum(jnp.sin(x) * x),))


def test_one_replica_computes_where_it_was_told_to_and_gradients_come_home():
    seen = []

    def noted(p: Any, x: Any) -> Any:
        seen.extend([str(home_of(p)), str(home_of(x))])
        return moved_arrays([p * x], jax.devices()[3:4])[0]  # So it is not compiled.

    home = jax.devices()[0]
    p, x = jax.device_put((jnp.full(2, 3.0), jnp.arange(6.0).reshape(3, 2)), home)
    places: dict[str, Any] = {"devices": ["cpu:3"], "output_device": "cpu:5"}
    out, vjp = jax.vjp(lambda *both: data_parallel(noted, *both, **places), p, x)
    assert str(home) not in seen and str(jax.devices()[3]) in seen
    assert where(out) == ["cpu:5"]
    found = vjp(jax.device_put(jnp.ones((3, 2)), jax.devices()[5]))
    assert list(map(where, found)) == [["cpu:0"], ["cpu:0"]]
    np.testing.assert_array_equal(found[0], np.sum(x, axis=0))
    np.testing.assert_array_equal(found[1], np.broadcast_to(p, (3, 2)))
