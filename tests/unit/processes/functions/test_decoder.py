"""Messages that arrived, with functions and values in place of names and bytes."""

import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from msgspec.structs import replace

from jdag.compute.avals import Aval, aval_of
from jdag.compute.callables import called
from jdag.compute.pairs import PAIRS_MAX, pair
from jdag.compute.placed import Placed, placed
from jdag.compute.pytrees import split, static
from jdag.compute.refs import RefData, Reply
from jdag.engine.credit import WHOLE
from jdag.engine.functions import name_of
from jdag.engine.protocol import (
    Assign,
    Assignment,
    Attach,
    Call,
    ConstantKey,
    ContextId,
    Hook,
    LeafId,
    LeafKey,
    OutputKey,
    Release,
    Return,
    Root,
    Run,
    Start,
)
from jdag.engine.protocol import Mode as PassMode
from jdag.errors import JdagError, ProtocolError
from jdag.processes.functions.decoder import MADE_MAX, Bound, FunctionDecoder
from jdag.wire.messages import Codec
from jdag.wire.specs import spec_of
from tests.tools import names_cases
from tests.tools.compute_cases import array
from tests.tools.error_texts import fails_with
from tests.tools.wire_cases import read_message

CODEC = Codec(("home", "a"))
CONTEXT = ContextId(0, 1, 0)
LEAF = LeafId("a", 7)
ALLOWED = FunctionDecoder(["tests"])


def made(fn: Any, *args: Any, tracked: bool = True) -> Any:
    fn, args, own = called(fn, args)
    parts = split(args, {}, lambda _: False, own)
    avals = tuple([aval_of(value) for _, value in parts.constants])
    return pair(
        fn, parts.template, avals, tuple([tracked and a.inexact for a in avals])
    )


def arrived(message: Any, functions: FunctionDecoder = ALLOWED) -> Any:
    return functions.bind(read_message(CODEC, CODEC.encode(message)), "a", CODEC)


def call_of(pair: Any) -> Call:
    inputs = tuple([ConstantKey(CONTEXT, (1,), p) for p in range(len(pair.avals))])
    return Call(CONTEXT, (1,), pair, inputs, pair.tracked, pair.out_tracked, (), "x:1")


def bound_of(pair: Any, functions: FunctionDecoder = ALLOWED) -> Bound:
    bound = arrived(call_of(pair), functions).function
    assert type(bound) is Bound
    return bound


@dataclass(frozen=True)
class Scale:
    by: float

    def times(self, x: Any) -> Any:
        return self.by * x


@jax.tree_util.register_pytree_node_class
class Module:
    def __init__(self, w: Any) -> None:
        self.w = w

    def __call__(self, x: Any) -> Any:
        return self.w @ x

    def twice(self, x: Any) -> Any:
        return self.w @ x * 2

    def tree_flatten(self) -> Any:
        return (self.w,), None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> "Module":
        return cls(*children)


X = array(3)
FUNCTIONS = [
    (names_cases.layer, array(2, 3), X),
    (names_cases.jit, X),
    (names_cases.clipped, X),
    (names_cases.Frozen.fixed, X),
    (jnp.add, X, 2.0),
    (jax.nn.softmax, X),
    (partial(jnp.sum, axis=0), array(2, 3)),
    (jnp.sum, array(2, 3), static((0, 1))),
    (jnp.astype, X, static(jnp.bfloat16)),
    (jax.lax.map, jnp.tanh, X),
    (Module(array(2, 3)), X),
    (Module(array(2, 3)).twice, X),
    (jax.tree_util.Partial(names_cases.layer, array(2, 3)), X),
]


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda case: name_of(case[0]))
def test_a_function_that_is_named_becomes_the_very_same_pair(fn: Any) -> None:
    here = made(*fn)
    there = bound_of(here)
    assert (there.name, there.avals) == (here.name, here.avals)
    assert (there.tracked, there.out_tracked) == (here.tracked, here.out_tracked)
    assert there.out_avals == here.out_avals
    assert spec_of(there) == spec_of(here)
    assert (there.device, there.in_devices, there.out_devices) == (None, None, None)
    assert there.pair is here  # In one process there is one of each.
    assert there.out_tree == here.out_tree
    assert there.reaches == here.reaches
    assert there.args_kept == here.args_kept
    assert there.outputs_kept == here.outputs_kept
    assert there.residual_bytes == here.residual_bytes


