"""Specs: a function for certain arguments as bytes, and back."""

from collections import OrderedDict
from functools import partial
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdag.compute.placed import placed
from jdag.compute.pytrees import Template, split, static, template_of
from jdag.engine.functions import Applied
from jdag.errors import ProtocolError
from jdag.processes.functions.allowed import Allowed
from jdag.processes.functions.unmarshal import received_copy, structure, unmarshal
from jdag.wire import specs
from jdag.wire.specs import (
    Body,
    DevicePlacement,
    encoded_spec,
    placed_spec,
    read_spec,
    spec_of,
)
from jdag.wire.trees import DictItem, Named, Opaque, TreeNode, TupleItem, pack
from tests.tools.compute_cases import pair_of
from tests.tools.error_texts import fails_with
from tests.tools.tiers import sized
from tests.tools.wire_cases import Config, Mode, Point

HERE = Allowed(["tests"])


@jtu.register_pytree_node_class
class Layer:
    def __init__(self, w: Any, sizes: Any) -> None:
        self.w = w
        self.sizes = sizes

    def tree_flatten(self) -> Any:
        return (self.w,), self.sizes

    @classmethod
    def tree_unflatten(cls, sizes: Any, children: Any) -> "Layer":
        return cls(children[0], sizes)


def total(*args: Any, **kwargs: Any) -> Any:
    arrays = [leaf for leaf in jtu.tree_leaves((args, kwargs)) if hasattr(leaf, "sum")]
    return sum([jnp.sum(array) for array in arrays], jnp.float32(0))


def spec_for(template: Template) -> bytes:
    arguments = specs.structure_item(template.treedef, iter(template.leaves))
    return encoded_spec(Body("m:f", None, arguments, template.own, b"", (), (), (), ()))


def there(template: Template) -> Template:
    _, body = read_spec(spec_for(template))
    return template_of(*structure(body.arguments, HERE), body.own)


numbers = st.sampled_from([True, False, 1, 0, 1.0, 0.0, -0.0, 2**70, float("inf"), 1j])
wrapped = (
    numbers
    | st.text(max_size=3)
    | st.binary(max_size=3)
    | st.sampled_from(
        [
            *(None, total, jnp.tanh, jnp.float16, np.float32, Config, Layer),
            *(Mode.FAST, Config(2, ("a",)), Point(1, (2.0, True)), np.dtype("int8")),
            *(jnp.dtype("bfloat16"), frozenset({"a", "b"}), partial(total, 1, k=-0.0)),
        ]
    )
)
nested = st.recursive(wrapped, lambda inner: st.lists(inner, max_size=3).map(tuple))
leaves = (
    st.just(np.float32(1))
    | st.sampled_from([3, 2.5, True, "name", total, None])
    | nested.map(static)
)


