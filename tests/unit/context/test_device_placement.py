"""Named devices of workers: puts that gradients flow back through, and their sums.

With several host devices, which a process has from its start or not at all, this module
runs itself once more: there its `here_*` functions are the tests.
"""

import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdag
from jdag import sim
from jdag.collectives.routes import HOW
from jdag.errors import JdagError, RemoteError
from tests.tools.error_texts import fails_with
from tests.tools.face_cases import nothing_is_left
from tests.tools.replica_cases import (
    NAMES,
    SHAPES,
    expected,
    factors,
    one_part,
    weighed,
)
from tests.tools.tiers import FIRST

COSTS = sim.DeviceModel(forward_ns=100, backward_ns=200, sum_ns=10)
T1, T2 = jnp.arange(3.0) + 1, jnp.arange(3.0) - 5


def mixed(a: Any, b: Any, c: Any, d: Any) -> Any:
    return jnp.tanh(a) * b + jnp.sin(c * d)


def there_and_back(ctx: Any, t1: Any, t2: Any, one: str = "b/cpu:1") -> Any:
    zero = ctx.call("b", lambda a, b: a + 2 * b, t1, t2)
    first = ctx.call(one, lambda x, b: 2 * x + 2 * b, zero, t2)
    return ctx.call("b", lambda y, a, b: jnp.sum(y + a + 2 * b), first, t1, t2)


def web(ctx: Any, params: Any, place: Any) -> Any:
    w, v = params
    hidden = [ctx.call(place(n), mixed, w, v, w, float(n + 1) / 7) for n in range(10)]
    hidden += [ctx.call(place(n), mixed, h, w, v, h) for n, h in enumerate(hidden)]
    # Each value goes to two workers, and is used at home before, between and after.
    users = ("b", "c", "b", "d", "b", "c", "d")
    far = [ctx.call(user, mixed, h, w, w, v) for user in users for h in hidden[:4]]
    moved = ctx.move(place(3), hidden[5])
    parts = [ctx.call(place(n), jnp.sum, h) for n, h in enumerate([*hidden, *far])]
    return ctx.call("b", lambda *all: sum(all), *parts, ctx.call("d", jnp.sum, moved))


def named(n: int) -> str:
    return ("b", "b/cpu:1", "b/cpu:2", "c/cpu:3")[n % 4]


def plain(n: int) -> str:
    return named(n).partition("/")[0]


def cluster_of(seed: int = 0, **settings: Any) -> Any:
    return jdag.simulate(["a", "b", "c", "d"], seed=seed, **settings)


# ---- here: in a process with four devices


def where(ref: Any) -> set[int]:
    driver = ref.holder.state.cluster.driver
    driver.settle()
    host, key = driver._env.hosts[ref.worker], ref.key
    if ref.leaf is not None:  # The newest version that is stored.
        held = host.machine.values._held
        key = max(k for k in held if k.kind == "leaf" and k.name == ref.leaf.id)
    if key.kind == "gradient":
        fragment = host.engine._state.contexts[key.context]
        key = fragment.leaves[key.name].gradient.stored
    return {device.id for device in host.machine.values.get(key).devices()}


def here_a_call_elsewhere_reads_what_its_program_made_of_a_leaf_on_a_device() -> None:
    with cluster_of() as cluster, cluster.context() as ctx:
        w = cluster.put("b/cpu:1", jnp.ones(3))
        before = ctx.call("c", jnp.sum, w)
        cluster.update(jnp.cumsum, w)
        after = ctx.call("c", jnp.sum, w)
        assert (before.fetch(), after.fetch()) == (3, 6)
        ctx.backward(before, after)
        np.testing.assert_array_equal(ctx.gradient(w).fetch(), 2 * jnp.ones(3))


def here_a_pass_goes_from_a_device_to_another_and_back() -> None:
    with cluster_of() as cluster:
        for place, one in (("b", "b/cpu:1"), ("b/cpu:2", "b/cpu:3"), ("c/cpu:1", "b")):
            t1, t2 = cluster.put(place, T1), cluster.put("b/cpu:1", T2)
            with cluster.context() as ctx:
                ctx.backward(there_and_back(ctx, t1, t2, one))
                found = ctx.gradient((t1, t2))
                assert found[0].place == t1.place == place
                np.testing.assert_array_equal(found[0].fetch(), np.full(3, 3.0))
                np.testing.assert_array_equal(found[1].fetch(), np.full(3, 8.0))
            loss = jdag.oracle(there_and_back, argnums=(0, 1))(t1, t2)
            np.testing.assert_array_equal(loss[1][1], np.full(3, 8.0))


