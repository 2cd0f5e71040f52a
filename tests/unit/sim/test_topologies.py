"""Which physical links a message takes, and when it arrives over them."""

from typing import Any

import pytest

from jdag.errors import ScenarioError
from jdag.runtime.chooser import Chooser
from jdag.sim.network import LinkModel, LogGP, Network, Traffic
from jdag.sim.topologies import (
    Dimension,
    fully_connected,
    ring,
    switch,
    topology,
    torus,
    tree,
)
from tests.tools.error_texts import fails_with

EIGHT = tuple("abcdefgh")
LINK = LinkModel(latency_ns=100, bandwidth_bytes_per_s=1_000_000_000)
NOT: Any = 5  # What is unusable.
SIZE = 5_000  # Bytes, one a nanosecond.


def nodes(network, source, destination):
    hops = network.path(source, destination)
    assert [h.destination for h in hops[:-1]] == [h.source for h in hops[1:]]
    return [hops[0].source, *[hop.destination for hop in hops]]


def arrives(network, *sends, workers=EIGHT):
    way = Traffic(network, workers)
    return [way.lane(*pair).transmit(SIZE, 0, Chooser(0)) for pair in sends]


def test_on_a_ring_a_message_takes_the_shorter_way_and_ascends_if_both_are_equal():
    network = ring(EIGHT, LINK)
    assert nodes(network, "a", "d") == ["a", "b", "c", "d"]
    assert nodes(network, "b", "h") == ["b", "a", "h"]
    assert nodes(network, "c", "g") == ["c", "d", "e", "f", "g"]


def test_on_a_torus_a_message_goes_through_the_dimensions_in_order():
    network = torus([str(n) for n in range(24)], (2, 3, 4), LINK)
    # From (0, 0, 1) to (1, 2, 3): 12 a step, 4 a step, 1 a step.
    assert nodes(network, "1", "23") == ["1", "13", "21", "22", "23"]


def test_a_switch_takes_two_links_and_a_tree_those_to_the_common_ancestor():
    assert len(nodes(switch(EIGHT, LINK), "a", "h")) == 3
    network = tree(EIGHT, LINK, arity=2)
    lengths = [len(nodes(network, "a", to)) - 1 for to in "bcdefgh"]
    assert lengths == [2, 4, 4, 6, 6, 6, 6]
    assert nodes(network, "c", "b")[1:4] == ["#0.0.1.1", "#0.0.2.0", "#0.0.1.0"]
    assert len(nodes(tree(EIGHT, LINK, arity=8), "a", "h")) == 3


def test_fully_connected_workers_have_a_link_each():
    network = fully_connected(EIGHT, LINK)
    pairs = [("a", "b"), ("a", "h"), ("b", "a")]
    assert arrives(network, *pairs) == [SIZE + 100] * 3


def test_dimensions_have_kinds_and_links_of_their_own():
    slow = LinkModel(latency_ns=9_000)
    outer, inner = Dimension("switch", 2, slow), Dimension("fully_connected", 4, LINK)
    network = topology(EIGHT, [outer, inner])
    hops = network.path("b", "g")  # From (0, 1) to (1, 2).
    assert nodes(network, "b", "g") == ["b", "#0.1.switch", "f", "g"]
    assert [hop.model for hop in hops] == [slow, slow, LINK]
    assert network.model("b", "g") == LinkModel(latency_ns=18_100)


@pytest.mark.parametrize("hops", [1, 2, 3, 4])
def test_store_and_forward_pays_the_transfer_at_each_hop_and_cut_through_once(hops):
    to = EIGHT[hops]
    assert arrives(ring(EIGHT, LINK), ("a", to)) == [hops * (100 + SIZE)]
    cut = ring(EIGHT, LINK, cut_through=True)
    assert arrives(cut, ("a", to)) == [hops * 100 + SIZE]


def test_cut_through_goes_at_the_pace_of_the_slowest_link():
    quick = LinkModel(latency_ns=10, bandwidth_bytes_per_s=5_000_000_000)
    for links in ((LINK, quick), (quick, LINK)):
        lines = [Dimension("fully_connected", 2, link) for link in links]
        network = topology([*"abcd"], lines, cut_through=True)
        assert arrives(network, ("a", "d"), workers="abcd") == [SIZE + 110]


@pytest.mark.parametrize("cut_through", [False, True])
def test_paths_over_one_physical_link_share_it_and_others_do_not(cut_through):
    network = ring(EIGHT, LINK, cut_through=cut_through)
    there, both = arrives(network, ("b", "c"), ("a", "c"))
    assert there == SIZE + 100
    # Over a to b it takes 100 more than the first, which holds b to c until then.
    assert both == 2 * SIZE + (100 if cut_through else 200)
    apart = arrives(network, ("b", "c"), ("c", "d"), ("b", "a"), ("c", "b"))
    assert apart == [SIZE + 100] * 4


def test_workers_outside_of_a_topology_have_links_of_their_own():
    network = topology([*"ab"], [Dimension("ring", 2, LINK)], default=LinkModel(7))
    assert arrives(network, ("c", "a"), ("a", "b")) == [7, SIZE + 100]
    with fails_with(ScenarioError, "sim.topology_worker_b_allowed_is"):
        Traffic(network, ["a", "c"])


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: Dimension("mesh", 2, LINK), "kind = 'mesh': expected one of ring"),
        (lambda: Dimension("ring", 0, LINK), "size = 0: expected an integer >= 1"),
        (
            lambda: ring(["a", "b"], LogGP()),
            r"link = LogGP\(.*: expected a LinkModel other",
        ),
        (lambda: tree(["a"], LINK, arity=1), "arity = 1: expected an integer >= 2"),
        (lambda: torus("abc", (2, 2), LINK), "workers = 'abc': expected a list of 4"),
        (lambda: ring(["a", "a"], LINK), "workers = .*: expected a list of 2 diff"),
        (lambda: torus(["a"], NOT, LINK), "shape = 5: expected a list"),
        (lambda: topology(["a"], [NOT]), r"dimensions\[0\] = 5: expected a Dime"),
        (lambda: Network(LINK, cut_through=NOT), "cut_through = 5: expected true"),
    ],
)
def test_an_unusable_topology_is_refused_in_one_line(build: Any, said: str):
    with pytest.raises(ScenarioError, match=said):
        build()
