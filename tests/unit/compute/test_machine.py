"""Jobs on one worker's values: what is made, what goes, and that shapes stand in."""

import contextlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdag.compute.avals import Aval, aval_of
from jdag.compute.machine import Machine
from jdag.compute.pairs import Pair
from jdag.engine.functions import unjitted
from jdag.engine.protocol import ContextId, Fill, Forward, Key, ScratchKey, Sum, Vjp
from jdag.errors import SAID_MAX, JdagError
from jdag.runtime.failures import error_text, failure_of, user_traceback
from tests.tools.compute_cases import no_new_arrays, pair_of

CONTEXT = ContextId(0, 1, 0)
PATH = (3, 1)


def key(name: Any, index: int = 0) -> Key:
    return ScratchKey(CONTEXT, name, index)


def affine(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.tanh(w @ x), w * 2


@unjitted(shapes=lambda w: w)
def breaks(w: jax.Array) -> jax.Array:
    _deeper()
    return w


def _deeper() -> None:
    raise ValueError("no such weight")


@jax.custom_vjp
def one_way(w: jax.Array) -> jax.Array:
    return w


def _not_back(_: Any) -> Any:
    raise ValueError("no way back")


def _back(_: Any, cotangent: jax.Array) -> tuple[jax.Array]:
    shape = jax.ShapeDtypeStruct(cotangent.shape, cotangent.dtype)
    return (jax.pure_callback(_not_back, shape, cotangent),)


one_way.defvjp(lambda w: (w, None), _back)

W, X = jnp.arange(9.0).reshape(3, 3) / 9, jnp.ones((3, 2))


def held(values: str, *arrays: Any) -> Machine:
    machine = Machine(values)
    for index, array in enumerate(arrays):
        value = aval_of(array) if machine.abstract else array
        machine.values.put(key("x", index), value)
    return machine


def keys(name: str, count: int) -> tuple[Key, ...]:
    return tuple(key(name, index) for index in range(count))


def forward(made: Pair, *, inputs: int, outputs: int, kept: bool = True) -> Forward:
    residuals = key("r") if kept else None
    return Forward(
        1, CONTEXT, PATH, made, keys("x", inputs), keys("y", outputs), residuals
    )


def vjp(made: Pair, *addends: tuple[Key, ...], outputs: int, last: bool) -> Vjp:
    given = keys("g", outputs)
    return Vjp(2, CONTEXT, 1, PATH, made, key("r"), addends, given, last)


@pytest.mark.parametrize("values", ["real", "abstract"])
def test_a_forward_reads_its_inputs_and_holds_outputs_and_residuals(values: str):
    made = pair_of(affine, W, X)
    for kept in (False, True):
        machine = held(values, W, X)
        assert machine.run(forward(made, inputs=2, outputs=2, kept=kept)) is None
        assert machine.values.held == 2 + 2 + kept
    outputs = [machine.values.get(each) for each in keys("y", 2)]
    if values == "abstract":
        assert outputs == list(made.out_avals)
    else:
        assert all(map(np.array_equal, outputs, affine(W, X)))


def differentiated(values: str, addends: list[Any], *, last: bool) -> Machine:
    made = pair_of(affine, W, X)
    machine = held(values, W, X)
    machine.run(forward(made, inputs=2, outputs=2))
    for index, addend in enumerate(addends):
        value = aval_of(addend) if machine.abstract else addend
        machine.values.put(key("c", index), value)
    job = vjp(made, keys("c", len(addends)), (), outputs=2, last=last)
    assert machine.run(job) is None
    return machine


@pytest.mark.parametrize("values", ["real", "abstract"])
@pytest.mark.parametrize("last", [False, True])
def test_a_vjp_uses_up_its_addends_and_the_last_one_the_residuals(
    values: str, last: bool
):
    addends = [jnp.full((3, 2), 0.5 + index) for index in range(3)]
    machine = differentiated(values, addends, last=last)
    assert not any(each in machine.values for each in keys("c", 3))
    assert (key("r") in machine.values) == (not last)
    gradients = [machine.values.get(each) for each in keys("g", 2)]
    if values == "abstract":
        assert gradients == [aval_of(W), aval_of(X)]
    else:
        cotangents = (sum(addends), jnp.zeros((3, 3)))
        expected = jax.vjp(affine, W, X)[1](cotangents)
        assert all(map(np.allclose, gradients, expected))


@pytest.mark.parametrize("values", ["real", "abstract"])
@pytest.mark.parametrize("based", [False, True])
def test_a_sum_begins_with_its_base_and_keeps_it(values: str, based: bool):
    # In float32 1e8 swallows 1, so that these have another sum in any other order.
    parts = [jnp.float32(x) for x in (1e8, 1.0, -1e8, 1.0)]
    machine = held(values, *parts)
    base, addends = (key("x", 0), keys("x", 4)[1:]) if based else (None, keys("x", 4))
    job = Sum(1, CONTEXT, 1, PATH, addends, base, key("s"))
    assert machine.run(job) is None
    assert machine.values.held == (2 if based else 1)
    assert (key("x", 0) in machine.values) == based
    total = machine.values.get(key("s"))
    assert total == (aval_of(parts[0]) if values == "abstract" else 1.0)


@pytest.mark.parametrize("value", [0, 1])
def test_a_fill_makes_zeros_or_ones_of_the_given_shape_and_dtype(value: int):
    aval = Aval((2, 3), jnp.dtype("bfloat16"))
    for kind in ("real", "abstract"):
        machine = Machine(kind)
        job = Fill(1, CONTEXT, 1, PATH, aval, value, key("f"))
        assert machine.run(job) is None
        made = machine.values.get(key("f"))
        assert aval_of(made) == aval
        assert kind == "abstract" or (np.asarray(made) == value).all()


def test_abstract_jobs_make_no_array_and_count_the_same_bytes():
    addends = [jnp.full((3, 2), float(index)) for index in range(3)]
    real = differentiated("real", addends, last=False)
    with no_new_arrays():
        abstract = differentiated("abstract", addends, last=False)
    assert abstract.values.held == real.values.held
    assert abstract.values.bytes_held == real.values.bytes_held
    assert abstract.values.bytes_peak == real.values.bytes_peak


def sigmoid(x: jax.Array) -> jax.Array:
    return x * jax.nn.sigmoid(x)


@pytest.mark.parametrize("fn", [affine, sigmoid, jnp.exp, jnp.multiply])
def test_abstract_residuals_hold_the_same_bytes_when_their_arguments_go(fn: Any):
    args = (W, X) if fn is affine else (W, W) if fn is jnp.multiply else (W,)
    made = pair_of(fn, *args)
    machines = [held(kind, *[arg + 1 for arg in args]) for kind in ("real", "abstract")]
    outputs = len(made.out_avals)
    everything = [*keys("x", len(args)), *keys("y", outputs), key("r")]
    for drops in (everything, everything[::-1], everything[1:] + everything[:1]):
        for machine in machines:
            for index, arg in enumerate(args):
                value = aval_of(arg) if machine.abstract else arg + 2
                machine.values.put(key("x", index), value)
            machine.run(forward(made, inputs=len(args), outputs=outputs))
        for gone in drops:
            real, abstract = [machine.values for machine in machines]
            assert real.bytes_held == abstract.bytes_held > 0, gone
            real.drop([gone])
            abstract.drop([gone])
        assert real.bytes_held == abstract.bytes_held == 0
    assert real.bytes_peak == abstract.bytes_peak


def test_a_vjp_that_raises_has_used_up_what_it_read():
    made = pair_of(one_way, W)
    machine = held("real", W)
    machine.run(forward(made, inputs=1, outputs=1))
    machine.values.put(key("c"), jnp.ones((3, 3)))
    error = machine.run(vjp(made, (key("c"),), outputs=1, last=True))
    assert error is not None and "no way back" in str(error)
    assert machine.values.held == 2  # The argument and the output.


def test_a_failure_says_what_where_and_shows_the_users_frames_alone():
    machine, made = held("real", W), pair_of(breaks, W, tracked=(False,))
    error = machine.run(forward(made, inputs=1, outputs=1, kept=False))
    assert isinstance(error, ValueError) and machine.values.held == 1
    failure = failure_of(error, "b", PATH, "m:breaks")
    assert failure.error == "RemoteError"
    assert failure.message == "ValueError: no such weight"
    assert (failure.worker, failure.path, failure.function) == ("b", PATH, "m:breaks")
    assert failure.exception is error
    frames = re.findall(r'File "(.*)", line \d+, in (\w+)', failure.traceback)
    assert [name for _, name in frames] == ["breaks", "_deeper"]
    assert {file for file, _ in frames} == {__file__}
    assert failure.traceback.endswith("ValueError: no such weight")


def test_an_error_without_a_users_frame_shows_all_that_it_has():
    with pytest.raises(KeyError) as raised:
        Machine("real").values.buffer("nothing")
    error = raised.value
    assert error.__traceback__ is not None
    assert "values.py" not in user_traceback(error)  # This test's frame is a user's.
    error.__traceback__ = error.__traceback__.tb_next
    assert "values.py" in user_traceback(error)


def test_frames_of_contextlib_are_nobodys():
    with pytest.raises(KeyError) as raised, contextlib.ExitStack() as stack:
        stack.callback({"a": 1}.pop, "nothing")
    assert "test_machine.py" in user_traceback(raised.value)
    assert "contextlib.py" not in user_traceback(raised.value)


def test_what_jdag_says_of_an_argument_and_what_python_says_of_a_call_stand_alone():
    with pytest.raises(JdagError) as refused:
        aval_of("no array")
    with pytest.raises(TypeError) as uncalled:
        pair_of(lambda a, b, c: a, W)
    for error in (refused.value, uncalled.value):
        assert user_traceback(error).startswith("Traceback")  # With this test's frame.
        while error.__traceback__ is not None and "tests/" in str(
            error.__traceback__.tb_frame
        ):
            error.__traceback__ = error.__traceback__.tb_next
        assert user_traceback(error) == ""
    assert error_text(uncalled.value).endswith("positional arguments: 'b' and 'c'")


def test_of_what_an_error_says_at_length_the_middle_is_left_out():
    text = "begins" + "x" * (1 << 20) + "ends"
    for error, whole in (
        (ValueError(text), f"ValueError: {text}"),
        (JdagError(text), text),
    ):
        failure = failure_of(error, "b", PATH, "m:breaks")
        left_out = f"... {len(whole) - SAID_MAX:,} characters are left out here ..."
        assert failure.message.startswith(whole[:100])
        assert left_out in failure.message
        assert failure.message.endswith("ends")
        assert len(failure.message) < SAID_MAX + 100
        assert len(failure.traceback) < 2 * SAID_MAX


def test_of_an_error_of_jdag_the_traceback_repeats_the_first_line_alone():
    with pytest.raises(JdagError) as raised:
        raise JdagError("worker 'b' is lost\nthe end of b.log:\n    one")
    raised.value.add_note("so is 'c'")
    failure = failure_of(raised.value, "a", PATH, "m:breaks")
    assert failure.message == "worker 'b' is lost\nthe end of b.log:\n    one"
    ends = "\njdag.errors.JdagError: worker 'b' is lost\nso is 'c'"
    assert failure.traceback.endswith(ends)


class SaysNothing(Exception):
    @property
    def __notes__(self) -> Any:  # type: ignore[override]
        raise ValueError("not even this")


def test_of_an_error_that_fails_where_it_is_asked_what_it_says_there_is_the_class():
    failure = failure_of(SaysNothing(), "b", PATH, "m:breaks")
    # From Python 3.13 on a second line says that the notes could not be had.
    assert failure.message.splitlines()[0] == f"{__name__}.SaysNothing"


def test_a_job_that_reads_what_is_not_held_is_our_own_mistake():
    with pytest.raises(KeyError):
        Machine("real").run(forward(pair_of(affine, W, X), inputs=2, outputs=2))


def test_values_of_a_step_leave_from_the_default_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine, key = Machine("real"), ScratchKey(ContextId(0, 1, 0), 1, 0)
    monkeypatch.setattr("jdag.compute.machine.put", lambda *moved: (moved,))
    value = jnp.ones(3)
    assert machine.leave((value,)) == (value,)
    machine.values.put(key, value, "cpu:0")
    assert machine.leave((value,)) == (((value,), None),)
