"""What a function is to a cache, how it is named, and where it is called from."""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jdag.errors import JdagError
from jdag.functions import (
    _PACKAGE,
    BYTES_MAX,
    ITEMS_MAX,
    CallSite,
    call_site,
    code_of,
    is_program,
    is_unjitted,
    key_of,
    name_of,
    program,
    unjitted,
    value_key,
)


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


def with_default(held: Any) -> Callable[..., Any]:
    return lambda x, y=held: (x, y)


def with_keyword(held: Any) -> Callable[..., Any]:
    return lambda x, *, y=held: (x, y)


def part(held: Any) -> Callable[..., Any]:
    return functools.partial(plain, held)


def part_by_name(held: Any) -> Callable[..., Any]:
    return functools.partial(plain, y=held)


MAKERS = [closing_over, with_default, with_keyword, part, part_by_name, Frozen]


def test_a_name_is_module_and_qualname_of_what_runs() -> None:
    scaler = Scaler(2.0)
    module = __name__
    assert name_of(plain) == f"{module}:plain"
    assert name_of(scaler.scale) == f"{module}:Scaler.scale"
    assert name_of(scaler) == f"{module}:Scaler"
    assert name_of(functools.partial(plain, 1)) == f"partial({module}:plain)"
    assert name_of(len) == "builtins:len"
    assert name_of(jnp.add) == "jax.numpy:add"


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


def test_frozen_sets_and_frozen_dataclasses_are_taken_apart() -> None:
    assert value_key(frozenset({1, 2})) == value_key(frozenset({2, 1}))
    assert value_key(frozenset({1})) != value_key(frozenset({True}))
    assert value_key(Frozen(0.0)) != value_key(Frozen(-0.0))
    assert value_key(Frozen(1.5)) == value_key(Frozen(1.5))


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


def test_a_list_that_holds_itself_has_a_key() -> None:
    held: list[Any] = [1]
    held.append(held)
    assert key_of(closing_over(held)) == key_of(closing_over(held))


def test_different_code_makes_other_keys() -> None:
    keys = [key_of(lambda x: x + 1), key_of(lambda x: x + 2), key_of(lambda x: x + 2.0)]
    assert keys[0] != keys[1] != keys[2] != keys[0]


def test_the_same_code_over_other_globals_makes_another_key() -> None:
    code = compile("def f(x): return x * scale", "anywhere.py", "exec")
    spaces: list[dict[str, Any]] = [{"scale": 2}, {"scale": 3}]
    for space in spaces:
        exec(code, space)
    assert spaces[0]["f"].__code__ == spaces[1]["f"].__code__
    assert key_of(spaces[0]["f"]) != key_of(spaces[1]["f"])


def test_a_function_that_closes_over_itself_has_a_key() -> None:
    def make() -> Callable[..., Any]:
        def down(n: int) -> Any:
            return n and down(n - 1)

        return down

    assert key_of(make()) == key_of(make())


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


def test_the_code_of_a_wrapped_function_is_that_of_what_runs() -> None:
    @functools.lru_cache
    def cached(x: int) -> int:
        return x

    assert code_of(functools.partial(plain, 1)) is plain.__code__
    assert code_of(Scaler(1.0).scale) is Scaler.scale.__code__
    assert code_of(Scaler(1.0)) is Scaler.__call__.__code__
    assert code_of(cached) is cached.__wrapped__.__code__
    assert code_of(len) is None


def test_marks_are_told_of_the_function_and_of_partials_over_it() -> None:
    def body(ctx: Any, x: Any) -> Any:
        return x

    assert not is_program(body)
    assert not is_unjitted(body)
    assert program(body).__wrapped__ is body  # type: ignore[attr-defined]
    assert is_program(body)
    assert is_program(functools.partial(functools.partial(body), 1))
    assert not is_unjitted(body)
    assert is_unjitted(unjitted(functools.partial(body, 1)))
    assert not is_unjitted(body)


@pytest.mark.parametrize("mark", [program, unjitted])
def test_what_takes_no_mark_is_refused_by_name(mark: Any) -> None:
    with pytest.raises(JdagError, match=r"jdag\.\w+ cannot mark .*len"):
        mark(len)


def test_the_call_site_is_the_first_frame_outside_of_the_package() -> None:
    space: dict[str, Any] = {"call_site": call_site}
    source = "def face():\n    return inner()\ndef inner():\n    return call_site()\n"
    exec(compile(source, _PACKAGE + "made_up.py", "exec"), space)
    line = test_the_call_site_is_the_first_frame_outside_of_the_package.__code__
    site = space["face"]()
    assert site == CallSite(__file__, line.co_firstlineno + 5, line.co_qualname)
    name = __file__.rpartition("/")[2]  # The folder would be in bytes on the wire.
    assert str(site) == f"{name}:{site.line} in {line.co_qualname}"


def test_a_ready_program_counts_as_outside_of_the_package() -> None:
    space: dict[str, Any] = {"call_site": call_site}
    file = _PACKAGE + "programs/made_up.py"
    exec(compile("def step():\n    return call_site()\n", file, "exec"), space)
    assert space["step"]() == CallSite(file, 2, "step")


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
