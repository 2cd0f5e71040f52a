"""Collectives between programs of cluster.run: values and errors, on every driver."""

from functools import partial
from typing import Any, cast

import jax

import jdag
from jdag.collectives.routes import route_of
from jdag.errors import CollectiveError, RemoteError, WorkerLost
from tests.conformance.drivers import Driver, leaving_nothing
from tests.tools.collective_programs import (
    HOW,
    adds_of_length,
    all_kinds,
    bits,
    dies,
    exchanges,
    in_order,
    raises,
    returns,
    sums,
    trains,
)
from tests.tools.error_texts import fails_with
from tests.tools.replica_cases import (
    NAMES,
    SHAPES,
    added_up,
    expected,
    factors,
    one_part,
)

WORKERS = ("a", "b", "c", "d")
WAITS = "waits in cluster.all_reduce, called at collective_programs.py"


def test_four_collectives_give_each_member_the_same_bits(driver: Driver, cluster: Any):
    among = ("c", "a", "d", "b")
    trees = [factors(WORKERS.index(name), SHAPES) for name in among]
    with leaving_nothing(driver, cluster):
        done = cluster.run(dict.fromkeys(WORKERS, partial(all_kinds, among)))
    for found in done.values():
        for how in HOW:
            right = expected(how, trees, NAMES, among=True)
            assert found[f"sum {how}"] == bits(right)
            assert found[f"all {how}"] == "".join(map(bits, trees))
            assert tuple(found[f"one {how}"]) == ("a", bits(trees[1]))


def test_shares_are_summed_and_exchanged_between_members(driver: Driver, cluster: Any):
    among = ("c", "a", "d", "b")
    trees = [factors(WORKERS.index(name), SHAPES) for name in among]
    with leaving_nothing(driver, cluster):
        done = cluster.run(dict.fromkeys(WORKERS, partial(exchanges, among)))
    for to, name in enumerate(among):
        shares = [jax.tree.map(lambda x, n=to: x * 2.0**n, tree) for tree in trees]
        vectors = [one_part(tree, NAMES) for tree in shares]
        for how in HOW:
            (right,) = added_up(route_of(to, 4, cast(Any, how), -1), vectors)
            assert done[name][how] == right.tobytes().hex()
        assert done[name]["all"] == bits(shares)


def test_replicas_that_train_in_loops_of_their_own_stay_equal(driver: Driver):
    found: list[Any] = []
    for cluster in driver.rough(WORKERS, 2):
        done = cluster.run(dict.fromkeys(WORKERS, partial(trains, 5, "ring")))
        assert len(dict.fromkeys(done["a"])) == 5
        found.extend(tuple(each) for each in done.values())
    assert found == found[:1] * 8


def test_a_member_that_returns_early_is_named_to_all_who_wait(cluster: Any):
    programs = {"b": sums, "c": returns, "d": sums}
    with fails_with(CollectiveError, "conformance.c_has_returned") as caught:
        cluster.run(programs)
    for text in (str(caught.value), *caught.value.__notes__):
        assert "'c' has returned" in text and WAITS in text
    assert len(caught.value.__notes__) == 1


def test_a_member_that_raises_is_the_error_and_others_have_named_it(cluster: Any):
    with fails_with(RemoteError, "conformance.raises_failed_on_d_no") as caught:
        cluster.run({"b": sums, "c": sums, "d": raises})
    assert len(caught.value.__notes__) == 2
    for note in caught.value.__notes__:
        assert "'d' has failed: ValueError: no more data" in note and WAITS in note


def test_a_member_that_dies_is_the_error_and_others_have_named_it(driver: Driver):
    with driver.mortal("c") as cluster:
        with fails_with(WorkerLost, "conformance.c_is_lost") as caught:
            cluster.run({"b": sums, "c": dies, "d": sums})
        assert len(caught.value.__notes__) == 2
        for note in caught.value.__notes__:
            assert "'c' has failed: worker 'c' is lost" in note and WAITS in note
        assert cluster.run({"a": sums, "b": sums, "d": sums})["d"] == 3.0


def test_members_that_disagree_are_told_both_and_go_on(cluster: Any):
    lengths = {"a": 3, "b": 3, "c": 4}
    done = cluster.run({one: partial(adds_of_length, n) for one, n in lengths.items()})
    for text, total in done.values():
        assert "['w'] is float64[" in text or "['w'] is float32[" in text
        assert "[4] in 'c'" in text and text.count(WAITS) >= 2
        assert total == 3.0


def test_crossed_groups_are_a_deadlock_that_names_who_waits_where(cluster: Any):
    one, other = ("a", "b", "c"), ("c", "b", "a")
    orders = {"a": (one, other), "b": (one, other), "c": (other, one)}
    done = cluster.run({name: partial(in_order, both) for name, both in orders.items()})
    for texts, total in done.values():
        assert total == 3.0
        for text in texts:
            assert "wait for each other, in groups" in text
            assert f"'c' {WAITS}" in text and text.count(WAITS) >= 2


def test_what_one_process_cannot_name_to_another_is_an_error_and_no_loss(
    driver: Driver,
):
    if driver.name == "sim":
        return  # Its workers are in one process.
    with driver.cluster() as cluster:
        done = cluster.run(dict.fromkeys("bcd", nameless))
        assert all(
            "nameless.<locals>.<lambda> cannot be looked up by name" in one
            for one in done.values()
        )
        assert cluster.run(dict.fromkeys("bcd", sums)) == dict.fromkeys("bcd", 3.0)


def nameless(cluster: Any) -> str:
    try:
        cluster.all_reduce({"w": 1.0, "fn": lambda x: x})
    except jdag.errors.CollectiveError as error:
        return str(error)
    return ""
