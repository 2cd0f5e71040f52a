"""Messages as bytes: sizes are exact, and what was written is what is read."""

from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import astuple

from jdag.compute.avals import aval_of
from jdag.engine.arrays import ArrayType
from jdag.engine.credit import NOTHING, WHOLE, Credit, credit_of
from jdag.engine.protocol import (
    Answer,
    Call,
    ContextId,
    Cotangent,
    Failure,
    Hook,
    LeafId,
    LeafKey,
    Message,
    Owed,
    Primal,
    Read,
    Reading,
    Release,
    Released,
    StepFrame,
)
from jdag.errors import SHOWN_MAX, ProtocolError
from jdag.wire.arrays import type_of
from jdag.wire.messages import STEP, WHOLE_MAX, Codec, blank, size
from jdag.wire.specs import spec_of
from tests.tools.compute_cases import pair_of
from tests.tools.error_texts import fails_with
from tests.tools.tiers import sized
from tests.tools.wire_cases import OPAQUE, WORKERS, messages, read_message

CODEC = Codec(WORKERS)
CONTEXT = ContextId(1, 2, 3)
TYPES = pytest.mark.parametrize("kind", messages, ids=lambda kind: kind.__name__)


def test_every_message_is_drawn_and_has_the_tag_of_its_place_in_the_file() -> None:
    assert set(get_args(Message)) == set(messages)
    tags = sorted((kind.__struct_config__.tag, kind.__name__) for kind in messages)
    assert [tag for tag, _ in tags] == list(range(len(tags)))
    assert " ".join(name for _, name in tags) == (
        "Call Ship Primal Run Return Tell Discard Read Reading Assign Forget Attach "
        "Start Mark Go Cotangent Answer Fail End Ended Release Released Listing "
        "Prepare StepFrame Stepped Settle"
    )


