"""Routes of collectives: the transfers between replicas, one replica on each worker.

`how` of `ctx.replicate`, `ctx.all_reduce` and other collectives selects a route:

- "owner": the owner of the arrays (for `all_reduce`, the first worker) sends them to
  each replica, and adds the replicas' values in order.
- "tree": a binary tree of replicas below the owner. Each replica adds its own value
  first, then the values of its children, of which there are at most two.
- "ring": arrays are divided into one part per replica. Part c goes from the owner to
  replica c, then around the ring; cotangents are added from the last replica back to
  the first (reduce-scatter), and the owner gathers the parts. In `all_reduce` part c is
  added from replica c + 1 around to c, then sent from c around (all-gather): each
  worker sends 2 (n - 1) / n of the arrays' bytes, all of them to the next worker.

Each route is a tree over the replicas, numbered from 0. Values are sent from its root
to all replicas; sums go the other way. So the order of a sum depends only on the route,
never on the order of arrival.
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
        parents: the sender to each replica; None is the source.
    """

    order: tuple[int, ...]
    parents: tuple[int | None, ...]

    def children(self, replica: int | None) -> tuple[int, ...]:
        """Return the receivers of a replica, or of the source (None), in order."""
        return tuple([r for r in self.order if self.parents[r] == replica])


def check_how(how: object) -> None:
    if not isinstance(how, str) or how not in HOW:
        raise JdagError(f"how={how!r}: expected {', '.join(map(repr, HOW))}")


def routes_from(source: int | None, count: int, how: How) -> tuple[Route, ...]:
    """Return the routes from one worker to all replicas.

    `source` is the replica on the source's worker; None if that worker has none.
    """
    if how == "owner":
        return (Route(tuple(range(count)), (None,) * count),)
    if how == "tree":
        return (_tree(source, count),)
    return tuple([_chain(first, count, 1) for first in range(count)])


def routes_up(count: int, how: How) -> tuple[Route, ...]:
    """Return the routes of sums, from the leaves to the root.

    On a ring the sum of part c starts at replica c + 1 and ends at c.
    """
    if how == "ring":
        return tuple([_chain(last, count, -1) for last in range(count)])
    return routes_among(count, how)


def routes_among(count: int, how: How) -> tuple[Route, ...]:
    """Return the routes that distribute sums: from the first replica or on a ring."""
    return (
        routes_from(0, count, how) if how == "ring" else (route_of(0, count, how, 1),)
    )


def route_of(root: int, count: int, how: How, step: int) -> Route:
    """Return the route from `root` to all replicas; for step -1, of a sum to `root`."""
    if how == "ring":
        return _chain(root, count, step)
    if how == "tree":
        return _tree(root, count)
    others = [replica for replica in range(count) if replica != root]
    parents = [None if replica == root else root for replica in range(count)]
    return Route((root, *others), tuple(parents))


def _tree(source: int | None, count: int) -> Route:
    """Return a binary heap: node n has the children 2 n + 1 and 2 n + 2."""
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
