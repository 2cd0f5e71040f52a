"""The script that was started: imported by workers, and refused with a remedy."""

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdag
from jdag.errors import JdagError, PortabilityWarning
from jdag.processes.functions import encoder as function_encoder
from jdag.processes.functions import script
from jdag.processes.functions.script import (
    GUARD,
    GuardedScript,
    expect,
    main_module,
    main_script,
    refusal,
)

TRAIN = """
import sys
from dataclasses import dataclass
from functools import partial
import jax, jax.numpy as jnp
import jdag

print("imported", __name__, *sys.argv[1:])
FACTOR = float(sys.argv[1])

@jax.tree_util.register_static
@dataclass(frozen=True)
class Config:
    depth: int

def half(x):
    return x / FACTOR

@jdag.program
def halve(ctx, config, x):
    if config.depth == 0:
        return x, config
    other = {"a": "b", "b": "c", "c": "b"}[ctx.here]
    return ctx.call(other, halve, Config(config.depth - 1), ctx.call(ctx.here, half, x))

def clipped(cotangent):
    return jnp.clip(cotangent, -0.25, 0.25)

@jdag.unjitted
def scaled(x):
    return x * FACTOR

@jdag.program
def back(ctx):
    return ctx.call("a", halve, Config(0), 3)[0]

def count(n, cluster):
    return n + 1, cluster.here

def used(cluster):
    x = cluster.put("b", jnp.array([13.0, 1.0, 0.2]))
    with cluster.context() as ctx:
        y, config = ctx.call("b", halve, Config(3), x)
        z = ctx.call("c", jnp.multiply, y, ctx.call("c", scaled, 1.0))
        ctx.on_cotangent(y, clipped)
        ctx.backward(ctx.call("b", jnp.sum, z))
        print(z.fetch().round(4), y.worker, ctx.gradient(x).fetch(), config)
        print(ctx.call("c", back))
    print(cluster.run({"b": partial(count, 3), "c": partial(count, 4)}))

"""
GUARDED = f"""
{GUARD}
    with jdag.launch(["a", "b", "c"], logs="logs") as cluster:
        used(cluster)
"""
PRINTED = """\
imported __main__ 2
[3.25 0.25 0.05] b [0.03125 0.03125 0.03125] Config(depth=0)
3
{'b': (4, 'b'), 'c': (5, 'c')}
"""


def written(folder: Path, text: str, name: str = "train.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    script._has_guard.cache_clear()

    def start(text: str, *argv: str) -> Any:
        expect(GuardedScript(written(tmp_path, text), None, ("train.py", *argv)))
        return main_module()

    yield start
    expect(None)


# --------------------------------------------------------------------- imports


def test_a_worker_imports_the_script_once_with_false_guards(started: Any) -> None:
    lines = (
        f"import sys\n{GUARD}\n    ran = 1\nelse:\n    other = sys.argv[1]",
        "if '__main__' == __name__ and True:\n    ran = 1",
        "if not __name__ == '__main__':\n    turned = True",
        "if 1 == 1:\n    name = __name__",
        "def f():\n    return __name__ == '__main__'",
        "here = sys.modules['__main__'].__dict__ is globals()",
    )
    main = started("\n".join(lines), "given")
    assert "ran" not in vars(main)
    assert (main.other, main.turned, main.name) == ("given", True, "__main__")
    assert main.f() and main.f.__module__ == "__main__" and main.here
    assert main_script() == GuardedScript(main.__file__, None, ("train.py", "given"))
    assert main_module() is main is sys.modules["__main__"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise ValueError('no good')", "3: ValueError: no good"),
        ("raise SystemExit(3)", "3: SystemExit: 3"),
        (
            "import jdag\ndef start():\n    jdag.launch(['a', 'b'])\nstart()",
            rf"5: JdagError: jdag\.launch at train\.py:5 in start .* put .*`{GUARD}`",
        ),
        (
            "import jdag\njdag.connect('cluster.toml', name='a')",
            r"4: JdagError: jdag\.connect at train\.py:4 in <module> runs when a",
        ),
    ],
)
def test_a_script_whose_import_fails_is_named_with_its_line_and_exception(
    started: Any, body: str, said: str
) -> None:
    before = sys.modules["__main__"]
    for _ in range(2):  # The next one who needs it tries again.
        with pytest.raises(JdagError, match=rf"cannot import .*/train\.py:{said}"):
            started(f"import sys\n\n{body}")
        assert sys.modules["__main__"] is before
    assert started("fine = 1").fine == 1