def _within(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    few = st.lists(inner, max_size=3)
    return (
        few
        | few.map(tuple)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.dictionaries(st.integers(0, 3), inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=2).map(OrderedDict)
        | st.builds(Point, inner, inner)
        | st.builds(Layer, inner, st.sampled_from([(1,), (1.0,), (True,), (-0.0,)]))
    )


templates = st.tuples(
    st.lists(st.recursive(leaves, _within, max_leaves=5), max_size=3),
    st.dictionaries(st.sampled_from("abc"), leaves, max_size=2),
    st.integers(0, 1),
).map(lambda a: split(tuple(a[0]), a[1], lambda _: False, a[2]).template)


@given(templates)
@settings(max_examples=sized(50, 200))
def test_a_template_is_the_same_on_the_other_side(template: Template) -> None:
    made = there(template)
    assert made == template
    assert hash(made) == hash(template)
    assert made.own == template.own
    assert spec_for(made) == spec_for(template)


@given(templates, templates)
@settings(max_examples=sized(50, 200))
def test_specs_are_equal_just_where_templates_are(one: Template, two: Template) -> None:
    assert (spec_for(one) == spec_for(two)) == (one == two and one.own == two.own)


def test_a_spec_has_types_and_what_is_tracked_with_weak_types_apart() -> None:
    x = jnp.ones((2, 3))
    weak, strong = pair_of(total, x, 2.0), pair_of(total, x, jnp.float32(2))
    assert spec_of(weak) != spec_of(strong)
    places, body = read_spec(spec_of(weak))
    assert places == DevicePlacement()
    assert body.tracked == (True, True)
    assert [kind.weak for kind in body.avals] == [False, True]
    assert [kind.shape for kind in body.out_avals] == [()]
    assert body.out_tracked == (True,)


def test_a_spec_is_made_once() -> None:
    actual = pair_of(total, jnp.ones(3))
    assert spec_of(actual) is spec_of(actual)


def test_a_spec_names_the_functions_among_its_statics_whatever_else_was_made() -> None:
    def noted(name: str) -> Any:
        def f(x: Any) -> Any:
            return 2 * x

        f.__qualname__ = name
        return f

    for name in ("first", "second", "third"):
        args = read_spec(spec_of(pair_of(total, noted(name))))[1].arguments.items[0]
        assert args.items[0].value == Named(f"{__name__}:{name}")


def test_places_go_before_the_spec_of_the_pair() -> None:
    actual = pair_of(total, jnp.ones(3), jnp.arange(2))
    there = placed(actual, "cpu:1", (None, None), ["cpu:2"])
    places, body = read_spec(spec_of(there))
    assert places == DevicePlacement("cpu:1", (None,), ("cpu:2",))
    assert body == read_spec(spec_of(actual))[1]
    head = len(placed_spec(b"", DevicePlacement()))
    assert spec_of(there).endswith(spec_of(actual)[head:])


def test_bytes_that_are_no_spec_are_refused() -> None:
    spec = spec_of(pair_of(total, jnp.ones(3)))
    with fails_with(ProtocolError, "wire.trailing_characters"):
        read_spec(spec + b"\0")
    for end in range(len(spec)):
        with pytest.raises(ProtocolError):
            read_spec(spec[:end])


class Plain: ...


def test_what_cannot_travel_is_opaque_where_it_is_and_has_a_spec() -> None:
    opaque = Opaque("tests.unit.wire.test_specs:Plain")
    assert pack(Plain(), opaque=True) == opaque
    assert pack((1, Plain()), opaque=True) == TupleItem((1, opaque))
    assert pack({Plain(): 1}, opaque=True) == DictItem(((opaque, 1),))
    node = pack(partial(total, Plain()), opaque=True)
    assert node.name == "functools:partial"
    assert node.parts[1] == TupleItem((opaque,))
    actual = pair_of(total, jnp.ones(3), static(Plain()))
    assert spec_of(actual) == spec_of(pair_of(total, jnp.ones(3), static(Plain())))


def test_arrays_in_a_function_are_opaque_unless_asked_for() -> None:
    array = jnp.ones(3)
    for one in (array, np.ones(3), np.float32(3)):
        assert type(pack(one, opaque=True)) is Opaque
    assert received_copy(partial(total, array), HERE).args[0] is array


def test_data_too_deep_to_travel_have_a_spec_all_the_same() -> None:
    deep: Any = jnp.ones(3)
    for _ in range(120):
        deep = (deep,)
    _, body = read_spec(spec_of(pair_of(total, deep)))
    assert type(body.arguments) is Opaque
    for _ in range(120):
        deep = (deep,)
    value: Any = 1
    for _ in range(120):
        value = (value,)
    _, body = read_spec(spec_of(pair_of(total, jnp.ones(3), static(value))))
    assert type(body.arguments) is TupleItem


def test_a_callable_pytree_is_named_by_its_class_and_marks() -> None:
    applied = Applied("module:Module", unjitted=True, program=False)
    data = pack(applied)
    assert type(data) is TreeNode
    assert unmarshal(data, HERE) == applied
