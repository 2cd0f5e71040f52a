"""Messages drawn at random, of every type, with contents of every kind."""

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from jdag.compute.avals import Aval
from jdag.compute.refs import RefData
from jdag.engine.credit import NOTHING, WHOLE, credit_of
from jdag.engine.protocol import (
    Answer,
    AnyKey,
    Assign,
    Assignment,
    Attach,
    Call,
    ConstantKey,
    ContextId,
    Cotangent,
    CotangentKey,
    Discard,
    End,
    Ended,
    Fail,
    Failure,
    Forget,
    Go,
    GradientKey,
    Hook,
    Incoming,
    LeafId,
    LeafKey,
    Listing,
    Mark,
    Marked,
    NewestKey,
    Notice,
    ObjectId,
    Outcome,
    Outgoing,
    OutputKey,
    Owed,
    Prepare,
    Primal,
    Read,
    Reading,
    ReadingKey,
    ReceivedKey,
    Release,
    Released,
    Return,
    Root,
    Run,
    SeedKey,
    Segment,
    Settle,
    Ship,
    SlotKey,
    Slotted,
    Stale,
    Start,
    StepFrame,
    Stepped,
    Tell,
)
from jdag.engine.protocol import Mode as PassMode
from jdag.errors import ProtocolError
from jdag.wire.messages import Codec

WORKERS = ("home", "a", "b", "ü")


@dataclass(frozen=True)
class Config:
    width: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class Buffer:
    """Has what an array has, and is none."""

    shape: tuple[int, ...]
    dtype: Any


class Mode(Enum):
    FAST = "fast"


Point = namedtuple("Point", "x y")


class Function:
    def __init__(self, spec: bytes) -> None:
        self.spec = spec


def program(context: Any, rounds: int = 1) -> None:
    """A program, for its name."""


def read_message(codec: Codec, data: bytes) -> Any:
    message, _, end = codec.decode(data)
    if end != len(data):
        raise ProtocolError(f"{len(data) - end} of {len(data)} bytes are left")
    return message


def _several(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(strategy, max_size=3).map(tuple)


def _wide(size: int) -> st.SearchStrategy[int]:
    return st.integers(0, (1 << 8 * size) - 1)


contexts = st.builds(ContextId, st.integers(0, len(WORKERS) - 1), _wide(6), _wide(4))
paths = st.lists(_wide(4), max_size=4).map(tuple)
workers = st.sampled_from(WORKERS)
leaves = st.builds(LeafId, workers, _wide(8))
masks = st.lists(st.booleans(), max_size=20).map(tuple)
texts = st.text(max_size=8) | st.just("\udc80 of a file's name")
passes = _wide(4)
names: dict[type[AnyKey], st.SearchStrategy[Any]] = {
    OutputKey: paths,
    ReceivedKey: st.tuples(paths, workers),
    ConstantKey: paths,
    LeafKey: leaves,
    GradientKey: leaves,
    SeedKey: passes,
    CotangentKey: st.tuples(passes, paths),
    ReadingKey: _wide(8),
    SlotKey: _wide(4),
    NewestKey: leaves,
}
keys = st.one_of(
    [
        st.builds(kind, st.none() | contexts, name, _wide(4))
        for kind, name in names.items()
    ]
)
dtypes = st.sampled_from(
    [
        *map(jnp.dtype, ("bool", "int8", "uint32", "float32", "bfloat16", "complex64")),
        jax.random.key(0).dtype,
    ]
)
avals = st.builds(
    Aval,
    st.lists(st.integers(0, 1 << 19), max_size=3).map(tuple),
    dtypes,
    st.booleans(),
)
placed = avals.map(lambda aval: aval.on("cpu:1"))
functions = st.builds(Function, st.binary(max_size=40))
# An exception does not travel: it is compared by hand.
failures = st.builds(
    Failure,
    error=texts,
    message=texts,
    worker=workers,
    path=paths,
    function=texts,
    call_site=texts,
    traceback=texts,
    route=_several(workers),
)
maybe_failures = _several(st.none() | failures)
owed = st.builds(Owed, paths, workers, workers, texts, texts)
roots = st.builds(Root, keys, avals | placed, st.booleans(), _wide(4))
hooks = st.builds(Hook, paths, st.just(program), st.booleans(), avals, texts)
slots = st.lists(_wide(4), max_size=4).map(tuple)
outgoing = st.builds(Outgoing, workers, slots)
slotted = st.builds(Slotted, leaves, _wide(4))
incoming = st.builds(Incoming, workers, masks)
marked = st.builds(Marked, paths, masks)
modes = st.sampled_from(PassMode)
# A long one has thousands of bits: its numbers grow with the fan-outs on its way.
weights = st.sampled_from(
    [NOTHING, WHOLE, credit_of((1 << 5_000) - 1, 5_001)]
) | st.builds(credit_of, _wide(12), st.integers(96, 5_000))
changes = st.integers(-(1 << 31), (1 << 31) - 1)
refs = st.builds(
    RefData, keys, workers, avals | placed, st.booleans(), st.none() | leaves
)
objects = st.builds(ObjectId, contexts, paths, workers, st.text(max_size=8))
plain = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | texts
    | st.binary(max_size=4)
)
opaque = (
    refs
    | objects
    | st.sampled_from(
        [
            np.float32(3),
            np.arange(6, dtype=np.int16).reshape(2, 3),
            jnp.ones((2, 0), jnp.bfloat16),
            jax.random.split(jax.random.key(1), 3),
            program,
            Config,
            Config(3, ("a", "b")),
            Mode.FAST,
            Point(1, (2.0,)),
            partial(program, 3, rounds=4),
            np.dtype("float32"),
            frozenset({"c", "a", "b"}),
            OrderedDict(b=1, a=2),
        ]
    )
)


