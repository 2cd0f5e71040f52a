"""Topologies: networks whose workers share physical links, of one or more dimensions.

Each builder returns a `jdag.sim.Network`. Its workers are numbered in the order given;
with several dimensions the coordinates of a number are row-major. A message goes
through the dimensions in order (dimension-order routing), over directed links between
workers and switches. Each link carries one message at a time, for size / bandwidth.

With store-and-forward each node receives all of a message before it sends it on: over
h equal free links s bytes take h (latency + s / bandwidth). With `cut_through` a node
sends on what has arrived, at most as fast as the slowest link so far: h latency +
s / bandwidth. Buffers are unlimited.

Workers of a run that the topology does not name, such as main, are reached over links
of their own, with the model `default`.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Annotated

from msgspec import Meta

from jdag.errors import ScenarioError, unusable
from jdag.settings.validation import (
    COUNT,
    Settings,
    converted,
    is_listed,
    one_of,
    where,
)
from jdag.sim.network import LinkModel, Network, PathLink

_KINDS = ("ring", "switch", "fully_connected", "tree")
_PLAIN = "a LinkModel, and no LogGP: its overheads are those of end points"


class Dimension(Settings, frozen=True):
    """One dimension of a topology.

    `kind`: "ring" (shorter way; of two equal ones the ascending), "switch" (one, over
    two links), "fully_connected" or "tree" (switches with `arity` children, workers at
    the leaves). `size`: the number of positions; `link`: the model of its links.

    Raises:
        ScenarioError: names the value that is unusable and what is allowed.
    """

    kind: Annotated[str, one_of(*_KINDS)]
    size: COUNT
    link: Annotated[LinkModel, where(lambda link: type(link) is LinkModel, _PLAIN)]
    arity: Annotated[int, Meta(ge=2)] = 2

    def steps(self, source: int, destination: int) -> list[int | str]:
        """Return the nodes after `source`: positions, and names of switches."""
        if self.kind == "ring":
            ahead = (destination - source) % self.size
            step = 1 if 2 * ahead <= self.size else -1
            count = min(ahead, self.size - ahead)
            return [(source + step * n) % self.size for n in range(1, count + 1)]
        if self.kind == "fully_connected":
            return [destination]
        if self.kind == "switch":
            return ["switch", destination]
        up: list[int | str] = []
        down: list[int | str] = [destination]
        level, left, right = 0, source, destination
        while left != right:  # Bounded: each is divided until both are 0.
            level, left, right = level + 1, left // self.arity, right // self.arity
            up.append(f"{level}.{left}")
            down.insert(0, f"{level}.{right}")
        return up + down[1:]


_LISTED = Meta(description="a list of jdag.sim.topologies.Dimension")
_DIMENSIONS = Annotated[tuple[Dimension, ...], _LISTED]
_SHAPE = Annotated[tuple[COUNT, ...], Meta(description="a list of integers >= 1")]


def topology(
    workers: Sequence[str],
    dimensions: Sequence[Dimension],
    *,
    cut_through: bool = False,
    default: LinkModel | None = None,
    control_lane: LinkModel | bool | None = None,
) -> Network:
    """Return a network of these dimensions; see `jdag.sim.topologies`.

    Args:
        workers: as many as the product of the dimensions' sizes, in row-major order.
        dimensions: in the order in which messages go through them.
        cut_through: whether nodes send on what has not arrived in full.
        default: the links of other workers; None: free and immediate.
        control_lane: see `jdag.sim.Network`.

    Raises:
        ScenarioError: names the value that is unusable and what is allowed.
    """
    dimensions = converted(_DIMENSIONS, dimensions, "dimensions")
    count = prod([one.size for one in dimensions])
    names = tuple(workers) if is_listed(workers) else ()
    if len(dict.fromkeys(names)) != count or len(names) != count:
        allowed = f"a list of {count} different names, the product of the sizes"
        raise ScenarioError(unusable("workers", workers, allowed))
    numbers = {name: number for number, name in enumerate(names)}
    route = partial(_route, names, numbers, tuple(dimensions))
    return Network(
        default or LinkModel(),
        control_lane=control_lane,
        routed=names,
        route=route,
        cut_through=cut_through,
    )


def _route(
    names: tuple[str, ...],
    numbers: Mapping[str, int],
    dimensions: tuple[Dimension, ...],
    source: str,
    destination: str,
) -> tuple[PathLink, ...]:
    hops: list[PathLink] = []
    at, number, goal = source, numbers[source], numbers[destination]
    stride = len(names)
    for index, dimension in enumerate(dimensions):
        before, stride = stride, stride // dimension.size
        here, there = (n % before // stride for n in (number, goal))
        if here == there:
            continue
        line = number - here * stride  # The first position of its line.
        for step in dimension.steps(here, there):
            if isinstance(step, int):
                node = names[line + step * stride]
            else:  # No worker's name has a #.
                node = f"#{index}.{line}.{step}"
            hops.append(PathLink(at, node, dimension.link))
            at = node
        number = line + there * stride
    return tuple(hops)


def ring(
    workers: Sequence[str], link: LinkModel, *, cut_through: bool = False
) -> Network:
    """Return a ring with links both ways; see `topology`."""
    return _one("ring", workers, link, cut_through)


def switch(
    workers: Sequence[str], link: LinkModel, *, cut_through: bool = False
) -> Network:
    """Return workers with one link each to, and from, one switch; see `topology`."""
    return _one("switch", workers, link, cut_through)


def fully_connected(workers: Sequence[str], link: LinkModel) -> Network:
    """Return a network with a link from each worker to each other; see `topology`."""
    return _one("fully_connected", workers, link, False)


def tree(
    workers: Sequence[str],
    link: LinkModel,
    *,
    arity: int = 2,
    cut_through: bool = False,
) -> Network:
    """Return a tree of switches with the workers at its leaves; see `topology`."""
    return _one("tree", workers, link, cut_through, arity)


def torus(
    workers: Sequence[str],
    shape: Sequence[int],
    link: LinkModel,
    *,
    cut_through: bool = False,
) -> Network:
    """Return a torus: a ring in each dimension of `shape`; see `topology`."""
    shape = converted(_SHAPE, shape, "shape")
    rings = [Dimension("ring", size, link) for size in shape]
    return topology(workers, rings, cut_through=cut_through)


def _one(
    kind: str,
    workers: Sequence[str],
    link: LinkModel,
    cut_through: bool,
    arity: int = 2,
) -> Network:
    count = len(workers) if is_listed(workers) else 1
    dimension = Dimension(kind, count, link, arity)
    return topology(workers, [dimension], cut_through=cut_through)
