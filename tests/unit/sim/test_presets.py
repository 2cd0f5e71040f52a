"""What presets of networks say of one message."""

import pytest

from jdag.runtime.chooser import Chooser
from jdag.sim.network import Traffic
from jdag.sim.presets import ethernet_100g, h100_node

MIB = 1 << 20


@pytest.mark.parametrize(
    ("preset", "mib_ns"), [(h100_node, 2_331), (ethernet_100g, 83_887)]
)
def test_a_mebibyte_takes_its_bytes_at_the_published_rate_and_two_latencies(
    preset, mib_ns
):
    way = Traffic(preset(["a", "b", "c"], latency_ns=500), ["a", "b", "c"])
    assert way.lane("a", "b").transmit(MIB, 0, Chooser(0)) == mib_ns + 2 * 500
    # The link into b is busy, that into c is not, that out of a is.
    assert way.lane("c", "b").transmit(MIB, 0, Chooser(0)) == 2 * mib_ns + 2 * 500
