"""What a function is to a cache: its code and the values that it reads."""

import copy
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from jdag.compute import fingerprint
from jdag.compute.fingerprint import BYTES_MAX, ITEMS_MAX, key_of


def plain(x: Any, y: Any = 1) -> Any:
    return x + y


class Scaler:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x: Any) -> Any:
        return x * self.factor

    def scale(self, x: Any) -> Any:
        return x * self.factor


@dataclass(frozen=True)
class Frozen:
    slope: float

    def __call__(self, x: Any) -> Any:
        return x * self.slope


def closing_over(held: Any) -> Callable[..., Any]:
    return lambda x: (x, held)


MAKERS: list[Any] = [
    closing_over,
    lambda held: lambda x, y=held: (x, y),
    lambda held: lambda x, *, y=held: (x, y),
    lambda held: functools.partial(plain, held),
    lambda held: functools.partial(plain, y=held),
    Frozen,
]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("held", ["a", None, 3, 2.5, (1, "b"), plain, int])
def test_a_function_made_anew_over_equal_values_keeps_its_key(
    make: Any, held: Any
) -> None:
    assert make(held) is not make(held)
    assert key_of(make(held)) == key_of(make(held))
    assert hash(key_of(make(held))) == hash(key_of(make(held)))


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    ("one", "other"),
    [(True, 1), (1, 1.0), (0.0, -0.0), ((1, 0.0), (1, -0.0)), ((True,), (1,))],
)
def test_values_that_are_equal_but_not_the_same_make_other_keys(
    make: Any, one: Any, other: Any
) -> None:
    assert one == other
    assert key_of(make(one)) != key_of(make(other))


def test_frozen_sets_are_taken_apart() -> None:
    assert list({0, 8}) != list({8, 0})
    assert key_of(frozenset({0, 8})) == key_of(frozenset({8, 0}))
    assert key_of(frozenset({1})) != key_of(frozenset({True}))


def test_what_cannot_be_hashed_counts_by_identity_and_is_kept_alive() -> None:
    held = [1.0] * (ITEMS_MAX + 1)
    assert key_of(closing_over(held)) == key_of(closing_over(held))
    assert key_of(closing_over(held)) != key_of(closing_over(list(held)))


@pytest.mark.parametrize("make", MAKERS[:-1])  # A dataclass of these has no hash.
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1.0, "a"], [1, "a"]),
        ({"k": [2]}, {"k": [3]}),
        ({"k": 2, "l": 3}, {"l": 3, "k": 2}),
        ({1, 2}, {1, 3}),
        (np.zeros(3), np.array([0.0, -0.0, 0.0])),
        (np.zeros(3), np.zeros((3, 1))),
        (np.zeros(3, np.float32), np.zeros(3, np.int32)),
        ([np.arange(3)], [np.arange(1, 4)]),
        ((np.arange(3),), (np.arange(1, 4),)),
    ],
    ids=repr,
)
def test_small_containers_and_arrays_count_by_what_they_hold(
    make: Any, one: Any, other: Any
) -> None:
    same, before = copy.deepcopy(one), key_of(make(one))
    assert same is not one and key_of(make(same)) == before
    assert hash(key_of(make(same))) == hash(before)
    assert key_of(make(other)) != before


