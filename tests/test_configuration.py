"""What of JAX's settings is compared, and when a change is seen."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jdag
from jdag.compute.configuration import LEFT_OUT, compared, configuration
from jdag.errors import JdagError
from tests.compute_cases import setting

PATTERNS = tuple(one for some in LEFT_OUT.values() for one in some)


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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("jax_threefry_partitionable", False),
        ("jax_random_seed_offset", 5),
        ("jax_disable_most_optimizations", True),
    ],
)
def test_a_setting_that_changed_after_the_cluster_was_made_is_refused(
    name: str, value: Any
):
    with jdag.simulate(["a", "b"], seed=1) as cluster, cluster.context() as ctx:
        with (
            setting(name, value),
            pytest.raises(JdagError, match=f"{name} is {value!r} and was .* per clust"),
        ):
            ctx.call("b", jnp.sin, jnp.ones(3))
        ctx.call("b", jnp.sin, jnp.ones(3)).fetch()


def test_a_context_manager_of_jax_around_calls_is_refused():
    with jdag.simulate(["a", "b"], seed=1) as cluster, cluster.context() as ctx:
        with (
            jax.threefry_partitionable(False),
            pytest.raises(JdagError, match="jax_threefry_partitionable is False and"),
        ):
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
