"""Keys as bytes: each kind, cut anywhere, and what does not fit."""

import pytest

from jdag.engine.names import PATH_MAX
from jdag.engine.protocol import (
    ConstantKey,
    ContextId,
    CotangentKey,
    Key,
    OutputKey,
    Read,
    ReceivedKey,
    ResidualsKey,
)
from jdag.errors import ProtocolError
from jdag.wire.messages import Codec
from tests.wire_cases import read_message

CODEC = Codec(("a", "b", "c"))
CONTEXT = ContextId(2, 7, 0)
KEYS = (
    OutputKey(CONTEXT, (3, 1, 2), 5),
    ConstantKey(CONTEXT, (4,), 0),
    OutputKey(CONTEXT, tuple(range(17)), 1),
    OutputKey(CONTEXT, (), 2),
    CotangentKey(CONTEXT, (1, (3, 1)), 3),
    ReceivedKey(CONTEXT, ((3, 1), "b"), 4),
)


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_a_key_reads_back_and_cut_anywhere_is_refused(key: Key) -> None:
    data = CODEC.encode(Read(9, (key, KEYS[0])))
    assert read_message(CODEC, data) == Read(9, (key, KEYS[0]))
    for cut in range(len(data)):
        with pytest.raises(ProtocolError):
            read_message(CODEC, data[:cut])


def test_keys_of_several_kinds_differ_and_have_hashes_of_their_own() -> None:
    one: Key = OutputKey(CONTEXT, (4,), 0)
    other: Key = ConstantKey(CONTEXT, (4,), 0)
    assert one != other and len({one, other, OutputKey(CONTEXT, (4,), 0)}) == 2
    assert (one.kind, other.kind) == ("output", "constant")


def test_a_key_of_a_context_of_no_worker_is_refused() -> None:
    data = CODEC.encode(Read(9, (OutputKey(ContextId(3, 7, 0), (1,), 0),)))
    with pytest.raises(ProtocolError, match="context's worker 3: the cluster has 3 wo"):
        read_message(CODEC, data)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (OutputKey(CONTEXT, (1, 1 << 32), 0), "`int` <= 4294967295"),
        (OutputKey(CONTEXT, (1,), 1 << 32), "`int` <= 4294967295"),
        (
            OutputKey(CONTEXT, (0,) * (PATH_MAX + 1), 0),
            f"`array` of length <= {PATH_MAX}",
        ),
        (ResidualsKey(CONTEXT, (1,), 0), "a key of kind 'residuals' cannot travel"),
        (ReceivedKey(CONTEXT, ((1,), "z"), 0), "worker 'z': the cluster has 3 workers"),
    ],
)
def test_what_no_key_has_is_refused(key: Key, said: str) -> None:
    with pytest.raises(ProtocolError, match=said):
        read_message(CODEC, CODEC.encode(Read(9, (key,))))