def here_the_device_of_a_call_changes_no_bit_of_a_wide_sum() -> None:
    rng = np.random.default_rng(0)
    params = [rng.standard_normal(33), rng.standard_normal(33)]
    bits = []
    for place in (named, plain):
        for seed in (0, 1):
            with cluster_of(seed=seed, devices=COSTS) as cluster:
                refs = [cluster.put(place(n + 1), p) for n, p in enumerate(params)]
                with cluster.context() as ctx:
                    loss = web(ctx, refs, place)
                    ctx.backward(loss)
                    found = jdag.fetch((loss, ctx.gradient(refs)))
                nothing_is_left(cluster)
            bits.append([np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(found)])
    assert all(other == bits[0] for other in bits)
    wanted = jdag.oracle(lambda ctx, p: web(ctx, p, named))(params)
    np.testing.assert_allclose(found[1][0], wanted[1][0], rtol=1e-12)


def here_a_hessian_vector_product_has_the_bits_that_it_has_without_devices() -> None:
    found = []
    for place, first in ((plain, "b"), (named, "b/cpu:1")):
        with cluster_of() as cluster:
            params = cluster.put(first, T1), cluster.put("c", T2)
            vector = cluster.put("b", T2), T1
            product = jdag.hvp(web, cluster)
            found.append([np.asarray(a) for a in product(params, vector, place)])
            nothing_is_left(cluster)
    wanted = jax.jvp(
        lambda p: jdag.oracle(lambda ctx, p: web(ctx, p, plain))(p)[1],
        ((T1, T2),),
        ((T2, T1),),
    )[1]
    for one, other, truth in zip(*found, wanted, strict=True):
        assert one.tobytes() == other.tobytes()
        np.testing.assert_allclose(one, truth, rtol=1e-11)


def here_values_gradients_and_new_versions_are_where_they_are_named() -> None:
    with cluster_of() as cluster:
        w = cluster.put("b/cpu:2", {"x": T1})["x"]
        v = cluster.make("b/cpu:3", jnp.ones, jdag.static((3,)))
        u = cluster.put("b", T1)
        assert (w.device, v.device, u.device) == ("cpu:2", "cpu:3", None)
        assert w.place == "b/cpu:2" and "cpu:2" in repr(w)
        assert [where(ref) for ref in (w, v, u)] == [{2}, {3}, {0}]
        with cluster.context() as ctx:
            out = ctx.call("b/cpu:1", lambda *a: sum(a), w, v, u, T2)
            made = ctx.call("b/cpu:3", lambda: jnp.zeros(4))
            back = ctx.call("b", jnp.multiply, out, w)
            far = ctx.call("c", jnp.sin, out)
            loss = ctx.call("a", lambda *a: sum(map(jnp.sum, a)), out, back, far)
            ctx.backward(loss)
            found = ctx.gradient([w, v, u])
            refs = [out, made, back, *found]
            assert [ref.device for ref in refs[3:]] == ["cpu:2", "cpu:3", None]
            assert [where(ref) for ref in refs] == [{1}, {3}, {0}, {2}, {3}, {0}]
            assert where(far) == {0}
            assert {d.id for ref in refs for d in ref.fetch().devices()} == {0}
            cluster.update(lambda a, g: a - g, [w, v, u], found)
        assert [where(ref) for ref in (w, v, u)] == [{2}, {3}, {0}]


def here_a_leaf_that_only_zeros_reach_has_them_on_its_device() -> None:
    with cluster_of() as cluster:
        w, v = cluster.put("b/cpu:2", T1), cluster.put("b", T1)
        with cluster.context() as ctx:
            ctx.call("c", jnp.add, w, v)  # Dropped: its recv gets a part of its slots.
            ctx.backward(ctx.call("c", jnp.sum, v), mode="fast")
            assert where(ctx.gradient(w)) == {2}
            np.testing.assert_array_equal(ctx.gradient(w).fetch(), np.zeros(3))
            np.testing.assert_array_equal(ctx.gradient(v).fetch(), np.ones(3))


def here_what_a_call_on_a_device_does_not_use_gets_a_zero_that_takes_no_bytes() -> None:
    with cluster_of() as cluster:
        w, v, u = (cluster.put(at, T1) for at in ("b/cpu:2", "b", "c"))
        with cluster.context() as ctx:
            ctx.backward(ctx.call("c/cpu:1", lambda w, v, u: v @ v, w, v, u))
            assert cluster.info()["c"]["zero_bytes_saved"] == T1.nbytes  # Of w.
            for leaf, device, wanted in ((w, 2, 0), (v, 0, 2), (u, 0, 0)):
                assert where(ctx.gradient(leaf)) == {device}
                found = ctx.gradient(leaf).fetch()
                np.testing.assert_array_equal(found, wanted * T1)


