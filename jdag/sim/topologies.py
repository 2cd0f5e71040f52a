"""Topologies: networks whose workers share physical links, of one or more dimensions.

Each builder returns a `jdag.sim.Network`. Workers are numbered in the order given; with
several dimensions, their coordinates are row-major. A message passes the dimensions in
order (dimension-order routing), over directed links between workers and switches. Each
link carries one message at a time, for size / bandwidth.

With store-and-forward, each node receives a whole message before it sends it on: s
bytes over h equal idle links take h (latency + s / bandwidth). With `cut_through`, a
node forwards bytes as they arrive, at most as fast as the slowest link so far; s bytes
then take h latency + s / bandwidth. Buffers are unlimited.

Workers of a run that the topology does not name, such as main, have direct links, with
the model `default`.
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
_PLAIN = "a LinkModel other than LogGP, whose overheads belong to end points"


class Dimension(Settings, frozen=True):
    """One dimension of a topology.

    Attributes:
        kind: "ring" (messages take the shorter way; of two equal ways, the ascending),
            "switch" (one switch, a link to and from each worker), "fully_connected", or
            "tree" (switches with `arity` children, workers at the leaves).
        size: number of positions.
        link: model of its links.

    Raises:
        ScenarioError: a value is unusable.
    """

    kind: Annotated[str, one_of(*_KINDS)]
    size: COUNT
    link: Annotated[LinkModel, where(lambda link: type(link) is LinkModel, _PLAIN)]
    arity: Annotated[int, Meta(ge=2)] = 2

    def steps(self, source: int, destination: int) -> list[int | str]:
        """Return the path's nodes after `source`: positions, and names of switches."""
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
        level, first, second = 0, source, destination
        while first != second:  # Bounded: both are divided until they are 0.
            level, first, second = level + 1, first // self.arity, second // self.arity
            up.append(f"{level}.{first}")
            down.insert(0, f"{level}.{second}")
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
        dimensions: in the order in which messages pass them.
        cut_through: whether nodes forward a message before all of it has arrived.
        default: model of the links of other workers; None: without delay.
        control_lane: see `jdag.sim.Network`.

    Raises:
        ScenarioError: an argument is unusable.
    """
    dimensions = converted(_DIMENSIONS, dimensions, "dimensions")
    count = prod([dimension.size for dimension in dimensions])
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
    node, number, goal = source, numbers[source], numbers[destination]
    stride = len(names)
    for index, dimension in enumerate(dimensions):
        before, stride = stride, stride // dimension.size
        position, target = (n % before // stride for n in (number, goal))
        if position == target:
            continue
        line = number - position * stride  # The first position of its line.
        for step in dimension.steps(position, target):
            if isinstance(step, int):
                next_node = names[line + step * stride]
            else:  # Names of workers do not contain a #.
                next_node = f"#{index}.{line}.{step}"
            hops.append(PathLink(node, next_node, dimension.link))
            node = next_node
        number = line + target * stride
    return tuple(hops)


def ring(
    workers: Sequence[str], link: LinkModel, *, cut_through: bool = False
) -> Network:
    """Return a ring of workers with links in both directions. See `topology`."""
    return _one_dimension("ring", workers, link, cut_through)


def switch(
    workers: Sequence[str], link: LinkModel, *, cut_through: bool = False
) -> Network:
    """Return one switch with a link to and from each worker. See `topology`."""
    return _one_dimension("switch", workers, link, cut_through)


def fully_connected(workers: Sequence[str], link: LinkModel) -> Network:
    """Return a network with a link from each worker to each other worker."""
    return _one_dimension("fully_connected", workers, link, False)


def tree(
    workers: Sequence[str],
    link: LinkModel,
    *,
    arity: int = 2,
    cut_through: bool = False,
) -> Network:
    """Return a tree of switches, whose leaves are the workers. See `topology`."""
    return _one_dimension("tree", workers, link, cut_through, arity)


def torus(
    workers: Sequence[str],
    shape: Sequence[int],
    link: LinkModel,
    *,
    cut_through: bool = False,
) -> Network:
    """Return a torus: a ring in each dimension of `shape`. See `topology`."""
    shape = converted(_SHAPE, shape, "shape")
    rings = [Dimension("ring", size, link) for size in shape]
    return topology(workers, rings, cut_through=cut_through)


def _one_dimension(
    kind: str,
    workers: Sequence[str],
    link: LinkModel,
    cut_through: bool,
    arity: int = 2,
) -> Network:
    count = len(workers) if is_listed(workers) else 1
    dimension = Dimension(kind, count, link, arity)
    return topology(workers, [dimension], cut_through=cut_through)
