"""Routes reach every replica once, parents first, and are as short as can be."""

import numpy as np
import pytest

from jdag.collectives.routes import HOW, check_how, routes_among, routes_from, routes_up
from jdag.errors import JdagError
from tests.tools.error_texts import fails_with

COUNTS = (1, 2, 3, 4, 7, 64)


def sources(count):
    return (None, 0, count - 1, count // 2)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("count", COUNTS)
def test_every_route_is_a_tree_over_all_replicas(how, count):
    all_routes = [routes_from(source, count, how) for source in sources(count)]
    for routes in (*all_routes, routes_among(count, how), routes_up(count, how)):
        assert len(routes) == (count if how == "ring" else 1)
        for route in routes:
            assert sorted(route.order) == list(range(count))
            for place, replica in enumerate(route.order):
                parent = route.parents[replica]
                assert parent is None or parent in route.order[:place]
                assert replica in route.children(parent)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("count", COUNTS)
def test_among_replicas_each_route_has_one_root(how, count):
    for routes in (routes_among(count, how), routes_up(count, how)):
        for number, route in enumerate(routes):
            assert route.children(None) == (number,) == route.order[:1]


@pytest.mark.parametrize("count", COUNTS)
def test_the_owner_sends_to_each_replica_in_order(count):
    for source in sources(count):
        (route,) = routes_from(source, count, "owner")
        assert route.children(None) == tuple(range(count))


@pytest.mark.parametrize("count", COUNTS)
def test_in_a_tree_nobody_has_more_than_two_below(count):
    for source in sources(count):
        (route,) = routes_from(source, count, "tree")
        most = {
            replica: len(route.children(replica)) for replica in (None, *route.order)
        }
        assert max(most.values()) <= 2
        assert route.children(None) == (
            (source,) if source is not None else (0, 1)[:count]
        )
        hops: dict[int | None, int] = {None: 0}
        for replica in route.order:
            hops[replica] = hops[route.parents[replica]] + 1
        assert max(hops.values()) <= count.bit_length() + (source is not None)


def test_in_a_tree_of_five_replica_1_is_above_3_and_4():
    (route,) = routes_from(0, 5, "tree")
    assert route.parents == (None, 0, 0, 1, 1)
    (route,) = routes_from(2, 5, "tree")
    assert route.parents == (2, 2, None, 0, 0)


def test_around_a_ring_each_part_goes_to_the_next_and_sums_end_at_its_root():
    down, up = routes_among(4, "ring"), routes_up(4, "ring")
    assert [route.order for route in down] == [
        (0, 1, 2, 3),
        (1, 2, 3, 0),
        (2, 3, 0, 1),
        (3, 0, 1, 2),
    ]
    for number, (route, back) in enumerate(zip(down, up, strict=True)):
        assert back.order[0] == number
        for before, after in zip(route.order, route.order[1:], strict=False):
            assert route.parents[after] == before
        for replica in back.order[1:]:  # Sums too go to the next: the same links.
            assert back.parents[replica] == (replica + 1) % 4


@pytest.mark.parametrize("how", ["star", "", None, 3, ["ring"], np.ones(2)])
def test_any_other_how_is_refused_with_what_is_allowed(how):
    with fails_with(JdagError, "collectives.how_allowed_are_owner_tree"):
        check_how(how)
