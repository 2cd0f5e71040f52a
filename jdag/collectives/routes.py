"""Routes between replicas: which replica sends which part of the arrays to which.

`how` of `ctx.replicate`, `ctx.all_reduce` and their like selects one of three:

- "owner": the owner of the arrays (for `all_reduce`, the first worker) sends them to
  each replica, and adds the replicas' values in order.
- "tree": a binary tree of replicas below the owner. Each replica adds its own value
  first, then those of its children, at most two.
- "ring": as many parts as replicas. Part c goes from the owner to replica c, then
  around the ring; cotangents are added from the last replica back to the first
  (reduce-scatter), and the owner gathers the parts. In `all_reduce` part c is added
  from replica c + 1 around to c, then sent from c around (all-gather): each worker
  sends only to the next one, 2 (n - 1) / n of the bytes of the arrays.

Each route is a tree over the replicas, numbered from 0. Values go from its root to all
replicas; sums go the other way. So the order of a sum depends only on the route, never
on order of arrival.
"""

from itertools import pairwise
from typing import Literal, NamedTuple, get_args

from jdag.errors import JdagError

How = Literal["owner", "tree", "ring"]
HOW: tuple[How, ...] = get_args(How)


class Route(NamedTuple):
    """A tree over replicas.

    Attributes:
        order: all replicas, parents before children.
        parents: for each replica, its sender; None: the source.
    """

    order: tuple[int, ...]
    parents: tuple[int | None, ...]

    def children(self, replica: int | None) -> tuple[int, ...]:
        """The receivers of a replica, or of the source (None), in order."""
        return tuple([one for one in self.order if self.parents[one] == replica])


def check_how(how: object) -> None:
    """Raise JdagError unless `how` names a kind of route."""
    if not isinstance(how, str) or how not in HOW:
        raise JdagError(f"how={how!r}: allowed are {', '.join(map(repr, HOW))}")


def routes_from(source: int | None, count: int, how: How) -> tuple[Route, ...]:
    """Return the routes from one worker to all replicas.

    `source` is the replica on the source's worker; None if there is none.
    """
    if how == "owner":
        return (Route(tuple(range(count)), (None,) * count),)
    if how == "tree":
        return (_tree(source, count),)
    return tuple([_chain(first, count, 1) for first in range(count)])


def routes_up(count: int, how: How) -> tuple[Route, ...]:
    """Return the routes of sums, which run from the leaves to the root.

    On a ring the sum of part c starts at replica c + 1 and is complete at c.
    """
    if how == "ring":
        return tuple([_chain(last, count, -1) for last in range(count)])
    return routes_among(count, how)


def routes_among(count: int, how: How) -> tuple[Route, ...]:
    """Return the routes that distribute sums: from the first replica, or on a ring."""
    return (
        routes_from(0, count, how) if how == "ring" else (route_of(0, count, how, 1),)
    )


def route_of(root: int, count: int, how: How, step: int) -> Route:
    """Return the route from one replica to all, or, for step -1, of a sum to it."""
    if how == "ring":
        return _chain(root, count, step)
    if how == "tree":
        return _tree(root, count)
    others = [one for one in range(count) if one != root]
    parents = [root if one != root else None for one in range(count)]
    return Route((root, *others), tuple(parents))


def _tree(source: int | None, count: int) -> Route:
    """A heap: node n, 0 at the root, has the children 2 n + 1 and 2 n + 2."""
    others = [replica for replica in range(count) if replica != source]
    nodes = [source, *others]
    parents: list[int | None] = [None] * count
    for number, replica in enumerate(others, 1):
        parents[replica] = nodes[(number - 1) // 2]
    order = others if source is None else [source, *others]
    return Route(tuple(order), tuple(parents))


def _chain(first: int, count: int, step: int) -> Route:
    order = tuple([(first + step * number) % count for number in range(count)])
    parents: list[int | None] = [None] * count
    for before, after in pairwise(order):
        parents[after] = before
    return Route(order, tuple(parents))
