"""Arguments and results of programs as bytes."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jdag.compute.avals import aval_of
from jdag.compute.refs import RefData
from jdag.engine.arrays import ArrayType
from jdag.engine.protocol import ContextId, ObjectId, OutputKey
from jdag.errors import ProtocolError
from jdag.wire.messages import Codec
from jdag.wire.trees import (
    DEPTH_MAX,
    Named,
    Part,
    Raw,
    RefParts,
    TreeNode,
    pack,
    read_tree,
    tree_size,
    unpack,
    write_tree,
)
from tests.wire_cases import WORKERS, Buffer, Config, Mode, plain_trees, program, trees

CODEC = Codec(WORKERS)


def there_and_back(tree: Any) -> Any:
    return read_tree(write_tree(tree), CODEC)


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
    data = write_tree(tree)
    assert tree_size(tree) == len(data)
    read = there_and_back(tree)
    assert write_tree(read) == data
    assert tree_size(read) == len(data)


def test_a_ref_travels_as_its_parts() -> None:
    key = OutputKey(ContextId(0, 1, 0), (3,), 0)
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
    assert there_and_back(Config(3, ("a",))) == TreeNode(f"{here}Config", (3, ("a",)))
    found = there_and_back(Buffer((3, 4), "f4"))
    assert found == TreeNode(f"{here}Buffer", ((3, 4), "f4"))
    assert there_and_back(Mode.FAST) == TreeNode(f"{here}Mode", ("FAST",))
    assert there_and_back(partial(program, 3, rounds=4)) == TreeNode(
        "functools:partial", (Named(f"{here}program"), (3,), {"rounds": 4})
    )
    assert there_and_back(np.dtype("int8")) == TreeNode("numpy:dtype", ("int8",))
    assert there_and_back(np.float32) == Named("numpy:float32")
    assert there_and_back(frozenset("cab")).parts == ("a", "b", "c")


def test_an_abstract_array_has_a_size_and_no_bytes() -> None:
    array = jnp.ones((3, 4), jnp.float32)
    struct = jax.ShapeDtypeStruct((3, 4), jnp.float32)
    assert tree_size(struct) == tree_size(aval_of(array)) == tree_size(array)
    with pytest.raises(ProtocolError, match="is abstract and has no bytes to send"):
        write_tree(struct)


def test_what_cannot_travel_is_named_with_what_can() -> None:
    with pytest.raises(
        ProtocolError, match=r"of type builtins:object cannot travel: .*r"
    ):
        tree_size([object()])
    with pytest.raises(ProtocolError, match="of type builtins:object cannot travel"):
        write_tree({"a": (object(),)})


def test_data_is_nested_only_so_deep() -> None:
    deep: Any = ()
    for _ in range(DEPTH_MAX - 1):
        deep = (deep,)
    assert there_and_back(deep) == deep
    pack(deep)
    node = TreeNode("m:f", (0, deep))
    more = [(deep,), [deep], {0: deep}, {deep: 0}, node, Part(deep)]
    for deeper in more:
        with pytest.raises(ProtocolError, match="more than 100 deep"):
            write_tree(deeper)
        with pytest.raises(ProtocolError, match="more than 100 deep"):
            pack(deeper)


def test_a_tree_that_nests_deeper_than_data_may_is_refused() -> None:
    for levels in (DEPTH_MAX, 400, 100_000):
        items = b"\x92\x03\x91" * levels + b"\x00"
        data = len(items).to_bytes(4, "little") + items
        with pytest.raises(ProtocolError, match=r"more than 100 deep|recursion"):
            read_tree(data, CODEC)


def test_a_dict_key_that_cannot_be_hashed_is_refused() -> None:
    data = write_tree({(): 1})
    assert data[-6:] == b"\x92\x92\x03\x90\x01"[-6:] or b"\x92\x03\x90" in data
    with pytest.raises(ProtocolError, match="a dict key cannot be hashed"):
        read_tree(data.replace(b"\x92\x03\x90", b"\x92\x04\x90"), CODEC)


def test_elements_are_as_many_as_types_say() -> None:
    data = write_tree((1, np.arange(6, dtype=np.int16)))
    with pytest.raises(ProtocolError, match="takes 12 bytes; 11 of"):
        read_tree(data[:-1], CODEC)
    with pytest.raises(ProtocolError, match=r"2 of .* bytes are left"):
        read_tree(data + b"xx", CODEC)


def test_a_ref_names_workers_that_there_are() -> None:
    ref = RefData(OutputKey(None, (3,), 0), "z", aval_of(1.0), True, None)
    with pytest.raises(ProtocolError, match="worker 'z': the cluster has 4 workers"):
        there_and_back([ref])


def test_a_handle_travels_as_it_is_and_names_a_worker_and_an_owner_that_there_are() -> (
    None
):
    handle = ObjectId(ContextId(3, 1, 0), (1, 2), "b", "Counter")
    assert there_and_back({"env": [handle]}) == {"env": [handle]}
    with pytest.raises(ProtocolError, match="worker 'z': the cluster has 4 workers"):
        there_and_back(ObjectId(ContextId(3, 1, 0), (1, 2), "z", "Counter"))
    with pytest.raises(ProtocolError, match="worker 4: the cluster has 4 workers"):
        there_and_back(ObjectId(ContextId(4, 1, 0), (1, 2), "b", "Counter"))


def test_the_elements_of_an_array_are_copied_once() -> None:
    array = np.arange(1 << 20, dtype=np.int8)
    data = write_tree([array])
    array[:] = 0
    (read,) = read_tree(data, CODEC)
    assert read.data.obj is data and bytes(read.data[:3]) == bytes(range(3))


def test_a_field_of_a_struct_has_neither_arrays_nor_refs() -> None:
    ref = RefData(OutputKey(None, (3,), 0), "a", aval_of(1.0), True, None)
    with pytest.raises(ProtocolError, match="arrays cannot travel here"):
        pack([np.ones(2)])
    for live in (ref, ObjectId(ContextId(0, 1, 0), (1,), "a", "Counter")):
        with pytest.raises(ProtocolError, match="a ref cannot travel here"):
            unpack(pack([live]))
