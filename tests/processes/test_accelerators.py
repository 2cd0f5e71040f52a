"""A plan on processes whose main takes the arrays of its CPU for those of a GPU."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdag

STEPS = 6
ROWS, WIDTH = 1024, 256  # An activation of bfloat16 has 512 KiB.


def layer(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


def mean_square(x: Any) -> Any:
    return jnp.mean(x.astype(jnp.float32) ** 2)


def program(ctx: Any, refs: Any, x: Any) -> Any:
    h = ctx.call("b", layer, refs[1], ctx.call("a", layer, refs[0], x))
    return ctx.call("b", mean_square, ctx.call("a", layer, refs[0], h))


def stepped(cluster: Any) -> Any:
    keys = jax.random.split(jax.random.key(0), 3)
    rows = (WIDTH, WIDTH, ROWS)
    w, v, x = [
        (jax.random.normal(key, (n, WIDTH)) / 16).astype(jnp.bfloat16)
        for key, n in zip(keys, rows, strict=True)
    ]
    refs = [cluster.put("a", w), cluster.put("b", v)]
    x = cluster.put("a", x, tracked=False)
    step = jdag.compile(program, cluster)
    for _ in range(STEPS):
        found = step.value_and_grad(refs, x)
    return jax.tree.map(np.asarray, found)


@pytest.mark.second
def test_what_leaves_a_device_is_copied_once_to_page_locked_memory_and_has_its_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with jdag.simulate(["a", "b"], seed=0) as cluster:
        expected = stepped(cluster)
    copied: list[int] = []
    put = jax.device_put

    def noted(value: Any, *place: Any, **options: Any) -> Any:
        if getattr(place[0] if place else None, "memory_kind", "") == "pinned_host":
            copied.append(value.nbytes)
        return put(value, *place, **options)

    monkeypatch.setattr(jax, "device_put", noted)
    monkeypatch.setattr(type(jnp.ones(1)), "platform", lambda array: "gpu")
    monkeypatch.setattr("jdag.processes.jobs.has_accelerator", lambda: True)
    with jdag.launch(["a", "b"], allow=["tests"]) as cluster:
        copied.clear()  # Those of `put` and of constants.
        found = stepped(cluster)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    activations = [nbytes for nbytes in copied if nbytes == 2 * ROWS * WIDTH]
    assert len(activations) == 3 * STEPS  # Two forward and a cotangent from `a`.
