"""Virtual time: a whole cluster in one process, exactly repeatable from one seed.

What a simulated cluster is made of, for `jdag.simulate`: links, faults, devices.
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
