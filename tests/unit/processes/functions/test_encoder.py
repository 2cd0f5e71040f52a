"""Functions on their way out: by name where that is the same there, else exported."""

import gc
import sys
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from msgspec.structs import replace

from jdag.compute.pairs import PAIRS_MAX
from jdag.compute.placed import placed
from jdag.compute.pytrees import static
from jdag.engine.functions import transferred
from jdag.engine.protocol import (
    Assign,
    Assigned,
    Assignment,
    Attached,
    Call,
    Discarded,
    Hook,
    Issued,
    Launched,
    LeafKey,
    OutputKey,
    Run,
)
from jdag.errors import JdagError, RemoteError
from jdag.processes.functions import decoder as functions_module
from jdag.processes.functions.decoder import FunctionDecoder
from jdag.processes.functions.encoder import FunctionEncoder
from jdag.training.leafwise import Leafwise
from jdag.training.optimizer import squared_norms, stepped
from jdag.wire.specs import PairData, read_spec, spec_of
from tests.tools import names_cases
from tests.tools.compute_cases import array
from tests.tools.error_texts import fails_with
from tests.tools.wire_cases import read_message
from tests.unit.compute.test_exported import bits, called_back
from tests.unit.processes.functions.test_decoder import (
    CODEC,
    CONTEXT,
    FUNCTIONS,
    LEAF,
    Module,
    Scale,
    bound_of,
    call_of,
    made,
)

X = array(3)
THERE = ("tests",)


def shadowed(x: Any) -> Any:
    return x + 1


def closing_over(by: Any) -> Any:
    def inner(x: Any) -> Any:
        return x * by

    return inner


def received(pair: Any, allowed: tuple[str, ...] = ()) -> Any:
    functions = FunctionDecoder(allowed)
    spec, definitions = FunctionEncoder().spec_for(pair, allowed)
    for one in definitions:
        functions.define(*one)
    return functions.bound(spec)


def by_name(spec: bytes) -> bool:
    return not read_spec(spec)[1].digest


@pytest.mark.parametrize("case", FUNCTIONS)
def test_what_names_the_same_there_goes_by_name(case: Any) -> None:
    pair = made(*case)
    spec, needed = FunctionEncoder().spec_for(pair, THERE)
    assert by_name(spec) and needed == ()
    assert FunctionDecoder(THERE).bound(spec).pair is pair


@pytest.mark.parametrize("case", [(transferred, X, X), (squared_norms, [X, X])])
def test_what_jdag_itself_calls_goes_by_name_everywhere(case: Any) -> None:
    pair = made(*case)
    assert FunctionEncoder().spec_for(pair, ()) == (spec_of(pair), ())


EXPORTED: dict[str, tuple[Any, ...]] = {
    "a lambda": (lambda x: jnp.sin(x) * 3.0, X),
    "a closure": (closing_over(2.5), X),
    "a closure over an array": (closing_over(array(3)), X),
    "a method": (Scale(1.5).times, X),
    "a partial of an array": (partial(jnp.add, array(3)), X),
    "a partial of a lambda": (partial(lambda a, x: a * x, 2.0), X),
    "a static array scalar": (jnp.astype, X, static(np.dtype("float32"))),
    "another module": (names_cases.layer, array(2, 3), X),
    "a pytree of another module": (Module(array(2, 3)), X),
    "statics of another module": (
        lambda x, mode: x * mode.value, X, static(names_cases.Colour.RED)
    ),
}  # fmt: skip


LATER = ("a closure", "a method", "a partial of a lambda", "another module")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.second) if case in LATER else case
        for case in EXPORTED
    ],
)
def test_what_cannot_be_named_there_has_the_same_bits(case: str) -> None:
    here = made(*EXPORTED[case])
    there = received(here)
    values = [v for v in jax.tree.leaves(EXPORTED[case][1:]) if hasattr(v, "shape")]
    if "pytree" in case:
        values = [EXPORTED[case][0].w, *values]
    outputs, residuals = here.forward(values)
    found, kept = there.forward(values)
    assert list(map(bits, outputs)) == list(map(bits, found))
    cotangents = [[output / (n + 3) for n in range(3)] for output in outputs]
    gradients = here.vjp(residuals, cotangents)
    assert list(map(bits, gradients)) == list(map(bits, there.vjp(kept, cotangents)))
    assert (there.pair is here) == (case == "a static array scalar")


