"""What of JAX's settings is compared, and when a change is seen."""

import re
from contextlib import ExitStack
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdag
from jdag.compute.configuration import LEFT_OUT, compared, configuration
from jdag.errors import JdagError
from tests.tools.compute_cases import setting


def test_every_setting_is_compared_or_left_out_for_one_reason():
    names: Any = jax.config.values
    for name in names:
        reasons = [
            why
            for why, some in LEFT_OUT.items()
            if any(re.fullmatch(f"(?:{one})", name) for one in some)
        ]
        assert len(reasons) == (name not in compared()), (name, reasons)


def test_a_setting_that_jax_traces_under_is_not_left_out_unless_it_only_checks():
    for name in (
        "jax_enable_x64",
        "jax_threefry_partitionable",
        "jax_random_seed_offset",
        "jax_disable_most_optimizations",
        "jax_default_prng_impl",
        "jax_disable_jit",
        "jax_softmax_custom_jvp",
        "jax_optimization_level",
    ):
        assert name in compared()
    assert len(compared()) < 60


CHANGED = {
    "jax_threefry_partitionable": False,
    "jax_random_seed_offset": 5,
    "jax_disable_most_optimizations": True,
}


@pytest.mark.parametrize("name", [*CHANGED, ""])
def test_a_setting_that_changed_after_the_cluster_was_made_is_refused(name: str):
    changed: Any = jax.threefry_partitionable(False)  # Its context manager.
    if name:
        changed = setting(name, CHANGED[name])
    name = name or "jax_threefry_partitionable"
    text = f"{name} is {CHANGED[name]!r} and was .*: set it first, then make"
    with jdag.simulate(["a", "b"], seed=1) as cluster, cluster.context() as ctx:
        with changed, pytest.raises(JdagError, match=text):
            ctx.call("b", jnp.sin, jnp.ones(3))
        with jax.log_compiles(False), jax.numpy_rank_promotion("raise"):
            ctx.call("b", jnp.sin, jnp.ones(3)).fetch()


def test_equal_settings_are_one_configuration_also_when_they_come_back():
    before = configuration()
    with jax.softmax_custom_jvp(True):
        inside = configuration()
    after = configuration()
    assert before == after and hash(before) == hash(after) and before != inside
    assert configuration() is after


def drawn(x):
    config: Any = jax.config
    is_low = config.jax_default_matmul_precision == "bfloat16"
    return jax.random.uniform(jax.random.key(3), (3,)), x * np.arange(3.0), x + is_low


@jdag.program
def drawn_by_program(ctx, x):
    return drawn(x.fetch())


@pytest.mark.parametrize(
    ("driver", "x64"),
    [
        ("simulate", True),
        ("simulate", False),
        ("launch", True),
        pytest.param("launch", False, marks=pytest.mark.second),
    ],
)
def test_each_thread_computes_under_the_context_managers_the_cluster_was_made_in(
    driver: str, x64: bool
):
    with ExitStack() as stack:
        stack.enter_context(jax.enable_x64(x64))
        stack.enter_context(jax.threefry_partitionable(not x64))
        stack.enter_context(jax.default_matmul_precision("bfloat16"))
        x = np.arange(1.0, 4.0)
        if driver == "launch":
            made = jdag.launch(["a", "b"], allow=["tests"])
        else:
            made = jdag.simulate(["a", "b"], seed=0)
        cluster, wanted = stack.enter_context(made), drawn(jnp.asarray(x))
        ctx = stack.enter_context(cluster.context())
        for worker in "ab":
            h = ctx.call(worker, jnp.add, x, 0.0)
            for fn in (drawn, jdag.unjitted(drawn), drawn_by_program):
                for one, other in zip(
                    jdag.fetch(ctx.call(worker, fn, h)), wanted, strict=True
                ):
                    assert one.dtype == other.dtype, (worker, fn)
                    np.testing.assert_array_equal(one, other, f"{worker} {fn}")


@pytest.mark.parametrize("make", [jdag.launch, jdag.connect])
@pytest.mark.parametrize(
    ("under", "value", "said"),
    [
        (
            jax.transfer_guard,
            "disallow",
            "host_to_device = 'disallow': expected .* allows transfers, because values",
        ),
        (
            jax.transfer_guard,
            "disallow_explicit",
            "= 'disallow_explicit': expected .* allows transfers, because values r",
        ),
        (
            jax.disable_jit,
            True,
            "jax_disable_jit = True: expected False, .* debug with jdag.simulate",
        ),
    ],
)
def test_what_processes_cannot_compute_under_is_refused(make, under, value, said):
    given: Any = ["a", "b"] if make is jdag.launch else "file"
    with under(value), pytest.raises(JdagError, match=said):
        make(given) if make is jdag.launch else make(given, name="a")
