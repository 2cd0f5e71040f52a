"""What values take on the wire."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdag.compute.avals import aval_of
from jdag.errors import ProtocolError
from jdag.wire.arrays import (
    ARRAY_TYPE,
    ARRAY_TYPES,
    DTYPES,
    RANK_MAX,
    ArrayType,
    sizes,
    type_of,
)
from jdag.wire.cursors import Reader, Writer

VALUES = (
    np.ones((2, 3), np.int8),
    np.float64(2),
    jnp.ones((4, 0), jnp.bfloat16),
    jnp.asarray(2.0),
    2.5,
    3,
    1j,
    jax.random.key(0),
    aval_of(3),
)


def header(value: Any) -> bytes:
    writer = Writer({})
    ARRAY_TYPE.write(writer, value)
    return bytes(writer.out)


@pytest.mark.parametrize("name", DTYPES)
def test_the_table_has_the_bytes_of_each_dtype(name: str) -> None:
    if name.startswith("key<"):
        kinds = {"fry": "threefry2x32", "rbg": "rbg", "urbg": "unsafe_rbg"}
        value: Any = jax.random.key(0, impl=kinds[name[4:-1]])
        data = np.asarray(jax.random.key_data(value))
    else:
        value = data = np.zeros((), jnp.dtype(name))
    assert type_of(value) == ArrayType((), name, False)
    assert type_of(value).nbytes == len(data.tobytes())
    assert sizes([value])[0] == len(data.tobytes())


def test_a_header_is_as_it_is_written_down() -> None:
    value = np.ones((2, 3), np.int8)
    assert header(value) == bytes.fromhex("010202000000000000000300000000000000")
    assert header(ArrayType((), "float32", True)) == bytes.fromhex("8b00")


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_a_header_is_read_as_it_was_and_has_its_size(value: Any) -> None:
    data = header(value)
    assert ARRAY_TYPE.read(Reader(data, {})) == type_of(value)
    assert ARRAY_TYPE.size(value) == len(data)
    assert sizes([value]) == (type_of(value).nbytes, len(data))


def test_the_header_of_a_type_says_all_that_the_type_does() -> None:
    for kind in (
        ArrayType((2, 3), "float32", False, None, True),
        ArrayType((), "bfloat16", True, "cpu:1", True),
        ArrayType((1,), "int8", True, "gpu:0"),
    ):
        reader = Reader(header(kind) + bytes(2_000), {})
        assert ARRAY_TYPE.read(reader) == kind and reader.left == 2_000


def test_many_are_as_much_as_each() -> None:
    elements, headers = sizes(VALUES)
    assert elements == sum(sizes([value])[0] for value in VALUES)
    assert headers == sum(sizes([value])[1] for value in VALUES)
    avals = [aval_of(value) for value in VALUES]
    assert ARRAY_TYPES.size(avals) == 4 + sum(map(ARRAY_TYPE.size, avals))


def test_weak_types_survive() -> None:
    for value in (2.5, aval_of(2.5), jnp.asarray(2.5)):
        assert type_of(value) == ArrayType((), jnp.asarray(2.5).dtype.name, True)
    assert not type_of(jnp.float32(2.5)).weak


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("text", "'text' of type str is no value: allowed are arrays"),
        (np.array(["a"]), "dtype <U1 cannot travel: allowed are bool, int8"),
        (np.ones((1,), ">f4"), "dtype >f4 cannot travel"),
    ],
)
def test_what_is_no_value_is_named(value: Any, said: str) -> None:
    with pytest.raises(ProtocolError, match=said):
        header(value)


def test_headers_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ProtocolError, match="dtype 63: allowed is 0 to"):
        ARRAY_TYPE.read(Reader(b"\x7f\0", {}))
    with pytest.raises(ProtocolError, match=f"rank 65: allowed is 0 to {RANK_MAX}"):
        ARRAY_TYPE.read(Reader(b"\0\x41" + bytes(8 * 65), {}))
    with pytest.raises(ProtocolError, match=r"an axis at byte 2 takes 8 bytes; 3 of 5"):
        ARRAY_TYPE.read(Reader(b"\0\1\1\1\1", {}))
