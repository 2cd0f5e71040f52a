"""Messages as bytes: sizes are exact, and what was written is what is read."""

from dataclasses import fields
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdag.compute.avals import aval_of
from jdag.compute.pairs import pair
from jdag.compute.pytrees import split
from jdag.engine.vocabulary import (
    Acknowledge,
    Answer,
    Call,
    ContextId,
    Cotangent,
    Fail,
    Failure,
    Key,
    LeafId,
    Message,
    Primal,
    Read,
    Reading,
    Release,
    Released,
    Run,
)
from jdag.engine.weight import NOTHING, WHOLE, Weight
from jdag.errors import SHOWN_MAX, ProtocolError
from jdag.wire.arrays import AXIS_BYTES, HEADER_BYTES
from jdag.wire.messages import LAYOUTS, WHOLE_MAX, Codec, FunctionData, size
from jdag.wire.trees import Named
from tests.wire_cases import OPAQUE, WORKERS, messages, program

CODEC = Codec(WORKERS)
CONTEXT = ContextId(1, 2, 3)
TYPES = pytest.mark.parametrize("kind", messages, ids=lambda kind: kind.__name__)


def test_every_message_has_a_layout_and_is_drawn() -> None:
    assert set(LAYOUTS) == set(get_args(Message)) == set(messages)


@TYPES
@given(data=st.data())
@settings(max_examples=40)
def test_the_size_is_the_number_of_bytes(kind: type[Any], data: st.DataObject) -> None:
    message = data.draw(messages[kind])
    assert size(message, ()) == (0, len(CODEC.encode(message)))


@TYPES
@given(data=st.data())
@settings(max_examples=40)
def test_what_was_written_is_read(kind: type[Any], data: st.DataObject) -> None:
    message = data.draw(messages[kind])
    written = CODEC.encode(message)
    read = CODEC.decode(written)
    assert type(read) is kind
    assert CODEC.encode(read) == written
    assert size(read, ()) == (0, len(written))
    for field in fields(kind):
        if field.name not in OPAQUE.get(kind, ()):
            assert getattr(read, field.name) == getattr(message, field.name)


@TYPES
@given(data=st.data())
@settings(max_examples=20)
def test_bytes_that_are_no_message_are_refused_and_nothing_else_is_raised(
    kind: type[Any], data: st.DataObject
) -> None:
    written = CODEC.encode(data.draw(messages[kind]))
    short = data.draw(st.integers(0, len(written) - 1))
    with pytest.raises(ProtocolError):
        CODEC.decode(written[:short])
    with pytest.raises(ProtocolError, match="1 of"):
        CODEC.decode(written + b"\0")
    place = data.draw(st.integers(0, len(written) - 1))
    byte = data.draw(st.integers(0, 255))
    changed = written[:place] + bytes([byte]) + written[place + 1 :]
    try:
        read = CODEC.decode(changed)
    except ProtocolError:
        return
    assert type(read) in messages


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_noise_is_refused_or_is_a_message(data: bytes) -> None:
    try:
        read = CODEC.decode(data)
    except ProtocolError:
        return
    assert type(read) in messages


def test_values_add_their_headers_and_their_bytes() -> None:
    values = (
        jnp.ones((3, 4), jnp.float32),
        np.ones(5, np.int8),
        jnp.ones((), jnp.bfloat16),
    )
    message = Primal(CONTEXT, (1,), "a", (None, None, None))
    headers = 3 * HEADER_BYTES + 3 * AXIS_BYTES
    elements = 48 + 5 + 2
    body = len(CODEC.encode(message))
    assert size(message, values) == (elements, body + headers + elements)


def test_an_abstract_run_is_charged_for_the_same_bytes() -> None:
    values = (jnp.ones((3, 4)), 2.5, 3, 1j, jax.random.split(jax.random.key(0), 3))
    message = Primal(CONTEXT, (1,), "a", (None,) * len(values))
    assert size(message, tuple(map(aval_of, values))) == size(message, values)


