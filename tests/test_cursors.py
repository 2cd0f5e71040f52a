"""What is written and read has bounds, and who passes one is told which."""

from typing import Any

import pytest

from jdag.engine.vocabulary import (
    Acknowledge,
    Answer,
    Assign,
    Assignment,
    Call,
    ContextId,
    Cotangent,
    Key,
    LeafId,
    Ship,
)
from jdag.engine.weight import WHOLE, Weight
from jdag.errors import ProtocolError
from jdag.wire.arrays import ARRAY_TYPE, NBYTES_MAX, ArrayType
from jdag.wire.cursors import SLOTS_MAX, Reader, Writer
from jdag.wire.encoding import NAME, NAME_MAX_BYTES, PATH_MAX, TEXT
from jdag.wire.messages import HALVINGS_MAX, Codec, FunctionData

WORKERS = ("a", "b", "c")
CODEC = Codec(WORKERS)
CONTEXT = ContextId(1, 2, 3)
FUNCTION = FunctionData(b"spec")
OUTPUT = Key("output", CONTEXT, (1,), 0)
LEAF = Key("leaf", None, LeafId("a", 1), 0)
KIND = ArrayType((2,), "int8", False)


def written(layout: Any, value: Any) -> bytes:
    writer = Writer({})
    layout.write(writer, value)
    return bytes(writer.out)


def test_a_path_has_so_many_numbers_and_no_more():
    long = Acknowledge(CONTEXT, tuple(range(PATH_MAX)))
    assert CODEC.decode(CODEC.encode(long)) == long
    said = f"{PATH_MAX + 1} numbers in a path: allowed are {PATH_MAX}"
    with pytest.raises(ProtocolError, match=said):
        CODEC.encode(Acknowledge(CONTEXT, (0,) * (PATH_MAX + 1)))
    more = (PATH_MAX + 1).to_bytes(4, "little") + bytes(4 * PATH_MAX + 4)
    with pytest.raises(ProtocolError, match=said):
        CODEC.decode(CODEC.encode(Acknowledge(CONTEXT, ()))[:-4] + more)


def test_a_name_has_so_many_bytes_and_no_more():
    for name in ("", "ü" * 40, "x" * 300, "x" * NAME_MAX_BYTES):
        data = written(NAME, name)
        assert data == written(TEXT, name) and NAME.size(name) == len(data)
        assert NAME.read(Reader(data, {})) == name
    long = "x" * (NAME_MAX_BYTES + 1)
    said = f"{NAME_MAX_BYTES + 1} bytes of a name: allowed are {NAME_MAX_BYTES}"
    with pytest.raises(ProtocolError, match=said):
        written(NAME, long)
    with pytest.raises(ProtocolError, match=said):
        NAME.read(Reader(written(TEXT, long), {}))


@pytest.mark.parametrize("slots", [0, 1, 7, 8, 9, 16, 1000])
def test_masks_of_any_length_are_read_as_they_were(slots: int):
    mask = tuple(place % 3 == 0 for place in range(slots))
    for one in (mask, (False,) * slots, (True,) * slots):
        message = Cotangent(CONTEXT, 1, (1,), one, False, WHOLE, 0)
        assert CODEC.decode(CODEC.encode(message)) == message


def test_more_slots_than_a_message_may_have_are_not_written():
    message = Cotangent(CONTEXT, 1, (), (True,) * (SLOTS_MAX + 1), False, WHOLE, 0)
    with pytest.raises(ProtocolError, match=f"slots in the masks .* are {SLOTS_MAX}"):
        CODEC.encode(message)


def test_a_context_is_of_a_worker_that_there_is():
    data = CODEC.encode(Acknowledge(ContextId(2, 1, 0), ()))
    assert CODEC.decode(data) == Acknowledge(ContextId(2, 1, 0), ())
    for codec in (Codec(WORKERS[:2]), joined(WORKERS[:2])):
        with pytest.raises(ProtocolError, match=r"context's worker 2: .*2 workers"):
            codec.decode(data)


def joined(workers: tuple[str, ...]) -> Codec:
    """One that knows of an incarnation as well, which has number 2."""
    codec = Codec(workers)
    codec.joined("a", 1)
    return codec


