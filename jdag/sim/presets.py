"""Networks of common hardware, with their sources.

Rates are the published signalling rates of one direction, in bytes per second; software
reaches less. The sources state no latency, so it is an argument.
"""

from collections.abc import Sequence

from jdag.sim.network import LinkModel, Network
from jdag.sim.topologies import switch


def h100_node(workers: Sequence[str], *, latency_ns: int = 0) -> Network:
    """Return the NVLink network of one HGX H100 node: a switch, with cut-through.

    Each worker has 450e9 B/s to the switch and 450e9 B/s from it. The sum is the
    published 900 GB/s.

    Args:
        workers: one for each GPU; 8 in a full node.
        latency_ns: latency of each of the two links of a path.

    Raises:
        ScenarioError: an argument is unusable.

    Source: NVIDIA, "NVIDIA H100 Tensor Core GPU" data sheet, "Interconnect: NVLink:
    900GB/s" (SXM).
    """
    return switch(workers, LinkModel(latency_ns, 450_000_000_000), cut_through=True)


def ethernet_100g(workers: Sequence[str], *, latency_ns: int = 0) -> Network:
    """Return the network of hosts at one 100 Gbit/s Ethernet switch, with cut-through.

    Each worker has 12.5e9 B/s to the switch and 12.5e9 B/s from it. The switch forwards
    a long message before all of it has arrived.

    Args:
        workers: one for each host.
        latency_ns: latency of each of the two links of a path.

    Raises:
        ScenarioError: an argument is unusable.

    Source: IEEE Std 802.3ba-2010, 100 Gb/s MAC data rate. Frame headers, preambles and
    gaps between frames are not counted.
    """
    return switch(workers, LinkModel(latency_ns, 12_500_000_000), cut_through=True)
