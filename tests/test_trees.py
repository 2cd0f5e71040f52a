"""Arguments and results of programs as bytes."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jdag.compute.avals import aval_of
from jdag.engine.vocabulary import ContextId, Key
from jdag.errors import ProtocolError
from jdag.ref import RefData
from jdag.wire.arrays import ArrayType
from jdag.wire.cursors import Reader, Writer
from jdag.wire.trees import (
    DEPTH_MAX,
    TREE,
    Named,
    Node,
    Part,
    Raw,
    RefParts,
    check_can_travel,
)
from tests.wire_cases import WORKERS, Buffer, Config, Mode, plain_trees, program, trees


def written(tree: Any) -> bytes:
    writer = Writer({worker: number for number, worker in enumerate(WORKERS)})
    TREE.write(writer, tree)
    return bytes(writer.out)


def there_and_back(tree: Any) -> Any:
    reader = Reader(written(tree), dict(enumerate(WORKERS)))
    read = TREE.read(reader)
    assert reader.left == 0
    return read


def typed(tree: Any) -> Any:
    """The tree with the type of each item, as True == 1 and 0.0 == -0.0."""
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
    data = written(tree)
    assert TREE.size(tree) == len(data)
    read = there_and_back(tree)
    assert written(read) == data
    assert TREE.size(read) == len(data)


def test_a_ref_travels_as_its_parts() -> None:
    key = Key("output", ContextId(0, 1, 0), (3,), 0)
    ref = RefData(key, "a", aval_of(jnp.ones((2, 3), jnp.float32)), True, None)
    kind = ArrayType((2, 3), "float32", False)
    assert there_and_back([ref]) == [RefParts(key, "a", kind, True, None)]


def test_arrays_travel_with_their_bytes() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    kind = ArrayType((2, 3), "int16", False)
    assert there_and_back(array) == Raw(kind, array.tobytes(), "numpy")
    assert there_and_back(jnp.asarray(array).T) == Raw(
        ArrayType((3, 2), "int16", False), b"\0\0\3\0\1\0\4\0\2\0\5\0", "array"
    )
    assert there_and_back(array[1, 2]) == Raw(
        ArrayType((), "int16", False), b"\5\0", "scalar"
    )
    keys = jax.random.split(jax.random.key(7), 2)
    assert there_and_back(keys) == Raw(
        ArrayType((2,), "key<fry>", False),
        np.asarray(jax.random.key_data(keys)).tobytes(),
    )


def test_code_and_instances_travel_by_name() -> None:
    here = "tests.wire_cases:"
    assert there_and_back(program) == Named(f"{here}program")
    assert there_and_back(Config(3, ("a",))) == Node(f"{here}Config", (3, ("a",)))
    assert there_and_back(Buffer((3, 4), "f4")) == Node(f"{here}Buffer", ((3, 4), "f4"))
    assert there_and_back(Mode.FAST) == Node(f"{here}Mode", ("FAST",))
    assert there_and_back(partial(program, 3, rounds=4)) == Node(
        "functools:partial", (Named(f"{here}program"), (3,), {"rounds": 4})
    )
    assert there_and_back(np.dtype("int8")) == Node("numpy:dtype", ("int8",))
    assert there_and_back(np.float32) == Named("numpy:float32")
    assert there_and_back(frozenset("cab")).parts == ("a", "b", "c")


def test_an_abstract_array_has_a_size_and_no_bytes() -> None:
    array = jnp.ones((3, 4), jnp.float32)
    struct = jax.ShapeDtypeStruct((3, 4), jnp.float32)
    assert TREE.size(struct) == TREE.size(aval_of(array)) == TREE.size(array)
    with pytest.raises(ProtocolError, match="is abstract and has no bytes to send"):
        written(struct)


def test_what_cannot_travel_is_named_with_what_can() -> None:
    with pytest.raises(
        ProtocolError, match=r"of type builtins:object cannot travel: .*r"
    ):
        TREE.size([object()])
    with pytest.raises(ProtocolError, match="of type builtins:object cannot travel"):
        written({"a": (object(),)})


def test_data_is_nested_only_so_deep() -> None:
    deep: Any = ()
    for _ in range(DEPTH_MAX - 1):
        deep = (deep,)
    assert there_and_back(deep) == deep
    check_can_travel(deep)
    more = [(deep,), [deep], {0: deep}, {deep: 0}, Node("m:f", (0, deep)), Part(deep)]
    for deeper in more:
        with pytest.raises(ProtocolError, match="more than 100 deep"):
            written(deeper)
        with pytest.raises(ProtocolError, match="more than 100 deep"):
            check_can_travel(deeper)
    data = written(deep)
    with pytest.raises(ProtocolError, match="more than 100 deep"):
        TREE.read(Reader(data[:5] + data, dict(enumerate(WORKERS))))


def test_a_dict_whose_keys_cannot_be_is_refused() -> None:
    data = bytearray(written({(): 1}))
    kinds = (written(())[0], written([])[0])
    data[data.index(kinds[0], 5)] = kinds[1]
    with pytest.raises(ProtocolError, match="a dict whose keys cannot be"):
        TREE.read(Reader(bytes(data), dict(enumerate(WORKERS))))