@pytest.mark.parametrize(
    ("weight", "said"),
    [
        (Weight(3, 1), "a weight of 2 bits, halved 1 times, is more than the whole"),
        (Weight((1 << 90) + 1, 90), "a weight of 91 bits, halved 90 times, is more"),
        (Weight(1 << 91, 90), "a weight of 92 bits, halved 90 times, is more"),
    ],
)
def test_no_part_is_more_than_the_whole(weight: Weight, said: str):
    data = CODEC.encode(Answer(CONTEXT, 1, weight, 0))
    with pytest.raises(ProtocolError, match=said):
        CODEC.decode(data)


def test_a_part_is_of_a_whole_that_was_halved_so_often_and_no_more():
    least = Answer(CONTEXT, 1, Weight(1, HALVINGS_MAX), 0)
    assert CODEC.decode(CODEC.encode(least)) == least
    said = rf"halvings of a weight = {HALVINGS_MAX + 1}"
    with pytest.raises(ProtocolError, match=said):
        CODEC.encode(Answer(CONTEXT, 1, Weight(1, HALVINGS_MAX + 1), 0))
    halvings = (HALVINGS_MAX + 1).to_bytes(4, "little")
    data = CODEC.encode(Answer(CONTEXT, 1, Weight(0, 0), 0))
    with pytest.raises(ProtocolError, match=said):
        CODEC.decode(data[:17] + halvings + data[21:])


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            Call(CONTEXT, (1,), FUNCTION, (OUTPUT,) * 3, (True,) * 2, (), (), ""),
            "Call of 3 inputs and 2 tracked: allowed is the same number",
        ),
        (
            Ship(CONTEXT, (1,), "b", (), (True,), "f", ""),
            "Ship of 0 keys and 1 tracked: allowed",
        ),
        (
            Assign((1,), (Assignment((1, 0), None, (), (LEAF,), (KIND,) * 2, ""),)),
            "Assignment of 1 outputs and 2 avals: allowed",
        ),
    ],
    ids=["Call", "Ship", "Assignment"],
)
def test_what_belongs_together_is_as_many(message: Any, said: str):
    data = CODEC.encode(message)
    with pytest.raises(ProtocolError, match=said):
        CODEC.decode(data)


@pytest.mark.parametrize(
    "shape", [(1 << 63,), (1 << 32, 1 << 31), (0, 1 << 60, 8), (1 << 40,) * 60]
)
def test_shapes_that_no_array_can_have_are_refused(shape: tuple[int, ...]):
    data = written(ARRAY_TYPE, ArrayType(shape, "int8", False))
    with pytest.raises(ProtocolError, match=f"of int8: allowed are {NBYTES_MAX} bytes"):
        ARRAY_TYPE.read(Reader(data, {}))
    allowed = ArrayType((0, (1 << 60) - 1, 2, 2), "int16", False)
    data = written(ARRAY_TYPE, allowed)
    assert ARRAY_TYPE.read(Reader(data, {})) == allowed


def test_data_has_nothing_left_over():
    data = CODEC.encode_data((1, "x"))
    assert CODEC.decode_data(data) == (1, "x")
    with pytest.raises(ProtocolError, match=f"2 of {len(data) + 2} bytes are left"):
        CODEC.decode_data(data + b"\0\0")


def test_an_error_about_a_huge_number_can_be_said():
    with pytest.raises(ProtocolError, match="= a number of 100001 bits cannot travel"):
        CODEC.encode(Answer(CONTEXT, 1 << 100_000, WHOLE, 0))
    with pytest.raises(ProtocolError, match="index of a key = a number of 100001 bits"):
        CODEC.encode(
            Call(
                CONTEXT,
                (),
                FUNCTION,
                (OUTPUT._replace(index=1 << 100_000),),
                (True,),
                (),
                (),
                "",
            )
        )


def test_what_equals_another_number_is_written_as_that_number():
    one: Any = ContextId(True, 1, 0)
    assert CODEC.encode(Acknowledge(one, ())) == CODEC.encode(
        Acknowledge(ContextId(1, 1, 0), ())
    )
