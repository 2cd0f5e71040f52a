"""Networks of known hardware, with their sources.

The rates are the published signalling rates, in bytes per second of one direction; what
software reaches is less. The sources give no latency, so that is an argument.
"""

from collections.abc import Sequence

from jdag.sim.network import LinkModel, Network
from jdag.sim.topologies import switch


def h100_node(workers: Sequence[str], *, latency_ns: int = 0) -> Network:
    """Return the NVLink network of one HGX H100 node: a switch, with cut-through.

    Each worker has 450e9 B/s to, and from, the switch: half of the 900 GB/s total of
    both directions.

    Args:
        workers: one for each GPU; 8 in a full node.
        latency_ns: of each of the two links of a path.

    Raises:
        ScenarioError: names the value that is unusable and what is allowed.

    Source: NVIDIA, "NVIDIA H100 Tensor Core GPU" data sheet, "Interconnect: NVLink:
    900GB/s" (SXM).
    """
    link = LinkModel(latency_ns, 450_000_000_000)
    return switch(workers, link, cut_through=True)


def ethernet_100g(workers: Sequence[str], *, latency_ns: int = 0) -> Network:
    """Return hosts at one 100 Gbit/s Ethernet switch, with cut-through.

    Each worker has 12.5e9 B/s to, and from, the switch, which passes on frames of a
    long message while others arrive.

    Args:
        workers: one for each host.
        latency_ns: of each of the two links of a path.

    Raises:
        ScenarioError: names the value that is unusable and what is allowed.

    Source: IEEE Std 802.3ba-2010, 100 Gb/s MAC data rate; headers of frames, preambles
    and gaps between frames are not counted.
    """
    link = LinkModel(latency_ns, 12_500_000_000)
    return switch(workers, link, cut_through=True)