def layer(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(w @ x)


def test_a_compiled_function_travels_as_its_spec() -> None:
    arguments = (jnp.ones((2, 3), jnp.float32), jnp.ones(3, jnp.bfloat16))
    template = split(arguments, {}, lambda _: False).template
    made = pair(layer, template, tuple(map(aval_of, arguments)), (True, True))
    call = Call(CONTEXT, (1,), made, (), (), (True,), (), "x.py:1")
    written = CODEC.encode(call)
    assert size(call, ()) == (0, len(written))
    read = CODEC.decode(written)
    assert isinstance(read, Call)
    assert read.function == FunctionData(made.spec)


def test_a_program_travels_as_its_name() -> None:
    run = Run(CONTEXT, (1,), program, ((), {}), "x.py:1")
    read = CODEC.decode(CODEC.encode(run))
    assert read == Run(
        CONTEXT, (1,), Named("tests.wire_cases:program"), ((), {}), "x.py:1"
    )


def test_an_exception_stays_where_it_was_raised() -> None:
    bare = Failure("RemoteError", "no", "a", (1,), route=("home", "a"))
    raised = Failure(
        "RemoteError", "no", "a", (1,), route=("home", "a"), exception=ValueError("no")
    )
    assert CODEC.decode(CODEC.encode(Fail(CONTEXT, 1, raised))) == Fail(
        CONTEXT, 1, bare
    )


def test_of_many_failures_in_one_message_all_but_the_first_say_less() -> None:
    long = "x" * (1 << 16)
    many = tuple(
        Failure("RemoteError", f"{number}{long}", "a", (number,), traceback=long)
        for number in range(4096)
    )
    mixed = (None, *many, None)
    for reading in (Reading(1, mixed), Released(CONTEXT, many)):
        data = CODEC.encode(reading)
        assert len(data) == size(reading, ())[1] < 1 << 26
        read: Any = CODEC.decode(data)
        failures = [one for one in read.failures if one is not None]
        assert tuple(failures[:WHOLE_MAX]) == many[:WHOLE_MAX]
        assert [one.path for one in failures] == [one.path for one in many]
        for one in failures[WHOLE_MAX:]:
            assert one.message.startswith(f"{one.path[0]}xxx")
            assert "characters are left out here" in one.message
            assert len(one.message) < 2 * SHOWN_MAX and one.traceback == ""


def test_a_byte_that_a_message_takes_is_as_it_is_written_down() -> None:
    weight = Weight(0x203, 10)
    answer = Answer(ContextId(1, 2, 3), 4, weight, -1)
    assert CODEC.encode(answer) == bytes.fromhex(
        "0d" "0100" "020000000000" "03000000" "04000000" "0a000000" "0200" "0302"
        "ffffffff"
    )  # fmt: skip
    context, slots = ContextId(1, 2, 3), (True, False, True)
    cotangent = Cotangent(context, 4, (5, 6), slots, True, weight, 7)
    assert CODEC.encode(cotangent) == bytes.fromhex(
        "0c" "0100" "020000000000" "03000000" "04000000"
        "02000000" "05000000" "06000000" "03000000" "05" "01" "0a000000" "0200" "0302"
        "07000000"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            Acknowledge(ContextId(1, 1 << 48, 0), (1,)),
            r"context's counter = 281474976710656.*0 to 281474976710655",
        ),
        (
            Acknowledge(ContextId(1 << 16, 1, 0), (1,)),
            r"context's worker = 65536 .*0 to 65535",
        ),
        (
            Acknowledge(CONTEXT, (1, 1 << 32)),
            r"number in a path = 4294967296 .*0 to 4294967295",
        ),
        (Acknowledge(CONTEXT, (-1,)), r"number in a path = -1 .*0 to"),
        (
            Answer(CONTEXT, 1, WHOLE, 1 << 31),
            r"sends owed = 2147483648 .*-2147483648 to",
        ),
        (
            Answer(CONTEXT, 1, Weight(1, 1 << 32), 0),
            r"halvings of a weight = 4294967296 .*0 to",
        ),
        (Primal(CONTEXT, (1,), "z", ()), r"worker 'z' is not in .*: home, a, b, ü"),
        (
            Read(1, (Key("scratch", CONTEXT, 1, 0),)),
            r"kind 'scratch' cannot travel: allowed are output, received",
        ),
        (
            Release(CONTEXT, (1.5,), False),  # type: ignore[arg-type]
            r"context's counter = 1.5 cannot travel: allowed is an int",
        ),
    ],
    ids=str,
)
def test_what_a_field_cannot_hold_is_named(message: Message, said: str) -> None:
    with pytest.raises(ProtocolError, match=said):
        CODEC.encode(message)


def test_what_is_no_message_is_named() -> None:
    other: Any = ("hello",)
    said = r"\('hello',\) is no message: allowed are Call, Ship"
    with pytest.raises(ProtocolError, match=said):
        size(other, ())
    with pytest.raises(ProtocolError, match=said):
        CODEC.encode(other)


