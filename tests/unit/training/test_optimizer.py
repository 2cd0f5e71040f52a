"""An optimizer steps each leaf on its owner, as optax does all of them in one place."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdag
from jdag.api.drivers import simulate
from jdag.context.refs import fetch
from jdag.errors import ContextError, JdagError, WorkerLost
from jdag.sim import Crash
from jdag.training.optimizer import Optimizer, squared_norm
from tests.tools.error_texts import fails_with
from tests.tools.face_cases import ONES, total
from tests.tools.recovery_cases import bits


def sent(cluster):
    cluster.driver.settle()
    info = cluster.info()["a"]
    return np.array([info["messages_sent"], info["payload_bytes_sent"]])


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_a_step_is_one_message_to_each_owner_and_clipping_one_exchange_more(
    cluster, clip_norm
):
    refs = [cluster.put("bcd"[n % 3], ONES + n) for n in range(12)]
    optimizer = Optimizer(optax.adam(0.1), refs, clip_norm=clip_norm)
    with cluster.context() as ctx:
        ctx.backward(ctx.call("a", total, *refs))
        before = sent(cluster)
        optimizer.step(ctx)
        messages, payload = sent(cluster) - before
        # For each of three owners Assign; and with norms Call, Read before it.
        assert messages == 3 * (1 if clip_norm is None else 3)
        assert payload == 3 * (0 if clip_norm is None else 8)  # The scale, once each.


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_an_abstract_step_sends_what_a_real_one_does(clip_norm):
    counts = []
    for values in ("real", "abstract"):
        with simulate(["a", "b", "c"], seed=0, values=values) as cluster:
            refs = [cluster.put("bcb"[n], ONES) for n in range(3)]
            optimizer = Optimizer(optax.adam(0.1), refs, clip_norm=clip_norm)
            with cluster.context() as ctx:
                ctx.backward(ctx.call("a", total, *refs))
                optimizer.step(ctx)
            counts.append(list(sent(cluster)))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("is_plan", [False, True])
def test_a_clipped_step_passes_a_guard_of_implicit_transfers(is_plan):
    x = jnp.arange(1.0, 4.0)
    with jax.transfer_guard("disallow"), simulate(["a", "b"], seed=0) as cluster:
        w = cluster.put("b", x)
        optimizer = Optimizer(optax.sgd(0.1), w, clip_norm=1.0)
        step = jdag.compile(lambda ctx, w: ctx.call("b", total, w), cluster, optimizer)
        for _ in range(2):  # The second call of a compiled function is another path.
            if is_plan:
                step(w)
                continue
            with cluster.context() as ctx:
                ctx.backward(ctx.call("b", total, w))
                optimizer.step(ctx)
        stepped = w.fetch()
    assert not np.array_equal(stepped, x)


def stepped_apart(tx, clip_norm, placement):
    with simulate(["a", "b", "c"], seed=0) as cluster:
        params = {
            name: cluster.put(
                placement[n], jnp.linspace(0.3, 2.0 + n, size).astype(dtype)
            )
            for n, (name, size, dtype) in enumerate(
                [
                    ("u", 5, "float32"),
                    ("v", 700, "float32"),
                    ("w", 5, "float32"),
                    ("x", 3, "float16"),
                    ("y", 700, "float32"),
                    ("z", 1, "float64"),
                ]
            )
        }
        optimizer = Optimizer(tx, params, clip_norm=clip_norm)
        for _ in range(3):
            with cluster.context() as ctx:
                parts = [
                    ctx.call(ref.worker, lambda p: jnp.sum(jnp.sin(p) ** 2), ref)
                    for ref in params.values()
                ]
                ctx.backward(*parts)
                optimizer.step(ctx)
        return bits(fetch([params, optimizer.states]))


@pytest.mark.parametrize("clip_norm", [None, 0.7])
def test_the_bits_of_a_step_are_those_of_any_placement(clip_norm):
    schedule = optax.cosine_decay_schedule(0.1, 10)
    tx = optax.chain(optax.clip(0.5), optax.adamw(schedule, weight_decay=0.01))
    alone = stepped_apart(tx, clip_norm, "aaaaaa")
    for placement in ("abcabc", "cabbac"):
        assert stepped_apart(tx, clip_norm, placement) == alone


def test_a_schedule_counts_the_steps_of_each_leaf(cluster):
    halving = optax.exponential_decay(1.0, 1, 0.5)
    p, q = cluster.put("b", 10.0), cluster.put("c", 10.0)
    optimizer = Optimizer(optax.sgd(halving), [p, q])
    for leaves in ([p, q], [p], [p], [p, q]):
        with cluster.context() as ctx:
            ctx.backward(ctx.call("d", total, *leaves))
            optimizer.step(ctx)
    assert fetch([p, q]) == [10 - 1 - 0.5 - 0.25 - 0.125, 10 - 1 - 0.5]


def test_the_clipped_norm_is_that_over_all_owners(cluster):
    refs = [cluster.put(worker, jnp.asarray([0.0])) for worker in "bcd"]
    optimizer = Optimizer(optax.sgd(1.0), refs, clip_norm=8.0)
    with cluster.context() as ctx:
        loss = ctx.call("a", lambda x, y, z: jnp.sum(2 * x + 3 * y + 6 * z), *refs)
        ctx.backward(loss)
        optimizer.step(ctx)
        np.testing.assert_allclose(
            np.concatenate(fetch(refs)), [-2.0, -3.0, -6.0], rtol=1e-15
        )
        optimizer = Optimizer(optax.sgd(1.0), refs, clip_norm=3.5)
        optimizer.step(ctx)
        np.testing.assert_allclose(
            np.concatenate(fetch(refs)), [-3.0, -4.5, -9.0], rtol=1e-15
        )


def test_squared_norms_are_summed_in_the_order_of_the_leaves(cluster):
    # 1.96 is lost in 2 ** 54, twelve times 1.96 are not: another order shows, as that
    # by owners, where the second leaf comes last.
    factors = [1.4, 2.0**27] + 11 * [1.4]
    refs = [cluster.put("b" if n == 1 else "c", 0.0) for n in range(13)]
    optimizer = Optimizer(optax.sgd(1.0), refs, clip_norm=2.0**26)
    with cluster.context() as ctx:
        ctx.backward(
            ctx.call("a", lambda *x: jnp.dot(jnp.stack(x), jnp.asarray(factors)), *refs)
        )
        optimizer.step(ctx)
    assert fetch(refs) == [-factor / 2 for factor in factors]


def test_a_norm_that_is_no_number_spoils_all_leaves_as_in_optax(cluster):
    refs = [cluster.put("b", jnp.ones(2)), cluster.put("c", jnp.ones(2))]
    optimizer = Optimizer(optax.sgd(1.0), refs, clip_norm=1.0)
    with cluster.context() as ctx:
        ctx.backward(ctx.call("b", lambda w, v: jnp.sum(w * jnp.nan + v), *refs))
        optimizer.step(ctx)
    assert np.isnan(fetch(refs)).all()


def test_squared_norms_are_taken_at_least_in_float32():
    # float(): JAX would take the other side of == to float16, where it is infinite too.
    assert float(squared_norm(jnp.full(4, 300.0, jnp.float16))) == 4 * 300.0**2
    assert squared_norm(jnp.asarray([3 + 4j])) == 25
    assert squared_norm(jnp.ones(2, jnp.float64)).dtype == jnp.float64


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda c: Optimizer(cast(Any, optax.sgd), []), r"tx = <fun.*sgd\("),
        (lambda c: Optimizer(cast(Any, None), []), r"tx = None: .*sgd\("),
        (lambda c: Optimizer(cast(Any, optax.MultiSteps), []), "tx = <class"),
        (lambda c: Optimizer(optax.sgd(0.1), []), "needs leaves, but .* has no refs"),
        (lambda c: Optimizer(optax.sgd(0.1), [1.0]), "expected a ref"),
        (lambda c: Optimizer(optax.sgd(0.1), c.put("b", 3)), "float or complex leaves"),
        (
            lambda c: Optimizer(optax.sgd(0.1), [c.put("b", 1.0)] * 2),
            "a leaf occurs twice",
        ),
        (
            lambda c: Optimizer(optax.sgd(0.1), c.put("b", 1.0), clip_norm=0.0),
            "clip_norm = 0.0: expected a number above 0, or None",
        ),
        (
            lambda c: Optimizer(optax.contrib.reduce_on_plateau(), c.put("b", 1.0)),
            "additional arguments are not supported",
        ),
    ],
)
def test_what_cannot_be_optimized_is_named(cluster, make, text):
    with pytest.raises(JdagError, match=text):
        make(cluster)


def test_an_optimizer_on_a_closed_cluster_says_that_it_is_closed(cluster):
    w = cluster.put("b", ONES)
    cluster.close()
    with fails_with(ContextError, "training.jdag_optimizer_on_which_is"):
        Optimizer(optax.sgd(0.1), w)


def test_a_step_needs_an_open_context_of_its_cluster(cluster):
    w = cluster.put("b", ONES)
    optimizer = Optimizer(optax.sgd(0.1), w)
    with cluster.context() as ctx:
        ctx.backward(ctx.call("c", total, w))
    with fails_with(ContextError, "training.is_over"):
        optimizer.step(ctx)
    with fails_with(JdagError, "training.step_takes_the_context_not"):
        optimizer.step(cast(Any, None))
    with simulate(["x", "y"], seed=0) as other:
        theirs = other.put("y", ONES)
        with other.context() as ctx:
            ctx.backward(ctx.call("x", total, theirs))
            with fails_with(ContextError, "training.leaves_of_the_cluster_of"):
                optimizer.step(ctx)


def test_states_are_dropped_with_their_optimizer(cluster):
    w = cluster.put("b", ONES)
    optimizer = Optimizer(optax.adam(0.1), w)
    cluster.driver.settle()
    assert cluster.info()["b"]["values_held"] == 4
    optimizer.drop()
    cluster.driver.settle()
    assert cluster.info()["b"]["values_held"] == 1


def three_leaves(cluster):
    return {
        "u": cluster.put("b", jnp.ones(3)),
        "v": cluster.put("c", jnp.ones(2)),
        "w": cluster.put("d", jnp.ones(4)),
    }


def test_many_optimizers_are_no_functions_made_anew_in_a_loop(cluster):
    w = cluster.put("b", 1.0)
    with cluster.context() as ctx:
        ctx.backward(ctx.call("c", total, w))
        for _ in range(33):  # A warning, which comes with the 32nd, is an error here.
            Optimizer(optax.sgd(0.125), w).step(ctx)
    assert w.fetch() == 1 - 33 * 0.125


def test_an_optimizer_is_shown_with_its_owners(cluster):
    params = three_leaves(cluster)
    optimizer = Optimizer(optax.sgd(0.1), params, clip_norm=2.0)
    assert repr(optimizer) == "Optimizer(3 leaves on 'b', 'c', 'd', clip_norm=2.0)"
    optimizer.drop()
    assert repr(optimizer) == "Optimizer(0 leaves on no worker, clip_norm=2.0)"
    optimizer.drop()
    with fails_with(ContextError, "training.whose_states_were_dropped"):
        fetch(optimizer.states)
    with (
        cluster.context() as ctx,
        fails_with(ContextError, "training.whose_states_were_dropped"),
    ):
        optimizer.step(ctx)


def test_a_state_that_cannot_be_made_is_named_and_the_others_are_dropped():
    with simulate(
        list("abcd"), seed=0, faults=[Crash("c", 10, at_ns=1_000)]
    ) as cluster:
        params = three_leaves(cluster)
        cluster.driver.settle()
        before = cluster.info()
        with fails_with(WorkerLost, "training.v_leaf_1_on_c"):
            Optimizer(optax.adam(0.1), params)
        cluster.driver.settle()
        for name in "abd":
            held = cluster.info()[name]["values_held"]
            assert held == before[name]["values_held"]