def test_a_refusal_names_the_statement_that_is_to_be_under_a_guard(started: Any):
    asked = "if 1:\n    x = 2\n    why = refusal('f')"
    main = started(f"from jdag.processes.functions.script import refusal\n{asked}")
    assert main_script() is None
    expected = (
        "f is defined in the main program, train.py; workers of jdag.launch import "
        "this script only if it has a guard: put the code at train.py:2 under "
        f"`{GUARD}`, below the functions; or move the functions to an importable "
        "module, and name that module in allow=[...]"
    )
    assert main.why == expected
    assert "guard: put the code that the script runs under" in refusal("f")


def test_without_a_file_the_remedy_is_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    for file in (None, "<stdin>"):
        assert main_script() is None
        said = refusal("__main__:f")
        assert "without a file that other processes can import (a notebook, " in said
        assert said.endswith("importable module, and name that module in allow=[...]")
        notebook.__file__ = file or "<stdin>"


# ------------------------------------------------------------ launched processes


@pytest.mark.second
def test_processes_have_the_bits_of_the_simulator_and_import_only_what_they_need(
    started: Any, tmp_path: Path
) -> None:
    main = started(TRAIN + GUARDED + "    def under(g): return g\n    ROWS = 1", "2")
    names, logs = ["a", "b", "c"], tmp_path / "logs"

    def found(cluster: Any) -> list[Any]:
        x = cluster.put("b", jnp.array([13.0, 1.0, 0.2], jnp.float32))
        with cluster.context() as ctx:
            ordinary = ctx.call("c", main.half, x).fetch()
            if cluster.driver.trace is None:
                assert not any(path.read_text() for path in logs.iterdir())
            y, config = ctx.call("b", main.halve, main.Config(3), x)
            factor = ctx.call("c", main.scaled, 1.0)
            z = ctx.call("c", jnp.multiply, ctx.call("b", jnp.sin, y), factor)
            ctx.on_cotangent(y, main.clipped)
            ctx.backward(ctx.call("b", jnp.sum, z))
            assert config == main.Config(0)
            return [ordinary, z.fetch(), ctx.gradient(x).fetch()]

    with jdag.simulate(names, seed=0) as cluster:
        simulated = found(cluster)
    with jdag.launch(names, logs=logs) as cluster:
        launched = found(cluster)
        with cluster.context() as ctx:
            assert ctx.call("c", main.back) == 3
            main.under = jdag.program(lambda ctx: 1)
            main.under.__qualname__, main.under.__module__ = "under", "__main__"
            said = rf"no function or class __main__:under; workers skip .*`{GUARD}`"
            with pytest.raises(JdagError, match=said):
                ctx.call("b", main.under)
            main.FACTOR = 5.0
            said = rf"halve, .* as arguments, .* on a worker; workers skip .*`{GUARD}`"
            with pytest.raises(JdagError, match=said):
                ctx.call("b", main.halve, main.Config(0), 1)
    texts = [(logs / f"{name}.log").read_text() for name in "bc"]
    assert texts == ["imported __main__ 2\n"] * 2

    y, pull = jax.vjp(lambda x: x / 2 / 2 / 2, jnp.array([13.0, 1.0, 0.2]))
    cotangent = jax.grad(lambda y: jnp.sum(jnp.sin(y) * 2))(y)
    (expected,) = pull(jnp.clip(cotangent, -0.25, 0.25))
    np.testing.assert_allclose(launched[2], expected, rtol=1e-5)
    for one, other in zip(launched, simulated, strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize(
    "command",
    [["train.py"], pytest.param(["-m", "package.train"], marks=pytest.mark.second)],
)
def test_what_a_script_with_a_guard_marks_runs_on_launched_workers(
    command: list[str], tmp_path: Path
) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "beside.py").write_text("")
    written(tmp_path, TRAIN + GUARDED)
    written(tmp_path / "package", f"from . import beside\n{TRAIN}{GUARDED}")
    start = [sys.executable, "-W", "error::UserWarning", *command, "2"]
    run = subprocess.run(
        start, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, PRINTED, "")


