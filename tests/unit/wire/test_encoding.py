"""Structs as bytes: bounds of what is written and read, and checks beyond these."""

from dataclasses import dataclass

import pytest

from jdag.engine.credit import HALVINGS_MAX, WHOLE, Credit, credit_of
from jdag.engine.names import NAME_MAX, PATH_MAX, SLOTS_MAX
from jdag.engine.protocol import (
    Answer,
    Call,
    ContextId,
    Cotangent,
    Ended,
    Fail,
    Failure,
    Key,
    LeafId,
    LeafKey,
    OutputKey,
    Primal,
    Read,
    Reading,
    ReceivedKey,
    Release,
    Released,
    Return,
    Ship,
)
from jdag.errors import ProtocolError
from jdag.wire.encoding import check_of
from jdag.wire.messages import Codec
from jdag.wire.trees import write_tree
from tests.tools.error_texts import fails_with
from tests.tools.wire_cases import read_message

WORKERS = ("a", "b", "c")
CODEC = Codec(WORKERS)
CONTEXT = ContextId(1, 2, 3)
OUTPUT = OutputKey(CONTEXT, (1,), 0)


def test_a_path_has_so_many_numbers_and_no_more():
    long = Primal(CONTEXT, tuple(range(PATH_MAX)), "a", ())
    assert read_message(CODEC, CODEC.encode(long)) == long
    with pytest.raises(ProtocolError, match=f"`array` of length <= {PATH_MAX}"):
        CODEC.encode(Primal(CONTEXT, (0,) * (PATH_MAX + 1), "a", ()))


def test_a_name_has_so_many_characters_and_no_more():
    for name in ("", "ü" * 40, "x" * 300, "x" * NAME_MAX):
        ship = Ship(CONTEXT, (1,), "b", (), (), name, "")
        assert read_message(CODEC, CODEC.encode(ship)) == ship
    with pytest.raises(ProtocolError, match=f"`str` of length <= {NAME_MAX}"):
        CODEC.encode(Ship(CONTEXT, (1,), "b", (), (), "x" * (NAME_MAX + 1), ""))


def test_a_text_that_is_not_unicode_travels_escaped():
    failure = Failure("E", "of \udc80", "a", call_site="\udc80.py:1")
    assert read_message(CODEC, CODEC.encode(Fail(CONTEXT, 1, failure))) == Fail(
        CONTEXT, 1, Failure("E", r"of \udc80", "a", call_site=r"\udc80.py:1")
    )


@dataclass
class Fault(Exception):
    """An exception that a dataclass is too."""

    code: int


def test_an_exception_of_whatever_class_stays():
    failure = Failure("E", "no", "a", exception=Fault(3))
    bare = Failure("E", "no", "a")
    for message, read in (
        (Fail(CONTEXT, 1, failure), Fail(CONTEXT, 1, bare)),
        (Ended(CONTEXT, 1, (), (), (), failure), Ended(CONTEXT, 1, (), (), (), bare)),
        (Primal(CONTEXT, (), "a", (failure,)), Primal(CONTEXT, (), "a", (bare,))),
        (Reading(1, (None, failure)), Reading(1, (None, bare))),
        (Released(CONTEXT, (failure,)), Released(CONTEXT, (bare,))),
        (
            Return(CONTEXT, (), 1, failure, (), ()),
            Return(CONTEXT, (), write_tree(1), bare, (), ()),
        ),
    ):
        assert read_message(CODEC, CODEC.encode(message)) == read


def test_a_context_is_of_a_worker_that_there_is():
    release = Release(ContextId(2, 1, 0), (), abort=False)
    data = CODEC.encode(release)
    assert read_message(CODEC, data) == release
    for codec in (Codec(WORKERS[:2]), joined(WORKERS[:2])):
        with fails_with(ProtocolError, "wire.unknown_context_owner"):
            read_message(codec, data)


def joined(workers: tuple[str, ...]) -> Codec:
    codec = Codec(workers)
    codec.joined("a", 1)
    return codec


def test_a_part_is_of_a_whole_that_was_halved_so_often_and_no_more():
    least = Answer(CONTEXT, 1, Credit(1, HALVINGS_MAX), 0)
    assert read_message(CODEC, CODEC.encode(least)) == least
    more = CODEC.encode(Answer(CONTEXT, 1, Credit(1, HALVINGS_MAX + 1), 0))
    with pytest.raises(ProtocolError, match=f"`int` <= {HALVINGS_MAX}"):
        read_message(CODEC, more)


@pytest.mark.parametrize(
    ("message", "key"),
    [
        (Call(CONTEXT, (), object(), (), (), (), (), ""), "wire.object_is_no_data"),
        (Answer(CONTEXT, 1 << 100_000, WHOLE, 0), "wire.field_cannot_be_serialized"),
        (
            Cotangent(CONTEXT, 1, (), (True,) * (SLOTS_MAX + 1), False, WHOLE, 0),
            "wire.mask_too_long",
        ),
        (
            Read(1, (OutputKey(CONTEXT, (1,), 1 << 32), *[OUTPUT] * 1000)),
            "wire.int_above_32_bits",
        ),
        (
            Answer(CONTEXT, 1, credit_of(1 << (8 << 16), 8 << 16), 0),
            "wire.digest_too_long",
        ),
    ],
    ids=["no data", "huge number", "long mask", "wide number", "long credit"],
)
def test_a_message_of_which_a_part_could_not_be_read_is_not_sent(message, key: str):
    with fails_with(ProtocolError, key):
        CODEC.encode(message)


def test_a_check_finds_what_it_is_of_wherever_that_is():
    leaf, far = LeafId("a", 1), LeafId("z", 1)
    for kind, good, bad in (
        (tuple[int, LeafId], (1, leaf), (1, far)),
        (tuple[LeafId, ...], (leaf, leaf), (leaf, far)),
        (LeafId | None, None, far),
        (Key, LeafKey(None, leaf, 0), LeafKey(None, far, 0)),
        (tuple[Key | None, ...], (OUTPUT,), (OUTPUT, None, LeafKey(None, far, 0))),
    ):
        check_of(kind)(good, CODEC)
        with fails_with(ProtocolError, "wire.unknown_worker_of_three"):
            check_of(kind)(bad, CODEC)
    check_of(tuple[int, ...])((1, 2), CODEC)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (OutputKey(CONTEXT, (1, 1 << 32), 0), "`int` <= 4294967295"),
        (OutputKey(CONTEXT, (1,), 1 << 32), "`int` <= 4294967295"),
        (
            OutputKey(ContextId(3, 7, 0), (1,), 0),
            "a context of worker 3: expected a worker from",
        ),
        (ReceivedKey(CONTEXT, ((1,), "z"), 0), "worker 'z': the cluster has 3 workers"),
    ],
)
def test_what_no_key_has_is_refused(key: Key, text: str):
    with pytest.raises(ProtocolError, match=text):
        read_message(CODEC, CODEC.encode(Read(1, (key,))))
