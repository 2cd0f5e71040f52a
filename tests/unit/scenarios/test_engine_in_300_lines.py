"""The worked example of the engine computes what `jax.grad` computes."""

import importlib.util
import random
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests import ROOT
from tests.tools.error_texts import fails_with
from tests.tools.tiers import sized

FILE = ROOT / "scenarios" / "engine_in_300_lines.py"
_spec = importlib.util.spec_from_file_location("engine_in_300_lines", FILE)
assert _spec is not None and _spec.loader is not None
example: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(example)

WORKERS = ["a", "b", "c"]


def times_sin(x, y):
    return x * jnp.sin(y)


def mix(x, y, z):
    return x * 0.3 + y * 0.7 - z / 3


FUNCTIONS = ((jnp.tanh, 1), (times_sin, 2), (mix, 3))


def play(seed: int, call, leaves: list[Any]) -> Any:
    """Draw a program from a seed; its last value is the sum of all its calls."""
    rng = random.Random(seed)
    values = list(leaves)
    for _ in range(9):
        fn, count = rng.choice(FUNCTIONS)
        values.append(call(rng.choice(WORKERS), fn, *rng.choices(values, k=count)))
    return call("b", lambda *parts: sum(map(jnp.sum, parts)), *values)


def distributed(program: int, order: int) -> list[Any]:
    cluster = example.Cluster(WORKERS, order)
    refs = [cluster.put(worker, leaf(i)) for i, worker in enumerate(WORKERS)]
    gradients = cluster.backward(play(program, cluster.call, refs))
    return [gradients[ref] for ref in refs]


def leaf(number: int) -> Any:
    return jnp.linspace(-1.0, 1.0, 5) * (number + 0.7)


@pytest.mark.parametrize("program", range(sized(4, 10)))
def test_gradients_equal_the_oracle_and_their_bits_do_not_depend_on_the_order(program):
    def plain(leaves):
        return play(program, lambda _, fn, *args: fn(*args), leaves)

    wanted = jax.grad(plain)([leaf(i) for i in range(3)])
    found = distributed(program, 0)
    for one, other in zip(found, wanted, strict=True):
        assert jnp.allclose(one, other, rtol=1e-12)
    for order in range(1, 6):
        again = distributed(program, order)
        assert [g.tobytes() for g in again] == [g.tobytes() for g in found]


def test_a_send_that_the_root_does_not_need_is_named():
    cluster = example.Cluster(WORKERS)
    x = cluster.put("a", leaf(0))
    cluster.call("c", jnp.tanh, x)
    root = cluster.call("b", jnp.sum, x)
    with fails_with(RuntimeError, "scenarios.stuck_for_value_1"):
        cluster.backward(root)


def test_it_has_300_lines_at_most():
    assert len(FILE.read_text(encoding="utf-8").splitlines()) <= 300