# ----------------------------------------------------------------- the simulator


class Trainer:
    def train(self, cluster: Any) -> int:
        return 3


def train(cluster: Any, *given: Any) -> int:
    return 3


@jdag.program
def fine(ctx: Any, *given: Any) -> int:
    return 3


@jdag.unjitted
def doubled(x: Any) -> Any:
    return x * 2


def watch(gradient: Any) -> None:
    pass


def runs(program: Any) -> Any:
    return lambda cluster, ctx, x: cluster.run({"b": program})


def calls(fn: Any, *args: Any, on: str = "b") -> Any:
    return lambda cluster, ctx, x: ctx.call(on, fn, *(args or (x,)))


REFUSED = {
    "a lambda": runs(lambda cluster: 3),
    "a local program": calls(jdag.program(lambda ctx, x: 3)),
    "a bound method": runs(Trainer().train),
    "a function that is given": calls(fine, lambda x: x),
    "a class that is given": calls(fine, type("Local", (), {})),
    "a hook": lambda cluster, ctx, x: ctx.on_gradient(x, lambda g: None),
    "a builtin": lambda cluster, ctx, x: ctx.on_gradient(x, repr),
    "an unjitted function": calls(jdag.unjitted(lambda x: x + 1), 3),
    "a new leaf by it": lambda cluster, ctx, x: cluster.update(
        jdag.unjitted(lambda x: x + 1, shapes=lambda x: x), x
    ),
}
SENT = {
    "a program": calls(fine, jnp.sum, train, 3),
    "a partial": runs(partial(train, jnp.ones(3))),
    "a hook": lambda cluster, ctx, x: ctx.on_gradient(x, watch),
    "an unjitted function": calls(doubled, 3),
    "a lambda that is compiled": calls(lambda x: x + 1),
    "what stays here": calls(jdag.program(lambda ctx, x: 3), on="a"),
    "a factory": lambda cluster, ctx, x: cluster.update(lambda x: x + 1, x),
}


def simulated(use: Any) -> None:
    with jdag.simulate(["a", "b"], seed=0) as cluster:
        x = cluster.put("b", jnp.ones(3))
        with cluster.context() as ctx:
            use(cluster, ctx, x)


@pytest.mark.parametrize("use", REFUSED.values(), ids=REFUSED)
def test_simulate_warns_once_where_launch_would_refuse(
    use: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(function_encoder, "_warned", [])
    said = r"jdag\.launch would refuse this: .* cannot (run on|be sent to) 'b'"
    with pytest.warns(PortabilityWarning, match=said) as caught:
        simulated(use)
        simulated(use)
    assert [Path(one.filename).name for one in caught] == ["test_script.py"]


@pytest.mark.parametrize("use", SENT.values(), ids=SENT)
@pytest.mark.filterwarnings("error::jdag.errors.PortabilityWarning")
def test_simulate_does_not_warn_of_what_launch_takes(
    use: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(function_encoder, "_warned", [])
    simulated(use)


@pytest.mark.parametrize("guard", ["", f"{GUARD}\n    pass"])
def test_simulate_warns_of_a_script_without_a_guard(
    guard: str, started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = started(TRAIN + guard, "2")
    monkeypatch.setattr(function_encoder, "_warned", [])
    simulated(calls(main.halve, main.Config(0), 3))
    assert len(function_encoder._warned) == (not guard)
