"""Leaves are made and replaced together: one message an owner, all of them or none."""

import jax.numpy as jnp
import numpy as np
import pytest

from jdag.api.drivers import simulate
from jdag.context.leaves import Change
from jdag.context.refs import fetch
from jdag.errors import JdagError, RemoteError, WorkerLost
from jdag.sim import Crash, LinkModel
from tests.tools.error_texts import fails_with
from tests.tools.face_cases import ONES, raises_at_run_time


def sent(cluster):
    cluster.driver.settle()
    info = cluster.info()["a"]
    return info["messages_sent"], info["payload_bytes_sent"]


def scaled(leaf, factor):
    return leaf * factor


def test_an_update_is_one_message_to_each_owner_and_its_constant_goes_once(cluster):
    refs = [cluster.put("bcbdcb"[n], ONES + n) for n in range(6)]
    before = sent(cluster)
    cluster.update(scaled, refs, 3 * ONES)
    messages, payload = sent(cluster)
    assert messages - before[0] == 3
    assert payload - before[1] == 3 * ONES.nbytes
    for n, leaf in enumerate(fetch(refs)):
        np.testing.assert_array_equal(leaf, 3 * (ONES + n))
    held = {name: worker["values_held"] for name, worker in cluster.info().items()}
    assert held == {"a": 0, "b": 3, "c": 2, "d": 1}


def test_a_constant_of_own_and_other_leaves_is_kept_until_all_have_used_it(cluster):
    refs = [cluster.put("abaca"[n], ONES + n) for n in range(5)]
    cluster.update(scaled, refs, 2 * ONES)
    for n, leaf in enumerate(fetch(refs)):
        np.testing.assert_array_equal(leaf, 2 * (ONES + n))
    cluster.driver.settle()
    held = {name: worker["values_held"] for name, worker in cluster.info().items()}
    assert held == {"a": 3, "b": 1, "c": 1, "d": 0}


def test_all_parts_of_an_assignment_read_the_versions_from_before_it(cluster):
    x, y = cluster.put("b", 3.0), cluster.put("b", 5.0)
    cluster.assign([Change(jnp.negative, [x], (7.0,)), Change(scaled, [y], (x, 10.0))])
    assert fetch([x, y]) == [-7.0, 30.0]
    cluster.assign([Change(scaled, [x], (y, 1.0)), Change(scaled, [y], (x, 1.0))])
    assert fetch([x, y]) == [30.0, -7.0]


def test_of_an_assignment_with_a_lost_owner_nothing_is_made():
    crash = Crash("c", 70, at_ns=1_000_000)
    link = LinkModel(latency_ns=100)
    with simulate(list("abcd"), seed=0, faults=[crash], network=link) as cluster:
        refs = [cluster.put(worker, ONES) for worker in "abcd"]
        cluster.driver.settle()
        with fails_with(WorkerLost, "properties.leaf_2_on_c_cannot"):
            cluster.update(scaled, refs, 3 * ONES)
        cluster.driver.settle()
        assert cluster.info()["a"]["values_held"] == 1  # The constant has gone.
        for ref in (refs[0], refs[1], refs[3]):
            np.testing.assert_array_equal(ref.fetch(), ONES)


def test_of_an_assignment_that_is_refused_nothing_is_made(cluster):
    refs = [cluster.put("b", ONES), cluster.put("c", jnp.ones(2)), cluster.put("d", 1)]
    with fails_with(JdagError, "properties.returned_float64_for_leaf_2"):
        cluster.update(lambda leaf: leaf * 0.5, refs)
    for ref, value in zip(refs, (ONES, jnp.ones(2), 1), strict=True):
        np.testing.assert_array_equal(ref.fetch(), value)
    with fails_with(RemoteError, "properties.failed_on_c_for_the"):
        cluster.assign(
            [
                Change(scaled, [refs[0]], (refs[0], 2.0)),
                Change(jnp.reshape, [refs[1]], (refs[1], 3), "for the second"),
            ]
        )
    np.testing.assert_array_equal(refs[0].fetch(), ONES)


def test_a_leaf_is_replaced_once_by_an_assignment(cluster):
    refs = [cluster.put(worker, ONES) for worker in "bcb"]
    with fails_with(JdagError, "properties.leaf_1_on_c_is"):
        cluster.update(scaled, [*refs, refs[1]], 3.0)
    for ref in refs:
        np.testing.assert_array_equal(ref.fetch(), ONES)


def test_what_fails_on_an_owner_fails_for_its_leaves_alone(cluster):
    refs = [cluster.put(worker, ONES) for worker in "bbc"]
    cluster.assign(
        [
            Change(scaled, [refs[0]], (refs[0], 2.0)),
            Change(raises_at_run_time, [refs[1]], (refs[1],), "for the second"),
            Change(scaled, [refs[2]], (refs[2], 2.0)),
        ]
    )
    np.testing.assert_array_equal(refs[0].fetch(), 2 * ONES)
    np.testing.assert_array_equal(refs[2].fetch(), 2 * ONES)
    with pytest.raises(RemoteError, match=r"for the second(.|\n)*not assigned: leaf 1"):
        refs[1].fetch()
    cluster.assign([Change(jnp.ones_like, [refs[1]], (refs[0],))])
    np.testing.assert_array_equal(refs[1].fetch(), ONES)


def test_a_leaf_takes_one_value_of_a_load(cluster, tmp_path):
    x, y = cluster.put("b", 3.0), cluster.put("c", 5.0)
    cluster.save(tmp_path / "site", params=[x, y])
    with fails_with(JdagError, "properties.leaf_0_on_b_is"):
        cluster.load(tmp_path / "site", params=[x, x])
    cluster.update(jnp.negative, [x, y])
    assert fetch([x, y]) == [-3.0, -5.0]
