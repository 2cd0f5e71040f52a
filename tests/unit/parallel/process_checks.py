"""What holds on each of two processes with two devices: run by `process_child`.

A check that returns something returns the same on both.
"""

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdag.errors import JdagError
from jdag.parallel import data_parallel, replicate, row_mean
from tests.tools.tiers import FIRST, sized
from tests.unit.parallel.cases import (
    array,
    close,
    norm_params,
    normed,
    normed_alone,
    where,
)

TOLERANCE = {"float32": 1e-6, "float64": 1e-14, "complex64": 1e-6, "bfloat16": 0.04}
OWN = [f"cpu:{device.id}" for device in jax.local_devices()]
ME = jax.process_index()


def mine(rows: Any, counts: tuple[int, int]) -> Any:
    return rows[: counts[0]] if ME == 0 else rows[counts[0] :]


def mine_of(tree: Any, counts: tuple[int, int]) -> Any:
    return jax.tree.map(lambda rows: mine(rows, counts), tree)


def layers(p: Any, x: Any) -> Any:
    h = jnp.tanh(x @ p["w"][0] * p["n"] + p["w"][1])
    return p["act"](h @ p["low"].astype(h.dtype)), jnp.argmax(jnp.abs(h), 1)


def drawn(seed: int) -> tuple[Any, Any, tuple[int, int], str]:
    chance = np.random.default_rng(seed)
    dtype = sorted(TOLERANCE)[seed]
    counts = [(3, 5), (4, 4), (1, 6), (0, 3)][seed]
    inner, middle, outer = map(int, chance.integers(1, 5, 3))
    w = array(inner, middle, seed=seed, dtype=dtype)
    b = array(middle, seed=seed + 1, dtype=dtype)
    low = array(middle, outer, seed=seed + 2, dtype=np.float32)
    p = {"w": [w, b], "low": low, "n": np.asarray(2), "act": jnp.sin}
    return p, array(sum(counts), inner, seed=seed + 3, dtype=dtype), counts, dtype


def check_gradients_are_sums_over_the_rows_of_all_processes() -> str:
    found = []
    for seed in (1, 3) if FIRST else range(4):
        p, rows, counts, dtype = drawn(seed)
        smooth = {"w": p["w"], "low": p["low"]}

        def spread(smooth: Any, x: Any, p: Any = p) -> Any:
            return data_parallel(layers, {**p, **smooth}, x, jax.devices())

        def alone(smooth: Any, x: Any, p: Any = p) -> Any:
            return layers({**p, **smooth}, x)

        x, tolerance = mine(rows, counts), 3 * TOLERANCE[dtype]
        wanted, alone_vjp, best = jax.jit(partial(jax.vjp, alone, has_aux=True))(
            smooth, rows
        )
        out, vjp, own_best = jax.vjp(spread, smooth, x, has_aux=True)
        cotangent = array(*wanted.shape, seed=seed, dtype=wanted.dtype)
        of_all, of_rows = alone_vjp(cotangent)
        gradients = vjp(mine(cotangent, counts))
        close((out, own_best), mine_of((wanted, best), counts), tolerance)
        close(gradients[0]["w"], of_all["w"], tolerance)
        close(gradients[0]["low"], of_all["low"], max(tolerance, 3e-6))
        close(gradients[1], mine(of_rows, counts), tolerance)
        assert set(where((gradients, out))) == {OWN[0]}
        found += [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(gradients[0])]
    return hashlib.sha256(b"".join(found)).hexdigest()


def weighted(p: Any, x: Any) -> Any:
    return p * x


def check_replicas_are_added_in_order_and_processes_after_that() -> None:
    # Left to right these are 0 on the first process and 2 on the other; in any other
    # order, or over all at once, something else.
    big = 2.0**24
    x = jnp.asarray([[big, -big], [big + 2, -big]][ME], jnp.float32)

    def loss(p: Any) -> Any:
        return jnp.sum(data_parallel(weighted, p, x, jax.devices()))

    assert jax.grad(loss)(jnp.float32(1)) == 2