def as_unicode(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace("\udc80", "\\udc80")
    if isinstance(value, tuple):
        return tuple(map(as_unicode, value))
    if isinstance(value, Failure | Owed | Hook):
        return type(value)(*map(as_unicode, astuple(value)))
    return value


@TYPES
@given(data=st.data())
@settings(max_examples=sized(15, 40))
def test_what_was_written_is_read_and_has_its_size_and_nothing_less_or_more_is_read(
    kind: type[Any], data: st.DataObject
) -> None:
    message = data.draw(messages[kind])
    written = CODEC.encode(message)
    nbytes = len(written)
    if isinstance(message, StepFrame):  # Its numbers come first, of 8 bytes each.
        nbytes = STEP.size + len(CODEC.encode(blank(message)))
    assert size(message, ()) == (0, nbytes)
    with pytest.raises(ProtocolError):
        read_message(CODEC, written[: data.draw(st.integers(0, len(written) - 1))])
    with fails_with(ProtocolError, "wire.one_byte_left_over"):
        read_message(CODEC, written + b"\0")
    read = read_message(CODEC, written)
    assert type(read) is kind
    assert CODEC.encode(read) == written
    assert size(read, ()) == (0, nbytes)
    for name in kind.__struct_fields__:
        if name not in OPAQUE.get(kind, ()):
            assert getattr(read, name) == as_unicode(getattr(message, name))


def test_values_add_their_headers_and_their_bytes() -> None:
    three = (
        jnp.ones((3, 4), jnp.float32),
        np.ones(5, np.int8),
        jnp.ones((), jnp.bfloat16),
    )
    for count in (3, 15, 16, 17):  # A list of 16 items has a longer head.
        values = (three * 6)[:count]
        message = Primal(CONTEXT, (1,), "a", (None,) * count)
        head = CODEC.encode(message, [type_of(value) for value in values])
        elements = sum([value.nbytes for value in values])
        assert size(message, values) == (elements, len(head) + elements)
        assert len(head) > len(CODEC.encode(message)) + count * len("int8")


def test_an_abstract_run_is_charged_for_the_same_bytes() -> None:
    values = (jnp.ones((3, 4)), 2.5, 3, 1j, jax.random.split(jax.random.key(0), 3))
    message = Primal(CONTEXT, (1,), "a", (None,) * len(values))
    assert size(message, tuple(map(aval_of, values))) == size(message, values)


def layer(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(w @ x)


def test_a_compiled_function_travels_as_its_spec() -> None:
    arguments = (jnp.ones((2, 3), jnp.float32), jnp.ones(3, jnp.bfloat16))
    made = pair_of(layer, *arguments)
    call = Call(CONTEXT, (1,), made, (), (), (True,), (), "x.py:1")
    written = CODEC.encode(call)
    assert size(call, ()) == (0, len(written))
    read = read_message(CODEC, written)
    assert isinstance(read, Call)
    assert read.function == spec_of(made)


def test_of_many_failures_in_one_message_all_but_the_first_say_less() -> None:
    long = "x" * (1 << 16)
    many = tuple(
        Failure("RemoteError", f"{number}{long}", "a", (number,), traceback=long)
        for number in range(1024)
    )
    mixed = (None, *many, None)
    for reading in (Reading(1, mixed), Released(CONTEXT, many)):
        data = CODEC.encode(reading)
        assert len(data) == size(reading, ())[1] < 1 << 26
        read: Any = read_message(CODEC, data)
        failures = [one for one in read.failures if one is not None]
        assert tuple(failures[:WHOLE_MAX]) == many[:WHOLE_MAX]
        assert [one.path for one in failures] == [one.path for one in many]
        for one in failures[WHOLE_MAX:]:
            assert one.message.startswith(f"{one.path[0]}xxx")
            assert "characters are left out here" in one.message
            assert len(one.message) < 2 * SHOWN_MAX and one.traceback == ""


def test_a_message_takes_the_bytes_that_are_written_down_here() -> None:
    weight = Credit(0x203, 10)
    answer = Answer(ContextId(1, 2, 3), 4, weight, -1)
    assert CODEC.encode(answer) == bytes.fromhex(
        "0f000000" "92" "95" "10" "93010203" "04" "92cd02030a" "ff" "90"
    )  # fmt: skip
    context, slots = ContextId(1, 2, 3), (True, False, True)
    cotangent = Cotangent(context, 4, (5, 6), slots, True, weight, 7)
    assert CODEC.encode(cotangent, [ArrayType((2,), "int8", False)]) == (
        bytes.fromhex(
            "22000000" "92" "98" "0f" "93010203" "04" "920506" "93c3c2c3" "c3"
            "92cd02030a" "07" "91" "95" "9102" "a4"
        ) + b"int8" + bytes.fromhex("c2c0c2")
    )  # fmt: skip


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (Primal(ContextId(1, 1 << 48, 0), (1,), "a", ()), r"`int` <= 281474976710655"),
        (Primal(ContextId(1 << 16, 1, 0), (1,), "a", ()), r"`int` <= 65535"),
        (Primal(CONTEXT, (-1,), "a", ()), r"`int` >= 0"),
        (Answer(CONTEXT, 1, WHOLE, 1 << 31), r"`int` <= 2147483647"),
        (
            Release(CONTEXT, (1.5,), False),  # type: ignore[arg-type]
            r"Expected `int`, got `float`",
        ),
    ],
    ids=str,
)
def test_what_a_field_cannot_hold_is_refused(message: Message, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        read_message(CODEC, CODEC.encode(message))


@pytest.mark.parametrize("bits", [1, 8, 9, 63, 64, 5_000, 8 * 65_536])
def test_a_weight_of_any_length_is_charged_for_its_bytes(bits: int) -> None:
    answer = Answer(CONTEXT, 1, credit_of((1 << bits) - 1, bits + 3), -2)
    written = CODEC.encode(answer)
    nothing = CODEC.encode(Answer(CONTEXT, 1, NOTHING, -2))
    assert 0 <= len(written) - len(nothing) - bits // 8 < 10
    assert size(answer, ()) == (0, len(written))
    assert read_message(CODEC, written) == answer


def test_a_cluster_has_no_more_workers_than_numbers() -> None:
    names = [f"w{number}" for number in range((1 << 16) + 1)]
    Codec(names[:-1])
    with fails_with(ProtocolError, "wire.too_many_workers"):
        Codec(names)


HERE = "93000000"  # A context.


def framed(data: str) -> bytes:
    envelope = bytes.fromhex("92" + data + "90")
    return len(envelope).to_bytes(4, "little") + envelope


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", r"a message of 4 bytes, but only 0 were received"),
        (b"\1\0\0\0\x92", r"1 bytes cannot be read: Input data was truncated"),
        (b"\5\0\0\0\x92", r"a message of 9 bytes, but only 5 were received"),
        (framed("9130"), r"Invalid value 48 - at `\$\[0\]\[0\]`"),
        (framed("9419" + HERE + "0105"), r"Expected `array \| null`, got `int`"),
        (framed("9512" + HERE + "01a46c6f7374c2"), r"Invalid enum value 'lost'"),
        (framed("920a91" + "92a17a01"), r"worker 'z': the cluster has 4 workers"),
        (framed("93070091" + "940fc09000"), r"Invalid value 15"),
        (framed("920a91" + "93a1610107"), r"length 2, got 3"),
        (framed("920a9192a1ff01"), r"invalid start byte|can't decode"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bytes_that_mean_nothing_are_named_with_what_would(
    data: bytes, text: str
) -> None:
    with pytest.raises(ProtocolError, match=text):
        read_message(CODEC, data)


def test_of_a_worker_that_joined_anew_each_incarnation_has_a_number_of_its_own():
    codec = Codec(WORKERS)
    given: list[Message] = [
        Release(ContextId(1, 2, 3), (), abort=True),
        *(Read(7, (LeafKey(None, LeafId(w, 1), 0),)) for w in ("a#1", "ü#2", "a")),
    ]
    other = CODEC.encode(given[1])
    with fails_with(ProtocolError, "wire.unknown_incarnation"):
        read_message(codec, other)
    codec.joined("a", 1)
    codec.joined("ü", 2)
    for message in given:
        data = codec.encode(message)
        assert read_message(codec, data) == message
        assert len(data) == size(message, ())[1]
