"""Keys as bytes: those that are taken as a whole, and what does not fit."""

import pytest

from jdag.engine.vocabulary import ContextId, Key, Read
from jdag.errors import ProtocolError
from jdag.wire.encoding import PATH_MAX
from jdag.wire.messages import Codec

CODEC = Codec(("a", "b", "c"))
CONTEXT = ContextId(2, 7, 0)
KEYS = (
    Key("output", CONTEXT, (3, 1, 2), 5),
    Key("constant", CONTEXT, (4,), 0),
    Key("output", CONTEXT, tuple(range(17)), 1),  # Too deep to be taken as a whole.
    Key("output", CONTEXT, (), 2),
    Key("cotangent", CONTEXT, (1, (3, 1)), 3),
    Key("received", CONTEXT, ((3, 1), "b"), 4),
)
BEFORE = 1 + 8 + 4  # The message's type, its request, and how many keys follow.
HEAD = 2  # A key's kind, and whether it has a context.


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_a_key_reads_back_and_cut_anywhere_is_refused(key: Key) -> None:
    data = CODEC.encode(Read(9, (key, KEYS[0])))
    assert CODEC.decode(data) == Read(9, (key, KEYS[0]))
    for cut in range(len(data)):
        with pytest.raises(ProtocolError):
            CODEC.decode(data[:cut])


def test_a_key_of_a_context_of_no_worker_is_refused() -> None:
    data = bytearray(CODEC.encode(Read(9, KEYS[:1])))
    assert data[BEFORE + HEAD] == CONTEXT.number
    data[BEFORE + HEAD] = 3
    with pytest.raises(ProtocolError, match="context's worker 3: the cluster has 3 wo"):
        CODEC.decode(bytes(data))


def test_what_of_a_key_takes_more_than_its_bytes_is_named() -> None:
    beyond = 1 << 32
    path = Key("output", CONTEXT, (1, beyond), 0)
    with pytest.raises(ProtocolError, match=f"number in a path = {beyond} cannot tra"):
        CODEC.encode(Read(9, (path,)))
    with pytest.raises(ProtocolError, match=f"index of a key = {beyond} cannot trave"):
        CODEC.encode(Read(9, (KEYS[0]._replace(index=beyond),)))


def test_a_path_that_is_deeper_than_programs_call_each_other_is_refused() -> None:
    data = CODEC.encode(Read(9, KEYS[3:4]))
    assert data[-8:-4] == bytes(4)  # How many numbers its path has.
    deeper = PATH_MAX + 1
    data = data[:-8] + deeper.to_bytes(4, "little") + bytes(4 * deeper) + data[-4:]
    with pytest.raises(ProtocolError, match=f"{deeper} numbers in a path: allowed are"):
        CODEC.decode(data)