def test_a_step_of_an_optimizer_and_its_first_state_travel() -> None:
    tx = Leafwise(optax.adam(0.1))
    leaf = jnp.asarray(array(4))
    begin = made(tx.init, leaf, tracked=False)
    (state, *rest), _ = begin.forward([leaf])
    found, _ = received(begin).forward([leaf])
    assert list(map(bits, (state, *rest))) == list(map(bits, found))
    states = jax.tree.unflatten(begin.out_tree, [state, *rest])
    step = made(partial(stepped, tx), leaf, states, leaf / 3, 0.5, tracked=False)
    values = [leaf, state, *rest, leaf / 3, 0.5]
    assert list(map(bits, step.forward(values)[0])) == list(
        map(bits, received(step).forward(values)[0])
    )


def launched(worker: str, *pairs: Any) -> Any:
    arguments: Any = (([PairData(pair) for pair in pairs], 2.0), {})
    return Launched(CONTEXT, (1,), worker, names_cases.program, arguments, "x:1")


def test_pairs_that_a_program_is_given_are_passed_on_as_they_came() -> None:
    exported, named = made(names_cases.layer, array(2, 3), X), made(jnp.tanh, X)
    exports, functions = FunctionEncoder(), FunctionDecoder(THERE)
    given = launched("a", exported, named, exported).arguments
    run = Run(CONTEXT, (1,), names_cases.program, given, "x:1")
    message, needed = exports.outgoing(run, ())
    (definition,) = needed
    functions.define(*definition)
    read = read_message(CODEC, CODEC.encode(message))
    bound: Any = functions.bind(read, "home", CODEC)
    (pairs, two), _ = bound.arguments
    there, same, _ = [one.pair.pair for one in pairs]
    assert same is named and two == 2.0
    spec, passed = functions.encoder.spec_for(there, ())
    assert (spec, passed) == exports.spec_for(exported, ())
    assert spec == pairs[0].spec and passed == (definition,)


def test_a_pair_that_cannot_travel_is_refused_where_a_program_is_given_it() -> None:
    exports, no = FunctionEncoder(), made(called_back, X)
    exports.prepare(launched("home", no), "home", lambda _: ())
    exports.prepare(launched("a", no), "home", lambda _: THERE)
    with fails_with(JdagError, "processes.called_back_cannot_be_called"):
        exports.prepare(launched("a", no), "home", lambda _: (names_cases.__name__,))


def applied(fn: Any, x: Any) -> Any:
    return fn(x)


@pytest.mark.parametrize("case", [(shadowed, X), (applied, shadowed, X)])
def test_a_name_that_stands_for_something_else_here_is_exported(
    case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = made(*case)
    assert by_name(FunctionEncoder().spec_for(pair, THERE)[0])

    def other(x: Any) -> Any:
        return x - 1

    other.__qualname__ = "shadowed"
    monkeypatch.setitem(globals(), "shadowed", other)
    spec, (definition,) = FunctionEncoder().spec_for(pair, THERE)
    assert read_spec(spec)[1].digest == definition.digest
    assert bits(received(pair, THERE).forward([X])[0][0]) == bits(X + 1)


def test_a_module_that_is_not_imported_here_is_not_imported_to_name_a_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "not_imported_yet.py").write_text("def other(x): return x")
    monkeypatch.syspath_prepend(tmp_path)

    def other(x: Any) -> Any:
        return x

    other.__module__, other.__qualname__ = "not_imported_yet", "other"
    _, definitions = FunctionEncoder().spec_for(made(other, X), ("not_imported_yet",))
    assert len(definitions) == 1 and "not_imported_yet" not in sys.modules


def test_it_is_exported_once_and_each_worker_is_told_its_own() -> None:
    pair, exports = made(names_cases.layer, array(2, 3), X), FunctionEncoder()
    spec, (definition,) = exports.spec_for(pair, ())
    again, (same,) = exports.spec_for(pair, ("other",))
    assert spec == again
    assert same is definition
    assert exports.spec_for(pair, ()) == (spec, (definition,))
    assert by_name(exports.spec_for(pair, THERE)[0])


