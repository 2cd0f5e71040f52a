"""What values take on the wire."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from msgspec.msgpack import Decoder

from jdag.compute.avals import aval_of
from jdag.engine.arrays import DTYPES, RANK_MAX, ArrayType
from jdag.errors import ProtocolError
from jdag.wire.arrays import type_of
from jdag.wire.encoding import decoded, encoded
from tests.tools.error_texts import fails_with


def there_and_back(kind: ArrayType) -> ArrayType:
    read: ArrayType = decoded(Decoder(ArrayType), encoded(kind))
    return read


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
    assert there_and_back(type_of(value)) == type_of(value)


def test_a_header_is_as_it_is_written_down() -> None:
    value = np.ones((2, 3), np.int8)
    assert encoded(type_of(value)) == b"\x95\x92\2\3\xa4int8\xc2\xc0\xc2"
    weak = ArrayType((), "float32", True)
    assert encoded(weak) == b"\x95\x90\xa7float32\xc3\xc0\xc2"


def test_the_header_of_a_type_says_all_that_the_type_does() -> None:
    for kind in (
        ArrayType((2, 3), "float32", False, None, True),
        ArrayType((), "bfloat16", True, "cpu:1", True),
        ArrayType((1,), "int8", True, "gpu:0"),
    ):
        assert there_and_back(kind) == kind == type_of(kind)


def test_weak_types_survive() -> None:
    for value in (2.5, aval_of(2.5), jnp.asarray(2.5)):
        assert type_of(value) == ArrayType((), jnp.asarray(2.5).dtype.name, True)
    assert not type_of(jnp.float32(2.5)).weak


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("text", "'text' of type str is not a value: expected arrays"),
        (np.array(["a"]), "dtype <U1 cannot be sent: expected bool, int8"),
        (np.ones((1,), ">f4"), "dtype >f4 cannot be sent"),
    ],
)
def test_what_is_no_value_is_named(value: Any, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        type_of(value)


def test_headers_that_mean_nothing_are_refused() -> None:
    with fails_with(ProtocolError, "wire.unknown_dtype"):
        there_and_back(ArrayType((), "int9", False))
    with pytest.raises(ProtocolError, match=f"`array` of length <= {RANK_MAX}"):
        there_and_back(ArrayType((1,) * (RANK_MAX + 1), "int8", False))
    with fails_with(ProtocolError, "wire.int_below_0"):
        there_and_back(ArrayType((-1,), "int8", False))