def _nested(one: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        one,
        lambda inner: (
            _several(inner)
            | st.lists(inner, max_size=3)
            | st.dictionaries(texts, inner, max_size=3)
        ),
        max_leaves=6,
    )


plain_trees = _nested(plain)
trees = _nested(plain | opaque)


def _alike(
    make: Callable[..., Any], places: tuple[int, int], *fields: st.SearchStrategy[Any]
) -> st.SearchStrategy[Any]:
    one, other = places

    def made(pairs: Any, rest: Any) -> Any:
        values = list(rest)
        values.insert(one, tuple([first for first, _ in pairs]))
        values.insert(other, tuple([second for _, second in pairs]))
        return make(*values)

    rest = [field for place, field in enumerate(fields) if place not in places]
    pairs = st.lists(st.tuples(fields[one], fields[other]), max_size=3)
    return st.builds(made, pairs, st.tuples(*rest))


assignments = _alike(
    Assignment,
    (3, 4),
    paths,
    st.none() | functions,
    _several(keys),
    keys,
    avals | placed,
    texts,
)

messages: dict[type[Any], st.SearchStrategy[Any]] = {
    Call: _alike(
        Call,
        (3, 4),
        contexts,
        paths,
        functions,
        keys,
        st.booleans(),
        masks,
        _several(incoming),
        texts,
        _several(keys),
    ),
    Ship: _alike(
        Ship,
        (3, 4),
        contexts,
        paths,
        workers,
        keys,
        st.booleans(),
        texts,
        texts,
        _several(keys),
    ),
    Primal: st.builds(Primal, contexts, paths, workers, maybe_failures),
    Run: st.builds(
        Run, contexts, paths, st.just(program), trees, texts, _several(objects)
    ),
    Return: st.builds(
        Return,
        contexts,
        paths,
        trees,
        st.none() | failures,
        _several(workers),
        _several(st.builds(Notice, workers, _several(keys))),
    ),
    Tell: st.builds(Tell, contexts, paths, trees, st.booleans()),
    Listing: st.builds(Listing, contexts, passes, st.booleans()),
    Discard: st.builds(Discard, contexts, _several(keys)),
    Prepare: st.builds(
        Prepare,
        contexts,
        _wide(4),
        _several(st.builds(Segment, functions, slots, slots, _several(outgoing))),
        slots,
        _several(slotted),
        _several(slotted),
        slots,
        st.booleans(),
    ),
    StepFrame: st.builds(StepFrame, contexts, _wide(4), slots, _wide(4), st.booleans()),
    Stepped: st.builds(Stepped, contexts, _wide(4), st.none() | failures),
    Settle: st.builds(Settle, contexts, _wide(4), st.booleans(), st.booleans()),
    Read: st.builds(Read, _wide(8), _several(keys)),
    Reading: st.builds(Reading, _wide(8), maybe_failures),
    Assign: st.builds(Assign, paths, _several(assignments)),
    Forget: st.builds(Forget, _several(leaves)),
    Start: st.builds(
        Start,
        contexts,
        passes,
        _several(roots),
        modes,
        st.booleans(),
        st.booleans(),
        weights,
        changes,
    ),
    Attach: st.builds(Attach, contexts, keys, hooks),
    Mark: st.builds(
        Mark, contexts, passes, _several(marked), st.booleans(), weights, changes
    ),
    Go: st.builds(Go, contexts, passes, st.booleans(), weights, changes),
    Cotangent: st.builds(
        Cotangent, contexts, passes, paths, masks, st.booleans(), weights, changes
    ),
    Answer: st.builds(Answer, contexts, passes, weights, changes),
    Fail: st.builds(Fail, contexts, passes, failures),
    End: st.builds(End, contexts, passes, st.sampled_from(Outcome), st.booleans()),
    Ended: st.builds(
        Ended,
        contexts,
        passes,
        _several(owed),
        _several(leaves),
        _several(st.builds(Stale, leaves, _wide(4))),
        st.none() | failures,
    ),
    Release: st.builds(Release, contexts, _several(_wide(6)), st.booleans()),
    Released: st.builds(Released, contexts, _several(failures)),
}
# The fields that read back as something else, since only code can make them again.
OPAQUE: dict[type[Any], tuple[str, ...]] = {
    Call: ("function",),
    Prepare: ("segments",),
    Tell: ("data",),
    Run: ("function", "arguments"),
    Return: ("result",),
    Assign: ("parts",),
    Start: ("roots",),
    Attach: ("hook",),
}