def check_batch_normalisation_is_that_of_one_device() -> str:
    params, found = norm_params(), []
    for counts in ((5, 2), (1, 7))[: sized(1, 2)]:
        rows = array(sum(counts), 3, seed=7)
        cotangent = array(sum(counts), 4, seed=8)
        axis: Any = {"axis_name": "all", "has_aux": True}
        spread = partial(data_parallel, normed, devices=jax.devices(), **axis)
        alone = jax.vjp(normed_alone, params, rows, has_aux=True)
        wanted, alone_vjp, statistics = alone
        out, vjp, aux = jax.vjp(spread, params, mine(rows, counts), has_aux=True)
        close(out, mine(wanted, counts))
        close(aux, statistics)
        of_params, of_rows = vjp(mine(cotangent, counts))
        all_params, all_rows = alone_vjp(cotangent)
        close(of_params, all_params, 1e-9)
        close(of_rows, mine(all_rows, counts), 1e-9)
        found += [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(of_params)]
    return hashlib.sha256(b"".join(found)).hexdigest()


def counted(p: Any, x: Any, rows: Any) -> Any:
    return p * x, (jax.lax.psum(jnp.sum(rows), "all"), jax.lax.psum(rows, "all"))


def check_rows_that_fill_up_are_told_apart_on_each_process() -> None:
    counts = (5, 2)  # Chunks of 3: the replicas have 3, 2, 2 and no rows.
    x = mine(jnp.arange(7.0), counts)
    for devices in (jax.devices(), [jax.devices()[n] for n in (0, 2, 1, 3)]):
        out, (count, rows) = data_parallel(
            counted, 2.0, x, devices, axis_name="all", has_aux=True
        )
        close(out, 2 * x)
        assert count == 7
        np.testing.assert_array_equal(rows, [3, 3, 1])


def check_without_devices_it_is_this_process_alone() -> None:
    x = jnp.full(4, 1.0 + ME)
    for devices in (None, jax.local_devices(), OWN and ["cpu:0", "cpu:1"]):

        def loss(p: Any, devices: Any = devices) -> Any:
            return jnp.sum(data_parallel(weighted, p, x, devices))

        assert jax.grad(loss)(2.0) == 4 + 4 * ME


def check_a_product_with_the_hessian_is_that_of_one_device() -> None:
    p, rows = {"w": array(3, 2)}, array(7, 3, seed=1)

    def by_itself(p: Any, x: Any, mean: Any = None) -> Any:
        h = jnp.tanh(x @ p["w"]) ** 2
        return h if mean is None else (h - mean(h)) ** 3

    def reduced(p: Any, x: Any, rows: Any) -> Any:
        return by_itself(p, x, lambda h: row_mean(h, rows, "all"))

    for fn, axis_name, mean in (
        (by_itself, None, None),
        (reduced, "all", lambda h: jnp.mean(h, 0)),
    ):

        def spread(p: Any, fn: Any = fn, axis_name: Any = axis_name) -> Any:
            x = mine(rows, (4, 3))
            found = data_parallel(fn, p, x, jax.devices(), axis_name=axis_name)
            return jnp.sum(found)

        def alone(p: Any, mean: Any = mean) -> Any:
            return jnp.sum(by_itself(p, rows, mean))

        losses = (spread, jax.jit(alone))
        close(*[jax.jvp(jax.grad(loss), (p,), (p,))[1] for loss in losses])


# ------------------------------------------------------------------- what is refused


def refused(said: str, call: Callable[[], Any]) -> str:
    with pytest.raises(JdagError, match=said) as caught:
        call()
    return str(caught.value)


def gradient(fn: Any = weighted, p: Any = 2.0, x: Any = None, **given: Any) -> Any:
    x = jnp.ones(4) if x is None else x
    options = {"devices": jax.devices(), **given}
    return jax.grad(
        lambda p: jnp.sum(jax.tree.leaves(data_parallel(fn, p, x, **options))[0])
    )(p)


def other(p: Any, x: Any) -> Any:
    return p * x


def inner(p: Any, x: Any, rows: Any) -> Any:
    """What it reduces differs between the processes."""
    y = x * jax.lax.psum(p, "all")
    return y if ME else y + jax.lax.psum(jnp.sum(x), "all")


