"""Segments in messages: their functions by name or as StableHLO; what is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdag.compute.segments import SegmentFunction
from jdag.engine.protocol import (
    ContextId,
    Failure,
    Planned,
    Prepare,
    Segment,
    Stepped,
    Worker,
)
from jdag.errors import JdagError, ProtocolError, RemoteError
from jdag.processes.functions.decoder import FunctionDecoder
from jdag.processes.functions.encoder import NAMING, FunctionEncoder
from jdag.wire.messages import Codec, size
from tests.tools.error_texts import fails_with
from tests.tools.segment_cases import Tape, array, mlp
from tests.tools.wire_cases import read_message

CODEC = Codec(("home", "a"))
PLAN = ContextId(0, 1, 0)


def prepare_of(*functions: SegmentFunction) -> Prepare:
    segments, slot = [], 0
    for function in functions:
        needs = tuple(range(slot, slot + len(function.avals) + len(function.bundles)))
        slot = (needs[-1] if function.carries else needs[-1] + 1) + 1
        made = len(function.outputs) + len(function.carries)
        segments.append(Segment(function, needs, tuple(range(slot, slot + made))))
    return Prepare(PLAN, 0, tuple(segments), (), (), (), (), True)


def halves_of(tape: Tape, loss: int, params: list[int], exact: bool = False) -> Prepare:
    forward, backward = tape.halves(loss, params, exact)
    arrays, outputs = len(forward.avals), len(backward.outputs)
    segments = (
        Segment(forward, tuple(range(arrays)), (900, 901)),
        Segment(backward, (900, 901), tuple(range(1000, 1000 + outputs))),
    )
    return Prepare(PLAN, 0, segments, (), (), (), (), True)


def arrived(
    message: Prepare, functions: FunctionDecoder, allowed: tuple[str, ...] = ()
) -> list[Any]:
    written, needed = FunctionEncoder().outgoing(message, allowed)
    for digest, data in needed:
        functions.define(digest, data)
    data = CODEC.encode(written)
    assert len(data) == size(written, ())[1]
    bound: Any = functions.bind(read_message(CODEC, data), "home", CODEC)
    return [one.function for one in bound.segments]


def run_both(functions: list[Any], arrays: Any) -> list[Any]:
    value, bundle = functions[0].run(arrays)
    return [value, *functions[1].run((value, bundle))]


def made_in_a_loop() -> Any:
    scale = 2.0
    return lambda x: (jnp.sin(x) * scale).sum() + jnp.exp(x).mean()


@pytest.mark.parametrize("exact", [False, True])
def test_by_name_it_becomes_the_same_segment_when_it_is_first_used(exact: bool) -> None:
    tape, loss, params = mlp(3)
    functions = FunctionDecoder(["tests"])
    message = halves_of(tape, loss, params, exact)
    found = arrived(message, functions, ("tests",))
    assert functions._pair.cache_info().currsize == 0  # Nothing is imported yet.
    for one, segment in zip(found, message.segments, strict=True):
        sent: Any = segment.function
        assert (one.name, one.costs, one.exact) == (sent.name, sent.costs, exact)
        assert one.out_avals == sent.out_avals
    for one in found:
        one.compile()
    expected = run_both([one.function for one in message.segments], tape.arrays)
    assert all(map(np.array_equal, run_both(found, tape.arrays), expected))
    if not exact:
        assert found[0]._fused is message.segments[0].function._fused


@pytest.mark.parametrize("exact", [False, True])
def test_as_stablehlo_it_gives_the_same_gradients(exact: bool) -> None:
    fn = made_in_a_loop()
    tape = Tape(array(6))
    loss = tape.call(fn, 0)
    found = arrived(halves_of(tape, loss, [0], exact), FunctionDecoder())
    found[1].compile()
    assert found[0].pairs[0].pair.source.digest
    expected = jax.value_and_grad(fn)(*tape.arrays)
    for one, other in zip(run_both(found, tape.arrays), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_a_definition_that_is_missing_fails_the_run_alone() -> None:
    tape, loss, params = mlp(2)
    written, _ = FunctionEncoder().outgoing(prepare_of(tape.whole(loss, params)), ())
    bound: Any = FunctionDecoder().bind(
        read_message(CODEC, CODEC.encode(written)), "home", CODEC
    )
    function = bound.segments[0].function
    assert function.may_raise
    with fails_with(JdagError, "properties.its_definition_is_not_here"):
        function.run(tape.arrays)


def called_back(x: Any) -> Any:
    return jax.pure_callback(np.sign, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def test_a_plan_is_refused_where_a_function_cannot_travel() -> None:
    tape = Tape(jnp.arange(3))
    message = prepare_of(tape.segment([tape.call(called_back, 0)]))
    assert {Planned, Prepare} <= NAMING

    def allowed(worker: Worker) -> tuple[str, ...]:
        return ("tests",) if worker == "b" else ()

    for worker in ("home", "b", "a"):
        event = Planned(PLAN, ((worker, message),), (), (), ())
        if worker != "a":
            FunctionEncoder().prepare(event, "home", allowed)
            continue
        with fails_with(JdagError, "properties.called_back_cannot_be_called"):
            FunctionEncoder().prepare(event, "home", allowed)
    tape = Tape(array(6))
    looped = tape.call(lambda x: jax.lax.while_loop(jnp.any, jnp.sin, x), 0)
    event = Planned(PLAN, (("a", prepare_of(tape.segment([looped]))),), (), (), ())
    with fails_with(RemoteError, "properties.backward_of_failed_on_a"):
        FunctionEncoder().prepare(event, "home", allowed)


def test_a_segment_that_its_spec_contradicts_is_refused() -> None:
    tape, loss, params = mlp(2)
    whole = tape.whole(loss, params)
    message = Prepare(PLAN, 0, (Segment(whole, (0, 1), (5,)),), (), (), (), (), True)
    with fails_with(ProtocolError, "properties.says_2_1_and_its"):
        arrived(message, FunctionDecoder(["tests"]), ("tests",))


def test_a_failed_step_travels_without_its_exception() -> None:
    failure = Failure("JdagError", "no", "a", (1,), exception=ValueError("no"))
    found = read_message(CODEC, CODEC.encode(Stepped(PLAN, 3, failure)))
    assert found.failure.message == "no"
    assert found.failure.exception is None
