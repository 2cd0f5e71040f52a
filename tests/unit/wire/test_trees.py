"""Arguments and results of programs as bytes, and what a receiver makes of them."""

from collections import OrderedDict
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jdag.compute.avals import aval_of
from jdag.compute.refs import RefData
from jdag.engine.protocol import ContextId, ObjectId, OutputKey
from jdag.errors import JdagError, ProtocolError
from jdag.processes.functions.allowed import Allowed
from jdag.processes.functions.unmarshal import read_tree, unmarshal
from jdag.wire.messages import Codec
from jdag.wire.trees import DEPTH_MAX, pack, tree_size, write_tree
from tests.tools.error_texts import fails_with
from tests.tools.wire_cases import (
    WORKERS,
    Buffer,
    Config,
    Mode,
    plain_trees,
    program,
    trees,
)

CODEC = Codec(WORKERS)
HERE = Allowed(["tests"])


def read(data: bytes | memoryview) -> Any:
    return read_tree(data, HERE, CODEC)


def there_and_back(tree: Any) -> Any:
    return read(write_tree(tree))


def typed(tree: Any) -> Any:
    if isinstance(tree, list | tuple):
        return type(tree), [typed(item) for item in tree]
    if isinstance(tree, dict):
        return [(typed(key), typed(item)) for key, item in tree.items()]
    return type(tree), repr(tree)


@given(plain_trees)
@settings(max_examples=100)
def test_plain_data_is_read_as_it_was(tree: Any) -> None:
    assert typed(there_and_back(tree)) == typed(tree)


@given(trees)
@settings(max_examples=100)
def test_all_else_is_read_as_what_writes_the_same_bytes(tree: Any) -> None:
    data = write_tree(tree)
    assert tree_size(tree) == len(data)
    assert write_tree(read(data)) == data


def test_a_ref_travels_as_its_parts() -> None:
    key = OutputKey(ContextId(0, 1, 0), (3,), 0)
    ref = RefData(key, "a", aval_of(jnp.ones((2, 3), jnp.float32)), True, None)
    assert there_and_back([ref]) == [ref]


def test_arrays_travel_with_their_bytes() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    keys = jax.random.split(jax.random.key(7), 2)
    for one in (array, array[1, 2], jnp.asarray(array).T, keys):
        actual = there_and_back(one)
        assert aval_of(actual) == aval_of(one)
        assert isinstance(
            actual, jax.Array if isinstance(one, jax.Array) else type(one)
        )
        assert (actual == one).all()
    assert write_tree(jnp.asarray(array).T)[-12:] == b"\0\0\3\0\1\0\4\0\2\0\5\0"


def test_code_and_instances_travel_by_name() -> None:
    assert b"tests.tools.wire_cases:program" in write_tree(program)
    for code in (program, np.float32):
        assert there_and_back(code) is code
    for one in (Config(3, ("a",)), Buffer((3, 4), "f4"), Mode.FAST, np.dtype("int8")):
        assert typed(there_and_back(one)) == typed(one)
    for pairs in ([], [("b", 1), ("a", 2)]):
        assert list(there_and_back(OrderedDict(pairs)).items()) == pairs
    actual = there_and_back(partial(program, 3, rounds=4))
    assert (actual.func, actual.args, actual.keywords) == (program, (3,), {"rounds": 4})
    assert write_tree(frozenset("cab")) == write_tree(frozenset("bca"))
    assert there_and_back(frozenset("cab")) == frozenset("abc")


def test_an_abstract_array_has_a_size_and_no_bytes() -> None:
    array = jnp.ones((3, 4), jnp.float32)
    struct = jax.ShapeDtypeStruct((3, 4), jnp.float32)
    assert tree_size(struct) == tree_size(aval_of(array)) == tree_size(array)
    with fails_with(ProtocolError, "wire.abstract_value"):
        write_tree(struct)


def test_what_cannot_travel_is_named_with_what_can() -> None:
    with fails_with(ProtocolError, "wire.class_cannot_be_sent"):
        tree_size([object()])
    with fails_with(ProtocolError, "wire.object_cannot_be_sent"):
        write_tree({"a": (object(),)})


def test_data_is_nested_only_so_deep() -> None:
    deep: Any = ()
    for _ in range(DEPTH_MAX - 1):
        deep = (deep,)
    assert there_and_back(deep) == deep
    for deeper in [(deep,), [deep], {0: deep}, {deep: 0}, Config(3, deep)]:
        with fails_with(ProtocolError, "wire.nested_too_deep"):
            write_tree(deeper)


def test_a_tree_that_nests_deeper_than_data_may_is_refused() -> None:
    for levels in (DEPTH_MAX, 400, 100_000):
        items = b"\x92\x03\x91" * levels + b"\x00"
        data = len(items).to_bytes(4, "little") + items
        with pytest.raises(ProtocolError, match=r"at most 100 levels|recursion"):
            read(data)


def test_a_dict_key_that_cannot_be_hashed_is_refused() -> None:
    data = write_tree({(): 1})
    assert data[-6:] == b"\x92\x92\x03\x90\x01"[-6:] or b"\x92\x03\x90" in data
    with fails_with(JdagError, "wire.unhashable_dict_key"):
        read(bytes(data).replace(b"\x92\x03\x90", b"\x92\x04\x90"))


def test_elements_are_as_many_as_types_say() -> None:
    data = write_tree((1, np.arange(6, dtype=np.int16)))
    with fails_with(ProtocolError, "wire.too_few_bytes"):
        read(data[:-1])
    with fails_with(ProtocolError, "wire.bytes_left_over"):
        read(bytes(data) + b"xx")


def test_a_ref_names_workers_that_there_are() -> None:
    ref = RefData(OutputKey(None, (3,), 0), "z", aval_of(1.0), True, None)
    with fails_with(ProtocolError, "wire.unknown_worker"):
        there_and_back([ref])


def test_a_handle_travels_as_it_is_and_names_a_worker_and_an_owner_that_there_are() -> (
    None
):
    handle = ObjectId(ContextId(3, 1, 0), (1, 2), "b", "Counter")
    assert there_and_back({"env": [handle]}) == {"env": [handle]}
    with fails_with(ProtocolError, "wire.unknown_worker"):
        there_and_back(ObjectId(ContextId(3, 1, 0), (1, 2), "z", "Counter"))
    with fails_with(ProtocolError, "wire.worker_is_no_text"):
        there_and_back(ObjectId(ContextId(4, 1, 0), (1, 2), "b", "Counter"))


def test_a_field_of_a_struct_has_neither_arrays_nor_refs() -> None:
    ref = RefData(OutputKey(None, (3,), 0), "a", aval_of(1.0), True, None)
    with fails_with(ProtocolError, "wire.array_in_static_data"):
        pack([np.ones(2)])
    arrays: list[Any] = []
    with fails_with(ProtocolError, "wire.no_bytes"):
        unmarshal(pack([np.ones(2)], arrays), HERE)
    for live in (ref, ObjectId(ContextId(0, 1, 0), (1,), "a", "Counter")):
        with fails_with(ProtocolError, "wire.ref_in_static_data"):
            unmarshal(pack([live]), HERE)
