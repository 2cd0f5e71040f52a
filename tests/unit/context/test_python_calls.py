"""Functions that run as Python on real arrays: `jdag.unjitted`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdag
from jdag.errors import JdagError, RemoteError
from tests.tools.compute_cases import array, assert_same
from tests.tools.error_texts import fails_with
from tests.tools.face_cases import squares

X = array(4, 3)
W = array(3, seed=1)


@jdag.unjitted
def largest(x: Any, at_least: Any = 0) -> Any:
    numbers = np.asarray(x).ravel()
    count = max(int((numbers > 0).sum()), at_least)
    return {"best": np.sort(numbers)[-count:], "count": count}


BEST = np.sort(np.asarray(X).ravel())[-int((X > 0).sum()) :]


def struct(x: Any, *_: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


@jdag.unjitted(shapes=lambda x, by: {"sorted": struct(x)})
def arranged(x: Any, by: Any) -> Any:
    order = sorted(range(len(x)), key=lambda row: float(x[row, int(by)]))
    return {"sorted": np.asarray(x)[order]}


ARRANGED = X[jnp.argsort(X[:, 1])]


def test_what_holds_objects_and_closures_runs_as_well(cluster):
    class Counter:
        def __init__(self) -> None:
            self.calls: list[float] = []

        @jdag.unjitted
        def add(self, x: Any) -> None:
            self.calls.append(float(x))

    counter = Counter()
    curried = functools.partial(largest, at_least=5)
    with cluster.context() as ctx:
        for x in (1.0, 2.0, 3.0):
            assert ctx.call("b", counter.add, x) is None
        assert ctx.call("b", curried, W)["count"].fetch() == 5
        node = jax.tree_util.Partial(largest, W)
        assert ctx.call("c", node)["count"].fetch() == int((W > 0).sum())
    assert counter.calls == [1.0, 2.0, 3.0]


def test_programs_call_such_functions_on_any_worker(cluster):
    @jdag.program
    def prog(ctx: Any, x: Any) -> Any:
        found = ctx.call("d", largest, x)
        return ctx.call(ctx.here, jnp.sum, found["best"]), found["count"]

    with cluster.context() as ctx:
        total, count = ctx.call("b", prog, X)
        assert_same(total.fetch(), jnp.sum(BEST))
        assert (count.fetch(), total.worker, count.worker) == (len(BEST), "b", "d")


def test_what_it_raises_names_it_the_worker_and_the_callers_line(cluster):
    @jdag.unjitted
    def fails(x: Any) -> Any:
        raise KeyError(f"nothing at {int(x)}")

    name = rf"^{__name__}:.*fails failed on 'c', called at test_python_c"
    with cluster.context() as ctx:
        with pytest.raises(RemoteError, match=name + r".*: KeyError: 'nothing at 7'"):
            ctx.call("c", fails, 7)
        with pytest.raises(JdagError, match=r"largest returned a|an object"):
            ctx.call("c", jdag.unjitted(lambda: {"a": object()}))
        assert ctx.call("c", largest, X)["count"].fetch() == len(BEST)


def test_with_shapes_refs_come_at_once_and_the_function_runs_when_it_can(cluster):
    with cluster.context() as ctx:
        x = ctx.call("d", jnp.multiply, X, 1.0)
        found = ctx.call("b/cpu:0", arranged, x, 1)["sorted"]
        assert (found.shape, found.dtype, found.tracked) == (X.shape, X.dtype, False)
        assert found.place == "b/cpu:0"
        assert_same(ctx.call("c", squares, found).fetch(), squares(X))
        assert_same(found.fetch(), ARRANGED)
    made = cluster.make("b", arranged, X, 1)["sorted"]
    assert_same(made.fetch(), ARRANGED)


def test_a_call_with_shapes_takes_no_time_of_its_caller_and_one_without_does():
    costs = {"tests.unit.context.test_python_calls:arranged": (1_000, 0)}
    devices = jdag.sim.DeviceModel(functions=costs)
    simulated = jdag.simulate(["a", "b"], seed=0, devices=devices)
    with simulated as cluster, cluster.context() as ctx:
        found = ctx.call("b", arranged, X, 1)
        assert cluster.now_ns == 0
        found["sorted"].fetch()
        assert cluster.now_ns == 1_000


@pytest.mark.parametrize(
    ("returns", "said"),
    [
        (
            lambda x: x[1:],
            r"returned float64\[3,3\], but its shapes= function declares float64",
        ),
        (
            lambda x: (x,),
            r"returned \('float64\[4,3\]',\), but its shapes= function declares",
        ),
        (lambda x: x > 0, r"returned bool\[4,3\], but its shapes= function declares"),
    ],
)
def test_what_it_returns_is_held_against_its_shapes(cluster, returns, said):
    fn = jdag.unjitted(shapes=struct)(functools.partial(returns))
    with cluster.context() as ctx:
        found = ctx.call("b", fn, X)
        with pytest.raises(JdagError, match=rf"lambda.*failed on 'b'.*{said}"):
            found.fetch()


def test_functions_of_one_code_with_other_shapes_are_not_mixed_up(cluster):
    def made(by: int) -> Any:
        def shapes(x: Any) -> Any:
            return jax.ShapeDtypeStruct((by * len(x),), x.dtype)

        return jdag.unjitted(shapes=shapes)(functools.partial(np.tile, reps=by))

    with cluster.context() as ctx:
        for by in (1, 2, 3):
            assert ctx.call("b", made(by), W).fetch().shape == (3 * by,)


def test_tracked_arguments_are_refused_with_what_to_do(cluster):
    w = cluster.put("b", W)
    said = (
        r"largest is marked by .*stop_gradient\(ref\) makes.*@jdag\.program, which may"
    )
    with cluster.context() as ctx:
        with pytest.raises(JdagError, match=said):
            ctx.call("b", largest, w)
        with pytest.raises(JdagError, match=said.replace("largest", "arranged")):
            ctx.call("b", arranged, w, by=0)
    with pytest.raises(JdagError, match=said):
        jdag.oracle(lambda ctx, w: ctx.call("b", largest, w)["best"])(W)


def test_where_shapes_have_to_be_known_the_error_names_them(cluster):
    with fails_with(JdagError, "context.largest_is_marked_unjitted_shapes"):
        cluster.make("b", largest, X)
    shapes = jdag.simulate(["a", "b"], values="abstract", seed=0)
    with shapes as abstract, abstract.context() as ctx:
        with fails_with(JdagError, "context.largest_unjitted_shapes_fn"):
            ctx.call("b", largest, X)
        assert ctx.call("b", arranged, X, 1)["sorted"].fetch().shape == X.shape
    with fails_with(JdagError, "context.shapes_takes_a_function_not"):
        jdag.unjitted(shapes=(3,))
    with cluster.context() as ctx, fails_with(JdagError, "context.its_shapes_said_int"):
        jdag.fetch(ctx.call("b", jdag.unjitted(shapes=lambda x: (4, 3))(np.sin), X))


def test_the_oracle_gives_what_the_functions_returned_when_it_ran_first(cluster):
    made: list[int] = []

    @jdag.unjitted
    def noise() -> Any:
        made.append(len(made))
        return np.float64(made[-1])

    def loss(ctx: Any, w: Any) -> Any:
        x = ctx.call("b", jnp.multiply, w, X)
        best = ctx.call("c", largest, jdag.stop_gradient(x), at_least=3)["best"]
        rows = ctx.call("d", arranged, jdag.stop_gradient(x), 1)["sorted"]
        return ctx.call("d", squares, x, best, rows, ctx.call("b", noise))

    wanted = jdag.oracle(loss)(W)
    assert made == [0]
    made.clear()
    found = jdag.value_and_grad(loss, cluster)(W)
    assert made == [0]
    assert_same(found, wanted)
    assert_same(wanted[1], jax.grad(lambda w: squares(w * X))(W))


def test_the_mark_is_given_to_a_function_or_as_a_decorator(cluster):
    def double(x: Any) -> Any:
        return np.asarray(x) * 2

    marked = jdag.unjitted(functools.partial(double), shapes=struct)
    with cluster.context() as ctx:
        kinds = ctx.call("b", marked, X), ctx.call("b", jdag.unjitted()(double), X)
        for found in kinds:
            assert_same(found.fetch(), 2 * X)
    simulated = jdag.simulate(["a", "b"], values="abstract", seed=0)
    with simulated as abstract, abstract.context() as ctx:
        assert ctx.call("b", marked, X).shape == X.shape


def test_what_static_wraps_is_handed_over_as_it_is(cluster):
    @jdag.unjitted
    def chosen(names: Any, x: Any, *, by: Any) -> Any:
        return float(x) if "a" in names and by == "name" else 0.0

    with cluster.context() as ctx:
        for names, wanted in (({"a", "b"}, 2.0), ({"b"}, 0.0)):
            found = ctx.call("b", chosen, jdag.static(tuple(names)), 2.0, by="name")
            assert found.fetch() == wanted