def check_what_differs_between_processes_is_named() -> list[str]:
    one = jnp.float32(1) if ME else jnp.float64(1)
    tree = {"a": jnp.ones(3), "b": jnp.ones((2, 2) if ME else (2, 3))}
    axis: Any = {"axis_name": "all"}
    return [
        refused(
            r"data_parallel over 2 processes: params = float64\[\], differentiated on "
            r"process 0 and float32\[\], differentiated on process 1",
            lambda: gradient(p=one),
        ),
        refused(
            r"params\['b'\] = float64\[2,3\].* on process 0 and float64\[2,2\].* on",
            lambda: gradient(lambda p, x: x * jnp.sum(p["b"]), tree),
        ),
        refused(
            r"fn = tests.unit.parallel.process_checks:weighted on process 0 and "
            r"tests.unit.parallel.process_checks:other on process 1",
            lambda: gradient(other if ME else weighted),
        ),
        refused(
            r"devices = cpu:0, cpu:1, .* on process 0 and cpu:\d+, cpu:\d+, cpu:1, cpu",
            lambda: gradient(devices=jax.devices()[:: -1 if ME else 1]),
        ),
        refused(
            r"x = float64\[rows,3\] on process 0 and float64\[rows,2\] on process 1",
            lambda: gradient(lambda p, x, r: p * x, x=jnp.ones((4, 3 - ME)), **axis),
        ),
        refused(
            r"axis_name = 'all' on process 0 and 'each' on process 1",
            lambda: gradient(counted, axis_name="each" if ME else "all", has_aux=True),
        ),
        refused(
            r"collective 1 = psum\(float64\[\]\) on process 0 and nothing on process 1",
            lambda: gradient(inner, jnp.float64(2), **axis),
        ),
        refused(
            r"process 1 has no rows; with axis_name each process needs at least one",
            lambda: gradient(counted, x=jnp.ones(3 - 3 * ME), has_aux=True, **axis),
        ),
    ]


def check_devices_that_do_not_fit_are_refused() -> None:
    refused(
        r"number of devices, but process 0 has 2, process 1 has 1: pass "
        r"jax.devices\(\), or, for this process alone, jax.local_devices\(\)",
        lambda: gradient(devices=jax.devices()[:3]),
    )
    if ME == 1:
        refused(
            r"process 0 has 2, process 1 has 0",
            lambda: gradient(devices=jax.devices()[:2]),
        )
    twice = [*jax.devices()[:2], jax.devices()[2], jax.devices()[2]]
    refused(r"is listed twice", lambda: gradient(devices=twice))
    far = jax.devices()[-1 if ME == 0 else 0]
    refused(
        rf"belongs to process {1 - ME}, and this is process {ME}.*only "
        r"data_parallel\(devices=jax.devices\(\)\) uses devices of other",
        lambda: replicate(jnp.ones(3), [far]),
    )
    refused(r"belongs to process", lambda: gradient(output_device=far))


def check_what_cannot_be_traced_is_refused() -> None:
    axis: Any = {"axis_name": "all", "has_aux": True}
    refused(r"arrays cannot move", lambda: jax.jit(gradient, static_argnums=0)(other))
    single = [d for d in jax.devices() if d.id % 2048 == 0]
    inside = r"over several processes cannot be inside of jax.jit, jax.vmap"
    for devices in (single, jax.devices()):
        call = jax.jit(partial(gradient, counted, devices=devices, **axis))
        refused(inside, partial(call, 2.0))
    refused("arrays", lambda: jax.jit(lambda p: gradient(p=p, devices=single))(2.0))
    refused(
        "arrays cannot move between devices inside of jax.jit, jax.vmap",
        lambda: jax.vmap(lambda p: gradient(p=p))(jnp.ones(3)),
    )
    refused(
        r"has no reverse-mode derivative: .* jax.jvp",
        lambda: jax.grad(lambda p: gradient(lambda p, x: p**3 * x, p))(2.0),
    )


CHECKS: dict[str, Callable[[], Any]] = {
    name.removeprefix("check_"): value
    for name, value in list(globals().items())
    if name.startswith("check_")
}
