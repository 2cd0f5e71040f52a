"""Two versions of a function of one name are told apart."""

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import pytest

import jdag
from jdag.compute.fingerprint import FUNCTIONS_MAX, function_digest
from jdag.errors import JdagError
from jdag.processes.functions.code_fingerprint import check_code, coded_name
from tests import ROOT
from tests.tools.error_texts import fails_with

SOURCE = '''
import dataclasses
import functools
import jax
import jax.numpy as jnp
import numpy as np

SCALE = 2.0
COUNT = 0
W = np.arange(3)
B = jnp.array([7.5, 8.5], "float32")
CONF = {"rates": [0.1, 0.2], "on": {"u", "v"}}
SEEN = []

def helper(x):
    """What it is for."""
    noted(x)
    return jnp.tanh(x) * SCALE * W * B * CONF["rates"][0]

def noted(x):
    SEEN.append(x)

def counted(x):
    global COUNT
    COUNT += 1
    return x

@functools.lru_cache
def cached():
    return 3

class Table:
    size = 4

    @staticmethod
    def of(x):
        return x + 1

    @property
    def half(self):
        return self.size / 2

    def another(self):
        return Table()

@jax.custom_vjp
def odd(x):
    return x

odd.defvjp(lambda x: (x, None), lambda _, given: (given,))
@dataclasses.dataclass
class Settings:
    rate: float
    rates: list

table = Table()
settings = Settings(0.5, list(range(100)))
LONG = list(range(100))
LARGE = np.arange(20_000)
BOXES = np.array([1.5, "a"], object)
PICKED = frozenset({noted, counted, helper})
act = jnp.sin
scaled = functools.partial(helper)

def f(x, k=1.0, *, n=3):
    """Its text."""
    def inner(y):
        return y ** n
    counted(x)
    x = act(scaled(odd(x))) + k + cached() + table.half + settings.rate
    x = x + LONG[0] + LARGE[0] + len(PICKED) + BOXES[0]
    return Table.of(inner(helper(x))) if x in {"a", "b"} else x
'''
# What another version may have in the place of some text; and what changes nothing.
OTHERS = (
    ("SCALE = 2.0", "SCALE = 2.5"),
    ("jnp.tanh(x) *", "jnp.tanh(x) /"),
    ("return 3", "return 4"),
    ("return x + 1", "return x + 2"),
    ("self.size / 2", "self.size / 3"),
    ("size = 4", "size = 5"),
    ("(given,)", "(2 * given,)"),
    ("lambda x: (x, None)", "lambda x: (2 * x, None)"),
    ("act = jnp.sin", "act = jnp.cos"),
    ("partial(helper)", "partial(counted)"),
    ("k=1.0", "k=1.5"),
    ("n=3", "n=4"),
    ("y ** n", "y * n"),
    ('{"a", "b"}', '{"a", "c"}'),
    ("jnp.tanh", "jnp.sinh"),
    ("arange(3)", "arange(4)"),
    ("arange(3)", "arange(3.0)"),
    ("arange(3)", "arange(3)[::-1]"),
    ("8.5", "8.25"),
    ("0.2]", "0.3]"),
    ('"rates": [0.1, 0.2]', '"rates": (0.1, 0.2)'),
    ('"v"', '"w"'),
    ("Settings(0.5, list(range(100)))", "Settings(0.25, list(range(100)))"),
    ("Settings(0.5, list(range(100)))", "Settings(0.5, list(range(101)))"),
    ("LONG = list(range(100))", "LONG = list(range(1, 101))"),
    ("LARGE = np.arange(20_000)", "LARGE = np.arange(20_000)[::-1]"),
    ("{noted, counted, helper}", "{noted, counted}"),
)
SAME = (
    ("COUNT = 0", "COUNT = 7"),
    ("SEEN = []", "SEEN = [1]"),
    ("What it is for.", "What it is not for."),
    ("Its text.", "Another text."),
    ("import functools\n", "import functools\n\n\n# A comment.\n"),
)


def made(*change: str) -> ModuleType:
    source = SOURCE.replace(change[0], change[1]) if change else SOURCE
    assert not change or source != SOURCE, change
    module = ModuleType("models")
    exec(compile(source, "models.py", "exec"), vars(module))
    return module


def test_equal_sources_have_one_digest_wherever_they_are_loaded():
    digest = function_digest(made().f)
    assert len(digest) == 32
    assert function_digest(made().f) == digest
    code = f"import {__name__} as t; print(t.function_digest(t.made().f))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == digest


