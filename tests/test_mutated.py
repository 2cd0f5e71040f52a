"""Messages whose bytes were changed are refused, or are messages; no more happens."""

import tracemalloc
from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import jax
import numpy as np
import pytest

from jdag.compute.avals import aval_of
from jdag.engine.vocabulary import (
    ContextId,
    Ended,
    Failure,
    Forget,
    Key,
    LeafId,
    Message,
    Notice,
    Reading,
    Return,
    Run,
)
from jdag.errors import ProtocolError
from jdag.ref import RefData
from jdag.sim import simulation
from jdag.wire import messages
from jdag.wire.arrays import type_of
from jdag.wire.cursors import SLOTS_MAX
from jdag.wire.messages import LAYOUTS, Codec
from tests import random_runs
from tests.random_hooks import numbered
from tests.random_source import source_of
from tests.wire_cases import Point, program

FEW = 4_000
MANY = 100_000
WORKERS = tuple("abcdef")
CODEC = Codec(WORKERS)
EXTREMES = (0, 1, 0x7F, 0x80, 0xFF)
WIDE = (0, 1, 0xFFFF, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
# Beyond the bytes themselves a message of n bytes may take so much while it is read.
TIMES = 100
BESIDE_BYTES = 1 << 20  # What is remembered grows by jumps, up to its bound.
KEPT_BYTES = 16 << 20


@pytest.fixture(scope="module")
def real() -> list[bytes]:
    """What programs drawn at random send, one after the other, each once."""
    found: dict[bytes, None] = {}

    def noted(message: Message, values: tuple[Any, ...]) -> tuple[int, int]:
        kinds = [type_of(value) for value in values]
        found[CODEC.encode_with(message, kinds)] = None
        return messages.size(message, values)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(simulation, "size", noted)
        for number in (1, 4):
            plan = numbered(number)
            for mode in random_runs.MODES:
                random_runs.run(plan, source_of(plan), mode=mode, seed=number)
    context = ContextId(1, 2, 0)
    failure = Failure("RemoteError", "no", "a", (1, 2), "f", "x.py:1", "y", ("a", "b"))
    leaf = LeafId("a", 5)
    ref = RefData(Key("leaf", None, leaf, 2), "a", aval_of(2.5), True, leaf)
    plain = (1, -(1 << 70), 2.5, 1j, "x", b"y", [None, True, False, {"a": (3,)}])
    arrays = (np.arange(6).reshape(2, 3), np.float32(2), jax.random.key(0))
    arguments = ((ref, plain, arrays, partial(program, 3), Point(1, 2)), {"k": ref})
    some = (
        Run(context, (1,), program, arguments, "x.py:1"),
        Return(context, (1,), arguments, failure, ("a", "b"), (Notice("c", ()),)),
        Forget((leaf, leaf, leaf)),
        Reading(7, (failure, failure)),
        Ended(context, 1, (), (), (), failure),
    )
    return [*found, *[CODEC.encode(message) for message in some]]


def flipped(data: bytearray, rng: Random) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def extreme(data: bytearray, rng: Random) -> None:
    data[rng.randrange(len(data))] = rng.choice(EXTREMES)


def wide(data: bytearray, rng: Random) -> None:
    at = rng.randrange(len(data))
    data[at : at + 4] = rng.choice(WIDE).to_bytes(4, "little")


def cut(data: bytearray, rng: Random) -> None:
    at = rng.randrange(len(data))
    del data[at : at + rng.choice((1, 1, 2, 4, 8, len(data)))]


def repeated(data: bytearray, rng: Random) -> None:
    start, end = sorted((rng.randrange(len(data)), rng.randrange(len(data))))
    data[end:end] = data[start:end] * rng.choice((1, 1, 2, 7))


def spread(data: bytearray, rng: Random) -> None:
    at = rng.randrange(len(data))
    data[at:at] = rng.randbytes(rng.choice((1, 4, 8, 12)))


CHANGES: tuple[Callable[[bytearray, Random], None], ...] = (
    flipped,
    extreme,
    wide,
    cut,
    repeated,
    spread,
)


def changed(real: list[bytes], rng: Random) -> bytes:
    """One of the messages with one to three changes, or the halves of two of them."""
    data = bytearray(rng.choice(real))
    if rng.random() < 0.1:
        other = rng.choice(real)
        data[rng.randrange(len(data)) :] = other[rng.randrange(len(other)) :]
    for _ in range(rng.choice((1, 1, 2, 3))):
        if data:
            rng.choice(CHANGES)(data, rng)
    return bytes(data)


def read_or_refused(data: bytes, seed: int) -> str:
    """What the bytes are; any error but a refusal names the seed."""
    try:
        message, kinds, offset = CODEC.decode_with(data)
    except ProtocolError as error:
        assert len(str(error)) < 4_000, seed
        return "refused"
    except BaseException as error:
        raise AssertionError(f"seed {seed}: {data.hex()}") from error
    assert type(message) in LAYOUTS and 0 <= offset <= len(data), seed
    assert all(0 <= kind.nbytes < 1 << 64 for kind in kinds), seed
    again = CODEC.encode_with(message, kinds)
    assert CODEC.decode_with(again)[0] == message or "nan" in repr(message), seed
    return "read"


def test_mutated_messages_are_refused_or_read(real: list[bytes]):
    kinds = {type(CODEC.decode_with(data)[0]) for data in real}
    missing = [kind.__name__ for kind in LAYOUTS if kind not in kinds]
    assert missing == [], missing
    found: Counter[str] = Counter()
    for seed in range(FEW):
        found[read_or_refused(changed(real, Random(seed)), seed)] += 1
    assert found["refused"] > FEW // 4 and found["read"] > FEW // 20, found


@pytest.mark.long
def test_many_mutated_messages_are_refused_or_read_in_bounded_memory(real: list[bytes]):
    tracemalloc.start()
    try:
        for seed in range(FEW, FEW + MANY):
            data = changed(real, Random(seed))
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            read_or_refused(data, seed)
            used = tracemalloc.get_traced_memory()[1] - before
            assert used <= TIMES * len(data) + BESIDE_BYTES, (seed, used, len(data))
        assert tracemalloc.get_traced_memory()[0] < KEPT_BYTES
    finally:
        tracemalloc.stop()


def taken(data: bytes) -> tuple[int, str]:
    """The memory that reading takes at its most, and what was said."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        try:
            CODEC.decode_with(data)
            said = ""
        except ProtocolError as error:
            said = str(error)
        return tracemalloc.get_traced_memory()[1] - before, said
    finally:
        tracemalloc.stop()


def count(number: int) -> bytes:
    return number.to_bytes(4, "little")


HERE = bytes(12)
CALL = b"\0" + HERE + count(0) + count(0)  # Up to its inputs, which are none.
BARE_KEY = b"\2\0" + count(0) + count(0)
N = 20_000
HUGE = {
    "nothings of a Reading": b"\7" + bytes(8) + count(N) + bytes(3 * N),
    "keys of a Read": b"\6" + bytes(8) + count(N) + BARE_KEY * N,
    "leaves of a Forget": b"\x09" + count(N) + bytes(10 * N),
    "slots of a Call": CALL + count(0) * 2 + count(8 * N) + b"\xff" * N + bytes(12),
    "receives of a Call": CALL + count(0) * 3 + count(N) + bytes(6 * N) + bytes(8),
    "items of a Run": b"\4"
    + HERE
    + count(0)
    + b"\0"
    + b"\x08"
    + count(N)
    + bytes(N + 4),
    "a text of a Run": b"\4"
    + HERE
    + count(0)
    + b"\0"
    + b"\6"
    + count(N)
    + b"x" * N
    + bytes(4),
    "live contexts of a Release": b"\x11" + HERE + count(N) + b"\xff" * 6 * N + b"\0",
}


@pytest.mark.parametrize("what", HUGE)
def test_reading_takes_memory_in_proportion_to_the_bytes(what: str):
    used, said = taken(HUGE[what])
    assert said == ""
    assert used <= TIMES * len(HUGE[what]), (used, len(HUGE[what]))


def test_masks_have_so_many_slots_and_no_more():
    mask = count(SLOTS_MAX // 2) + bytes(SLOTS_MAX // 16)
    mark = b"\x13" + HERE + count(1) + count(3) + (count(0) + mask) * 3
    used, said = taken(mark)
    assert f"slots in the masks of a message: allowed are {SLOTS_MAX}" in said
    assert used < 40 * SLOTS_MAX


@pytest.mark.parametrize("number", [1 << 20, 1 << 28, (1 << 32) - 1])
def test_what_is_announced_and_not_there_takes_no_memory(number: int):
    for head in (
        b"\7" + bytes(8),
        b"\6" + bytes(8),
        b"\x09",
        CALL + count(0) * 2,
        b"\x13" + HERE + count(1),
        b"\4" + HERE + count(0) + b"\0" + b"\x08",
        b"\4" + HERE + count(0) + b"\0" + b"\x07",
    ):
        used, said = taken(head + count(number) + bytes(3))
        assert said and used < 20_000, (head, used)