@pytest.mark.parametrize("bits", [1, 8, 9, 5_000, 8 * 65_535])
def test_a_weight_of_any_length_is_charged_for_its_bytes(bits: int) -> None:
    answer = Answer(CONTEXT, 1, Weight((1 << bits) - 1, bits + 3), -2)
    written = CODEC.encode(answer)
    nothing = CODEC.encode(Answer(CONTEXT, 1, NOTHING, -2))
    assert len(written) - len(nothing) == (bits + 7) // 8
    assert size(answer, ()) == (0, len(written))
    assert CODEC.decode(written) == answer


def test_a_weight_that_is_longer_than_its_length_can_say_is_refused() -> None:
    weight = Weight(1 << (8 << 16), 8 << 16)
    with pytest.raises(ProtocolError, match=r"bytes of a weight = 65537 .*0 to 65535"):
        CODEC.encode(Answer(CONTEXT, 1, weight, 0))


def test_a_weight_that_is_cut_short_is_refused() -> None:
    written = CODEC.encode(Answer(CONTEXT, 1, Weight((1 << 5_000) - 1, 5_000), 0))
    with pytest.raises(ProtocolError, match=r"units of a weight .*625 bytes; 600 of"):
        CODEC.decode(written[: 17 + 6 + 600])


def test_more_is_never_announced_than_can_follow() -> None:
    released = bytes([18]) + bytes(12) + b"\xff\xff\xff\xff"
    with pytest.raises(ProtocolError, match="4294967295 failures of at least"):
        CODEC.decode(released)


def test_a_cluster_has_no_more_workers_than_numbers() -> None:
    names = [f"w{number}" for number in range((1 << 16) + 1)]
    Codec(names[:-1])
    with pytest.raises(ProtocolError, match="65537 workers: allowed are 65536"):
        Codec(names)


HERE = bytes(12)  # A context.


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", r"type of a message at byte 0 takes 1 bytes; 0 of 0 are left"),
        (
            bytes([len(LAYOUTS)]),
            f"type {len(LAYOUTS)} of a message: allowed is 0 to {len(LAYOUTS) - 1}",
        ),
        (b"\x02\x02", r"flag = 2: allowed are 0 and 1"),
        (b"\x0f" + HERE + b"\1\0\0\0\4\0", r"outcome 4: allowed is 0 to 3"),
        (
            b"\x0c" + HERE + bytes(8) + b"\3\0\0\0\x08\0",
            r"mask of 3 slots has bits beyond its last",
        ),
        (
            b"\x09\1\0\0\0\4\0" + bytes(8),
            r"worker's number 4: the cluster has 4 workers",
        ),
        (
            b"\x06" + bytes(8) + b"\1\0\0\0\x09" + bytes(20),
            r"kind 9 of a key: allowed is 0 to 8",
        ),
        (
            b"\x04" + HERE + bytes(4) + b"\x14" + bytes(4),
            r"kind 20 of data: allowed is 0 to 19",
        ),
        (
            b"\x04" + HERE + bytes(4) + b"\x0d\1\0\0\0\xff\0" + bytes(4),
            r"text b'\\xff' is not UTF-8",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bytes_that_mean_nothing_are_named_with_what_would(
    data: bytes, said: str
) -> None:
    with pytest.raises(ProtocolError, match=said):
        CODEC.decode(data)


def test_of_a_worker_that_joined_anew_each_incarnation_has_a_number_of_its_own():
    codec = Codec(WORKERS)
    given: list[Message] = [
        Release(ContextId(1, 2, 3), (), abort=True),
        *(Read(7, (Key("leaf", None, LeafId(w, 1), 0),)) for w in ("a#1", "ü#2", "a")),
    ]
    with pytest.raises(ProtocolError, match="worker 'a#1' is not in the cluster"):
        codec.encode(given[1])
    codec.joined("a", 1)
    codec.joined("ü", 2)
    for message in given:
        data = codec.encode(message)
        assert codec.decode(data) == message
        assert len(data) == size(message, ())[1]
    with pytest.raises(ProtocolError, match="worker's number 5: the cluster has 4"):
        Codec(WORKERS).decode(codec.encode(given[1]))


def test_a_worker_joins_as_often_as_there_are_numbers():
    codec = Codec(WORKERS)
    codec.joined("ü", 16_383)
    with pytest.raises(ProtocolError, match="of 4 workers each may join 16383 times"):
        codec.joined("home", 16_384)
