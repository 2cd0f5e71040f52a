"""Messages whose bytes were changed are refused, or are messages; no more happens."""

import tracemalloc
from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, get_args

import jax
import numpy as np
import optax
import pytest

import jdag
from jdag import simulate
from jdag.compute.avals import aval_of
from jdag.compute.refs import RefData
from jdag.engine.names import Record
from jdag.engine.protocol import (
    Attach,
    Call,
    ContextId,
    Ended,
    Failure,
    Forget,
    LeafId,
    LeafKey,
    Listing,
    Mark,
    Message,
    Notice,
    ObjectId,
    Prepare,
    Read,
    Reading,
    Release,
    Return,
    Run,
    Tell,
)
from jdag.errors import ProtocolError
from jdag.processes.functions.decoder import FunctionDecoder
from jdag.sim import transport
from jdag.wire import messages
from jdag.wire.arrays import type_of
from jdag.wire.messages import Codec
from tests.tools import random_runs
from tests.tools.plan_cases import batch, network, put
from tests.tools.random_hooks import numbered
from tests.tools.random_source import source_of
from tests.tools.wire_cases import Point, program, read_message

FEW = 4_000
MANY = 100_000
WORKERS = tuple("abcdef")
CODEC = Codec(WORKERS)
FUNCTIONS = FunctionDecoder(["tests"])
KINDS = get_args(Message)
EXTREMES = (0, 1, 0x7F, 0x80, 0xFF)
WIDE = (0, 1, 0xFFFF, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
# Beyond the bytes themselves a message of n bytes may take so much while it is read.
TIMES = 100
BESIDE_BYTES = 1 << 20  # What is remembered grows by jumps, up to its bound.
KEPT_BYTES = 16 << 20


@pytest.fixture(scope="module")
def real() -> list[bytes]:
    found: dict[bytes, None] = {}

    def noted(message: Message, values: tuple[Any, ...]) -> tuple[int, int]:
        kinds = [type_of(value) for value in values]
        found[CODEC.encode(message, kinds)] = None
        return messages.size(message, values)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(transport, "size", noted)
        for number in (1, 4):
            plan = numbered(number)
            for mode in random_runs.MODES:
                random_runs.run(plan, source_of(plan), mode=mode, seed=number)
        with simulate(WORKERS[:3], seed=0) as cluster:
            params = put(cluster, "bc", np.float32)
            optimizer = jdag.Optimizer(optax.sgd(0.1), params)
            step = jdag.compile(network, cluster, optimizer=optimizer)
            step(params, *batch(0, np.float32))
            jdag.fetch(params)
    context = ContextId(1, 2, 0)
    failure = Failure("RemoteError", "no", "a", (1, 2), "f", "x.py:1", "y", ("a", "b"))
    leaf = LeafId("a", 5)
    ref = RefData(LeafKey(None, leaf, 2), "a", aval_of(2.5), True, leaf)
    plain = (1, -(1 << 70), 2.5, 1j, "x", b"y", [None, True, False, {"a": (3,)}])
    arrays = (np.arange(6).reshape(2, 3), np.float32(2), jax.random.key(0))
    one, other = (ObjectId(context, (1, n), "b", "Counter") for n in (2, 3))
    data = (ref, one, plain, arrays, partial(program, 3), Point(1, 2))
    arguments = (data, {"k": ref, "o": other})
    some = (
        Run(context, (1,), program, arguments, "x.py:1", (one, other)),
        Return(context, (1,), arguments, failure, ("a", "b"), (Notice("c", ()),)),
        Tell(context, (1,), arguments, answers=False),
        Forget((leaf, leaf, leaf)),
        Reading(7, (failure, failure)),
        Ended(context, 1, (), (), (), failure),
        Listing(context, 1, marked=True),
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
    data = bytearray(rng.choice(real))
    if rng.random() < 0.1:
        other = rng.choice(real)
        data[rng.randrange(len(data)) :] = other[rng.randrange(len(other)) :]
    for _ in range(rng.choice((1, 1, 2, 3))):
        if data:
            rng.choice(CHANGES)(data, rng)
    return bytes(data)


def opened(message: Any) -> None:
    if isinstance(message, Run | Return | Tell | Attach | Prepare):
        FUNCTIONS.bind(message, "a", CODEC)


def read_or_refused(data: bytes, seed: int) -> str:
    try:
        message, kinds, offset = CODEC.decode(data)
        opened(message)
    except ProtocolError as error:
        assert len(str(error)) < 4_000, seed
        return "refused"
    except BaseException as error:
        raise AssertionError(f"seed {seed}: {data.hex()}") from error
    assert type(message) in KINDS and 0 <= offset <= len(data), seed
    assert all(kind.nbytes >= 0 for kind in kinds), seed
    again = CODEC.encode(message, kinds)
    assert CODEC.decode(again)[0] == message or "nan" in repr(message), seed
    return "read"


def test_mutated_messages_are_refused_or_read(real: list[bytes]):
    kinds = {type(CODEC.decode(data)[0]) for data in real}
    missing = [kind.__name__ for kind in KINDS if kind not in kinds]
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
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        try:
            opened(read_message(CODEC, data))
            said = ""
        except ProtocolError as error:
            said = str(error)
        return tracemalloc.get_traced_memory()[1] - before, said
    finally:
        tracemalloc.stop()


def framed(data: bytes) -> bytes:
    return (len(data) + 2).to_bytes(4, "little") + b"\x92" + data + b"\x90"


def array(number: int) -> bytes:
    return b"\xdd" + number.to_bytes(4, "big")


def data(items: bytes) -> bytes:
    return b"\xc6" + (len(items) + 4).to_bytes(4, "big") + inner(items)


def inner(items: bytes) -> bytes:
    return len(items).to_bytes(4, "little") + items


def head(kind: type[Record], fields: int) -> bytes:
    """The beginning of a message as an array: its length, and the tag."""
    tag: Any = kind.__struct_config__.tag
    return bytes([0x90 + 1 + fields, tag])


HERE = b"\x93\0\0\0"
CALL = head(Call, 9) + HERE + b"\x90" + b"\xc4\0"  # Up to its inputs.
SIN = data(b"\x92\x08\xadjax.numpy:sin")
RUN = head(Run, 5) + HERE + b"\x90" + SIN  # Up to its arguments.
KEY = b"\x94\2" + HERE + b"\x90\0"
READING, READ, FORGET = head(Reading, 2) + b"\0", head(Read, 2) + b"\0", head(Forget, 1)
RELEASE = head(Release, 3) + HERE
N = 20_000
HUGE = {
    "failures of a Reading": READING + array(N) + b"\xc0" * N,
    "keys of a Read": READ + array(N) + KEY * N,
    "leaves of a Forget": FORGET + array(N) + b"\x92\xa1a\1" * N,
    "slots of a Call": CALL + b"\x90\x90" + array(N) + b"\xc3" * N + b"\x90\xa0\x90",
    "receives of a Call": CALL
    + b"\x90\x90\x90"
    + array(N)
    + b"\x92\xa1a\x90" * N
    + b"\xa0\x90",
    "items of a Run": RUN + data(b"\x92\3" + array(N) + b"\xc0" * N) + b"\xa0",
    "a text of a Run": RUN + data(b"\xdb" + N.to_bytes(4, "big") + b"x" * N) + b"\xa0",
    "live contexts of a Release": RELEASE + array(N) + b"\1" * N + b"\xc2",
}


@pytest.mark.parametrize("what", HUGE)
def test_reading_takes_memory_in_proportion_to_the_bytes(what: str):
    message = framed(HUGE[what])
    used, said = taken(message)
    assert said == ""
    assert used <= TIMES * len(message), (used, len(message))


@pytest.mark.parametrize("number", [1 << 20, 1 << 28, (1 << 32) - 1])
def test_what_is_announced_and_not_there_takes_no_memory(number: int):
    mark = head(Mark, 6) + HERE + b"\0"
    for begun in (READING, READ, FORGET, CALL + b"\x90\x90", mark, RUN, RELEASE):
        used, said = taken(framed(begun + array(number) + bytes(3)))
        assert said and used < 20_000, (begun, used)
    for items in (b"\x92\3" + array(number), b"\xdb" + number.to_bytes(4, "big")):
        used, said = taken(framed(RUN + data(items) + b"\xa0"))
        assert said and used < 20_000, (items, used)
    used, said = taken(number.to_bytes(4, "little") + bytes(3))
    assert said and used < 20_000, used


def test_what_nests_announced_tuples_takes_no_memory():
    level = b"\x92\3" + array(1 << 20)
    for levels in (90, 400, 50_000):
        items = level * levels
        used, said = taken(framed(RUN + data(items) + b"\xa0"))
        assert said and used < 100_000 + 20 * len(items), (levels, used)