def here_a_wide_sum_has_its_given_cotangent_where_its_value_was_made() -> None:
    with cluster_of() as cluster:
        w = cluster.put("b", T1)
        with cluster.context() as ctx:
            out = ctx.call("b/cpu:1", jnp.sin, w)
            users = [ctx.call("b", jnp.sum, out) for _ in range(10)]
            here = jax.device_put(T2, jax.local_devices()[0])
            ctx.backward(out, *users, cotangents=[here, *[None] * 10])
            found = ctx.gradient(w).fetch()
        np.testing.assert_allclose(found, np.cos(T1) * (10 + T2), rtol=1e-14)


def here_an_array_that_a_user_put_on_a_device_is_on_the_default_one() -> None:
    away = jax.device_put(T1, jax.local_devices()[3])
    with cluster_of() as cluster:
        w = cluster.put("b", away)
        with cluster.context() as ctx:
            out = ctx.call("b", lambda a, b, c: a + b + c, w, away, T2)
            placed = ctx.call("b/cpu:1", jnp.add, w, away)
            ctx.backward(out, cotangents=away)
            assert (where(w), where(out), where(placed)) == ({0}, {0}, {1})
            np.testing.assert_array_equal(ctx.gradient(w).fetch(), T1)


def here_what_runs_unjitted_makes_its_arrays_on_its_device() -> None:
    seen: list[set[int]] = []

    def made(a: Any) -> Any:
        seen.extend({one.id for one in b.devices()} for b in (a, jnp.ones(3)))
        return a + jnp.ones(3)

    with cluster_of() as cluster:
        w = cluster.put("b", T1, tracked=False)
        with cluster.context() as ctx:
            for fn in (jdag.unjitted(shapes=lambda a: a)(made), jdag.unjitted(made)):
                out = ctx.call("b/cpu:2", fn, w)
                assert out.place == "b/cpu:2" and where(out) == {2}
    assert seen == [{2}] * 4


def here_what_is_kept_stays_on_its_device() -> None:
    with cluster_of() as cluster:
        with cluster.context() as ctx:
            value = ctx.call("b/cpu:2", jnp.sin, T1)
            both = cluster.keep([value, ctx.call("b", jnp.cos, T1), value])
        assert [where(kept) for kept in both] == [{2}, {0}, {2}]
        for _ in range(2):
            with cluster.context() as ctx:
                found = ctx.call("c/cpu:1", lambda *parts: sum(parts), *both)
                assert where(found) == {1}
                wanted = 2 * jnp.sin(T1) + jnp.cos(T1)
                np.testing.assert_allclose(found.fetch(), wanted, rtol=1e-14)


def here_a_device_that_is_not_there_is_named_with_those_that_are() -> None:
    said = (
        r"worker 'b' has no device '{}'; it has the devices cpu:0, cpu:1, cpu:2, cpu:3$"
    )
    with cluster_of() as cluster, cluster.context() as ctx:
        for device in ("cpu:4", "gpu:0"):
            for use in (
                lambda place: cluster.put(place, T1),
                lambda place: cluster.make(place, jnp.ones, jdag.static((3,))),
                lambda place: ctx.call(place, jnp.sin, T1),
                lambda place: ctx.move(place, T1),
            ):
                with pytest.raises(JdagError, match=said.format(device)):
                    use(f"b/{device}")


def here_an_error_on_a_device_is_that_of_its_function() -> None:
    with cluster_of() as cluster:
        mine = jnp.ones(3)
        w = cluster.put("b", mine)
        cluster.driver.settle()
        mine.delete()
        with cluster.context() as ctx:
            out = ctx.call("b/cpu:1", mixed, w, w, w, w)
            with fails_with(JdagError, "context.argument_0_of_mixed_was"):
                out.fetch()
            with fails_with(RemoteError, "context.mixed_failed_on_b_missing"):
                ctx.call("b/cpu:1", mixed, 1.0, 1.0, 1.0)


def here_replicas_on_devices_of_workers_add_up_in_the_order_that_is_told() -> None:
    places = ("b/cpu:2", "c", "b", "c/cpu:3", "b/cpu:1")
    trees = [factors(number, SHAPES) for number in range(len(places))]
    zeros = {name: jnp.zeros(shape, jnp.float32) for name, shape in SHAPES.items()}
    for how in HOW:
        with cluster_of() as cluster:
            params = cluster.put("b/cpu:1", zeros)
            with cluster.context() as ctx:
                replicas = ctx.replicate(places, params, how)
                losses = [
                    ctx.call(place, weighed, replica, tree)
                    for place, replica, tree in zip(
                        places, replicas, trees, strict=True
                    )
                ]
                ctx.backward(*losses)
                got = one_part(jdag.fetch(ctx.gradient(params)), NAMES)
                right = expected(how, trees, NAMES, among=False, source=4)
                assert got.tobytes() == right.tobytes(), how
                sums = ctx.all_reduce(dict(zip(places, replicas, strict=True)), how)
                for place in places:
                    assert sums[place]["w"].place == place