def test_a_bound_pair_runs_forward_and_vjp() -> None:
    w, cotangent = array(2, 3), array(2)
    there = bound_of(made(names_cases.layer, w, X))
    outputs, residuals = there.forward([w, X])
    gradients = there.vjp(residuals, [[cotangent, cotangent, cotangent]])
    expected, vjp = jax.vjp(names_cases.layer, w, X)
    np.testing.assert_allclose(outputs[0], expected, rtol=1e-6)
    for found, wanted in zip(gradients, vjp(3 * cotangent), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_places_are_bound_with_it() -> None:
    here = placed(made(jnp.add, X, X), "cpu:0", (None, "cpu:0"), [None])
    there = bound_of(here)
    assert there.device == "cpu:0"
    assert (there.in_devices, there.out_devices) == ((None, "cpu:0"), (None,))
    assert isinstance(there.pair, Placed)
    assert there.pair.pair is here.pair
    assert there.pair.in_devices == here.in_devices
    assert there.pair.out_devices == here.out_devices


def test_equal_specs_are_bound_once() -> None:
    functions = FunctionDecoder(["tests"])
    here = made(names_cases.layer, array(2, 3), X)
    assert bound_of(here, functions) is bound_of(here, functions)
    assert bound_of(made(jnp.add, X, X), functions) is not bound_of(here, functions)


def test_nothing_is_made_before_forward_runs_and_then_once_by_all_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traced = []

    def counted(x: Any) -> Any:
        traced.append(threading.get_ident())
        return x * 2

    def make(*_: Any) -> Any:
        entered[0] += 1
        if entered[0] > 1:
            second.set()
        second.wait(0.3)  # Time for the others to come in, if they may.
        return made(counted, X)

    here = made(jnp.tanh, X)
    entered, second = [0], threading.Event()
    monkeypatch.setattr("jdag.processes.functions.decoder.pair", make)
    bound = FunctionDecoder(["tests"]).bound(spec_of(here))
    assert not traced
    threads = [threading.Thread(target=bound.forward, args=([X],)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert entered == [1]
    assert len(traced) == 1
    assert traced[0] != threading.get_ident()


def secret(x: Any) -> Any:
    return x + 1


def test_what_may_not_be_had_raises_at_each_forward_and_not_before() -> None:
    bound = bound_of(made(secret, X), FunctionDecoder())
    for _ in range(2):
        with fails_with(JdagError, "processes.secret_is_not_available_allow"):
            bound.forward([X])
    assert bound.out_tracked == (True,)


def gives_two(x: Any) -> Any:
    return x, x


def raises(x: Any) -> Any:
    raise ZeroDivisionError("while it was traced")


@pytest.mark.parametrize(
    ("changed", "error", "key"),
    [
        (gives_two, JdagError, "processes.gives_float64_3_float64_3"),
        (raises, ZeroDivisionError, "processes.while_it_was_traced"),
    ],
)
def test_another_function_of_that_name_fails_the_forward(
    changed: Any, error: Any, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = call_of(made(secret, X))
    monkeypatch.setattr(changed, "__qualname__", "secret")
    monkeypatch.setitem(globals(), "secret", changed)
    bound = arrived(data).function
    with fails_with(error, key):
        bound.forward([X])


def test_a_call_that_its_spec_contradicts_is_refused() -> None:
    call = call_of(made(names_cases.layer, array(2, 3), X))
    few: dict[str, Any] = {"inputs": call.inputs[:1], "tracked": (True,)}
    for changed in (few, {"tracked": (True, False)}, {"outputs": (True, True)}):
        with fails_with(ProtocolError, "processes.layer_says_and_its_spec"):
            arrived(replace(call, **changed))
    with pytest.raises(ProtocolError):
        arrived(replace(call, function=b"\7"))


def test_assignments_are_bound_with_their_types() -> None:
    here = made(jnp.add, X, X)
    key = LeafKey(None, LEAF, 0)
    part = Assignment((1,), here, (key, key), (key,), here.out_avals, "x:1")
    written = replace(part, function=None, inputs=(), avals=(aval_of(X).on("cpu:1"),))
    message = arrived(Assign((1,), (part, written)))
    bound, plain = message.parts
    assert bound.function.pair is here
    assert bound.avals == here.out_avals
    assert plain.function is None
    assert type(plain.avals[0]) is Aval
    assert plain.avals[0].device == "cpu:1"
    with fails_with(ProtocolError, "processes.says_and_its_spec"):
        arrived(Assign((1,), (replace(part, outputs=(), avals=()),)))


def test_shapes_of_roots_and_hooks_are_abstract_values() -> None:
    aval = aval_of(jax.random.key(0))
    root = Root(OutputKey(CONTEXT, (1,), 0), aval_of(X), False, 1)
    start = Start(CONTEXT, 1, (root,), PassMode.FAST, False, True, WHOLE, 0)
    assert arrived(start).roots == (root,)
    assert type(arrived(start).roots[0].aval) is Aval
    hook = Hook((1,), secret, True, aval, "x:1")
    found = arrived(Attach(CONTEXT, root.key, hook)).hook
    assert found == hook
    assert type(found.aval) is Aval


def test_a_hook_that_cannot_be_had_raises_when_it_is_run() -> None:
    hook = Hook((1,), partial(secret, 3), True, aval_of(X), "x:1")
    key = OutputKey(CONTEXT, (1,), 0)
    found = arrived(Attach(CONTEXT, key, hook), FunctionDecoder()).hook.function
    with fails_with(JdagError, "processes.secret_may_not_be_had"):
        found(X)


def test_a_program_and_its_arguments_are_live() -> None:
    ref = RefData(OutputKey(CONTEXT, (1,), 0), "a", aval_of(X), True, LEAF)
    arguments = (
        ({"w": ref}, names_cases.Pair(1, 2.0), names_cases.Colour.RED, None, True),
        {"fn": secret, "x": np.arange(3), "dtype": np.dtype("int8"), "s": np.int8(3)},
    )
    run = Run(CONTEXT, (1,), names_cases.program, arguments, "x:1")
    found = arrived(run)
    assert found.function is names_cases.program
    assert found.arguments[0] == arguments[0]
    assert type(found.arguments[0][0]["w"].aval) is Aval
    named = found.arguments[1]
    assert named["fn"] is secret
    assert type(named["x"]) is np.ndarray
    assert type(named["s"]) is np.int8
    assert named["x"].tolist() == [0, 1, 2]
    assert named["dtype"] == np.dtype("int8")
    assert named["s"] == 3


ARRAYS = [
    jnp.arange(6, dtype=jnp.int16).reshape(2, 3),
    jnp.ones((2, 0), jnp.bfloat16),
    jnp.asarray(2.5),
    jax.random.split(jax.random.key(3), 2),
    jnp.asarray([1 + 2j, 3j]),
    jnp.zeros((200, 300)) + 0.5,
]


@pytest.mark.parametrize("value", ARRAYS, ids=lambda a: f"{a.dtype}{a.shape}")
def test_arrays_of_jax_come_as_such(value: Any) -> None:
    found = arrived(Run(CONTEXT, (1,), secret, ((value,), {}), "x:1")).arguments[0][0]
    assert isinstance(found, jax.Array)
    assert aval_of(found) == aval_of(value)
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        found, value = map(jax.random.key_data, (found, value))
    assert np.asarray(found).tobytes() == np.asarray(value).tobytes()


def test_a_program_or_argument_that_cannot_be_had_fails_the_program_alone() -> None:
    run = Run(CONTEXT, (1,), names_cases.program, ((secret,), {}), "x:1")
    for allow, said in (
        ((), "names_cases:program is not in the allowlist.*allow="),
        (
            [names_cases.__name__],
            "an argument of the program is not available on this worker: .*:secret is "
            "not in the allowlist",
        ),
    ):
        found = arrived(run, FunctionDecoder(allow))
        assert found.arguments == ((), {})
        assert found.function.__qualname__ == "program"
        with pytest.raises(JdagError, match=said):
            found.function(object())


def test_what_a_program_returns_is_live() -> None:
    reply = Reply({"x": names_cases.Pair(1, secret)}, (("a", (1, 2)),), (((3,), 0),))
    found = arrived(Return(CONTEXT, (1,), reply, None, ("a",), ()))
    assert found.result == reply
    assert type(found.result) is Reply
    none = Return(CONTEXT, (1,), None, None, (), ())
    assert arrived(none) == none


def test_a_result_that_cannot_be_had_is_a_failure_of_its_program() -> None:
    reply = Reply(secret, (("a", (1, 2)),), ())
    found = arrived(Return(CONTEXT, (1,), reply, None, ("a",), ()), FunctionDecoder())
    assert found.result == reply._replace(result=None)
    assert found.failure.error == "JdagError"
    assert found.failure.worker == "a"
    assert "secret is not in the allowlist" in found.failure.message
    with fails_with(ProtocolError, "processes.which_is_no_reply"):
        arrived(Return(CONTEXT, (1,), (1, 2), None, ("a",), ()))


def test_other_messages_are_as_they_were() -> None:
    release = Release(CONTEXT, (1, 2), True)
    assert ALLOWED.bind(release, "a", CODEC) is release


def test_the_bound_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jdag.processes.functions.decoder.BOUND_MAX", 3)
    functions = FunctionDecoder()
    shapes = [made(jnp.tanh, jnp.ones(size)) for size in range(1, 6)]
    first = bound_of(shapes[0], functions)
    kept = [bound_of(shape, functions) for shape in shapes]
    assert functions.bound.cache_info().currsize == 3
    assert bound_of(shapes[4], functions) is kept[4]
    assert bound_of(shapes[0], functions) is not first


def test_few_hold_what_they_were_made_into_and_all_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert 2 * (PAIRS_MAX + MADE_MAX) < 10_900
    monkeypatch.setattr("jdag.processes.functions.decoder.MADE_MAX", 2)
    functions = FunctionDecoder()
    shapes = [made(jnp.tanh, jnp.ones(size)) for size in range(1, 6)]
    bound = [bound_of(shape, functions) for shape in shapes]
    for _ in range(2):
        for size, one in enumerate(bound, 1):
            (found,), residuals = one.forward([jnp.full(size, 0.5)])
            bound[size % 5].forward([jnp.ones(size % 5 + 1)])
            (back,) = one.vjp(residuals, [[jnp.ones(size)]])
            assert found.tolist() == [float(jnp.tanh(0.5))] * size
            np.testing.assert_allclose(back, 1.0 - found * found)
            assert functions._pair.cache_info().currsize == 2


def test_a_key_of_a_dict_that_cannot_be_one_fails_the_program_alone() -> None:
    data = {(): 1}
    run = Run(CONTEXT, (1,), secret, ((data,), {}), "x:1")
    written = CODEC.encode(run).replace(b"\x92\x03\x90\x01", b"\x92\x04\x90\x01")
    found: Any = ALLOWED.bind(read_message(CODEC, written), "a", CODEC)
    with fails_with(JdagError, "processes.a_dict_key_cannot_be"):
        found.function(object())


@jax.tree_util.register_pytree_node_class
class Fragile:
    def __init__(self, part: Any) -> None:
        self.part = part

    def tree_flatten(self) -> Any:
        return (self.part,), None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> "Fragile":
        if children[0] == 3:
            raise ZeroDivisionError("of a part")
        return cls(*children)


def test_what_a_class_raises_as_it_is_put_together_fails_the_program_alone() -> None:
    found = arrived(Run(CONTEXT, (1,), secret, ((Fragile(3),), {}), "x:1"))
    with fails_with(JdagError, "processes.cannot_be_made_of_2"):
        found.function(object())