@pytest.mark.parametrize("change", OTHERS, ids=lambda change: change[1])
def test_what_computes_other_numbers_has_another_digest(change: tuple[str, str]):
    assert function_digest(made(*change).f) != function_digest(made().f)


@pytest.mark.parametrize("change", SAME, ids=lambda change: change[1])
def test_what_is_said_of_code_and_what_it_counts_are_no_part_of_it(
    change: tuple[str, str],
):
    assert function_digest(made(*change).f) == function_digest(made().f)


def test_code_that_pytest_has_rewritten_has_no_digest():
    assert function_digest(test_code_that_pytest_has_rewritten_has_no_digest) == ""
    assert function_digest(made) == ""


def chained(count: int, default: str, last: str) -> Any:
    space: dict[str, Any] = {"__name__": "long"}
    names = [f"f{place}" for place in range(count)]
    for name, called in zip(names, [*names[1:], last], strict=True):
        exec(f"def {name}({default}): return {called}", space)
    return space["f0"]


@pytest.mark.parametrize("default", ["", "x=1"])
def test_more_functions_than_a_key_follows_have_a_digest(default: str) -> None:
    count = FUNCTIONS_MAX + 50
    digests = [function_digest(chained(count, default, last)) for last in ("1", "2")]
    assert "" not in digests
    assert digests[0] != digests[1]


def test_functions_that_call_each_other_too_deep_are_not_compared() -> None:
    assert function_digest(chained(3000, "x=1", "1")) == ""


def test_objects_that_hold_each_other_are_gone_through_once():
    module = made()
    module.helper.__defaults__ = (module.f,)
    assert function_digest(module.f) == function_digest(module.f)


def test_a_name_goes_with_the_digest_of_what_users_wrote():
    named = coded_name(made().f)
    assert named == f"models:f#{function_digest(made().f)}"
    assert coded_name(jnp.sin) == "jax.numpy:sin"
    assert coded_name(dict) == "builtins:dict"
    assert coded_name(function_digest) == "jdag.compute.fingerprint:function_digest"
    # pytest has rewritten it.
    assert (
        coded_name(made) == "tests.unit.processes.functions.test_code_fingerprint:made"
    )


def test_what_is_found_by_a_name_is_held_to_its_digest():
    name, _, code = coded_name(made().f).partition("#")
    check_code(name, code, made(*SAME[0]).f)
    check_code(name, code, made)  # It has no digest.
    with fails_with(JdagError, "processes.models_f_or_something_that"):
        check_code(name, code, made(*OTHERS[0]).f)


def test_a_worker_with_another_version_of_a_module_computes_nothing_by_its_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "two_versions.py"
    source = """
import dataclasses, jax, jax.numpy as jnp, jdag

RATE = 2.0
TABLE = {"rate": [2.0]}

def tabled(x):
    return TABLE["rate"][0] * x

def scaled(x):
    return RATE * x

def same(x):
    return x + 1.0

@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    w: float

    def __call__(self, x):
        return RATE * self.w * x

layer = Layer(jnp.ones(()))

def seen(cotangent):
    return cotangent * RATE

@jdag.program
def runs(ctx, x):
    return ctx.call(ctx.here, scaled, x)
"""
    file.write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    old = importlib.import_module("two_versions")
    file.write_text(source.replace("RATE = 2.0", "RATE = 2.5  # Another one."))
    old.TABLE["rate"][0] = 5.0
    x = jnp.arange(3.0)
    other = r"two_versions:{}, or something that it uses .*cluster\.host\(worker, Class"
    with jdag.launch(["a", "b"], allow=["two_versions"]) as cluster:
        leaf = cluster.put("b", x)
        for name in ("scaled", "tabled", "runs", "layer"):
            named = other.format("Layer" if name == "layer" else name)
            with (
                pytest.raises(JdagError, match=named),
                cluster.context() as ctx,
            ):
                ctx.call("b", getattr(old, name), leaf).fetch()
        with (
            pytest.raises(JdagError, match=other.format("seen")),
            cluster.context() as ctx,
        ):
            ctx.on_cotangent(leaf, old.seen)
            ctx.backward(ctx.call("b", jnp.sum, ctx.call("b", old.same, leaf)))
        with cluster.context() as ctx:
            assert ctx.call("b", old.same, leaf).fetch().tolist() == [1.0, 2.0, 3.0]