def test_places_go_with_what_was_exported() -> None:
    bare = made(names_cases.layer, array(2, 3), X)
    pair = placed(bare, "cpu:0", (None, "cpu:0"), [None])
    there = received(pair)
    places = (there.device, there.in_devices, there.out_devices)
    assert places == ("cpu:0", (None, "cpu:0"), (None,))
    assert list(map(bits, there.forward([array(2, 3), X])[0])) == list(
        map(bits, bare.forward([array(2, 3), X])[0])
    )


def test_what_can_go_neither_way_says_both_reasons_and_what_to_do() -> None:
    pair = made(called_back, X)
    said = (
        r"called_back cannot be sent to another worker. .* by name: .*allow=\['tests'\]"
    )
    with pytest.raises(
        JdagError, match=said + r".* sent as StableHLO: .*calls back into P"
    ):
        FunctionEncoder().spec_for(pair, ())
    assert by_name(FunctionEncoder().spec_for(pair, THERE)[0])


def test_a_message_is_sent_with_what_is_to_be_defined_first() -> None:
    exports = FunctionEncoder()
    plain = call_of(made(jnp.tanh, X))
    named = replace(plain, function=spec_of(plain.function))
    assert exports.outgoing(plain, ()) == (named, ())
    pair = made(names_cases.layer, array(2, 3), X)
    call = call_of(pair)
    message, (definition,) = exports.outgoing(call, ())
    assert isinstance(message, Call)
    functions = FunctionDecoder()
    functions.define(*definition)
    bound: Any = functions.bind(read_message(CODEC, CODEC.encode(message)), "a", CODEC)
    assert bits(bound.function.forward([array(2, 3), X])[0][0]) == bits(
        pair.forward([array(2, 3), X])[0][0]
    )
    key = LeafKey(None, LEAF, 0)
    part = Assignment((1,), pair, (key, key), (key,), pair.out_avals, "x:1")
    bare = Assignment((1,), None, (), (key,), pair.out_avals, "x:1")
    sent, definitions = exports.outgoing(Assign((1,), (part, bare, part)), ())
    assert isinstance(sent, Assign)
    assert definitions == (definition,)
    function = message.function
    assert [part.function for part in sent.parts] == [function, None, function]


def test_a_definition_that_did_not_come_fails_the_call() -> None:
    spec, _ = FunctionEncoder().spec_for(made(names_cases.layer, array(2, 3), X), ())
    bound = FunctionDecoder().bound(spec)
    with fails_with(JdagError, "processes.was_exported_and_its_definition"):
        bound.forward([array(2, 3), X])


def test_a_definition_of_another_function_fails_the_call() -> None:
    exports, functions = FunctionEncoder(), FunctionDecoder()
    one, _ = exports.spec_for(made(names_cases.layer, array(2, 3), X), ())
    _, (other,) = exports.spec_for(made(names_cases.layer, array(4, 3), X), ())
    functions.define(*other)
    digest = read_spec(one)[1].digest
    bound = functions.bound(one.replace(digest, other.digest))
    with fails_with(JdagError, "processes.is_of_and_not_of"):
        bound.forward([array(2, 3), X])


def test_definitions_are_checked_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jdag.processes.functions.decoder.DEFINED_MAX", 2)
    exports, functions = FunctionEncoder(), FunctionDecoder()
    found = [
        exports.spec_for(made(names_cases.layer, array(rows, 3), X), ())
        for rows in (2, 3, 4)
    ]
    with fails_with(Exception, "processes.not_those_of_its_digest"):
        functions.define(found[0][1][0].digest, b"other")
    for _, (definition,) in found:
        functions.define(*definition)
    assert len(functions._definitions) == 2
    with fails_with(JdagError, "processes.at_most_2_are_kept"):
        functions.bound(found[0][0]).forward([array(2, 3), X])
    functions.bound(found[2][0]).forward([array(4, 3), X])


def test_definitions_are_bounded_by_their_bytes_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exports, functions = FunctionEncoder(), FunctionDecoder()
    found = [
        exports.spec_for(made(names_cases.layer, array(rows, 3), X), ())[1][0]
        for rows in (2, 3, 4, 5)
    ]
    sizes = [len(one.data) for one in found]
    monkeypatch.setattr(functions_module, "DEFINED_BYTES_MAX", sum(sizes[1:3]))
    for one in (*found[:3], found[2], found[1]):  # Coming twice, each counts once.
        functions.define(*one)
    assert list(functions._definitions) == [found[2].digest, found[1].digest]
    functions.define(*found[3])
    assert list(functions._definitions)[-1] == found[3].digest
    monkeypatch.setattr(functions_module, "DEFINED_BYTES_MAX", 1)
    functions.define(*found[0])
    assert list(functions._definitions) == [found[0].digest]


