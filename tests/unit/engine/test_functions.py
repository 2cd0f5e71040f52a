"""How a function is named and marked, and where it is called from."""

import functools
from typing import Any

import jax.numpy as jnp
import pytest

from jdag.engine.functions import (
    _PACKAGE,
    CallSite,
    call_site,
    code_of,
    is_program,
    is_unjitted,
    name_of,
    program,
    unjitted,
)
from jdag.errors import JdagError
from tests.tools.error_texts import fails_with


def plain(x: Any, y: Any = 1) -> Any:
    return x + y


class Scaler:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x: Any) -> Any:
        return x * self.factor

    def scale(self, x: Any) -> Any:
        return x * self.factor


def test_a_name_is_module_and_qualname_of_what_runs() -> None:
    scaler = Scaler(2.0)
    module = __name__
    assert name_of(plain) == f"{module}:plain"
    assert name_of(scaler.scale) == f"{module}:Scaler.scale"
    assert name_of(scaler) == f"{module}:Scaler"
    assert name_of(functools.partial(plain, 1)) == f"partial({module}:plain)"
    assert name_of(len) == "builtins:len"
    assert (name_of([].append), name_of(str.upper)) == ("list.append", "str.upper")
    assert name_of(jnp.add) == "jax.numpy:add"


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
    with fails_with(JdagError, "engine.cannot_mark_builtin"):
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
