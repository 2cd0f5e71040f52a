"""Which way replicas go, and what they have to have in common on it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdag
from jdag.compute.moves import home_of, transferred
from jdag.errors import JdagError
from jdag.parallel import data_parallel, parallel_apply
from tests.parallel.cases import HOW, array, close, names, where


def by_hand(p: Any, x: Any) -> Any:
    """Tell by the numbers whether it was compiled."""
    is_compiled = isinstance(x, jax.core.Tracer) and not hasattr(x, "primal")
    return (1 if is_compiled else 2) * p * x


@pytest.mark.parametrize("rows", [6, 5])
def test_a_function_that_moves_arrays_is_not_jitted_in_its_replicas(rows):
    def moves(p: Any, x: Any) -> Any:
        return transferred([by_hand(p, x)], jax.devices()[:1])[0]

    x, p, devices = jnp.arange(float(rows)), jnp.float64(3), names(3)
    close(data_parallel(by_hand, p, x, devices, how="each"), p * x)
    close(data_parallel(moves, p, x, devices, how="each"), 2 * p * x)


@pytest.mark.parametrize("how", [None, "each", "pmap"])
def test_what_runs_as_python_is_refused_with_what_to_do(how):
    fn = jdag.unjitted(lambda p, x: x)
    with pytest.raises(
        JdagError, match=r"data_parallel: .* jdag\.unjitted, .* leave t"
    ):
        data_parallel(fn, {}, array(6), names(3), how=how)
    with pytest.raises(JdagError, match=r"parallel_apply: .* jdag\.unjitted, .* leave"):
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

    with pytest.raises(
        JdagError,
        match=r"returned PyTreeDef.* of replica 0 and PyTre.*"
        r" of replica 2: outputs of other structures cannot be joined",
    ):
        data_parallel(fn, {}, array(5), names(3))
    both = data_parallel(
        lambda p, x: (x, fn(p, x)), {}, array(5), names(3), has_aux=True
    )
    close(both, (array(5), full(array(5)[:2])))


def test_aux_of_other_structures_takes_nothing_from_the_gradient():
    def fn(p: Any, x: Any) -> Any:
        return p * x, [p * row for row in x]

    def found_by(p: Any) -> Any:
        y, aux = data_parallel(fn, p, array(5), names(3), has_aux=True)
        assert len(aux) == 2
        return jnp.sum(y**2)

    close(jax.grad(found_by)(3.0), 6 * jnp.sum(array(5) ** 2))


@pytest.mark.parametrize("rows", [6, 5])
def test_the_replica_that_raised_is_named(rows):
    def fn(p: Any, x: Any) -> Any:
        if len(x) == rows - 4:
            raise KeyError("mine")
        return x

    with pytest.raises(KeyError, match="mine") as caught:
        data_parallel(fn, {}, array(rows), names(3), how="each")
    number = 0 if rows == 6 else 2
    assert caught.value.__notes__[-1].endswith(f"by replica {number} of 0 to 2.")


INSIDE = r"cannot move between devices inside of jax\.jit"


def weighted(p: Any, x: Any) -> Any:
    return jnp.sin(x) * p


@pytest.mark.parametrize("inner", HOW)
def test_one_program_over_devices_is_refused_inside_of_another(inner):
    def fn(p: Any, x: Any) -> Any:
        return data_parallel(weighted, p, x, names(2), how=inner)

    with pytest.raises(JdagError, match=INSIDE):
        data_parallel(fn, 2.0, array(6), names(3), how="shard_map")


def test_what_spreads_its_own_rows_is_called_on_each_device():
    def fn(p: Any, x: Any) -> Any:
        return data_parallel(weighted, p, x, names(2))

    x = array(6)
    found, vjp = jax.vjp(
        lambda p: data_parallel(fn, p, x, names(3), how="each"), jnp.float64(2)
    )
    close(found, weighted(2.0, x))
    close(vjp(x), (jnp.sum(jnp.sin(x) * x),))


def test_one_replica_computes_where_it_was_told_to_and_gradients_come_home():
    seen = []

    def noted(p: Any, x: Any) -> Any:
        seen.extend([str(home_of(p)), str(home_of(x))])
        return transferred([p * x], jax.devices()[3:4])[0]  # So it is not compiled.

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