def test_no_more_pairs_are_kept_than_compute_keeps_and_what_goes_is_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert functions_module.MADE_MAX <= functions_module.BOUND_MAX <= PAIRS_MAX
    monkeypatch.setattr(functions_module, "MADE_MAX", 2)
    exports, functions = FunctionEncoder(), FunctionDecoder()
    pairs = []
    for rows in (2, 3, 4):
        args = [array(rows, 3), X]
        spec, (definition,) = exports.spec_for(made(names_cases.layer, *args), ())
        functions.define(*definition)
        bound = functions.bound(spec)
        bound.vjp(bound.forward(args)[1], [[array(rows)]])
        pairs.append(weakref.ref(bound.pair))
    gc.collect()
    assert [pair() is None for pair in pairs] == [True, False, False]


def hook(g: Any) -> Any:
    return g * 2


def test_what_a_program_tells_is_prepared_or_refused() -> None:
    exports, key = FunctionEncoder(), OutputKey(CONTEXT, (1,), 0)
    fine, no = made(names_cases.layer, array(2, 3), X), made(called_back, X)

    def issued(pair: Any, worker: str) -> Issued:
        return Issued(CONTEXT, (1,), worker, pair, pair.name, (), (), "x:1")

    def allowed(worker: str) -> tuple[str, ...]:
        return THERE if worker == "b" else ()

    exports.prepare(issued(fine, "a"), "home", allowed)
    assert fine in exports._exported
    exports.prepare(issued(no, "home"), "home", allowed)
    exports.prepare(issued(no, "b"), "home", allowed)
    with fails_with(JdagError, "processes.called_back_cannot_be_called"):
        exports.prepare(issued(no, "a"), "home", allowed)
    leaf = LeafKey(None, LEAF, 0)
    part = Assignment((1,), no, (leaf,), (leaf,), no.out_avals, "x:1")
    with fails_with(JdagError, "processes.called_back_cannot_be_called"):
        exports.prepare(Assigned((1,), (part,)), "home", allowed)
    exports.prepare(Assigned((1,), (part,)), "a", allowed)
    for worker, fn, said in (
        ("a", hook, r"hook cannot run on 'a': .* not in the allow.*allow=\['tests'\]"),
        ("b", lambda g: g, r"cannot run on 'b': programs .*not be looked up by name"),
        ("b", partial(hook), ""),
        ("home", lambda g: g, ""),
    ):
        attached = Attached(CONTEXT, worker, key, Hook((1,), fn, True, None, "x:1"))
        launched = Launched(CONTEXT, (1,), worker, fn, ((), {}), "x:1")
        for event in (attached, launched):
            if not said:
                exports.prepare(event, "home", allowed)
                continue
            with pytest.raises(JdagError, match=said):
                exports.prepare(event, "home", allowed)
    exports.prepare(Discarded(CONTEXT, (), ()), "home", allowed)
    lost = made(lambda x: jax.lax.while_loop(jnp.any, jnp.sin, x), X)
    part = Assignment((1,), lost, (leaf,), (leaf,), lost.out_avals, "x:1")
    given: Any = (([PairData(lost)], 2.0), {})
    program = Launched(CONTEXT, (1,), LEAF.worker, names_cases.program, given, "x:1")
    for one in (issued(lost, LEAF.worker), Assigned((1,), (part,)), program):
        says = f" failed on '{LEAF.worker}', called at x:1: ValueError: Reverse-mode"
        with pytest.raises(RemoteError, match=f"the backward of .*{says}") as caught:
            exports.prepare(one, "home", lambda _: ("tests.tools.names_cases",))
        assert "Traceback" not in str(caught.value)


def test_bound_pairs_of_equal_names_are_told_apart_by_their_digests() -> None:
    one, two = made(lambda x: x + 1, X), made(lambda x: x + 2, X)
    assert spec_of(one) == spec_of(two)
    first, second = received(one), received(two)
    assert spec_of(first) != spec_of(second)
    assert bits(first.forward([X])[0][0]) == bits(X + 1)
    assert bits(second.forward([X])[0][0]) == bits(X + 2)
    assert bound_of(one) is bound_of(two)  # Hence they never go by name.
