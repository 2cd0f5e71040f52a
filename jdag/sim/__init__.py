"""Simulated clusters: virtual time in one process, repeatable bit for bit from a seed.

This package contains the links, faults and device models that `jdag.simulate` accepts.
"""

from jdag.sim import presets, topologies
from jdag.sim.devices import DeviceModel, Roofline
from jdag.sim.faults import Crash, Delay, Drop, Duplicate, Fault, Partition, Slow
from jdag.sim.network import LinkModel, LogGP, Network
from jdag.sim.reliable_link import LinkSettings

__all__ = [
    "Crash",
    "Delay",
    "DeviceModel",
    "Drop",
    "Duplicate",
    "Fault",
    "LinkModel",
    "LinkSettings",
    "LogGP",
    "Network",
    "Partition",
    "Roofline",
    "Slow",
    "presets",
    "topologies",
]
