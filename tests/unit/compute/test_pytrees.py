"""Arguments taken apart: positions, templates, and what a call does not take."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdag.compute.pytrees import (
    Split,
    flatten,
    flatten_refs,
    paths,
    split,
    static,
    unflatten,
)
from jdag.errors import ContextError, JdagError
from tests.tools.error_texts import fails_with


class Ref: ...


def is_ref(leaf: Any) -> bool:
    return isinstance(leaf, Ref)


def taken(*args: Any, **kwargs: Any) -> Split:
    return split(args, kwargs, is_ref)


def test_positions_count_refs_and_constants_in_the_order_of_jax() -> None:
    one, two, three = Ref(), Ref(), Ref()
    parts = taken(one, "mode", {"b": two, "a": 2.0}, z=three, y=[True, None, 3])
    assert parts.refs == ((0, one), (2, two), (4, three))
    assert parts.constants == ((1, 2.0), (3, 3))
    assert parts.size == 5
    args, kwargs = parts.template.rebuild(["v0", "v1", "v2", "v3", "v4"])
    assert args == ("v0", "mode", {"b": "v2", "a": "v1"})
    assert kwargs == {"z": "v4", "y": [True, None, "v3"]}


def test_arrays_and_numbers_are_constants() -> None:
    held = [jnp.ones(2), np.ones(2), np.float32(1), np.bool_(True), 1, 1.0, 1j]
    held.append(jax.random.key(0))
    assert [place for place, _ in taken(held).constants] == list(range(8))


def test_statics_are_part_of_the_template_and_come_back_unwrapped() -> None:
    shape = static((2, 3))
    parts = taken("a", True, None, jnp.sin, float, jnp.float32, shape, ())
    assert parts.size == 0
    args, _ = parts.template.rebuild([])
    assert args == ("a", True, None, jnp.sin, float, jnp.float32, (2, 3), ())


def test_templates_are_equal_when_tree_and_statics_are() -> None:
    def other(x: Any) -> Any:
        return x

    base = taken(Ref(), 1.0, "a", fn=jnp.sin, n=static(1)).template
    same = taken(2.0, np.ones(3), "a", fn=jnp.sin, n=static(1)).template
    assert base == same
    assert hash(base) == hash(same)
    for unlike in (
        taken(Ref(), 1.0, "b", fn=jnp.sin, n=static(1)),
        taken(Ref(), 1.0, "a", fn=other, n=static(1)),
        taken(Ref(), 1.0, "a", fn=jnp.sin, n=static(True)),
        taken(Ref(), 1.0, "a", fn=jnp.sin, n=static(1.0)),
        taken(Ref(), "a", 1.0, fn=jnp.sin, n=static(1)),
        taken(Ref(), 1.0, "a", f=jnp.sin, n=static(1)),
        taken(Ref(), [1.0], "a", fn=jnp.sin, n=static(1)),
        taken(Ref(), 1.0, "a", fn=jnp.sin, n=1),
    ):
        assert unlike.template != base


def test_a_numpy_array_written_to_afterwards_is_as_it_was() -> None:
    array = np.zeros(3)
    view = array[:2]
    view.flags.writeable = False
    parts = taken(array, view)
    array[:] = 7.0
    assert [value.tolist() for _, value in parts.constants] == [[0, 0, 0], [0, 0]]
    again = taken(parts.constants[0][1])
    assert again.constants[0][1] is parts.constants[0][1]


def test_a_tracer_is_refused_with_what_to_do() -> None:
    def traced(x: Any) -> Any:
        return taken(1.0, {"w": x}).size

    for transform in (jax.jit, jax.vmap, jax.grad):
        with fails_with(ContextError, "compute.a_tracer_as_argument_1"):
            transform(traced)(jnp.ones(3))


@pytest.mark.parametrize("wrong", [object(), {1, 2}, b"raw", range(3), slice(None)])
def test_what_a_call_does_not_take_is_named_with_its_place(wrong: Any) -> None:
    kind = type(wrong).__name__
    with pytest.raises(
        JdagError, match=rf"argument 'w'\[1\] is an? {kind}.*jdag\.static"
    ):
        taken(1.0, w=[2.0, wrong])


def test_arrays_that_are_not_numbers_are_refused() -> None:
    with fails_with(JdagError, "compute.jax_cannot_compute_with_dtype_u1"):
        taken(np.array(["a"]))


def test_a_static_value_has_to_be_hashable() -> None:
    with fails_with(JdagError, "compute.hashable_value_not_1_2"):
        static([1, 2])  # type: ignore[arg-type]


def test_a_tree_of_refs_is_taken_apart_and_put_together() -> None:
    tree = {"w": [Ref(), Ref()], "b": Ref()}
    leaves, treedef = flatten_refs(tree, is_ref)
    assert leaves == [tree["b"], *tree["w"]]  # type: ignore[misc]
    assert unflatten(treedef, leaves) == tree
    assert jax.tree.map(is_ref, tree) == {"w": [True, True], "b": True}
    assert paths(tree) == ["['b']", "['w'][0]", "['w'][1]"]


def test_a_leaf_that_is_not_a_ref_is_named() -> None:
    with fails_with(JdagError, "compute.leaf_w_1_is_a"):
        flatten_refs({"w": [Ref(), jnp.ones(3)]}, is_ref)
    with fails_with(JdagError, "compute.the_value_is_a_float"):
        flatten_refs(1.0, is_ref)


def test_a_dict_whose_keys_have_no_order_is_no_pytree() -> None:
    tree = {"w": {1: 2.0, "b": 3.0}}
    said = (
        r"not a pytree of JAX: .* dictionary keys.*'<' not supported between instances"
    )
    with pytest.raises(JdagError, match=said):
        flatten(tree)
    with pytest.raises(JdagError, match=said):
        split((tree,), {}, lambda _: False)


def test_a_node_of_the_user_that_cannot_be_taken_apart_says_why_once() -> None:
    @jax.tree_util.register_pytree_node_class
    class Odd:
        def tree_flatten(self) -> Any:
            raise ValueError("it is odd")

        @classmethod
        def tree_unflatten(cls, _: Any, __: Any) -> Any:
            raise NotImplementedError

    with fails_with(JdagError, "compute.this_is_no_pytree_of"):
        flatten(Odd())


def _deep(depth: int) -> Any:
    tree: Any = np.ones(3)
    for _ in range(depth):
        tree = {"a": tree}
    return tree


def test_a_pytree_that_is_deep_or_contains_itself_is_refused_before_jax_sees_it() -> (
    None
):
    said = "it is a pytree that is nested more than 150 .*deep, or that contains itself"
    listed: list[Any] = [np.ones(3)]
    listed += [listed] * 3
    named: dict[str, Any] = {"w": np.ones(3)}
    named["again"] = (named, OrderedDict(again=named))
    for tree in (_deep(150), _deep(3_000), listed, named):
        for _ in range(20):  # Each failure of JAX would leave less of Python's stack.
            with pytest.raises(JdagError, match=said):
                flatten(tree, what="it")
        with fails_with(JdagError, "compute.argument_1_is_a_pytree"):
            split((1.0, tree), {}, lambda _: False)
        with fails_with(JdagError, "compute.argument_w_is_a_pytree"):
            split((1.0,), {"w": tree}, lambda _: False)
    assert len(flatten(_deep(149))[0]) == 1


def test_a_large_pytree_that_shares_its_parts_is_no_deep_one() -> None:
    shared = [[np.ones(1)] * 40] * 40
    assert len(flatten({"a": shared, "b": shared})[0]) == 2 * 1600


def test_a_static_that_is_deep_or_holds_itself_is_refused_and_nothing_is_lost():
    @dataclass(frozen=True)
    class Held:
        held: list[object]

        def __hash__(self) -> int:
            return hash(self.held[0])

    itself = Held([])
    itself.held.append(itself)
    deep: Any = 0
    for _ in range(3_000):
        deep = [deep]
    for value in (deep, itself):
        with fails_with(JdagError, "compute.jdag_static_takes"):
            static(value)