# ---- there: with the devices that there are


# They compile most: not in the first tier.
LATER = (
    "here_the_device_of_a_call_changes_no_bit_of_a_wide_sum",
    "here_a_hessian_vector_product_has_the_bits_that_it_has_without_devices",
)
CHECKS = [n for n in globals() if n[:5] == "here_" and not (FIRST and n in LATER)]


def test_with_four_devices_all_that_is_said_of_here_holds():
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.context.test_device_placement"],
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "4", "JAX_ENABLE_X64": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == CHECKS


def test_what_hvp_makes_of_a_leaf_is_on_the_device_that_the_leaf_was_put_on():
    places: list[str] = []

    def noted(ctx: Any, v: Any, w: Any) -> Any:
        places.extend((v.place, w.place))
        return ctx.call(v.place, lambda v, h: jnp.sum(v * h), v, ctx.move("b", w))

    with cluster_of() as cluster:
        v, w = cluster.put("d", T1), cluster.put("b/cpu:0", T2)
        found = jdag.hvp(noted, cluster, argnums=(0, 1))(v, (T2, T1), w)
        np.testing.assert_array_equal(found[0], T1)
        np.testing.assert_array_equal(found[1], T2)
        assert places == ["d", "b/cpu:0"]
        nothing_is_left(cluster)


def test_abstract_values_have_devices_by_form_alone_and_no_arrays():
    with cluster_of(values="abstract") as cluster:
        t1, t2 = cluster.put("b/gpu:7", T1), cluster.put("b", T2)
        with cluster.context() as ctx:
            ctx.backward(there_and_back(ctx, t1, t2, "b/gpu:3"))
            gradient = ctx.gradient(t1)
            assert gradient.place == "b/gpu:7" and gradient.fetch().shape == (3,)
        cluster.update(lambda a: a, t1)
        assert t1.place == "b/gpu:7"
        nothing_is_left(cluster)


def timed(places: list[str]) -> tuple[int, int]:
    with cluster_of(values="abstract", devices=COSTS) as cluster:
        w = cluster.put("b", T1)
        with cluster.context() as ctx:
            parts = [ctx.call(place, jnp.sin, w) for place in places]
            ctx.backward(ctx.call("c", lambda *a: sum(map(jnp.sum, a)), *parts))
            took_ns = cluster.now_ns
        return took_ns, int(cluster.info()["b"]["busy_ns"])


def test_named_devices_of_a_worker_work_at_the_same_time():
    after_ns = 100 + 200  # On c; the ones of the root are there before.
    busy_ns = 3 * (100 + 200) + 10
    assert timed(["b", "b", "b"]) == (busy_ns + after_ns, busy_ns)
    assert timed(["b/gpu:1"] * 3) == (busy_ns + after_ns, busy_ns)
    one_ns = 100 + 200 + 10
    assert timed(["b", "b/gpu:0", "b/gpu:1"]) == (one_ns + after_ns, busy_ns)


def test_a_device_is_named_by_platform_and_index_after_its_worker(cluster):
    for wrong in ("b/", "b/cpu", "b/cpu:x", "b/CPU:0", "b/cpu:0/", "b/:0"):
        with fails_with(JdagError, "context.no_worker_b_named_as"):
            cluster.put(wrong, T1)
    with fails_with(JdagError, "context.no_worker_e_cpu_0"):
        cluster.put("e/cpu:0", T1)


def test_a_program_runs_on_a_worker_and_not_on_a_device(cluster):
    @jdag.program
    def inner(ctx: Any, x: Any) -> Any:
        return ctx.call(f"{ctx.here}/cpu:0", jnp.sum, x)

    @jdag.program
    def outer(ctx: Any, x: Any) -> Any:
        return ctx.call("b/cpu:0", inner, x)

    with cluster.context() as ctx:
        with fails_with(JdagError, "context.inner_is_a_program_b_cpu"):
            outer(ctx, T1)
        out = ctx.call("b", inner, T1)
        assert out.place == "b/cpu:0" and out.fetch() == 6
    with fails_with(JdagError, "context.inner_is_a_program_b"):
        jdag.oracle(outer)(T1)


def test_refs_of_the_oracle_say_their_device_as_well():
    seen = []

    def loss(ctx: Any, w: Any) -> Any:
        out = ctx.call("b/gpu:5", jnp.sum, w)
        seen.append((out.worker, out.device, out.place))
        return out

    jdag.oracle(loss)(T1)
    assert seen == [("b", "gpu:5", "b/gpu:5")] * 2


if __name__ == "__main__":
    for check in CHECKS:
        globals()[check]()
        print(check)