def test_an_array_that_changed_in_place_makes_another_key() -> None:
    held, large = np.ones(3), np.ones(BYTES_MAX // 8 + 1)
    before = key_of(closing_over(held)), key_of(closing_over(large))
    held[:] = large[:] = 5
    assert key_of(closing_over(held)) != before[0]
    assert key_of(closing_over(large)) == before[1]


def test_what_the_code_itself_may_change_counts_by_identity() -> None:
    notes: list[int] = []
    table: dict[int, int] = {}

    def noting(x: Any) -> Any:
        def inner() -> None:
            notes.append(1)

        inner()
        return x

    def storing(x: Any) -> Any:
        table[0] = 1
        return x

    for fn in (noting, storing):
        before = key_of(fn)
        fn(1)
        assert key_of(fn) == before
    assert notes and table


def test_different_code_makes_other_keys() -> None:
    keys = [key_of(lambda x: x + 1), key_of(lambda x: x + 2), key_of(lambda x: x + 2.0)]
    assert keys[0] != keys[1] != keys[2] != keys[0]


@pytest.mark.parametrize("make", [lambda held: lambda x: x, closing_over])
@pytest.mark.parametrize("name", ["__qualname__", "__module__"])
def test_the_same_code_under_another_name_has_another_key(make: Any, name: str) -> None:
    one, other = make(3), make(3)
    assert key_of(one) == key_of(other)
    setattr(other, name, "another")
    assert key_of(one) != key_of(other)
    assert key_of(functools.partial(one)) != key_of(functools.partial(other))


def test_the_same_code_over_other_globals_makes_another_key() -> None:
    code = compile("def f(x): return x * scale", "anywhere.py", "exec")
    spaces: list[dict[str, Any]] = [{"scale": 2}, {"scale": 3}]
    for space in spaces:
        exec(code, space)
    assert spaces[0]["f"].__code__ == spaces[1]["f"].__code__
    assert key_of(spaces[0]["f"]) != key_of(spaces[1]["f"])


def test_what_holds_itself_has_a_key() -> None:
    def make() -> Callable[..., Any]:
        def down(n: int) -> Any:
            return n and down(n - 1)

        return down

    held: list[Any] = [1]
    held.append(held)
    node = Node([])
    node.children.append(node)
    assert key_of(make()) == key_of(make())
    for one in (held, node):
        assert key_of(closing_over(one)) == key_of(closing_over(one))


def test_a_cell_that_is_not_filled_yet_has_a_key() -> None:
    def early() -> Any:
        return late

    assert key_of(early) == key_of(early)
    late = 3
    assert key_of(early) != key_of(lambda: late)


def test_bound_methods_go_by_function_and_object() -> None:
    one, other = Scaler(1.0), Scaler(1.0)
    assert key_of(one.scale) == key_of(one.scale)
    assert key_of(one.scale) != key_of(other.scale)
    assert key_of(one.scale) != key_of(one)


def test_a_global_that_changed_makes_another_key_and_one_that_did_not_the_same():
    space: dict[str, Any] = {"factor": 2, "helper": len}
    exec("def times(x):\n    return [helper(x) * factor for _ in x]", space)
    times = space["times"]
    first = key_of(times)
    assert key_of(times) == first
    for name, value in (("factor", 3), ("factor", 2.0), ("helper", sum)):
        before = space[name]
        space[name] = value
        assert key_of(times) != first, (name, value)
        space[name] = before
    assert key_of(times) == first


SOURCES = {
    "other": "FACTOR = 2\ndef far(x): return x * FACTOR\n",
    "kit": "",
    "kit.deep": "FACTOR = MORE = 2\ndef last(x): return x * FACTOR\n",
    "kit.near": """
from kit.deep import last
import kit.deep, other
SCALE = 2
def make(power):
    def closed(x): return x ** power
    return closed
def defaulted(x, y=1, *, z=1): return x + y + z
def even(x): return x and odd(x - 1)
def odd(x): return x and even(x - 1)
def helper(x): return last(x) * SCALE
square = make(2)
table = {}
def f(x): return helper(x) + square(x) + defaulted(x) + even(x)
def more(): return kit.deep.MORE
def by_module(x): return kit.deep.last(x) + other.far(x) + more()
def by_table(x): return table["by_table"](x)
table["by_table"] = by_table
""",
}


@pytest.fixture
def kit() -> Iterator[Callable[[str], ModuleType]]:
    for name, source in SOURCES.items():
        module = sys.modules[name] = ModuleType(name)
        vars(module).update(__path__=[])
        exec(source, vars(module))
        if "." in name:
            setattr(sys.modules["kit"], name.partition(".")[2], module)
    yield sys.modules.__getitem__
    for name in SOURCES:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("module", "change"),
    [
        ("kit.near", "defaulted.__defaults__ = (2,)"),
        ("kit.near", "defaulted.__kwdefaults__['z'] = 2"),
        ("kit.near", "square.__closure__[0].cell_contents = 3"),
        ("kit.near", "helper.__code__ = even.__code__"),
        ("kit.near", "def last(x): return x"),
        ("kit.near", "SCALE = 3"),
        ("kit.near", "odd = lambda x: x"),
        ("kit.deep", "FACTOR = 3"),
    ],
)
def test_what_a_helper_of_the_same_package_reads_is_part_of_the_key(
    kit: Any, module: str, change: str
) -> None:
    f = kit("kit.near").f
    before = key_of(f)
    assert key_of(f) == before
    exec(change, vars(kit(module)))
    assert key_of(f) != before


def test_attributes_of_modules_count_if_these_are_of_the_same_package(kit: Any) -> None:
    by_module = kit("kit.near").by_module
    first = key_of(by_module)
    kit("other").FACTOR = 3
    kit("other").far = len
    assert key_of(by_module) == first
    kit("kit.near").other = kit("kit")
    second = key_of(by_module)
    assert second != first
    kit("kit.deep").last = len
    third = key_of(by_module)
    assert third != second
    kit("kit.deep").MORE = 3
    assert key_of(by_module) != third


def test_a_function_that_reads_a_table_of_itself_has_a_key(kit: Any) -> None:
    near = kit("kit.near")
    first = key_of(near.by_table)
    assert key_of(near.by_table) == first
    near.table["more"] = near.f
    assert key_of(near.by_table) != first


def test_a_global_that_the_code_assigns_is_not_part_of_the_key() -> None:
    space: dict[str, Any] = {"count": 0}
    exec("def f():\n    global count\n    count += 1\n    return count", space)
    before = key_of(space["f"])
    assert space["f"]() == 1
    assert key_of(space["f"]) == before


def test_functions_that_all_read_each_other_take_linear_time() -> None:
    space: dict[str, Any] = {"__name__": "mutual"}
    names = [f"f{place}" for place in range(40)]
    calls = ", ".join(names)
    exec("\n".join(f"def {name}(x=1): return [{calls}]" for name in names), space)
    exec(f"def all_of(): return [{calls}]", space)
    before = key_of(space["all_of"])
    assert key_of(space["all_of"]) == before
    space["f7"].__defaults__ = (2,)
    assert key_of(space["all_of"]) != before


def test_what_an_unchanged_function_reads_is_found_once() -> None:
    keys: list[Any] = [key_of(_bare), key_of(_bare)]
    assert keys[0][0] is keys[1][0]


def _bare(x: Any) -> Any:
    return closing_over(x)


def test_beyond_so_many_functions_one_counts_by_identity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    space: dict[str, Any] = {"__name__": "long", "last": 1}
    names = [f"f{place}" for place in range(20)]
    for name, called in zip(names, [*names[1:], "last"], strict=True):
        exec(f"def {name}(): return {called}", space)
    for limit, is_noticed in ((10, False), (30, True)):
        monkeypatch.setattr(fingerprint, "FUNCTIONS_MAX", limit)
        fingerprint._slot.cache_clear()
        before = key_of(space["f0"])
        space["last"] += 1
        assert (key_of(space["f0"]) != before) == is_noticed


def test_equal_dataclasses_have_equal_keys_also_beside_each_other() -> None:
    one, other = Frozen(2.0), Frozen(2.0)
    assert key_of((one, one)) == key_of((one, other))


@dataclass(eq=False)
class Node:
    children: list[Any]
