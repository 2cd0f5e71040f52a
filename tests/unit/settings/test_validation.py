"""Settings: what is wrong is said with key, value and what is allowed."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Annotated, Any, Literal

import jax.numpy as jnp
import numpy as np
import pytest
from msgspec import NODEFAULT, Meta
from msgspec.structs import fields, replace

import jdag
from jdag.errors import ScenarioError, unusable
from jdag.settings.validation import (
    COUNT,
    NS,
    TEXT,
    Settings,
    converted,
    is_path,
    one_of,
    part,
    reads,
    settings_from,
    takes,
    where,
)
from tests.tools.error_texts import fails_with


class Inner(Settings, frozen=True):
    colour: Annotated[str, one_of("red", "green")] = "red"
    share: Annotated[float, Meta(ge=0, le=1)] = 0.0


class Dot(Settings, frozen=True, tag_field="kind", tag="dot"):
    at: int


class Line(Settings, frozen=True, tag_field="kind", tag="line"):
    ends: tuple[NS, NS]

    def contradictions(self) -> Iterator[str]:
        if self.ends[0] > self.ends[1]:
            yield unusable("ends", self.ends, "an ascending pair")


class OuterTable(Settings, frozen=True):
    name: TEXT
    copies: COUNT = 1
    loud: bool = False
    inner: Inner = Inner()
    shapes: tuple[Dot | Line, ...] = ()
    by_name: Mapping[str, Inner | int] | None = None


KEYS = "name, copies, loud, inner, shapes, by_name"
SHAPES = "one of Dot, Line, or a table with its kind"
KINDS = "one of dot, line"

WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"name": ""}, "name = '': expected a string"),
    ({"name": 3}, "name = 3: expected a string"),
    ({"copies": 0}, "copies = 0: expected an integer >= 1"),
    ({"copies": True}, "copies = True: expected an integer >= 1"),
    ({"copies": 2.0}, "copies = 2.0: expected an integer >= 1"),
    ({"loud": 1}, "loud = 1: expected true or false"),
    ({"inner": 3}, "inner = 3: expected an Inner, or a table of its keys"),
    (
        {"inner": {"colour": "blue"}},
        "inner.colour = 'blue': expected one of red, green",
    ),
    ({"inner": {"share": 1.5}}, "inner.share = 1.5: expected a number from 0 to 1"),
    (
        {"copis": 2},
        f"copis = 2: expected one of the keys {KEYS} (did you mean copies?)",
    ),
    ({"shapes": 3}, "shapes = 3: expected a list"),
    ({"shapes": [3]}, f"shapes[0] = 3: expected {SHAPES}"),
    ({"shapes": [{"at": 3}]}, f"shapes[0].kind is missing: expected {KINDS}"),
    ({"shapes": [{"kind": "dto"}]}, f"shapes[0].kind = 'dto': expected {KINDS}"),
    (
        {"shapes": [{"kind": "line", "ends": [7, 3]}]},
        "shapes[0].ends = (7, 3): expected an ascending pair",
    ),
    (
        {"shapes": [{"kind": "line", "ends": [7]}]},
        "shapes[0].ends = [7]: expected a list",
    ),
    (
        {"by_name": {"a": {"share": 2}}},
        "by_name.a.share = 2: expected a number from 0 to 1",
    ),
    (
        {"by_name": {"a": "b"}},
        "by_name.a = 'b': expected an Inner, or a table of its keys or an integer",
    ),
)


@pytest.mark.parametrize(("table", "message"), WRONG, ids=[text for _, text in WRONG])
def test_a_mistake_is_said_with_its_key_its_value_and_what_is_allowed(table, message):
    with pytest.raises(ScenarioError) as caught:
        settings_from(OuterTable, {"name": "x"} | table)
    assert str(caught.value) == message


def test_a_missing_key_is_named():
    with fails_with(ScenarioError, "settings.name_is_missing"):
        settings_from(OuterTable, {})


def test_all_values_that_are_wrong_are_named_at_once_with_their_places():
    shapes = [{"kind": "dot", "at": "a"}, {"kind": "line", "ends": [-1, 1.5]}]
    table = {"name": "x", "copies": 0, "inner": {"share": 2}, "shapes": shapes}
    with pytest.raises(ScenarioError) as caught:
        settings_from(OuterTable, table, "tables[2]")
    assert caught.value.args == (
        "tables[2].copies = 0: expected an integer >= 1",
        "tables[2].inner.share = 2: expected a number from 0 to 1",
        "tables[2].shapes[0].at = 'a': expected an integer",
        "tables[2].shapes[1].ends[0] = -1: expected an integer >= 0 and < 2^63",
        "tables[2].shapes[1].ends[1] = 1.5: expected an integer >= 0 and < 2^63",
    )
    assert str(caught.value) == "; ".join(caught.value.args)


def test_a_right_table_is_as_it_was_written_and_lists_are_tuples():
    shapes = [{"kind": "line", "ends": [3, 7]}, Dot(5)]
    table = {"name": "x", "copies": 3, "inner": {"share": 1}, "shapes": shapes}
    outer = settings_from(OuterTable, table)
    assert outer == OuterTable("x", 3, False, Inner("red", 1.0), (Line((3, 7)), Dot(5)))
    assert type(outer.inner.share) is float


def test_a_constructor_and_a_changed_copy_check_as_a_table_does():
    with fails_with(ScenarioError, "settings.share_above_1"):
        Inner(share=2)
    with fails_with(ScenarioError, "settings.unknown_tag"):
        replace(Inner(), colour="blue")


def test_a_field_that_is_given_is_no_key_of_the_table():
    assert settings_from(Inner, {"share": 0.5}, colour="green") == Inner("green", 0.5)
    with fails_with(ScenarioError, "settings.unknown_key_of_tagged"):
        settings_from(Inner, {"colour": "red"}, colour="green")


@pytest.mark.parametrize(
    "value", [0.5, Fraction(1, 2), np.float32(0.5), jnp.bfloat16(0.5), np.array(0.5)]
)
def test_any_real_number_is_a_float(value: Any):
    actual = Inner(share=value).share
    assert (actual, type(actual)) == (0.5, float)


@pytest.mark.parametrize(
    "value", [True, "0.5", np.array([0.5]), 0.5j, np.array(0.5j), np.bool_(1), None]
)
def test_what_is_no_real_number_is_no_float(value: Any):
    with fails_with(ScenarioError, "settings.share_is_no_number"):
        Inner(share=value)


@pytest.mark.parametrize(
    ("kind", "value", "actual"),
    [
        (list[int], (1, 2), [1, 2]),
        (tuple[str, ...], ["a"], ("a",)),
        (Sequence[int], [1], (1,)),
        (Literal["a", "b"], "a", "a"),
        (int | str, "a", "a"),
        (int | None, None, None),
        (Path, "a", Path("a")),
        (Any, {1}, {1}),
        (tuple, [1, "a"], (1, "a")),
        (Annotated[int, where(lambda n: n % 2 == 0, "even")], 4, 4),
        (Annotated[int, reads(lambda text: len(text) or None, "a text")], "abc", 3),
    ],
)
def test_a_value_is_converted_to_its_type(kind: Any, value: Any, actual: Any):
    made = converted(kind, value, "key")
    assert (made, type(made)) == (actual, type(actual))


@pytest.mark.parametrize(
    ("kind", "value", "allowed"),
    [
        (list[int], "12", "a list"),
        (list[int], {1, 2}, "a list"),
        (Literal["a", "b"], "c", "one of a, b"),
        (int | str, 0.5, "an integer or a string"),
        (Path, 3, "a Path"),
        (Annotated[int, where(lambda n: n % 2 == 0, "even")], 3, "even"),
        (Annotated[int, reads(lambda text: len(text) or None, "a text")], "", "a text"),
        (Annotated[float, Meta(gt=0, le=9)], 0, "a number above 0 and at most 9"),
        (Annotated[int, Meta(ge=1, le=4000)], 4001, "an integer from 1 to 4,000"),
    ],
)
def test_a_value_of_another_type_is_refused(kind: Any, value: Any, allowed: str):
    with pytest.raises(ScenarioError) as caught:
        converted(kind, value, "key")
    assert str(caught.value) == unusable("key", value, allowed)


def test_settings_are_what_others_have_of_them():
    assert part(Dot, settings_from(Dot, {"at": 3})) == Dot(3)


@takes(OuterTable)
def prints(asked: OuterTable) -> str:
    """Return the name, so often."""
    return asked.name * asked.copies


def test_a_function_takes_the_fields_of_its_settings_and_checks_them():
    assert prints("ab", copies=2) == "abab"
    with fails_with(ScenarioError, "settings.copies_below_1"):
        prints("ab", copies=0)
    error_text = (
        r"prints has no setting copis: expected one of name, .*\(did you mean copi"
    )
    with pytest.raises(ScenarioError, match=error_text):
        prints("ab", copis=2)  # type: ignore[call-arg]
    shown = str(inspect.signature(prints))
    assert shown.startswith("(name: str, copies: int = 1, loud: bool = False")
    assert shown.endswith(" -> str")
    assert prints.__doc__ == "Return the name, so often."


def test_a_default_needs_no_check():
    for module in walk_packages(jdag.__path__, "jdag."):
        if not module.name.endswith("__main__"):
            import_module(module.name)
    kinds, checked = [*Settings.__subclasses__()], 0
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        for field in fields(kind):
            value = field.default
            if kind.__module__.startswith("jdag") and value is not NODEFAULT:
                assert converted(field.type, value, field.name) is value, field
                checked += 1
    assert checked > 100


def test_what_may_be_a_path():
    assert all(map(is_path, ("a", Path("a"))))
    assert not any(map(is_path, (None, 3, b"a", ["a"], "", "a\0b", Path("a\0b"))))
